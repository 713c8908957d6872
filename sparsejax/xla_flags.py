"""XLA flags that make a GPU run repeat itself bit for bit.

Two things let the same program give other bits on the next start: kernels that add in an order of
their own (atomics in scatters and reductions), and autotuning, which times candidates anew in each
process and may keep another one. On the CPU neither happens and the flags change nothing.

XLA reads `XLA_FLAGS` once, when the first device is touched, so the string has to be in the
environment before that:

    os.environ["XLA_FLAGS"] = gpu_determinism_flags(os.environ.get("XLA_FLAGS", ""))
"""

from pathlib import Path

_LOAD = "xla_gpu_load_autotune_results_from"
_DUMP = "xla_gpu_dump_autotune_results_to"


def gpu_determinism_flags(xla_flags: str = "", *, autotune_results: Path | None = None) -> str:
    """`xla_flags` plus the flags under which a restarted GPU run computes the same bits.

    Without `autotune_results` the first valid kernel is taken instead of the fastest
    (`--xla_gpu_deterministic_ops`): nothing to keep, but slower matrix products. With it, kernels
    are still autotuned, once: a first run writes its choices to that file and every later run reads
    them (`--xla_gpu_exclude_nondeterministic_ops` with XLA's persisted autotuning). The file is the
    form to use: XLA's per-fusion cache directory leaves some choices out (openxla/xla#37902).

    Args:
      xla_flags: what `XLA_FLAGS` holds already. A flag named there keeps its value.
      autotune_results: file for the autotuner's choices, one per process of a launch (each process
        writes its own). Valid for one GPU model and one jaxlib version.

    Returns:
      the merged string; merging it again adds nothing.

    Raises:
      ValueError: `xla_flags` is the name of a flag file, or the results path holds white space
        (XLA would cut it there).
    """
    if xla_flags.strip() and not xla_flags.lstrip().startswith("--"):
        raise ValueError(
            f"xla_flags: expected flags that begin with '--', got {xla_flags!r}. Where XLA_FLAGS "
            "names a file of flags, add the determinism flags to that file."
        )
    if autotune_results is not None and len(str(autotune_results).split()) != 1:
        raise ValueError(
            f"autotune_results: want a path without white space, got {str(autotune_results)!r}. "
            "XLA_FLAGS is split at spaces; choose another folder."
        )
    present = {flag.lstrip("-").split("=", 1)[0] for flag in xla_flags.split()}
    if autotune_results is None:
        wanted = {"xla_gpu_deterministic_ops": "true"}
    else:
        wanted = {"xla_gpu_exclude_nondeterministic_ops": "true"}
        if not present & {_LOAD, _DUMP}:
            wanted[_LOAD if autotune_results.is_file() else _DUMP] = str(autotune_results)
    added = [f"--{name}={value}" for name, value in wanted.items() if name not in present]
    return " ".join([*xla_flags.split(), *added])
