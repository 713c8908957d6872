"""Determinism flags merge into what the user set, and jaxlib knows every one of their names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsejax.xla_flags import gpu_determinism_flags


def test_without_a_results_file_autotuning_is_off():
    assert gpu_determinism_flags("") == "--xla_gpu_deterministic_ops=true"


def test_a_first_run_writes_the_choices_and_a_later_one_reads_them(tmp_path):
    results = tmp_path / "autotune.pb"
    first = gpu_determinism_flags("", autotune_results=results)
    assert first == (
        f"--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_dump_autotune_results_to={results}"
    )
    results.write_bytes(b"")
    later = gpu_determinism_flags("", autotune_results=results)
    assert later == (
        "--xla_gpu_exclude_nondeterministic_ops=true "
        f"--xla_gpu_load_autotune_results_from={results}"
    )


def test_flags_of_the_user_come_first_and_keep_their_values():
    user = "--xla_force_host_platform_device_count=8 --xla_gpu_deterministic_ops=false"
    assert gpu_determinism_flags(user) == user
    assert gpu_determinism_flags("--xla_dump_to=/d") == (
        "--xla_dump_to=/d --xla_gpu_deterministic_ops=true"
    )
    load = "--xla_gpu_load_autotune_results_from=mine.pb"
    merged = gpu_determinism_flags(load, autotune_results=Path("theirs.pb"))
    assert merged == f"{load} --xla_gpu_exclude_nondeterministic_ops=true"


def test_a_flag_whose_name_only_begins_alike_is_not_taken_for_it():
    user = "--xla_gpu_deterministic_ops_other=false"
    assert gpu_determinism_flags(user).endswith(" --xla_gpu_deterministic_ops=true")


@pytest.mark.parametrize("results", [None, Path("autotune.pb")])
def test_merging_twice_adds_nothing(results):
    once = gpu_determinism_flags("--xla_dump_to=/d", autotune_results=results)
    assert gpu_determinism_flags(once, autotune_results=results) == once


def test_a_flag_file_and_a_path_with_spaces_are_refused():
    with pytest.raises(ValueError, match="names a file of flags"):
        gpu_determinism_flags("flags.txt")
    with pytest.raises(ValueError, match="without white space"):
        gpu_determinism_flags("", autotune_results=Path("my runs/autotune.pb"))


def test_jaxlib_knows_every_flag(tmp_path):
    # An unknown name in XLA_FLAGS ends the process, on the CPU too.
    flags = gpu_determinism_flags("", autotune_results=tmp_path / "autotune.pb")
    loading = "--xla_gpu_load_autotune_results_from=" + str(tmp_path / "autotune.pb")
    every = f"{flags} --xla_gpu_deterministic_ops=true {loading}"
    code = "import jax; print(jax.jit(lambda x: x + 1)(1))"

    def run(xla_flags):
        environment = os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    known = run(every)
    assert known.returncode == 0, known.stderr
    assert known.stdout.strip() == "2"
    unknown = run(every + " --xla_gpu_no_such_flag=true")
    assert unknown.returncode != 0
    assert "xla_gpu_no_such_flag" in unknown.stderr


# Where bits could differ between starts: float32 matrix products (autotuned), a long sum, and a
# scatter of many rows onto few (the gradient of an embedding).
PROGRAM = """
import hashlib, sys
import jax, jax.numpy as jnp

size = int(sys.argv[1])
keys = jax.random.split(jax.random.key(0), 4)
x, w = (jax.random.normal(key, (size, size)) for key in keys[:2])
table = jax.random.normal(keys[2], (64, size))
tokens = jax.random.randint(keys[3], (16 * size,), 0, 64)

def loss(x, w, table):
    h = jax.nn.relu(x @ w)
    return jnp.sum(jnp.tanh(h @ w.T)) + jnp.sum(jnp.sin(table[tokens]))

value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, w, table)
digest = hashlib.sha256(b"".join(jax.device_get(leaf).tobytes() for leaf in (value, *gradients)))
print("digest", jax.default_backend(), digest.hexdigest())
"""


@pytest.mark.parametrize(
    ("backend", "size", "starts", "keep_results"),
    [
        ("cpu", 64, 2, False),
        pytest.param("gpu", 2048, 4, False, marks=pytest.mark.gpu),
        pytest.param("gpu", 2048, 4, True, marks=pytest.mark.gpu),
    ],
)
def test_separate_starts_give_the_same_bits(tmp_path, backend, size, starts, keep_results):
    results = tmp_path / "autotune.pb" if keep_results else None
    lines = set()
    for _ in range(starts):
        environment = os.environ | {
            "XLA_FLAGS": gpu_determinism_flags("", autotune_results=results),
            # The process that runs the tests holds most of the memory of a GPU.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if backend == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(size)],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        lines.add(run.stdout.strip())
        if results is not None:
            # Without the file, the later starts would autotune again and could still agree by luck.
            assert results.is_file()
            assert results.stat().st_size > 0
    assert len(lines) == 1
    assert lines.pop().startswith(f"digest {backend} ")
