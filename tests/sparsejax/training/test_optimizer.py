"""Schedules at their corners, and AdamW against its written-out update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import init_params
from sparsejax.params import flatten
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule, zero_rows


def test_cosine_corners():
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10), 110)
    rates = [float(schedule(n)) for n in (0, 4, 9, 10, 60, 110)]
    np.testing.assert_allclose(rates, [0.1, 0.5, 1.0, 1.0, 0.55, 0.1], rtol=1e-6)


def test_warmup_stable_decay_corners():
    config = OptimizerConfig(
        learning_rate=1.0, schedule="wsd", warmup_steps=10, decay_share=0.2, final_lr=0.0
    )
    schedule = make_schedule(config, 100)
    rates = [float(schedule(n)) for n in (0, 9, 10, 50, 80, 90, 100)]
    np.testing.assert_allclose(rates, [0.1, 1, 1, 1, 1, 0.5, 0], atol=1e-6)


def test_constant_and_default_warmup():
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, schedule="constant"), 50)
    np.testing.assert_allclose([float(schedule(n)) for n in (0, 4, 40)], [0.4, 2.0, 2.0], rtol=1e-6)
    no_warmup = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=0), 10)
    assert float(no_warmup(0)) == 1.0


def test_update_is_adamw_with_decay_on_matrices_only(micro):
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, schedule="constant")
    optimizer = make_optimizer(config, 10)
    params = init_params(micro, jax.random.key(0))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-4), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # First step of Adam with bias correction: g / (|g| + eps), gradient norm under the clip.
    adam = 1e-4 / (1e-4 + 1e-8)
    for path, update in flatten(updates).items():
        decay = 0.1 if "norm" not in path else 0.0
        expected = -0.1 * (adam + decay * np.asarray(flatten(params)[path]))
        np.testing.assert_allclose(update, expected, rtol=1e-5, err_msg=path)


def test_clipping():
    optimizer = make_optimizer(OptimizerConfig(clip_norm=1.0), 10)
    params = {"w": jnp.zeros((4,))}
    _, state = optimizer.update({"w": jnp.full((4,), 50.0)}, optimizer.init(params), params)
    first_moment = flatten(state)["1/mu/w"]
    np.testing.assert_allclose(first_moment, 0.1 * 0.5, rtol=1e-5)  # (1 - b1) * 50 / 100


def test_zero_rows_touches_those_rows_of_that_parameter(micro):
    optimizer = make_optimizer(OptimizerConfig(), 10)
    params = init_params(micro, jax.random.key(0))
    state = jax.tree.map(jnp.ones_like, optimizer.init(params))
    dead = jnp.arange(64) % 5 == 0
    changed = flatten(zero_rows(state, {"layer_1/ffn/gate": dead}))
    for path, leaf in changed.items():
        expected = np.ones(leaf.shape, leaf.dtype)
        if path.endswith("layer_1/ffn/gate"):
            expected[np.asarray(dead)] = 0
        np.testing.assert_array_equal(leaf, expected, err_msg=path)
    assert sum("layer_1/ffn/gate" in path for path in changed) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"schedule": "linear"}, "schedule must be"),
        ({"final_lr": 1.5}, "final_lr must be in"),
        ({"clip_norm": -1.0}, "clip_norm must be finite and not negative"),
        ({"clip_norm": float("inf")}, "clip_norm must be finite and not negative"),
        ({"b2": 1.5}, r"b2 must be in \[0, 1\)"),
        ({"eps": -1.0}, "eps must be positive"),
        ({"warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**change)
