"""Contributions of neurons, and their order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import MeshConfig, make_mesh, param_shapes
from sparsejax.params import flatten
from sparsejax.sharding import tree_shardings
from sparsejax.surgery import channel_contribution, permute_neurons
from tests.sparsejax.surgery.test_attention import TOKENS
from tests.sparsejax.surgery.test_prune import CONFIG
from tests.sparsejax.test_model import close, np_model, random_params

ORDER = np.random.default_rng(3).permutation(30)


def test_another_order_is_the_same_function():
    params = random_params(CONFIG)
    config, new = permute_neurons(CONFIG, params, 2, ORDER)
    assert config == CONFIG
    for path, leaf in flatten(params).items():
        if path.startswith("layer_2/ffn/"):
            np.testing.assert_array_equal(flatten(new)[path], np.asarray(leaf)[ORDER])
        else:
            assert flatten(new)[path] is leaf
    with jax.default_matmul_precision("highest"):
        got = sparsejax.apply(config, new, jnp.asarray(TOKENS))
    close(got, np_model(CONFIG, params, TOKENS)[0])
    back = permute_neurons(config, new, 2, jnp.argsort(jnp.asarray(ORDER)))[1]
    for path, leaf in flatten(back).items():
        np.testing.assert_array_equal(leaf, flatten(params)[path])
    assert permute_neurons(CONFIG, param_shapes(CONFIG), 2, ORDER)[1] == param_shapes(CONFIG)


def test_wrong_orders():
    shapes = param_shapes(CONFIG)
    for order, message in (
        (ORDER[1:], "permutation must hold layer 0's 30 neurons as integers, got int64[29]"),
        (ORDER * 1.0, "as integers, got float64[30]"),
        (ORDER + 1, "permutation must hold 0 to 29, got 30"),
        (ORDER - 1, "permutation must hold 0 to 29, got -1"),
        ([[1, 2], [3]], "permutation must hold numbers in equal rows, got [[1, 2], [3]]"),
        ([0, 1, 1, *range(3, 30)], "every neuron once; 1 comes 2 times and 2 not at all"),
    ):
        with pytest.raises(ValueError, match=re.escape("permute_neurons: ")) as caught:
            permute_neurons(CONFIG, shapes, 0, order)
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="layers names layer 3"):
        permute_neurons(CONFIG, shapes, 3, ORDER)


def written_out(params, tokens, layer, mask, segments=None):
    """mean over tokens of |h_n| times the norm of down_n, h taken from the model without neuron n.

    A neuron's |h| per token is what the sum of |h| over neurons loses when n is silenced.
    """
    config, leaves = CONFIG, params[f"layer_{layer}"]["ffn"]
    at = config.ffn_layers.index(layer)
    rows = "gate" if "gate" in leaves else "up"
    total = np_model(config, params, tokens, segments)[1][at][0]
    scores = []
    for n in range(leaves["down"].shape[0]):
        silent = jax.tree.map(lambda x: x, params)
        ffn = silent[f"layer_{layer}"]["ffn"]
        ffn[rows] = ffn[rows].at[n].set(0.0)
        if "gate_bias" in ffn:
            ffn["gate_bias"] = ffn["gate_bias"].at[n].set(0.0)
        h = total - np_model(config, silent, tokens, segments)[1][at][0]
        scores.append(h[mask].mean() * np.linalg.norm(np.asarray(leaves["down"][n], np.float64)))
    return np.array(scores)


def test_contributions_written_out():
    params = random_params(CONFIG)
    first, second = TOKENS[:, :4], TOKENS[:1]
    with jax.default_matmul_precision("highest"):
        got = channel_contribution(CONFIG, params, iter([first, jnp.asarray(second)]))
        alone = channel_contribution(CONFIG, params, [first], layers=1)
    assert list(got) == [0, 1, 2] and list(alone) == [1]
    for layer in (0, 1):
        parts = [
            written_out(params, tokens, layer, np.ones(tokens.shape, bool))
            for tokens in (first, second)
        ]
        # Every token counts the same: 8 of them, then 9.
        close(got[layer], (8 * parts[0] + 9 * parts[1]) / 17)
        assert got[layer].min() >= 0 and got[layer].max() > 0
    close(alone[1], parts[0])


def test_documents_and_masks_of_a_loader():
    params = random_params(CONFIG)
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
    mask = np.random.default_rng(1).random((2, 9)) < 0.6
    batch = {"tokens": TOKENS, "segment_ids": segments, "loss_mask": mask, "targets": TOKENS}
    with jax.default_matmul_precision("highest"):
        got = channel_contribution(CONFIG, params, [batch], layers=[1])[1]
    close(got, written_out(params, TOKENS, 1, mask, segments))


def test_contributions_on_a_mesh():
    config = CONFIG.replace(
        layers=tuple(layer for layer in CONFIG.layers if layer.ffn.d_ff % 4 == 0)
    )
    params = random_params(config)
    mesh = make_mesh(MeshConfig(1, 2, 4))
    placed = jax.device_put(params, tree_shardings(mesh, params))
    want = channel_contribution(config, params, [TOKENS])
    with jax.set_mesh(mesh):
        got = channel_contribution(config, placed, [TOKENS])
    assert list(got) == [0]
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


def test_nothing_to_average():
    params = random_params(CONFIG)
    with pytest.raises(ValueError, match="batches hold no tokens to average over"):
        channel_contribution(CONFIG, params, [])
    told = r"batches must hold integer tokens \(B, T\), got int64\[9\]"
    with pytest.raises(ValueError, match=told):
        channel_contribution(CONFIG, params, [TOKENS[0]])


def test_a_mask_counts_positions_whatever_its_type():
    params = random_params(CONFIG)
    keep = np.arange(18).reshape(2, 9) % 3 != 0
    with jax.default_matmul_precision("highest"):
        for mask in (keep * 0.5, keep * 2):
            batch = {"tokens": TOKENS, "positions": None, "loss_mask": mask}
            got = channel_contribution(CONFIG, params, [batch], layers=1)[1]
            close(got, written_out(params, TOKENS, 1, keep))


def test_batches_that_are_none():
    params = random_params(CONFIG)
    for batches, message in (
        (5, "batches must be an iterable of batches, got 5"),
        (None, "batches must be an iterable of batches, got None"),
        ({"tokens": TOKENS}, "for a single one pass [batch]"),
        ([{"ids": TOKENS}], "a batch needs 'tokens', got ['ids']"),
        ([TOKENS * 1.0], "integer tokens (B, T), got float64[2, 9]"),
        ([TOKENS > 3], "integer tokens (B, T), got bool[2, 9]"),
        ([None], "tokens of a batch must hold numbers in equal rows, got None"),
        (
            [{"tokens": TOKENS, "loss_mask": np.ones((1, 9))}],
            "loss_mask must have tokens' shape [2, 9], got [1, 9]",
        ),
        (
            [{"tokens": TOKENS, "positions": [1, 2]}],
            "positions must have tokens' shape [2, 9], got [2]",
        ),
        (
            [{"tokens": TOKENS, "positions": TOKENS + 2**40}],
            f"positions must hold integers of 32 bits, got {TOKENS[0, 0] + 2**40}",
        ),
        ([TOKENS + 1000], "contributions of 30 of layer 0's 30 neurons are not finite: ids"),
        ([TOKENS + 2**32], "contributions of 30 of layer 0's 30 neurons are not finite: ids"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            channel_contribution(CONFIG, params, batches)  # pyright: ignore[reportArgumentType]
        assert str(caught.value).startswith("channel_contribution: ")
    with pytest.raises(ValueError, match="embed/embedding is a shape alone"):
        channel_contribution(CONFIG, param_shapes(CONFIG), [TOKENS])
    down = params["layer_2"]["ffn"]["down"]
    params["layer_2"]["ffn"]["down"] = down.at[3, 0].set(jnp.nan)
    # Layers before it do not know; of the layer itself only that neuron.
    assert list(channel_contribution(CONFIG, params, [TOKENS], [0, 1])) == [0, 1]
    with pytest.raises(ValueError, match="contributions of 1 of layer 2's 30 neurons are not fin"):
        channel_contribution(CONFIG, params, [TOKENS])


def test_lists_are_batches_too():
    params = random_params(CONFIG)
    want = channel_contribution(CONFIG, params, [TOKENS])
    got = channel_contribution(CONFIG, params, [TOKENS.tolist()])
    for layer, values in want.items():
        np.testing.assert_array_equal(got[layer], values)
