"""XLA flags that make a GPU run repeat itself bit for bit.

Two things let the same program give other bits on the next start: kernels that add in an order of
their own (atomics in scatters and reductions), and autotuning, which times candidates anew in each
process and may keep another one. On the CPU neither happens and the flags change nothing.

XLA reads `XLA_FLAGS` once, when the first device is touched, so the string has to be in the
environment before that:

    os.environ["XLA_FLAGS"] = gpu_determinism_flags(os.environ.get("XLA_FLAGS", ""))
"""


def gpu_determinism_flags(xla_flags: str = "") -> str:
    """`xla_flags` plus the flag under which a restarted GPU run computes the same bits.

    `--xla_gpu_deterministic_ops`: no kernel whose order of additions varies, and the first valid
    kernel in the place of the one that autotuning found fastest, so matrix products can be slower.
    Keeping the autotuner's choices in a file instead is not offered: with jax 0.11.2 XLA wrote an
    empty one (`--xla_gpu_dump_autotune_results_to`), and later starts would have tuned anew.

    Args:
      xla_flags: what `XLA_FLAGS` holds already. A flag named there keeps its value.

    Returns:
      the merged string; merging it again adds nothing.

    Raises:
      ValueError: `xla_flags` is the name of a flag file.
    """
    if xla_flags.strip() and not xla_flags.lstrip().startswith("--"):
        raise ValueError(
            f"xla_flags: expected flags that begin with '--', got {xla_flags!r}. Where XLA_FLAGS "
            "names a file of flags, add the determinism flags to that file."
        )
    present = {flag.lstrip("-").split("=", 1)[0] for flag in xla_flags.split()}
    if "xla_gpu_deterministic_ops" in present:
        return " ".join(xla_flags.split())
    return " ".join([*xla_flags.split(), "--xla_gpu_deterministic_ops=true"])
