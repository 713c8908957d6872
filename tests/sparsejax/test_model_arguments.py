"""What `apply` refuses: tokens, masks and parameters that do not fit."""

import jax
import numpy as np
import pytest

from sparsejax import apply, forward, init_params, param_shapes, presets


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros(8, np.int32), r"pass tokens\[None\]"),
        (np.zeros((1, 8), np.float32), "must be integers"),
        (np.zeros((1, 8), bool), "must be integers"),
    ],
)
def test_tokens_of_another_kind_are_refused(tokens, message):
    config = presets.tiny()
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p, t: apply(config, p, t), param_shapes(config), tokens)


def test_wide_ids_beyond_the_vocabulary_give_nan():
    config = presets.tiny().replace(layers=())
    params = init_params(config, jax.random.key(0))
    out = apply(config, params, np.array([[2**32 - 1, 5]], np.uint32))
    assert np.isnan(out[0, 0]).all() and np.isfinite(out[0, 1]).all()
    narrow = apply(config, params, np.array([[5]], np.uint8))[0, 0]
    np.testing.assert_allclose(out[0, 1], narrow, rtol=2e-5, atol=2e-5)


def test_ids_of_64_bits_beyond_the_vocabulary_give_nan():
    """JAX would narrow them, and look up 2**32 + 5 as 5."""
    config = presets.tiny().replace(layers=())
    params = init_params(config, jax.random.key(0))
    want = apply(config, params, np.array([[5, 5, 5]], np.int32))
    for tokens in (
        np.array([[2**32 + 5, 5, -(2**32) + 5]]),
        np.array([[2**32 + 5, 5, 2**63 + 5]], np.uint64),
    ):
        for out, whole in (
            (apply(config, params, tokens), want),
            (
                forward(config, params, tokens).hidden,
                forward(config, params, tokens % 1 + 5).hidden,
            ),
        ):
            assert np.isnan(out[0, ::2]).all()
            np.testing.assert_array_equal(out[0, 1], whole[0, 1])
    wrong = np.array([[0, 1, 2**32 + 2]])
    for name in ("positions", "segment_ids"):
        with pytest.raises(ValueError, match=f"{name} must hold integers of 32 bits, got 42949672"):
            apply(config, params, np.zeros((1, 3), int), **{name: wrong})


def test_swapped_arguments():
    config = presets.tiny()
    with pytest.raises(ValueError, match="apply: config must be a ModelConfig, got dict; the argu"):
        apply(param_shapes(config), config, np.zeros((1, 3), int))  # pyright: ignore
    with pytest.raises(ValueError, match="in this order, got dict and ModelConfig"):
        forward(param_shapes(config), config, np.zeros((1, 3), int))  # pyright: ignore
    shapes = {**param_shapes(config), "final_norm": {"scale": 1.0}}
    with pytest.raises(ValueError, match="final_norm/scale: expected an array, got float"):
        forward(config, shapes, np.zeros((1, 3), int))


def test_parameters_that_do_not_fit_are_refused():
    config = presets.tiny()
    shapes = param_shapes(config)
    shapes["layer_0"]["ffn"]["gate_bias"] = jax.ShapeDtypeStruct((512,), "float32")
    with pytest.raises(ValueError, match="layer_0/ffn/gate_bias: not in the config"):
        jax.eval_shape(lambda p, t: apply(config, p, t), shapes, np.zeros((1, 4), np.int32))
    with pytest.raises(ValueError, match="segment_ids must have tokens' shape"):
        jax.eval_shape(
            lambda p, t: apply(config, p, t, segment_ids=t[:, :1]),
            param_shapes(config),
            np.zeros((1, 4), np.int32),
        )
