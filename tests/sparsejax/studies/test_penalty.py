"""The coefficient as an argument gives the update that it gives as a constant."""

import types

import jax
import numpy as np
import pytest

from sparsejax import MeshConfig, make_mesh
from sparsejax.modules import Options
from sparsejax.studies.penalty import penalised
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from sparsejax.training.state import sharded_state
from sparsejax.training.step import LossConfig, make_train_step


def update(model, mesh, loss, l1=None):
    config = model[0].replace(layers=model[0].layers[1:2])
    run = types.SimpleNamespace(config=types.SimpleNamespace(loss=loss), model=config, mesh=mesh)
    objective = None if l1 is None else penalised(run, l1)
    settings = OptimizerConfig(learning_rate=1e-2)
    optimizer, schedule = make_optimizer(settings, 10), make_schedule(settings, 10)
    ids = np.random.default_rng(0).integers(0, 48, (2, 17)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    with jax.set_mesh(mesh):
        state = sharded_state(config, optimizer, mesh, 0)
        step = make_train_step(
            config, optimizer, schedule, loss, Options(), mesh, objective=objective
        )
        new, metrics = step(state, batch, *([] if objective is None else [objective.frozen]))
    return jax.device_get((new.params, metrics))


def test_the_same_update_and_loss_as_with_a_constant(model):
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    params, metrics = update(model, mesh, LossConfig(l1_coeff=0.05))
    found, seen = update(model, mesh, LossConfig(l1_coeff=0.0), l1=0.05)
    # The term is no small part of it: without it the gradient would be another.
    assert 0.05 * metrics["l1"] > 0.01 * metrics["ce"]
    for name in ("loss", "ce", "l1", "grad_norm", "nnz"):
        np.testing.assert_allclose(seen[name], metrics[name], rtol=1e-5)
    for ours, wanted in zip(*map(jax.tree.leaves, (found, params)), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=1e-5)


def test_two_coefficients_are_refused(model):
    loss = LossConfig(l1_coeff=1e-3)
    run = types.SimpleNamespace(config=types.SimpleNamespace(loss=loss), model=model[0], mesh=None)
    with pytest.raises(ValueError, match=r"l1_coeff must be 0 and accumulate 1, got 0\.001 and 1"):
        penalised(run, 1e-3)
