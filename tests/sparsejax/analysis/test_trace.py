"""Time in collectives out of traces, by hand and of a run on host devices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sparsejax import MeshConfig, make_mesh
from sparsejax.analysis.collectives import collectives
from sparsejax.analysis.trace import DeviceTime, device_times, read_trace


def row(pid, tid, start, length, name, **args):
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length, "name": name} | (
        {"args": args} if args else {}
    )


def test_overlap_by_hand():
    meta = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/device:GPU:1"}},
        {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "/host:CPU"}},
    ]
    for pid in (1, 2):
        for tid, name in ((7, "Stream #7(Compute)"), (8, "Stream #8(Compute)"), (9, "XLA Ops")):
            event = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid}
            meta.append(event | {"args": {"name": name}})
    rows = [
        row(1, 7, 0e6, 4e6, "gemm", hlo_op="dot.1"),
        row(1, 8, 3e6, 3e6, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)"),
        row(1, 8, 5e6, 2e6, "AllReduceKernel", hlo_op="all-reduce-start.2"),
        row(1, 7, 9e6, 1e6, "fusion", hlo_op="fusion"),
        row(1, 9, 0e6, 90e6, "all-reduce-start.2", hlo_op="all-reduce-start.2"),  # not a stream
        row(2, 7, 2e6, 2e6, "gemm", hlo_op="dot.1"),
        row(3, 1, 0e6, 50e6, "ncclGroupEnd"),
        {},
    ]
    got = device_times({"traceEvents": meta + rows}, {"all-reduce-start.2"})
    assert got == {
        "GPU:0": DeviceTime(span=10, collectives=4, exposed=3, compute=5, idle=2),
        "GPU:1": DeviceTime(span=2, collectives=0, exposed=0, compute=2, idle=0),
    }
    with pytest.raises(ValueError, match="no row of a device"):
        device_times({"traceEvents": meta}, set())


def test_a_run_on_host_devices(tmp_path):
    mesh = make_mesh(MeshConfig(1, 4, 1), jax.devices()[:4])
    with jax.set_mesh(mesh):
        f = jax.shard_map(
            lambda x: lax.psum(jnp.tanh(x @ x.T), "fsdp"), in_specs=P("fsdp"), out_specs=P()
        )
        x = jnp.ones((64, 16))
        program = jax.jit(f).lower(x).compile()
        names = {c.name for c in collectives(program.as_text())}
        jax.block_until_ready(program(x))
        with jax.profiler.trace(tmp_path):
            jax.block_until_ready(program(x))
    times = device_times(read_trace(tmp_path), names)
    assert sorted(times) == [f"CPU:{i}" for i in range(4)]
    for time in times.values():
        assert 0 < time.collectives < time.span
        # Some operations run in pieces beside a collective that waits.
        assert time.collectives - time.compute <= time.exposed <= time.collectives * (1 + 1e-9)
        assert time.span == pytest.approx(time.collectives + time.compute + time.idle)
    with pytest.raises(FileNotFoundError, match="holds no"):
        read_trace(tmp_path / "nothing")
