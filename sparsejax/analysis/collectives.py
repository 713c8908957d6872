"""Collectives of a compiled program, read from its HLO text: kinds, bytes, devices, mesh axes.

`compiled.as_text()` is what runs: partitioned, with collectives combined and loops marked with how
often they run. What each device sends is counted as for a ring of n devices, which is the least
that can be sent: (n - 1) / n of the whole array for an all-gather, a reduce-scatter or an
all-to-all, and twice that for an all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from jax.sharding import Mesh

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_WIDTH = {"pred": 1, "bf16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)
}
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})"
    r"(?P<start>-start)?\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{\s*$")
_CALLED = re.compile(
    r"\b(condition|body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
      name: the instruction's; a profiler's rows carry it.
      kind: one of `KINDS`.
      arrays: (dtype, shape) of what is gathered or reduced, whole; several where the compiler
        combined some.
      groups: devices that take part together, as numbers in the order of the mesh.
      runs: how often one execution of the program runs it.
      op_name: where in the traced program it comes from.
    """

    name: str
    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    groups: tuple[tuple[int, ...], ...]
    runs: int
    op_name: str

    @property
    def size(self) -> int:
        """Bytes of the whole arrays, per group and run."""
        return sum(array_bytes(*array) for array in self.arrays)

    @property
    def ways(self) -> int:
        """Devices in a group."""
        return len(self.groups[0])

    @property
    def sent(self) -> float:
        """Bytes that each device sends in one execution of the program, as a ring."""
        n = self.ways
        if self.kind == "all-reduce":
            share = 2 * (n - 1) / n
        elif self.kind in ("collective-permute", "collective-broadcast"):
            share = 1.0 if n > 1 else 0.0
        else:
            share = (n - 1) / n
        return share * self.size * self.runs

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group differ."""
        places = np.array(np.unravel_index(self.groups[0], tuple(mesh.shape.values())))
        varies = np.any(places != places[:, :1], axis=1)
        return tuple(a for a, differs in zip(mesh.axis_names, varies, strict=True) if differs)


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program.

    Args:
      text: `compiled.as_text()`.

    Returns:
      One entry per instruction that moves bytes, in the order of the text; groups of one device
      are left out.

    Raises:
      ValueError: replica groups in a form that is not known, or a loop that holds a collective and
        does not say how often it runs.
    """
    partitions = re.search(r"\bnum_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    found: list[tuple[str, Collective]] = []
    calls: dict[str, list[tuple[str, int | None]]] = defaultdict(list)
    computation = entry = ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            computation = opened["name"]
            entry = computation if opened["entry"] else entry
            continue
        calls[computation] += _calls(line)
        if match := _INSTRUCTION.match(line):
            collective = _collective(match, devices)
            if collective.ways > 1:
                found.append((computation, collective))
    runs = _runs(calls, entry, {name for name, _ in found})
    return [dataclasses.replace(c, runs=runs[name]) for name, c in found if runs[name]]


def totals(found: Iterable[Collective], mesh: Mesh) -> list[dict[str, object]]:
    """Collectives summed by kind and mesh axes, as JSON values: count, bytes, bytes sent."""
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for collective in found:
        groups[collective.kind, "+".join(collective.axes(mesh))].append(collective)
    return [
        {
            "kind": kind,
            "axes": axes,
            "count": sum(c.runs for c in members),
            "bytes": sum(c.size * c.runs for c in members),
            "sent_bytes": sum(c.sent for c in members),
        }
        for (kind, axes), members in sorted(groups.items())
    ]


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array by its name in HLO text."""
    return _WIDTH.get(dtype, 1) * math.prod(shape)  # what is not named is a form of float8


def _collective(match: re.Match[str], devices: int) -> Collective:
    kind, rest = match["kind"], match["rest"]
    arrays = _arrays(match["type"])
    groups = _groups(rest, devices, kind)
    # A start's type is (operands, results, ...), but an all-reduce's may be that of its results.
    if match["start"] and (kind != "all-reduce" or match["type"].startswith("((")):
        # The whole arrays are the larger of the two.
        parts = [_arrays(part) for part in _parts(match["type"])[:2]]
        arrays = max(parts, key=lambda part: sum(array_bytes(*array) for array in part))
    elif kind == "reduce-scatter":
        along = re.search(r"\bdimensions=\{(\d+)\}", rest)
        at = int(along[1]) if along else 0
        arrays = [
            (dtype, (*shape[:at], shape[at] * len(groups[0]), *shape[at + 1 :]))
            for dtype, shape in arrays
        ]
    op_name = re.search(r'op_name="([^"]*)"', rest)
    return Collective(
        name=match["name"],
        kind=kind,
        arrays=tuple(arrays),
        groups=groups,
        runs=1,
        op_name=op_name[1] if op_name else "",
    )


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of all arrays in a type."""
    found = _ARRAY.findall(text)
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in found]


def _parts(text: str) -> list[str]:
    """Elements of a tuple type, nested ones whole."""
    parts, depth, part = [], 0, ""
    for char in text.strip().removeprefix("(").removesuffix(")"):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    return [*parts, part]


def _groups(rest: str, devices: int, kind: str) -> tuple[tuple[int, ...], ...]:
    everybody = (tuple(range(devices)),)
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        links = re.findall(r"(\d+),(\d+)", pairs[1]) if pairs else []
        links = [(int(a), int(b)) for a, b in links if a != b]
        return tuple(links) or ((0,),)
    if "replica_groups={}" in rest or "replica_groups=" not in rest:
        return everybody
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest):
        inner = re.findall(r"\{([\d, ]*)\}", listed[1])
        return tuple(tuple(int(n) for n in group.split(",")) for group in inner)
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return _rows(_iota(iota[2], iota[3]).reshape(_numbers(iota[1])))
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
        r"\{(.*?)\}",
        rest,
    )
    if mesh is None:
        found = re.search(r"replica_groups=.{0,80}", rest)
        raise ValueError(f"collectives: cannot read {found[0] if found else rest[:80]!r}")
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    ids = np.arange(devices) if mesh[2] is None else _iota(mesh[2], mesh[3])
    # An axis, or a part 'axis':(before)size of one, split off as a dimension of its own.
    dims, own = [], []
    parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[4])
    for name, size in sizes.items():
        mine = sorted((int(before or 1), int(n or size)) for a, before, n in parts if a == name)
        at = 1
        for before, n in mine:
            dims += [before // at, n]
            own.append(len(dims) - 1)
            at = before * n
        dims.append(size // at)
    ids = np.moveaxis(ids.reshape(dims), own, range(-len(own), 0))
    return _rows(ids.reshape(-1, math.prod(dims[i] for i in own)))


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _numbers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids if order is None else ids.transpose(_numbers(order))).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in ids.tolist())


def _calls(line: str) -> list[tuple[str, int | None]]:
    """Computations that an instruction calls, and how often; None where a loop does not say."""
    trips = _TRIPS.search(line)
    loops = " while(" in line
    times = (int(trips[1]) if trips else None) if loops else 1
    found = [(name, times) for _, name in _CALLED.findall(line)]
    for names in _BRANCHES.findall(line):
        found += [(name.strip().lstrip("%"), 1) for name in names.split(",")]
    return found


def _runs(
    calls: dict[str, list[tuple[str, int | None]]], entry: str, wanted: set[str]
) -> dict[str, int]:
    """How often each wanted computation runs in one run of `entry`; a branch counts as taken."""
    holds: dict[str, bool] = {}

    def matters(name: str) -> bool:
        if name not in holds:
            holds[name] = name in wanted or any(matters(n) for n, _ in calls.get(name, ()))
        return holds[name]

    runs: dict[str, int] = defaultdict(int)

    def walk(name: str, times: int) -> None:
        runs[name] += times
        for called, often in calls.get(name, ()):
            if not matters(called):
                continue
            if often is None:
                raise ValueError(
                    f"collectives: a loop in {name} runs a collective in {called}, and does not "
                    "say how often"
                )
            walk(called, times * often)

    walk(entry, 1)
    return runs
