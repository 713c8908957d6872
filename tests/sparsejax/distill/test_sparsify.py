"""From SiLU to ReLU by training on, with and without the dense model as a teacher."""

import dataclasses

import jax
import numpy as np
import pytest

from sparsejax import init_params
from sparsejax.convert import load_run, save_run
from sparsejax.distill.objective import DistillLoss
from sparsejax.distill.sparsify import RelufyConfig, sparsify
from sparsejax.params import flatten
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.step import LossConfig

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def dense(whole, tmp_path_factory):
    config, _ = whole
    layer = config.layers[0]
    ffn = dataclasses.replace(layer.ffn, activation="silu")
    config = config.replace(layers=(dataclasses.replace(layer, ffn=ffn),) * 2)
    path = tmp_path_factory.mktemp("dense") / "run"
    save_run(path, config, init_params(config, jax.random.key(3)))
    return path


def config(dense, workdir, **changes) -> RelufyConfig:
    base = RelufyConfig(
        init_from=dense,
        workdir=workdir,
        steps=8,
        seq_len=16,
        threshold=0.05,
        log_every=1,
        eval_batches=1,
        checkpoint_every=4,
        loss=LossConfig(l1_coeff=0.1, l1_start=2, l1_ramp=2),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    return dataclasses.replace(base, **changes)


def test_training_on_with_a_teacher(dense, tmp_path):
    run = config(dense, tmp_path / "run", teacher=dense)
    summary = sparsify(run)
    assert summary["step"] == 8
    first, last = summary["first"], summary["last"]
    np.testing.assert_allclose(first["loss"], first["kl"] + first["cosine"], rtol=1e-5)
    with_l1 = last["kl"] + last["cosine"] + 0.1 * last["l1"]
    np.testing.assert_allclose(last["loss"], with_l1, rtol=1e-5)
    assert last["nnz"] < 0.9 * first["nnz"] < 0.9 * 32
    model, params, _ = load_run(run.workdir)
    assert all(layer.ffn.activation == "relu" and layer.ffn.gate_bias for layer in model.layers)
    assert np.ptp(flatten(params)["layer_0/ffn/gate_bias"]) > 0


def test_without_a_teacher_it_begins_with_the_dense_weights(dense, tmp_path):
    still = OptimizerConfig(learning_rate=1e-30, weight_decay=0)
    run = config(dense, tmp_path / "run", steps=4, optimizer=still, relu_layers=(1,))
    # Resumed after its end, the run knows its model without the dense one's.
    summary = sparsify(run)
    assert sparsify(dataclasses.replace(run, resume=True)) == summary
    assert summary["first"]["loss"] == summary["first"]["ce"]  # L1 sets in later
    model, params, _ = load_run(run.workdir)
    assert [layer.ffn.activation for layer in model.layers] == ["silu", "relu"]
    found = flatten(params)
    bias = found.pop("layer_1/ffn/gate_bias")
    np.testing.assert_allclose(bias, np.full(32, -0.05), rtol=1e-6)
    for path, leaf in flatten(load_run(dense)[1]).items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


def test_wrong_settings(dense, folders, tmp_path):
    with pytest.raises(ValueError, match="--init-from"):
        config(None, tmp_path)
    with pytest.raises(ValueError, match="relu_layers is empty, and no activation would be"):
        config(dense, tmp_path, relu_layers=())
    with pytest.raises(ValueError, match="no meaning without --teacher"):
        config(dense, tmp_path, distill=DistillLoss(lm_weight=1.0))
    with pytest.raises(ValueError, match="has ReLU already"):
        sparsify(config(folders[0], tmp_path / "run"))
    assert not (tmp_path / "run").exists()
