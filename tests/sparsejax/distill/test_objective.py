"""The distillation objective in a training step: its formula, its gradients, meshes, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsejax import MeshConfig, Options, apply, forward, make_mesh, surgery
from sparsejax.distill import DistillLoss, Teacher, make_distillation
from sparsejax.distill.teacher import load_teacher
from sparsejax.params import flatten
from sparsejax.sharding import batch_sharding, tree_shardings
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer
from sparsejax.training.state import TrainState
from sparsejax.training.step import LossConfig, make_eval_step, make_train_step

IDS = np.random.default_rng(0).integers(0, 272, (8, 13)).astype(np.int32)
BATCH = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:]}
WEIGHTS = DistillLoss(kl_weight=0.8, cosine_weight=0.5, lm_weight=0.25)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def objective(whole, cut, mesh=None, weights=WEIGHTS, **changes):
    params = whole[1]
    if mesh is not None:
        params = jax.device_put(params, tree_shardings(mesh, params))
    return make_distillation(cut[0], Teacher(whole[0], params), weights=weights, **changes)


def update(whole, cut, mesh, weights=WEIGHTS, accumulate=1, optimizer=None, batch=BATCH, **changes):
    """One step of gradient descent: (new params, metrics)."""
    optimizer = optimizer or optax.sgd(1.0)
    made = objective(whole, cut, mesh, weights, **changes)
    loss = LossConfig(l1_coeff=0.0, accumulate=accumulate)
    step = make_train_step(cut[0], optimizer, lambda n: 1.0, loss, Options(), mesh, objective=made)
    # The step donates its state's buffers, and device_put may share them.
    params = jax.device_put(jax.tree.map(jnp.copy, cut[1]), tree_shardings(mesh, cut[1]))
    with jax.set_mesh(mesh):
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        placed = jax.device_put(batch, batch_sharding(mesh))
        state, metrics = step(state, placed, made.frozen)
    return jax.device_get(state.params), jax.device_get(metrics)


def naive(whole, params, cut):
    """Terms of the loss, with whole logits and jax's own gradients."""
    capture = Options(capture_hidden=True)
    log_p = jax.nn.log_softmax(apply(*whole, BATCH["tokens"]))
    log_q = jax.nn.log_softmax(apply(cut[0], params, BATCH["tokens"]))
    kl = jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))
    ce = -jnp.mean(jnp.take_along_axis(log_q, BATCH["targets"][..., None], -1))
    ours = forward(cut[0], params, BATCH["tokens"], options=capture).hidden_states
    theirs = forward(*whole, BATCH["tokens"], options=capture).hidden_states
    cosines = []
    for s, t in ((0, 1), (1, 2)):
        x, y = ours[s + 1], theirs[t + 1]
        norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
        cosines.append(jnp.mean(1 - jnp.sum(x * y, axis=-1) / norms))
    return kl, ce, jnp.stack(cosines)


@pytest.fixture(scope="module")
def expected(whole, cut):
    def total(params):
        kl, ce, cosines = naive(whole, params, cut)
        return 0.8 * kl + 0.25 * ce + 0.5 * jnp.sum(cosines), (kl, ce, cosines)

    (loss, terms), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(cut[1])
    return loss, terms, jax.device_get(grads)


def assert_is_expected(cut, params, metrics, expected, rtol=2e-5):
    loss, (kl, ce, cosines), grads = expected
    for name, want in {"loss": loss, "kl": kl, "ce": ce, "cosine": cosines.sum()}.items():
        np.testing.assert_allclose(metrics[name], want, rtol=rtol, err_msg=name)
    np.testing.assert_allclose(metrics["cosine_per_layer"], cosines, rtol=rtol)
    before, after, want = flatten(cut[1]), flatten(params), flatten(grads)
    for path in want:
        scale = np.abs(want[path]).max()
        got = np.asarray(before[path]) - after[path]
        room = 2e-7 * np.abs(before[path]).max()  # the subtraction's own rounding
        np.testing.assert_allclose(got, want[path], atol=rtol * scale + room, err_msg=path)


def test_loss_terms_and_gradients_equal_the_naive_form(whole, cut, expected):
    assert_is_expected(cut, *update(whole, cut, one_device()), expected)


def test_a_mesh_gives_the_same(whole, cut, expected):
    mesh = make_mesh(MeshConfig(2, 2, 2))
    assert_is_expected(cut, *update(whole, cut, mesh), expected, rtol=5e-5)


def test_microbatches_add_up(whole, cut, expected):
    assert_is_expected(cut, *update(whole, cut, one_device(), accumulate=4), expected)


def test_half_precision(whole, cut, expected):
    """Both models in bfloat16: losses to its rounding, gradients for float32 parameters."""
    half = (
        whole[0].replace(dtype="bfloat16"),
        jax.tree.map(lambda x: x.astype("bfloat16"), whole[1]),
    )
    student = cut[0].replace(dtype="bfloat16"), cut[1]
    params, metrics = update(half, student, one_device())
    np.testing.assert_allclose(metrics["kl"], expected[1][0], rtol=0.03)
    np.testing.assert_allclose(metrics["cosine"], expected[1][2].sum(), rtol=0.03)
    for path, want in flatten(expected[2]).items():
        got = np.asarray(flatten(cut[1])[path]) - flatten(params)[path]
        assert got.dtype == np.float32
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 0.05, (path, error)
    blocks = objective(half, student, weights=DistillLoss(blocks=True))
    weights = jnp.full((8, 12), 1 / 96)
    loss, terms, _ = jax.eval_shape(
        lambda p, frozen: blocks.loss(p, frozen, BATCH, weights, Options()), cut[1], half[1]
    )
    assert loss.dtype == terms["error_per_layer"].dtype == jnp.float32


def test_held_out_divergence(whole, cut, expected):
    made = objective(whole, cut, one_device())
    step = make_eval_step(cut[0], 100, Options(), one_device(), made)
    mask = np.zeros((8, 12), bool)
    mask[:, 3:] = True
    sums = step(cut[1], BATCH, made.frozen)
    np.testing.assert_allclose(sums["kl_sum"] / 96, expected[1][0], rtol=2e-5)
    np.testing.assert_allclose(sums["ce_sum"] / 96, expected[1][1], rtol=2e-5)
    masked = step(cut[1], BATCH | {"loss_mask": mask}, made.frozen)
    early = step(cut[1], BATCH | {"loss_mask": ~mask}, made.frozen)
    np.testing.assert_allclose(masked["kl_sum"] + early["kl_sum"], sums["kl_sum"], rtol=2e-5)


def test_blocks_alone_change_and_only_those_asked_for(whole, cut):
    weights = DistillLoss(blocks=True, block_layers=(0,))
    # Weight decay would move what gets no gradient.
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), 20)
    params, metrics = update(whole, cut, one_device(), weights, optimizer=optimizer)
    before = flatten(cut[1])
    for path, after in flatten(params).items():
        assert np.array_equal(before[path], after) != path.startswith("layer_0/"), path
    assert metrics["error_per_layer"].shape == (1,)
    assert metrics["loss"] == metrics["error"] == metrics["error_per_layer"][0] > 0.1
    assert metrics["nnz_per_layer"][0] > 0 and metrics["nnz_per_layer"][1] == 0
    # Layer 1 was not run: none of its neurons counts as dead.
    assert metrics["dead_fraction"] <= 64 / 96


def test_blocks_on_a_mesh_and_in_microbatches(whole, cut):
    weights = DistillLoss(blocks=True)
    # Equal rows: the error of a microbatch is that of the batch.
    same = jax.tree.map(lambda x: np.repeat(x[:1], 8, axis=0), BATCH)
    _, want = update(whole, cut, one_device(), weights, batch=same)
    assert want["error_per_layer"].shape == (2,)
    np.testing.assert_allclose(want["error_per_layer"][1], 0, atol=1e-10)  # unchanged by surgery
    mesh = make_mesh(MeshConfig(2, 2, 2))
    _, micro = update(whole, cut, mesh, weights, accumulate=2, batch=same)
    np.testing.assert_allclose(micro["loss"], want["loss"], rtol=2e-5)


def test_blocks_of_a_student_without_feed_forward_parts(whole):
    student = surgery.remove_ffn(*whole, [0, 1, 2])
    _, metrics = update(whole, student, one_device(), DistillLoss(blocks=True))
    assert metrics["error_per_layer"].shape == (3,) and metrics["nnz_per_layer"].shape == (0,)


def other(model, **changes):
    return model[0].replace(**changes), model[1]


@pytest.mark.parametrize(
    ("teacher", "settings", "message"),
    [
        ({"vocab_size": 300}, {}, "teacher has vocab_size 300, the student 272"),
        ({"d_model": 32}, {}, "teacher has d_model 32, the student 16; set cosine_weight to 0"),
        ({}, {"layer_map": (2,)}, "an entry for each of the student's 2 layers"),
        ({}, {"seq_len": 33}, "seq_len 33 exceeds the teacher's context length 32"),
        ({}, {"weights": DistillLoss(blocks=True, block_layers=(5,))}, "names student layer 5"),
    ],
)
def test_models_that_do_not_fit(whole, cut, teacher, settings, message):
    with pytest.raises(ValueError, match=message):
        objective(other(whole, **teacher), cut, **settings)


def test_logits_alone_need_neither_width_nor_pairing(whole, cut):
    narrow = other(whole, d_model=32, layers=whole[0].layers[:1] * 7)
    made = objective(narrow, cut, weights=DistillLoss(cosine_weight=0))
    assert made.layer_map == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_weight": -1.0}, "kl_weight must be finite and not negative"),
        ({"cosine_weight": float("inf")}, "cosine_weight must be finite"),
        ({"kl_weight": 0.0, "cosine_weight": 0.0}, "must be positive: all are 0"),
        ({"block_layers": (1,)}, "no meaning without blocks"),
        ({"blocks": True, "block_layers": ()}, "block_layers is empty, and nothing would be"),
        ({"blocks": True, "lm_weight": 0.5}, "with blocks the loss is the error"),
    ],
)
def test_wrong_weights(change, message):
    with pytest.raises(ValueError, match=message):
        DistillLoss(**change)


def test_teachers_are_read_in_the_dtype_asked_for(whole, folders):
    teacher = load_teacher(folders[0], one_device(), "bfloat16")
    assert teacher.config == whole[0].replace(dtype="bfloat16", param_dtype="bfloat16")
    for path, leaf in flatten(teacher.params).items():
        want = np.asarray(flatten(whole[1])[path]).astype("bfloat16")
        np.testing.assert_array_equal(leaf, want, err_msg=path)
    assert teacher.origin["step"] == 0 and len(teacher.origin["digest"]) == 16
    with pytest.raises(FileNotFoundError, match="5"):
        load_teacher(folders[0], one_device(), "bfloat16", step=5)


def test_a_teacher_with_nan_is_refused(whole, tmp_path):
    from sparsejax import convert

    params = jax.tree.map(jnp.copy, whole[1])
    params["layer_1"]["ffn"]["up"] = params["layer_1"]["ffn"]["up"].at[3, 4].set(jnp.nan)
    convert.save(tmp_path / "teacher", whole[0], params)
    with pytest.raises(ValueError, match=r"layer_1/ffn/up holds NaN or infinity \(1 of 29"):
        load_teacher(tmp_path / "teacher", one_device(), "float32")
    with pytest.raises(ValueError, match="has no step 3"):
        load_teacher(tmp_path / "teacher", one_device(), "float32", step=3)


def test_describe_names_teacher_pairs_and_blocks(whole, cut):
    made = objective(whole, cut, weights=DistillLoss(blocks=True))
    teacher = dataclasses.replace(made.teacher, origin={"teacher": "x"})
    told = dataclasses.replace(made, teacher=teacher).describe()
    assert told == {"teacher": "x", "layer_map": [1, 2], "blocks": [[0], [1]]}
