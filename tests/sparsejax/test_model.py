"""The whole model against a NumPy forward pass in float64, and what must not change its result."""

import dataclasses
import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import Options, forward, param_shapes, presets
from sparsejax.attention import init_cache
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig
from sparsejax.model import flops_per_token, head_weight, logits
from sparsejax.params import flatten

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True, qk_norm=True)
OTHER = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=10)
FULL = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=40, gate_bias=True))
NO_ATTENTION = LayerConfig(attention=None, ffn=FFNConfig(d_ff=25, gated=False))
NO_FFN = LayerConfig(attention=OTHER, ffn=None)
EMPTY = LayerConfig(attention=None, ffn=None)
SMOOTH = LayerConfig(attention=OTHER, ffn=FFNConfig(d_ff=17, activation="silu"))


def parallel(layer):
    return dataclasses.replace(layer, parallel_with_previous=True)


ODD = ModelConfig(
    vocab_size=50,
    d_model=24,
    layers=(FULL, parallel(NO_ATTENTION), NO_FFN),
    rope=RopeConfig(theta=1e4, scaling="llama3", factor=4.0, original_context=32),
    norm_eps=1e-3,  # large, so that a wrong epsilon shows
    tie_embeddings=False,
    dtype="float32",
)
CONFIGS = {
    "odd": ODD,
    "an empty layer, then a parallel one": ODD.replace(
        layers=(FULL, EMPTY, parallel(NO_ATTENTION)), tie_embeddings=True
    ),
    "a run of parallel layers with an empty one": ODD.replace(
        layers=(NO_FFN, parallel(NO_ATTENTION), parallel(EMPTY), parallel(SMOOTH), FULL)
    ),
    "gelu, linear rope": ODD.replace(
        layers=(
            LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=9, activation="gelu")),
            parallel(FULL),
        ),
        rope=RopeConfig(scaling="linear", factor=3.0),
    ),
    "no layers": ODD.replace(layers=()),
}


def random_params(config, seed=0):
    """Parameters away from their initial values: every bias, scale and matrix counts."""

    def leaf(path, shape):
        draw = np.random.default_rng([seed, zlib.crc32(path.encode())]).normal(size=shape.shape)
        if path.endswith(("scale", "norm")):
            draw = 1 + 0.3 * draw
        else:
            draw *= 0.5 if path.endswith("bias") else 0.25
        return jnp.asarray(draw, shape.dtype)

    shapes = param_shapes(config)
    names = jax.tree.unflatten(jax.tree.structure(shapes), list(flatten(shapes)))
    return jax.tree.map(leaf, names, shapes)


# ---- the model once more, in float64, a token and a head at a time where that is clearer --------


def np_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def np_frequencies(rope, k):
    freq = rope.theta ** (-np.arange(0, k, 2) / k)
    if rope.scaling == "linear":
        return freq / rope.factor
    if rope.scaling == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        for i, f in enumerate(freq):
            turns = rope.original_context * f / (2 * math.pi)
            keep = min(max((turns - low) / (high - low), 0.0), 1.0)
            freq[i] = keep * f + (1 - keep) * f / rope.factor
    return freq


def np_rotate(x, positions, rope):
    k = x.shape[-1]
    turn = np.exp(1j * positions[..., None, None] * np_frequencies(rope, k))
    y = (x[..., : k // 2] + 1j * x[..., k // 2 :]) * turn
    return np.concatenate([y.real, y.imag], axis=-1)


def np_attention(a, p, x, positions, segments, config):
    def project(name):
        y = np.einsum("btd,dhk->bthk", x, p[name]) + p.get(f"{name}_bias", 0.0)
        if a.qk_norm and name != "v":
            y = np_norm(y, p[f"{name}_norm"], config.norm_eps)
        return y if name == "v" else np_rotate(y, positions, config.rope)

    q, k, v = project("q"), project("k"), project("v")
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        g = h // (a.num_heads // a.num_kv_heads)
        seen = segments[b, : t + 1] == segments[b, t]
        scores = k[b, : t + 1, g][seen] @ q[b, t, h] / math.sqrt(a.head_dim)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, : t + 1, g][seen]
    return np.einsum("bthk,hkd->btd", out, p["o"])


NP_ACT = {
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}


def np_ffn(f, p, x):
    pre = x @ p["gate" if f.gated else "up"].T + p.get("gate_bias", 0.0)
    h = NP_ACT[f.activation](pre)
    h = h * (x @ p["up"].T) if f.gated else h
    return h @ p["down"], h, pre


def np_model(config, params, tokens, segments=None):
    """Returns logits, and (|h| summed, active neurons) of each layer with an FFN."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    segments = np.zeros(tokens.shape) if segments is None else np.asarray(segments)
    x = p["embed"]["embedding"][tokens]
    read, statistics = x, []
    for i, layer in enumerate(config.layers):
        read = read if layer.parallel_with_previous else x
        here, mine = read, p.get(f"layer_{i}", {})
        if layer.attention is not None:
            normed = np_norm(here, mine["attn_norm"]["scale"], config.norm_eps)
            here = here + np_attention(
                layer.attention, mine["attn"], normed, positions, segments, config
            )
        if layer.ffn is not None:
            normed = np_norm(here, mine["ffn_norm"]["scale"], config.norm_eps)
            y, h, pre = np_ffn(layer.ffn, mine["ffn"], normed)
            here = here + y
            active = pre > 0 if layer.ffn.activation == "relu" else h != 0
            statistics.append((np.abs(h).sum(-1), active))
        x = x + here - read
    x = np_norm(x, p["final_norm"]["scale"], config.norm_eps)
    head = p["embed"]["embedding"].T if config.tie_embeddings else p["lm_head"]["kernel"]
    return x @ head, statistics


def close(got, want, tolerance=2e-5, **kwargs):
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, **kwargs)


# Over 64 tokens, so that the op takes its training form; 7 below for its decoding form.
TOKENS = np.asarray(jax.random.randint(jax.random.key(11), (2, 33), 0, 50))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_statistics(config):
    params = random_params(config)
    want, statistics = np_model(config, params, TOKENS)
    run = jax.jit(functools.partial(forward, config, options=Options(count_neurons=True)))
    with jax.default_matmul_precision("highest"):
        out = run(params, jnp.asarray(TOKENS))
        close(logits(config, params, out.hidden), want)
    assert out.cache is None
    assert out.stats.l1.shape == out.stats.nnz.shape == (len(config.ffn_layers), *TOKENS.shape)
    # Neurons are counted where they can be silent: in ReLU layers.
    assert len(out.stats.neuron_nnz) == len(config.sparse_layers)
    fires = dict(zip(config.sparse_layers, out.stats.neuron_nnz, strict=True))
    for i, layer, (l1, active) in zip(
        range(len(statistics)), config.ffn_layers, statistics, strict=True
    ):
        close(out.stats.l1[i], l1)
        np.testing.assert_array_equal(out.stats.nnz[i], active.sum(-1))
        if layer in fires:
            np.testing.assert_array_equal(fires[layer], active.sum((0, 1)))


def test_apply_on_few_tokens_and_with_documents():
    params, tokens = random_params(ODD), TOKENS[:, :7]
    segments = np.array([[0, 0, 1, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4, 9]])
    with jax.default_matmul_precision("highest"):
        got = sparsejax.apply(ODD, params, jnp.asarray(tokens), segment_ids=jnp.asarray(segments))
    assert got.dtype == jnp.float32 and got.shape == (2, 7, 50)
    close(got, np_model(ODD, params, tokens, segments)[0])
    assert np.abs(got - np_model(ODD, params, tokens)[0]).max() > 0.1


def test_a_packed_row_equals_its_documents_alone():
    params = random_params(ODD)
    documents = [TOKENS[0, :5], TOKENS[0, 5:16], TOKENS[0, 16:33]]
    lengths = [len(d) for d in documents]
    segments = jnp.asarray(np.repeat([3, 1, 2], lengths))[None]
    restarted = jnp.asarray(np.concatenate([np.arange(n) for n in lengths]))[None]
    row = jnp.asarray(TOKENS[:1])
    # Rotary positions are relative: restarting them in every document changes nothing.
    for positions in (restarted, None):
        packed = sparsejax.apply(ODD, params, row, positions=positions, segment_ids=segments)
        start = 0
        for document in documents:
            alone = np_model(ODD, params, document[None])[0][0]
            close(packed[0, start : start + len(document)], alone)
            start += len(document)


def total_loss(config, params, tokens, options):
    out = forward(config, params, tokens, options=options)
    z = logits(config, params, out.hidden)
    return jnp.mean(jax.nn.logsumexp(z, axis=-1) - z[..., 3]) + 0.01 * jnp.mean(out.stats.l1)


@functools.cache
def gradients(config, remat):
    args = random_params(config), jnp.asarray(TOKENS)
    loss = functools.partial(total_loss, config, options=Options(remat=remat))
    lowered = jax.jit(jax.value_and_grad(loss)).lower(*args)
    # LLVM's optimisations cost half the compile time and matter to no assertion here.
    return lowered.compile({"xla_backend_optimization_level": 0})(*args)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_nothing(remat):
    (loss, grads), (want_loss, want) = gradients(ODD, remat), gradients(ODD, "none")
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for path, g in flatten(grads).items():
        close(g, flatten(want)[path], 2e-6, err_msg=path)


def test_remat_recomputes():
    """The saved residuals shrink, so the option does something."""

    def saved(remat):
        shapes = param_shapes(ODD)
        fn = functools.partial(total_loss, ODD, options=Options(remat=remat))
        _, vjp = jax.eval_shape(lambda p: jax.vjp(lambda q: fn(q, jnp.asarray(TOKENS)), p), shapes)
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(vjp))

    assert saved("full") < saved("dots") < saved("none")


def test_gradients_by_finite_differences():
    """Along a random direction, in float64 NumPy: independent of any of our derivatives."""
    _, grads = gradients(ODD, "none")
    params = random_params(ODD)
    towards = jax.tree.map(lambda a: np.asarray(a, np.float64), random_params(ODD, seed=1))

    def loss(step):
        moved = jax.tree.map(lambda a, d: np.asarray(a, np.float64) + step * d, params, towards)
        z, statistics = np_model(ODD, moved, TOKENS)
        peak = z.max(-1, keepdims=True)
        ce = np.log(np.exp(z - peak).sum(-1)) + peak[..., 0] - z[..., 3]
        return ce.mean() + 0.01 * np.mean([l1 for l1, _ in statistics])

    step = 1e-6
    numeric = (loss(step) - loss(-step)) / (2 * step)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(towards), strict=True)
    analytic = sum(float(np.sum(np.asarray(g, np.float64) * d)) for g, d in pairs)
    assert abs(numeric) > 0.1
    np.testing.assert_allclose(analytic, numeric, rtol=1e-4)


def test_bf16_compute_over_float32_parameters():
    half = ODD.replace(dtype="bfloat16")
    params = random_params(ODD)
    loss, grads = gradients(half, "none")
    want_loss, want = gradients(ODD, "none")
    assert loss.dtype == jnp.float32
    assert abs(loss - want_loss) < 2e-2 * abs(want_loss)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert head_weight(half, params).dtype == jnp.bfloat16
    out = jax.eval_shape(functools.partial(forward, half), params, jnp.asarray(TOKENS))
    assert out.hidden.dtype == jnp.bfloat16 and out.stats.l1.dtype == jnp.float32
    z = sparsejax.apply(half, params, jnp.asarray(TOKENS))
    assert z.dtype == jnp.float32
    reference = np_model(ODD, params, TOKENS)[0]
    error = np.linalg.norm(z - reference) / np.linalg.norm(reference)
    assert 1e-4 < error < 2e-2
    joined, joined_want = (
        np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (grads, want)
    )
    assert np.linalg.norm(joined - joined_want) / np.linalg.norm(joined_want) < 0.1


def test_bf16_parameters_give_bf16_gradients():
    config = ODD.replace(dtype="bfloat16", param_dtype="bfloat16")
    grad = jax.grad(functools.partial(total_loss, config))
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    grads = jax.eval_shape(functools.partial(grad, options=Options()), param_shapes(config), tokens)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("token", [50, -1])
def test_a_token_outside_the_vocabulary_gives_nan_in_its_row_only(token):
    tokens = TOKENS[:, :7].copy()
    tokens[0, 4] = token
    params = random_params(ODD)
    got = sparsejax.apply(ODD, params, jnp.asarray(tokens))
    assert np.isnan(got[0, 4:]).all()
    close(got[1], np_model(ODD, params, TOKENS[:, :7])[0][1])


def test_cached_logits_equal_uncached_ones():
    """Prompts of 6 and 3 tokens in one batch, then three more tokens one by one."""
    config = ODD.replace(layers=(FULL, NO_ATTENTION))
    params, tokens = random_params(config), TOKENS[:, :9]
    want = np_model(config, params, tokens)[0]
    empty = init_cache(config, 2, 9)
    assert set(empty) == {"layer_0"}

    @functools.partial(jax.jit, static_argnames="options")
    def run(tokens, positions, cache, options):
        out = forward(config, params, tokens, positions=positions, cache=cache, options=options)
        return logits(config, params, out.hidden), out.cache

    for fresh in (True, False):
        got, cache = run(jnp.asarray(tokens[:, :6]), None, empty, Options(fresh_cache=fresh))
        close(got[0], want[0, :6])
        close(got[1, :3], want[1, :3])
    for n in range(3):
        at = np.array([[6 + n], [3 + n]], np.int32)
        next_tokens = jnp.asarray(np.take_along_axis(tokens, at, axis=1))
        got, cache = run(next_tokens, jnp.asarray(at), cache, Options())
        close(got[:, 0], np.take_along_axis(want, at[..., None], axis=1)[:, 0])
    assert jax.tree.structure(cache) == jax.tree.structure(empty)


def test_cache_and_documents_are_refused_together():
    with pytest.raises(ValueError, match="segment_ids and cache cannot be combined"):
        forward(
            ODD,
            param_shapes(ODD),
            jnp.zeros((1, 1), jnp.int32),
            segment_ids=jnp.zeros((1, 1), jnp.int32),
            cache=init_cache(ODD, 1, 1),
        )


def test_flops_per_token():
    # By hand: 6 per matmul parameter; causal attention 6 T H K.
    layers = [
        6 * (24 * 4 * 6 + 2 * 24 * 2 * 6 + 4 * 6 * 24) + 6 * 100 * 4 * 6 + 6 * 3 * 24 * 40,
        6 * 2 * 24 * 25,
        6 * (24 * 3 * 10 + 2 * 24 * 10 + 3 * 10 * 24) + 6 * 100 * 3 * 10,
    ]
    assert flops_per_token(ODD, 100) == sum(layers) + 6 * 24 * 50
    assert flops_per_token(ODD.replace(tie_embeddings=True), 100) == flops_per_token(ODD, 100)
    # 125m at 2048 tokens: 6 x 122.7 M matmul parameters and 12 layers of attention.
    small = presets.get("125m")
    matmul = 49152 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048)
    assert flops_per_token(small, 2048) == 6 * matmul + 12 * 6 * 2048 * 768 == 849_346_560
    assert flops_per_token(small, 2048) == flops_per_token(presets.get("125m-dense"), 2048)


def test_flops_agree_with_the_compiler():
    """Forward matmuls of the compiled program, full square instead of causal attention."""
    config = presets.get("tiny").replace(layers=presets.get("tiny").layers[:1])
    b, t = 1, 128
    program = jax.jit(functools.partial(sparsejax.apply, config))
    tokens = jax.ShapeDtypeStruct((b, t), jnp.int32)
    compiled = program.lower(param_shapes(config), tokens).compile()
    ours = b * t * (flops_per_token(config, t) / 3 + 2 * t * 4 * 32)
    measured = compiled.cost_analysis()["flops"]
    assert ours < measured < 1.15 * ours  # the rest: norms, softmax, rotations
