"""The training step: its loss from the formula, splits over meshes, dead neurons."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from sparsejax import Options, apply, forward, make_mesh
from sparsejax.params import flatten
from sparsejax.sharding import MeshConfig, batch_sharding
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from sparsejax.training.state import sharded_state
from sparsejax.training.step import LossConfig, make_eval_step, make_train_step

OPTIMIZER = OptimizerConfig(learning_rate=3e-3)


def batch_of(seed, rows=8, length=16):
    # 32 of the 272 ids: something to learn.
    ids = np.random.default_rng(seed).integers(0, 32, (rows, length + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


@functools.cache
def compiled(config, mesh, loss, implementation=None):
    """Mesh, a function making fresh states, and the step; compiled once per module."""
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else make_mesh(mesh)
    optimizer, schedule = make_optimizer(OPTIMIZER, 20), make_schedule(OPTIMIZER, 20)
    step = make_train_step(config, optimizer, schedule, loss, Options(implementation), mesh)
    return mesh, lambda: sharded_state(config, optimizer, mesh, 0), step


def run(
    config,
    steps,
    mesh: MeshConfig | None = MeshConfig(),
    loss=LossConfig(l1_coeff=1e-2),
    change_state=None,
    implementation=None,
):
    """Trains on fixed batches; returns the last state and every step's metrics.

    Without a mesh it takes one device: programs for eight compile several times as long."""
    devices, new_state, step = compiled(config, mesh, loss, implementation)
    state = new_state()
    state = state if change_state is None else change_state(state)
    history = []
    with jax.set_mesh(devices):
        for i in range(steps):
            batch = jax.device_put(batch_of(i), batch_sharding(devices))
            state, metrics = step(state, batch)
            history.append(jax.device_get(metrics))
    return state, history


@pytest.fixture(scope="module")
def one_device(micro):
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1, 1),
        ("data", "fsdp", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    optimizer, schedule = make_optimizer(OPTIMIZER, 20), make_schedule(OPTIMIZER, 20)
    state = sharded_state(micro, optimizer, mesh, 0)
    loss = LossConfig(l1_coeff=1e-2)
    step = make_train_step(micro, optimizer, schedule, loss, Options(), mesh)
    first, history = jax.device_get(state.params), []
    for i in range(20):
        state, metrics = step(state, jax.device_put(batch_of(i), batch_sharding(mesh)))
        history.append(jax.device_get(metrics))
    return first, jax.device_get(state), history


def test_first_loss_is_the_formula(micro, one_device):
    params, _, history = one_device
    batch, got = batch_of(0), history[0]
    log_p = jax.nn.log_softmax(apply(micro, params, batch["tokens"]))
    ce = -np.take_along_axis(np.asarray(log_p), batch["targets"][..., None], -1).mean()
    stats = forward(micro, params, batch["tokens"], options=Options(count_neurons=True)).stats
    l1 = np.asarray(stats.l1, np.float64).mean()
    np.testing.assert_allclose(got["ce"], ce, rtol=1e-5)
    np.testing.assert_allclose(got["l1"], l1, rtol=1e-5)
    np.testing.assert_allclose(got["loss"], ce + 1e-2 * l1, rtol=1e-5)
    np.testing.assert_allclose(got["nnz_per_layer"], np.asarray(stats.nnz).mean((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(got["nnz"], np.asarray(stats.nnz).mean(), rtol=1e-6)
    dead = np.concatenate([np.asarray(n) == 0 for n in stats.neuron_nnz])
    np.testing.assert_allclose(got["dead_fraction"], dead.mean(), rtol=1e-6)
    assert got["learning_rate"] == np.float32(1.5e-3)  # 2 warm-up steps of 20


def test_training_lowers_the_loss(one_device):
    _, state, history = one_device
    assert state.step == 20
    assert history[-1]["loss"] < history[0]["loss"] - 0.2


@pytest.mark.parametrize(
    "mesh", [MeshConfig(8, 1, 1), MeshConfig(1, 8, 1), MeshConfig(2, 2, 2), MeshConfig(1, 2, 4)]
)
def test_meshes_give_the_one_device_losses(micro, one_device, mesh):
    state, history = run(micro, 20, mesh)
    _, _, want = one_device
    for got, expected in zip(history, want, strict=True):
        np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-4)
        np.testing.assert_allclose(got["nnz"], expected["nnz"], rtol=1e-3)
    # Each device holds its share of the matrices' bytes, of the optimiser's too.
    for path, leaf in flatten(state).items():
        share = leaf.addressable_shards[0].data.size / max(leaf.size, 1)
        matrix = leaf.ndim >= 2
        assert share == (1 / (mesh.fsdp * mesh.tensor) if matrix else 1), path


def test_accumulation_equals_one_batch(micro, one_device):
    loss = LossConfig(l1_coeff=1e-2, accumulate=4)
    state, history = run(micro, 3, MeshConfig(2, 1, 4), loss)
    for got, expected in zip(history, one_device[2], strict=False):
        for key in ("loss", "ce", "l1", "nnz_per_layer", "dead_fraction", "grad_norm"):
            np.testing.assert_allclose(got[key], expected[key], rtol=2e-5, err_msg=key)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_the_sparse_engine_trains_like_the_dense_one_on_a_mesh(micro, one_device):
    loss = LossConfig(l1_coeff=1e-2, accumulate=2)
    with pallas_kernels.interpret():
        _, history = run(micro, 3, MeshConfig(2, 2, 2), loss, implementation="triton")
    for got, expected in zip(history, one_device[2], strict=False):
        for key in ("loss", "ce", "l1", "nnz_per_layer", "dead_fraction", "grad_norm"):
            np.testing.assert_allclose(got[key], expected[key], rtol=1e-4, err_msg=key)
        # Per layer between 0 (dense on every device and microbatch) and 1.
        assert 0 <= got["sparse_layers"] <= 2
        assert expected["sparse_layers"] == 0


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_an_engine_per_layer_trains_alike(micro, one_device):
    engines = ("xla", "triton")
    with pallas_kernels.interpret():
        state, history = run(micro, 2, None, implementation=engines)
    keys = ("loss", "ce", "l1", "nnz_per_layer", "dead_fraction", "grad_norm")
    for got, expected in zip(history, one_device[2], strict=False):
        for key in keys:
            np.testing.assert_allclose(got[key], expected[key], rtol=1e-4, err_msg=key)
        assert got["sparse_layers"] <= 1
    assert state.step == 2
    with pytest.raises(ValueError, match=r"each of the model's 2 layers, got 3; give layers with"):
        run(micro, 1, None, implementation=(*engines, "xla"))


def test_masked_targets_do_not_count(micro):
    mesh = make_mesh()
    evaluate = make_eval_step(micro, 100, Options(), mesh)
    params = sharded_state(micro, make_optimizer(OPTIMIZER, 2), mesh, 0).params
    batch = batch_of(0)
    full = evaluate(params, batch)
    mask = np.zeros((8, 16), bool)
    mask[:, :5] = True
    masked = evaluate(params, batch | {"loss_mask": mask})
    log_p = np.asarray(jax.nn.log_softmax(apply(micro, params, batch["tokens"])))
    ce = -np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(full["ce_sum"], ce.sum(), rtol=1e-5)
    np.testing.assert_allclose(masked["ce_sum"], ce[:, :5].sum(), rtol=1e-5)
    assert masked["tokens"] == 40
    assert masked["batches"] == 1
    np.testing.assert_array_equal(masked["sparse_sum"], [0, 0])


def kill(state, rows):
    """Makes some gate rows of layer 0 fire on nothing: a bias-free row against all inputs is zero,
    so the row itself is set to zero (pre-activation 0 is not active)."""
    params = jax.device_get(state.params)
    gate = np.array(params["layer_0"]["ffn"]["gate"])
    gate[rows] = 0.0
    params["layer_0"]["ffn"]["gate"] = gate
    new = jax.tree.map(lambda a, old: jax.device_put(a, old.sharding), params, state.params)
    return dataclasses.replace(state, params=new)


def test_revival_mixes_dead_rows_and_nothing_else(micro):
    rows = [3, 17, 40]
    plain, plain_metrics = run(micro, 1, change_state=lambda s: kill(s, rows))
    loss = LossConfig(l1_coeff=1e-2, revive_dead=0.1)
    revived, metrics = run(micro, 1, loss=loss, change_state=lambda s: kill(s, rows))
    np.testing.assert_array_equal(metrics[0]["dead_fraction"], plain_metrics[0]["dead_fraction"])
    np.testing.assert_allclose(metrics[0]["dead_fraction"], 3 / 128, rtol=1e-6)
    a, b = flatten(jax.device_get(plain)), flatten(jax.device_get(revived))
    for path in a:
        if path.endswith("layer_0/ffn/gate"):
            alive = np.setdiff1d(np.arange(64), rows)
            np.testing.assert_array_equal(a[path][alive], b[path][alive], err_msg=path)
        else:
            np.testing.assert_array_equal(a[path], b[path], err_msg=path)
    fresh = b["params/layer_0/ffn/gate"][rows]
    assert 0.05 < fresh.std() / (0.1 * micro.init_std) < 1.5
    assert len(np.unique(fresh)) == fresh.size
    for moment in ("mu", "nu"):
        path = next(p for p in b if p.endswith(f"{moment}/layer_0/ffn/gate"))
        assert not b[path][rows].any()
    _, after = run(micro, 5, loss=loss, change_state=lambda s: kill(s, rows))
    assert after[-1]["dead_fraction"] == 0


def test_nothing_dead_changes_no_bit(micro):
    a, _ = run(micro, 2)
    b, metrics = run(micro, 2, loss=LossConfig(l1_coeff=1e-2, revive_dead=0.1))
    assert all(m["dead_fraction"] == 0 for m in metrics)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_l1_warm_up_reaches_the_loss(micro):
    loss = LossConfig(l1_coeff=0.5, l1_start=2, l1_ramp=4)
    _, history = run(micro, 8, None, loss)
    coefficients = [float((m["loss"] - m["ce"]) / m["l1"]) for m in history]
    np.testing.assert_allclose(coefficients, [0, 0, 0, 0.125, 0.25, 0.375, 0.5, 0.5], atol=2e-3)


def test_more_l1_means_fewer_active_neurons(micro):
    nnz = [run(micro, 20, None, LossConfig(l1_coeff=c))[1][-1]["nnz"] for c in (0.0, 0.1, 1.0)]
    assert nnz[0] > 1.1 * nnz[1] > 1.2 * nnz[2]


def test_layers_without_ffn_or_any_layer(micro):
    no_ffn = micro.replace(layers=(dataclasses.replace(micro.layers[0], ffn=None),))
    _, history = run(no_ffn, 1, None)
    assert history[0]["nnz"] == 0 and history[0]["nnz_per_layer"].shape == (0,)
    assert np.isfinite(history[0]["loss"])


def test_dtypes_of_the_state(micro):
    state, _ = run(micro.replace(dtype="bfloat16"), 1, None)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"l1_coeff": -1.0}, "l1_coeff must be finite and not negative"),
        ({"l1_coeff": float("nan")}, "l1_coeff must be finite and not negative"),
        ({"revive_dead": 2.0}, "revive_dead must be in"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"vocab_chunk": 0}, "vocab_chunk must be at least 1"),
    ],
)
def test_wrong_loss_settings(change, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**change)
