"""Determinism flags merge into what the user set, and jaxlib knows every one of their names."""

import os
import subprocess
import sys

import pytest

from sparsejax.xla_flags import gpu_determinism_flags


def test_autotuning_is_off():
    assert gpu_determinism_flags("") == "--xla_gpu_deterministic_ops=true"


def test_flags_of_the_user_come_first_and_keep_their_values():
    user = "--xla_force_host_platform_device_count=8 --xla_gpu_deterministic_ops=false"
    assert gpu_determinism_flags(user) == user
    assert gpu_determinism_flags("--xla_dump_to=/d") == (
        "--xla_dump_to=/d --xla_gpu_deterministic_ops=true"
    )


def test_a_flag_whose_name_only_begins_alike_is_not_taken_for_it():
    user = "--xla_gpu_deterministic_ops_other=false"
    assert gpu_determinism_flags(user).endswith(" --xla_gpu_deterministic_ops=true")


def test_merging_twice_adds_nothing():
    once = gpu_determinism_flags("--xla_dump_to=/d")
    assert gpu_determinism_flags(once) == once


def test_a_flag_file_is_refused():
    with pytest.raises(ValueError, match="names a file of flags"):
        gpu_determinism_flags("flags.txt")


def test_jaxlib_knows_the_flag():
    # An unknown name in XLA_FLAGS ends the process, on the CPU too.
    code = "import jax; print(jax.jit(lambda x: x + 1)(1))"

    def run(xla_flags):
        environment = os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    known = run(gpu_determinism_flags(""))
    assert known.returncode == 0, known.stderr
    assert known.stdout.strip() == "2"
    unknown = run("--xla_gpu_no_such_flag=true")
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
    ("backend", "size", "starts"),
    [("cpu", 64, 2), pytest.param("gpu", 2048, 4, marks=pytest.mark.gpu)],
)
def test_separate_starts_give_the_same_bits(backend, size, starts):
    lines = set()
    for _ in range(starts):
        environment = os.environ | {
            "XLA_FLAGS": gpu_determinism_flags(""),
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
    assert len(lines) == 1
    assert lines.pop().startswith(f"digest {backend} ")
