"""Finds launch settings of the sparse engine of `gated_ffn` for a device and a shape.

    python experiments/tune_ffn.py --d-model 1024 --d-ff 2816 --nnz 15 30 --out rows.jsonl
    python experiments/tune_ffn.py --mode train --d-model 2048 --d-ff 5632 --nnz 30 60
    python experiments/tune_ffn.py --tokens 8 --nnz 30                 # decode
    python experiments/tune_ffn.py --fields walk_warps list_warps --time-limit 300
    python experiments/tune_ffn.py --smoke                             # tiny shapes, runs on a CPU

What it prints last is an entry for `MEASURED` in pallas_kernels/gated_ffn/config.py. Fields are
swept one after the other, each from the best of those before: its values take turns inside every
repetition, for every --nnz, with the sparse kernels forced; a value is taken if its times, relative
to the current one's, are lower by more than 1 % over all --nnz. Values that do not compile or run
are told and passed over. At the end results under the chosen settings are held against those under
the default.

Forward times the stages after the gate (up to 64 tokens 4 passes through 8 layers in one program,
ms per layer), training the whole call with all gradients. Training sweeps the settings of the
backward pass unless --fields names others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from pallas_kernels import UnsupportedError, interpret, tuning
from pallas_kernels.gated_ffn import config as configs
from sparsejax import ffn_tuning as lib
from sparsejax.studies import records
from sparsejax.studies.flags import at_least, check_file, check_gpu, with_smoke

SMOKE: dict[str, Any] = {"d_model": 32, "d_ff": 128, "nnz": (4.0, 8.0), "repeats": 2, "calls": 1}
SMOKE_TOKENS = 96


@dataclasses.dataclass(frozen=True)
class Flags:
    """Tunes the launch of one feed-forward layer.

    Attributes:
      mode: forward, or forward and backward.
      tokens: M.
      d_model: D.
      d_ff: F.
      dtype: bfloat16 or float32.
      nnz: active neurons per token; settings are chosen for all of them together.
      pattern: whether neurons fire equally often or by a power law.
      fields: of `FFNConfig`, in this order; by default those of the kernels that --mode is about.
      repeats: repetitions, in each of which all values of a field take turns.
      calls: calls per repetition.
      time_limit: seconds after which no further field is begun; None for no limit.
      out: JSON lines, appended after every field.
      smoke: tiny shapes, two fields and two values of each; without a GPU kernels are interpreted.
    """

    mode: Literal["forward", "train"] = "forward"
    tokens: int = 16384
    d_model: int = 1024
    d_ff: int = 2816
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    nnz: tuple[float, ...] = (15, 30)
    pattern: Literal["uniform", "powerlaw"] = "uniform"
    fields: tuple[str, ...] = ()
    repeats: int = 9
    calls: int = 10
    time_limit: float | None = None
    out: Path | None = None
    smoke: bool = False


def chosen_fields(flags: Flags, case: lib.Case) -> lib.Candidates:
    """Fields to sweep, in order, with their values."""
    known = case.known_fields()
    unknown = [name for name in flags.fields if name not in known]
    if unknown:
        raise ValueError(
            f"--fields: {', '.join(unknown)} cannot be swept in --mode {flags.mode} with --tokens "
            f"{case.tokens}; what can: {', '.join(known)}"
        )
    fields = {name: known[name] for name in flags.fields or case.fields()}
    if flags.smoke:
        fields = {name: fields[name] for name in list(fields)[:2]}
    return fields


def rows_of(trials: Sequence[lib.Trial], nnz: Sequence[float]) -> list[dict[str, Any]]:
    """One row per value and nnz."""
    rows = []
    for trial in trials:
        for number in nnz:
            row: dict[str, Any] = {"nnz": number, "field": trial.field, "value": trial.value}
            row |= {"ms": None, "ms_min": None, "ms_max": None}
            if trial.times:
                ms = trial.times[number]
                row |= {"ms": trial.ms(number), "ms_min": ms[0], "ms_max": ms[-1]}
            rows.append(row | {"chosen": trial.chosen, "error": trial.error})
    return rows


def line(trial: lib.Trial, nnz: Sequence[float]) -> str:
    """A row of the table."""
    times = "".join(f"{trial.ms(number):12.4f}" for number in nnz) if trial.times else ""
    told = "  does not run" if trial.error else "  chosen" if trial.chosen else ""
    return f"{trial.field:20} {trial.value:6}{times}{told}"


def entry(case: lib.Case, trials: Sequence[lib.Trial], about: str) -> str:
    """Source of an entry of `pallas_kernels.gated_ffn.config.MEASURED`.

    Args:
      case: the layer.
      trials: all values of the fields that were swept.
      about: device, versions and what was timed, for the comment above the entry.

    Returns:
      Lines as they stand in the table: what was swept, each field with the times that it was chosen
      from, and what the table held for the layer before.
    """

    def comment(text: str, indent: int) -> list[str]:
        lead = " " * indent + "# "
        return textwrap.wrap(text, 100, initial_indent=lead, subsequent_indent=lead)

    size = (case.tokens, case.d_model, case.d_ff)
    key = tuning.bucket(tuning.device_kind(), case.dtype, *size)
    names = ", ".join(f'"{part}"' if isinstance(part, str) else str(part) for part in key)
    lines = [*comment(about, 4), f"    tuning.Bucket({names}): {{"]
    fields = list(dict.fromkeys(trial.field for trial in trials))
    for field in fields:
        own = [trial for trial in trials if trial.field == field]
        ran = [trial for trial in own if trial.times]
        parts = [
            " / ".join(f"{trial.ms(nnz):.4g}" for trial in ran) + f" at {nnz:g}" for nnz in case.nnz
        ]
        told = " / ".join(str(trial.value) for trial in ran) + ": " + ", ".join(parts) + "."
        if len(ran) < len(own):
            told += f" {', '.join(str(t.value) for t in own if not t.times)}: does not run."
        lines += comment(told, 8)
        lines += [f'        "{field}": {trial.value},' for trial in own if trial.chosen]
    before = {
        field: value
        for field, value in tuning.measured(configs.MEASURED, key).items()
        if field not in fields
    }
    if before:
        lines += comment("Not swept, as measured before.", 8)
        lines += [f'        "{field}": {value!r},' for field, value in before.items()]
    return "\n".join([*lines, "    },"])


def tune(flags: Flags, case: lib.Case, fields: lib.Candidates, about: dict[str, Any]) -> str:
    """Sweeps the fields, prints a table, and returns the entry of `MEASURED`."""
    began = time.monotonic()
    tuner = lib.Tuner(case, repeats=flags.repeats, calls=flags.calls)
    trials: list[lib.Trial] = []
    missing = list(fields)
    for name, values in fields.items():
        if flags.time_limit is not None and time.monotonic() - began > flags.time_limit:
            break
        if flags.smoke:
            current = getattr(tuner.config, name)
            values = [value for value in values if value != current][:1]
        before = tuner.config
        new = tuner.sweep(name, values)
        trials += new
        missing.remove(name)
        took = f"{time.monotonic() - began:.0f} s, {tuner.compiled} programs compiled"
        print(f"{name} = {getattr(tuner.config, name)}  ({took})", flush=True)
        for trial in new:
            if trial.error:
                print(f"{name} = {trial.value} does not run: {trial.error}", flush=True)
        if flags.out:
            others = {field: getattr(before, field) for field in case.known_fields()}
            with flags.out.open("a") as file:
                file.writelines(
                    json.dumps(about | row | {"began_with": others}) + "\n"
                    for row in rows_of(new, case.nnz)
                )
    if missing:
        print(f"--time-limit reached, not swept: {', '.join(missing)}")
    if not trials:
        raise ValueError(f"--time-limit {flags.time_limit:g} left no time for any field")
    print(f"\n{'field':20} {'value':>6}" + "".join(f"{f'ms at {n:g}':>12}" for n in case.nnz))
    for trial in trials:
        print(line(trial, case.nnz))
    print(f"largest relative error against the default settings: {tuner.check():.2g}", flush=True)
    what = "gradient call" if flags.mode == "train" else "stages after the gate"
    what = "ms per decoded layer" if case.decodes else f"ms of the {what}"
    return entry(
        case,
        trials,
        f"{what}, {about['device']}, jax {about['jax']}, {about['git']}, {case.dtype}, "
        f"{case.tokens:,} x {case.d_model} x {case.d_ff}, {case.pattern}, by active neurons.",
    )


def main(flags: Flags) -> None:
    """Checks flags, sweeps, writes rows and prints the entry."""
    at_least(flags, 1, "tokens", "d_model", "d_ff", "nnz", "repeats", "calls")
    at_least(flags, 0, "time_limit")
    check_file("--out", flags.out)
    if flags.smoke:
        flags = with_smoke(flags, tokens=min(flags.tokens, SMOKE_TOKENS), **SMOKE)
    else:
        check_gpu("tuning")
    size = (flags.tokens, flags.d_model, flags.d_ff)
    case = lib.Case(flags.mode, *size, flags.dtype, flags.nnz, flags.pattern)
    about = records.about() | {"kernel": f"gated_ffn_{flags.mode}", "device": tuning.device_kind()}
    about |= {"pattern": flags.pattern, "dtype": flags.dtype}
    about |= {"tokens": flags.tokens, "d_model": flags.d_model, "d_ff": flags.d_ff}
    interpreted = flags.smoke and jax.default_backend() != "gpu"
    with interpret() if interpreted else contextlib.nullcontext():
        text = tune(flags, case, chosen_fields(flags, case), about)
    print(f"\n{text}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Flags))
    except (ValueError, UnsupportedError) as error:
        raise SystemExit(f"tune_ffn.py: {error}") from None
