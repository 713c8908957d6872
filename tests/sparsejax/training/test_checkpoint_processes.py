"""Checkpoints over the borders of processes: two that save together, and ones that are killed."""

import os
import socket
import subprocess
import sys
import textwrap

import jax
from jax.sharding import PartitionSpec as P

from sparsejax.training.checkpoint import Checkpointer

# What all processes of these tests share: the state of a step, a function of the step alone.
COMMON = """
import os, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from sparsejax.training.checkpoint import Checkpointer, CheckpointWarning

def values(step):
    rng = np.random.default_rng(step)
    return {
        "params": {"w": rng.standard_normal((64, 48)).astype(np.float32),
                   "b": rng.standard_normal(64).astype(jnp.bfloat16)},
        "empty": np.zeros((0, 8), np.float32),
        "step": np.int32(step),
    }

def place(tree, mesh, spec):
    def put(x):
        sharding = NamedSharding(mesh, spec if x.ndim and x.size else P())
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i], dtype=x.dtype)
    return jax.tree.map(put, tree)

def template_of(tree):
    def leaf(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(leaf, tree)

def same_bits(tree, expected):
    return all(
        np.asarray(shard.data).tobytes() == e[shard.index].tobytes()
        for x, e in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
        for shard in x.addressable_shards
    )
"""
shared: dict = {}
exec(COMMON, shared)
values, place, template_of, same_bits = (
    shared[name] for name in ("values", "place", "template_of", "same_bits")
)


def start(script, *args, **env):
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + textwrap.dedent(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
    )


TWO = """
import warnings
port, index, root = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
assert (jax.device_count(), jax.local_device_count()) == (8, 4)
mesh = jax.make_mesh((4, 2), ("data", "tensor"))
template = template_of(place(values(0), mesh, P(("tensor", "data"))))

# One lock for the run: the first process takes it, for both.
from sparsejax.training.workdir import WorkdirLock
with WorkdirLock(root) as lock:
    assert (lock._fd is not None) == (index == 0)
    jax.experimental.multihost_utils.sync_global_devices("locked")

# What the first process sees or fails with reaches the others.
from sparsejax.training.processes import from_all_processes, from_process_0
assert from_process_0(lambda: {"seen by": [index, None]}) == {"seen by": [0, None]}
assert from_all_processes(f"\u00fc{index}") == ["\u00fc0", "\u00fc1"]
def fail():
    raise OSError("disk gone")
try:
    from_process_0(fail)
except (OSError, RuntimeError) as error:
    expected = "disk gone" if index == 0 else "process 0 failed: OSError: disk gone"
    assert str(error) == expected
else:
    raise AssertionError

# What one process saved on another mesh.
restored = Checkpointer(root + "/single").restore(template)
assert restored.step == 3 and restored.extra == {"by": "one"}
assert same_bits(restored.state, values(3))

with Checkpointer(root + "/joint", keep=2) as checkpointer, jax.set_mesh(mesh):
    for step in (1, 2, 3):
        state = place(values(step), mesh, P(("tensor", "data")))
        assert checkpointer.save(step, state, {"by": "two", "step": step})
    checkpointer.wait()
    assert checkpointer.all_steps() == [2, 3]
    restored = checkpointer.restore(template)
    assert restored.step == 3 and same_bits(restored.state, values(3))
    assert not checkpointer.save(3, restored.state, {})

    # Damage that only the second process meets: both fall back, with the same words.
    if index == 0:
        folder = f"{root}/joint/3/state/ocdbt.process_1/d"
        largest = max(os.listdir(folder), key=lambda f: os.path.getsize(f"{folder}/{f}"))
        os.truncate(f"{folder}/{largest}", 100)
    jax.experimental.multihost_utils.sync_global_devices("damaged")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        restored = checkpointer.restore(template)
        assert restored.step == 2 and same_bits(restored.state, values(2))
        state = place(values(3), mesh, P(("tensor", "data")))
        checkpointer.save(3, state, {"by": "two", "step": 3})
    passed, moved = [str(w.message) for w in caught if w.category is CheckpointWarning]
    assert "step 3 is passed over: params/" in passed and "step 2 is used" in passed, passed
    assert "moved aside to damaged-3-1" in moved, moved

    # A mistake is everybody's mistake.
    try:
        checkpointer.restore(template, expected_config={})
    except ValueError as error:
        assert "extra has no 'config'" in str(error)
    else:
        raise AssertionError
    poisoned = place({"params": {"w": np.full((8,), np.nan, np.float32)}}, mesh, P("data"))
    try:
        checkpointer.save(4, poisoned, {})
    except ValueError as error:
        assert "not finite in params/w" in str(error)
    else:
        raise AssertionError
    assert checkpointer.read_extra() == {"by": "two", "step": 3}
print("done", index, flush=True)
"""


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_two_processes_save_together_and_either_side_reads_the_other(tmp_path):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with Checkpointer(tmp_path / "single") as checkpointer:
        checkpointer.save(3, place(values(3), mesh, P("data")), {"by": "one"})
    port = free_port()
    flags = "--xla_force_host_platform_device_count=4"
    runs = [start(TWO, port, index, tmp_path, XLA_FLAGS=flags) for index in (0, 1)]
    outputs = [run.communicate(timeout=240)[0] for run in runs]
    for index, (run, output) in enumerate(zip(runs, outputs, strict=True)):
        assert run.returncode == 0, output
        assert f"done {index}" in output
    assert sorted(os.listdir(tmp_path / "joint")) == ["2", "3", "damaged-3-1"]
    other = jax.make_mesh((2, 4), ("a", "b"))
    for step in (2, 3):
        template = template_of(place(values(step), other, P(("a", "b"))))
        restored = Checkpointer(tmp_path / "joint").restore(template, step=step)
        assert restored.extra == {"by": "two", "step": step}
        assert same_bits(restored.state, values(step))


KILLED = """
import pathlib, signal, time
root = pathlib.Path(sys.argv[1])
spec = P("data")

def run():
    "Resume, check every bit, save step after step until killed."
    mesh = jax.make_mesh((1,), ("data",))
    template = template_of(place(values(0), mesh, spec))
    with Checkpointer(root, keep=3) as checkpointer:
        step = 0
        if checkpointer.latest_step() is not None:
            restored = checkpointer.restore(template)
            step = restored.step
            assert same_bits(restored.state, values(step))
            # Killed in a save, it lost only what came after the last whole one.
            assert step == max(map(int, complete()))
        while True:
            step += 1
            checkpointer.save(step, place(values(step), mesh, spec), {"config": {}})

def complete():
    return {path.name for path in root.glob("*") if path.name.isdecimal()}

def wait_until(pid, condition):
    while not condition():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended by itself"
        time.sleep(0.0005)

tmp = "*.orbax-checkpoint-tmp"
files = tmp + "/state*/ocdbt.process_0/"
manifest, state = tmp + "/state*/manifest.ocdbt", tmp + "/state"
moments = [tmp, files, tmp + "/meta*", files + "d/*", manifest, state]
unfinished = 0
# One import for all victims: forked before any device exists.
for saves, moment in enumerate(moments):  # the first dies in its first save
    before = complete()
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(1)
    if saves:
        wait_until(pid, lambda: complete() - before)
    wait_until(pid, lambda: any(root.glob(moment)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    unfinished += any(root.glob(tmp))
print(unfinished, "killed in the middle of a save", flush=True)
assert unfinished >= 3, unfinished
"""


def test_killed_during_saves_leaves_no_bad_step(tmp_path):
    run = start(KILLED, tmp_path, XLA_FLAGS="")
    output = run.communicate(timeout=240)[0]
    assert run.returncode == 0, output
    checkpointer = Checkpointer(tmp_path)
    steps = checkpointer.all_steps()
    assert max(steps) >= 5
    assert steps == sorted(int(name) for name in os.listdir(tmp_path) if name.isdecimal())
    mesh = jax.make_mesh((8,), ("data",))
    for step in steps:
        template = template_of(place(values(step), mesh, P("data")))
        assert same_bits(checkpointer.restore(template, step=step).state, values(step))
