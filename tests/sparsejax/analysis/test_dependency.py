"""The dependency matrix against a naive loop in float64 NumPy, its cost, and what it refuses."""

import csv
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import MeshConfig, make_mesh, param_shapes
from sparsejax.analysis import Dependency, block_dependency, steps
from sparsejax.sharding import tree_shardings
from tests.sparsejax.test_model import (
    EMPTY,
    FULL,
    NO_ATTENTION,
    NO_FFN,
    ODD,
    SMOOTH,
    np_attention,
    np_ffn,
    np_norm,
    parallel,
    random_params,
)

LAYERS = (FULL, SMOOTH, NO_ATTENTION, EMPTY, parallel(FULL), parallel(NO_FFN), FULL)
CONFIG = ODD.replace(layers=LAYERS)
UNIFORM = ODD.replace(layers=(SMOOTH,) * 6)
BATCHES = [np.random.default_rng(k).integers(0, 50, (2, 9)) for k in range(2)]
PARTS = ("block", "attention", "ffn")


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def np_contributions(config, params, tokens, segments=None, without=(None, "block")):
    """What each layer's attention and FFN add, one layer's part being removed; float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    segments = np.zeros(tokens.shape) if segments is None else segments
    x = p["embed"]["embedding"][tokens]
    read, found = x, []
    for i, layer in enumerate(config.layers):
        read = read if layer.parallel_with_previous else x
        mine = p.get(f"layer_{i}", {})
        attention = ffn = np.zeros_like(x)
        gone = without[1] if without[0] == i else None
        if layer.attention and gone not in ("block", "attention"):
            normed = np_norm(read, mine["attn_norm"]["scale"], config.norm_eps)
            attention = np_attention(
                layer.attention, mine["attn"], normed, positions, segments, config
            )
        if layer.ffn and gone not in ("block", "ffn"):
            normed = np_norm(read + attention, mine["ffn_norm"]["scale"], config.norm_eps)
            ffn = np_ffn(layer.ffn, mine["ffn"], normed)[0]
        x = x + attention + ffn
        found.append({"block": attention + ffn, "attention": attention, "ffn": ffn})
    return found


def has(layer, part):
    parts = {"attention": layer.attention, "ffn": layer.ffn}
    return any(parts.values()) if part == "block" else parts[part] is not None


def naive(config, params, batches, part, masks=None, segments=None):
    """One whole pass per removed layer; the mean over all tokens of all batches."""
    m = config.num_layers
    matrix = np.full((m, m), np.nan)
    for i in range(m):
        distances = {j: [] for j in range(i + 1, m)}
        for k, tokens in enumerate(batches):
            rows = segments[k] if segments else None
            before = np_contributions(config, params, tokens, rows)
            after = np_contributions(config, params, tokens, rows, (i, part))
            mask = masks[k] if masks else np.ones(tokens.shape, bool)
            for j in distances:
                a, b = before[j][part][mask], after[j][part][mask]
                norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
                if has(config.layers[i], part) and has(config.layers[j], part):
                    distances[j].append(1 - (a * b).sum(-1) / norms)
        for j, found in distances.items():
            if found:
                matrix[i, j] = np.concatenate(found).mean()
    return matrix


@pytest.mark.parametrize("part", PARTS)
def test_equal_to_the_naive_loop(part):
    params = random_params(CONFIG)
    got = block_dependency(CONFIG, params, BATCHES, part=part)
    want = naive(CONFIG, params, BATCHES, part)
    np.testing.assert_allclose(got.matrix, want, rtol=2e-5, atol=2e-6)
    assert np.nanmax(want) > 0.05
    # A layer without such a part has neither row nor column, and nothing depends on what follows.
    assert not np.isfinite(got.matrix[np.tril_indices(7)]).any()
    measured = [j for j, layer in enumerate(LAYERS) if has(layer, part)]
    finite = {(i, j) for i in measured for j in measured if i < j}
    assert finite == set(zip(*np.nonzero(np.isfinite(got.matrix)), strict=True))
    assert got.tokens == 36 and got.part == part and not got.left_out.any()


def test_documents_and_masks_are_heeded():
    params = random_params(CONFIG)
    rng = np.random.default_rng(5)
    segments = [np.sort(rng.integers(0, 3, (2, 9)), axis=1) for _ in BATCHES]
    masks = [rng.random((2, 9)) < 0.6 for _ in BATCHES]
    batches = [
        {"tokens": t, "segment_ids": s, "loss_mask": k}
        for t, s, k in zip(BATCHES, segments, masks, strict=True)
    ]
    got = block_dependency(CONFIG, params, batches)
    want = naive(CONFIG, params, BATCHES, "block", masks, segments)
    np.testing.assert_allclose(got.matrix, want, rtol=2e-5, atol=2e-6)
    assert got.tokens == sum(int(mask.sum()) for mask in masks)
    # A batch that is all padding changes nothing.
    padding = {"tokens": BATCHES[0], "loss_mask": np.zeros((2, 9), bool)}
    again = block_dependency(CONFIG, params, [batches[0], padding, batches[1]])
    np.testing.assert_array_equal(again.matrix, got.matrix)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layers", [2, 3, 6])
def test_cost_at_most_six_tenths_of_the_naive_loop(part, layers):
    config = UNIFORM.replace(layers=(SMOOTH,) * layers)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        real = steps._part
        patch.setattr(steps, "_part", lambda *args: calls.append(args[1]) or real(*args))
        got = block_dependency(config, random_params(config), BATCHES, part=part)
    # Half layers, of two batches.
    assert len(calls) / 2 / layers / 2 == pytest.approx(got.forwards)
    assert got.forwards <= 0.6 * (layers + 1)
    if part == "block":
        assert got.forwards == (layers + 1) / 2


def test_compiled_once_per_kind_of_part():
    steps._part.clear_cache()
    params = random_params(UNIFORM)
    block_dependency(UNIFORM, params, BATCHES)
    assert steps._part._cache_size() == 2
    block_dependency(CONFIG, random_params(CONFIG), BATCHES)
    kinds = {layer.attention for layer in LAYERS} | {layer.ffn for layer in LAYERS}
    assert SMOOTH.attention in kinds and SMOOTH.ffn in kinds
    assert steps._part._cache_size() == len(kinds - {None})


@pytest.mark.parametrize("part", PARTS)
def test_on_a_mesh(part):
    config = UNIFORM.replace(
        layers=tuple(
            dataclasses.replace(
                FULL,
                attention=dataclasses.replace(FULL.attention, num_kv_heads=2),
                ffn=dataclasses.replace(FULL.ffn, d_ff=40),
            )
            for _ in range(3)
        )
    )
    params = random_params(config)
    want = block_dependency(config, params, BATCHES, part=part)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    split = jax.device_put(params, tree_shardings(mesh, params))
    batches = [np.concatenate([b, b]) for b in BATCHES]
    for given in (batches, [jnp.asarray(b) for b in batches]):
        got = block_dependency(config, split, given, part=part)
        np.testing.assert_allclose(got.matrix, want.matrix, rtol=1e-4, atol=2e-6)


def test_no_whole_matrix_on_a_mesh():
    """The program of a part gathers over fsdp what its rules say, never over tensor."""
    layer = dataclasses.replace(SMOOTH, attention=None, ffn=FULL.ffn)
    config = UNIFORM.replace(layers=(layer,), vocab_size=52)
    params = random_params(config)
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=4))
    split = jax.device_put(params, tree_shardings(mesh, params))
    core = config.replace(layers=())
    x = jnp.ones((4, 9, 24), jnp.float32)
    with steps.on_mesh(split):
        text = steps._part.lower(
            core, config.layers[0], split["layer_0"], x, jnp.zeros((4, 9), jnp.int32), None
        )
        compiled = text.compile().as_text()
    assert "all-reduce" in compiled
    assert not re.search(r"f32\[40,24\]", compiled)


def test_small_distances_keep_their_digits():
    params = random_params(UNIFORM)
    for i in range(6):
        scale = params[f"layer_{i}"]["ffn"]["down"]
        params[f"layer_{i}"]["ffn"]["down"] = scale * 1e-4
        params[f"layer_{i}"]["attn"]["o"] = params[f"layer_{i}"]["attn"]["o"] * 1e-4
    got = block_dependency(UNIFORM, params, BATCHES).matrix
    want = naive(UNIFORM, params, BATCHES, "block")
    assert np.nanmax(want) < 2e-6  # 1 - cos in float32 would be rounding
    np.testing.assert_allclose(got, want, rtol=0.05)


def test_contributions_that_are_zero_are_counted_and_left_out():
    config = UNIFORM.replace(layers=(FULL, NO_ATTENTION, FULL))
    params = random_params(config)
    # A layer that is silent unless a token is 7: the embedding of all others is in a half space.
    table = np.abs(np.array(params["embed"]["embedding"])) + 0.1
    table[7] = -table[7]
    params["embed"]["embedding"] = jnp.asarray(table)
    up = jnp.abs(params["layer_1"]["ffn"]["up"])
    params["layer_1"]["ffn"]["up"] = -up
    params["layer_1"]["ffn_norm"]["scale"] = jnp.abs(params["layer_1"]["ffn_norm"]["scale"])
    params["layer_0"] = jax.tree.map(lambda x: x * 1e-3, params["layer_0"])
    tokens = np.where(np.random.default_rng(0).random((2, 9)) < 0.3, 7, 3)
    with pytest.warns(UserWarning, match="contributions that are zero have no direction"):
        got = block_dependency(config, params, [tokens])
    silent = int((tokens != 7).sum())
    assert got.left_out[0, 1] == silent and got.left_out[0, 2] == 0
    before = np_contributions(config, params, tokens)
    after = np_contributions(config, params, tokens, None, (0, "block"))
    a, b = (c[1]["block"][tokens == 7] for c in (before, after))
    cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(got.matrix[0, 1], 1 - cosines.mean(), rtol=1e-3, atol=1e-6)
    # Nothing left to average: NaN, not zero.
    with pytest.warns(UserWarning, match="most of layer 1 with layer 0 removed: 18 of 18"):
        got = block_dependency(config, params, [np.full((2, 9), 3)])
    assert np.isnan(got.matrix[0, 1]) and np.isfinite(got.matrix[0, 2])


def test_numbers_that_are_not_finite_are_named():
    config = UNIFORM.replace(layers=(SMOOTH,) * 3)

    def broken(path, value):
        params = random_params(config)
        layer, part, leaf = path.split("/")
        params[layer][part][leaf] = params[layer][part][leaf].at[0].set(value)
        return params

    for path, layer in (("layer_1/ffn/down", 1), ("layer_2/attn/o", 2), ("layer_0/ffn/up", 0)):
        for value in (np.nan, np.inf):
            message = rf"the contribution of layer {layer} is not finite on \d+ of 18 tokens"
            with pytest.raises(ValueError, match=message):
                block_dependency(config, broken(path, value), BATCHES[:1])
    params = random_params(config)
    one = config.replace(layers=(SMOOTH,))
    kept = {k: v for k, v in params.items() if k not in ("layer_1", "layer_2")}
    kept["layer_0"]["ffn"]["down"] = kept["layer_0"]["ffn"]["down"] * np.nan
    with pytest.raises(ValueError, match="the contribution of layer 0 is not finite"):
        block_dependency(one, kept, BATCHES)
    with pytest.raises(ValueError, match="embeddings of 1 tokens are not finite: ids outside"):
        block_dependency(config, params, [np.where(np.arange(9) == 3, [[50], [0]], 1)])
    padding = {"tokens": np.where(np.arange(9) == 8, [[-1], [0]], 1)}
    padding["loss_mask"] = padding["tokens"] == 1
    with pytest.raises(ValueError, match="masked positions need valid ones too"):
        block_dependency(config, params, [padding])


def test_an_overflow_that_only_a_removal_brings_is_named():
    ffn = dataclasses.replace(NO_ATTENTION.ffn, d_ff=2)
    layer = dataclasses.replace(NO_ATTENTION, ffn=ffn)
    config = UNIFORM.replace(layers=(layer, layer), dtype="float16")
    params = random_params(config)
    # Embeddings are positive and layer 0 makes them negative; of the positive ones layer 1 makes
    # numbers that float16 does not hold.
    params["embed"]["embedding"] = jnp.abs(params["embed"]["embedding"]) + 0.1
    ones = jnp.ones((2, 24))
    for i in range(2):
        params[f"layer_{i}"]["ffn_norm"]["scale"] = jnp.ones(24)
    params["layer_0"]["ffn"] = {"up": ones, "down": -5.0 * ones}
    signs, sizes = jnp.asarray([[1.0], [-1.0]]), jnp.asarray([[1e4], [0.1]])
    params["layer_1"]["ffn"] = {"up": signs * ones, "down": sizes * ones}
    message = "contribution of layer 1 with layer 0 removed is not finite on 18 of 18 tokens"
    with pytest.raises(ValueError, match=message):
        block_dependency(config, params, BATCHES[:1])
    got = block_dependency(config.replace(dtype="float32"), params, BATCHES[:1])
    assert np.isfinite(got.matrix[0, 1])


def test_few_layers():
    for layers, m in (((SMOOTH,), 1), ((), 0), ((EMPTY, EMPTY), 2)):
        config = UNIFORM.replace(layers=layers)
        for part in PARTS:
            got = block_dependency(config, random_params(config), BATCHES, part=part)
            assert got.matrix.shape == (m, m) and np.isnan(got.matrix).all() and got.tokens == 36


def test_wrong_requests():
    params = random_params(UNIFORM)
    for batches, message in (
        ([], "batches hold no tokens"),
        ([np.zeros((0, 9), np.int32)], "batches hold no tokens"),
        ([np.zeros((2, 0), np.int32)], "batches hold no tokens"),
        ([np.zeros(9, np.int32)], "integer tokens (B, T), got int32[9]"),
        ([np.zeros((2, 9))], "integer tokens (B, T), got float64[2, 9]"),
        (BATCHES[0], "for a single one pass [batch]"),
        ({"tokens": BATCHES[0]}, "for a single one pass [batch]"),
        (5, "batches must be an iterable of batches, got 5"),
        (None, "batches must be an iterable of batches, got None"),
        ([5], "integer tokens (B, T), got int64[]"),
        ([[[1, 2], [3]]], "tokens of a batch must hold numbers in equal rows, got [[1, 2], [3]]"),
        ([BATCHES[0] + 2**32], "embeddings of 18 tokens are not finite: ids outside the vocab"),
        ([{"ids": BATCHES[0]}], "a batch needs 'tokens', got ['ids']"),
        (
            [{"tokens": BATCHES[0], "loss_mask": np.ones((2, 8), bool)}],
            "loss_mask must have tokens' shape [2, 9], got [2, 8]",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            block_dependency(UNIFORM, params, batches)  # pyright: ignore[reportArgumentType]
        assert str(caught.value).startswith("block_dependency: ")
    with pytest.raises(ValueError, match="part must be 'block', 'attention' or 'ffn', got 'mlp'"):
        block_dependency(UNIFORM, params, BATCHES, part="mlp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="embed/embedding is a shape alone"):
        block_dependency(UNIFORM, param_shapes(UNIFORM), BATCHES)
    del params["layer_3"]
    with pytest.raises(ValueError, match="layer_3/attn/q: missing"):
        block_dependency(UNIFORM, params, BATCHES)


def test_fields_that_are_none_are_absent():
    params = random_params(UNIFORM)
    want = block_dependency(UNIFORM, params, BATCHES[:1]).matrix
    batch = {"tokens": BATCHES[0], "positions": None, "segment_ids": None, "loss_mask": None}
    np.testing.assert_array_equal(block_dependency(UNIFORM, params, [batch]).matrix, want)


def test_files(tmp_path):
    got = block_dependency(UNIFORM, random_params(UNIFORM), BATCHES)
    got.to_csv(tmp_path / "m.csv")
    with (tmp_path / "m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    for row in rows:
        value = got.matrix[int(row["removed"]), int(row["measured"])]
        assert float(row["distance"]) == value and row["tokens"] == "36"
    got.save(tmp_path / "m")
    back = Dependency.load(tmp_path / "m")
    for field in dataclasses.fields(Dependency):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(got, field.name))
    assert back.part == "block"
