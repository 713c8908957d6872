"""Time in collectives, from the trace that `jax.profiler.trace` writes.

On a GPU a device's rows are its streams, and a collective is an NCCL kernel or a kernel of an HLO
collective. On host devices they are the operations that XLA's CPU runtime ran for one device. A
kernel of a collective also waits for the slowest device: its time is what it cost, not what the
link took.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Where the time of one device went; seconds.

    Attributes:
      span: from the start of its first operation to the end of its last.
      collectives: while a collective ran.
      exposed: while a collective ran and nothing else did.
      compute: while anything else ran.
      idle: while nothing ran.
    """

    span: float
    collectives: float
    exposed: float
    compute: float
    idle: float


def read_trace(folder: Path) -> dict[str, Any]:
    """The newest trace below a folder that was given to `jax.profiler.trace`.

    Raises:
      FileNotFoundError: there is none.
    """
    found = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no *.trace.json.gz of jax.profiler.trace")
    with gzip.open(found[-1], "rt", encoding="utf-8") as file:
        return json.load(file)


def device_times(trace: dict[str, Any], names: Collection[str]) -> dict[str, DeviceTime]:
    """Seconds by device of what ran in a trace.

    Args:
      trace: from `read_trace`.
      names: HLO instructions that are collectives (`Collective.name`).

    Returns:
      {device: DeviceTime}, the devices of this process in the order of their names.

    Raises:
      ValueError: the trace has no row of a device.
    """
    events = trace["traceEvents"]
    processes = _named(events, "process_name", lambda e: e["pid"])
    threads = _named(events, "thread_name", lambda e: (e["pid"], e["tid"]))
    collectives: dict[str, list[Interval]] = defaultdict(list)
    others: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        args = event.get("args", {})
        process = processes.get(event["pid"], "")
        if "/device:GPU" in process:
            if not threads.get((event["pid"], event["tid"]), "").startswith("Stream"):
                continue
            device = process[process.index("/device:GPU") :].removeprefix("/device:")
        elif "hlo_op" in args and "device_ordinal" in args:
            device = f"CPU:{args['device_ordinal']}"
        else:
            continue
        operation = _operation(args.get("hlo_op", ""))
        moves = operation in names or "nccl" in event["name"].lower()
        interval = (event["ts"] * 1e-6, (event["ts"] + event.get("dur", 0)) * 1e-6)
        (collectives if moves else others)[device].append(interval)
    devices = sorted({*collectives, *others})
    if not devices:
        raise ValueError("the trace has no row of a device; was anything run inside the trace?")
    return {d: _device_time(collectives[d], others[d]) for d in devices}


def _named(events: Iterable[dict[str, Any]], kind: str, key: Any) -> dict[Any, str]:
    return {key(e): e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == kind}


def _operation(name: str) -> str:
    # A pair's done is part of the collective that its start names.
    return name.replace("-done", "-start") if "-done" in name else name


def _device_time(collectives: list[Interval], others: list[Interval]) -> DeviceTime:
    everything = collectives + others
    span = max(end for _, end in everything) - min(start for start, _ in everything)
    busy, moving, compute = (_length(x) for x in (everything, collectives, others))
    return DeviceTime(
        span=span,
        collectives=moving,
        exposed=busy - compute,
        compute=compute,
        idle=span - busy,
    )


def _length(intervals: list[Interval]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
