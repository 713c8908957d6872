"""Cross-entropy: values, gradients, memory and communication; the L1 warm-up."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax import MeshConfig, forward, make_mesh, param_shapes
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.fused_loss import weighted_cross_entropy
from sparsejax.losses import DEFAULT_CHUNK, cross_entropy, l1_coefficient
from sparsejax.model import head_weight


def inputs(vocab, shape=(3, 5), d=12, seed=0):
    rng = np.random.default_rng(seed)
    # Logits of order one, so that no entry of the softmax is negligible.
    hidden = jnp.asarray(rng.normal(size=(*shape, d)) / d**0.5, jnp.float32)
    weight = jnp.asarray(rng.normal(size=(vocab, d)), jnp.float32)
    targets = jnp.asarray(rng.integers(vocab, size=shape), jnp.int32)
    return hidden, weight, targets, jnp.asarray(rng.normal(size=shape), jnp.float32)


def reference(hidden, weight, targets, scale):
    """Loss, and gradients of sum(loss * scale), written out in float64."""
    h, w, s = (np.asarray(a, np.float64) for a in (hidden, weight, scale))
    t = np.asarray(targets)
    z = h @ w.T
    z = z - z.max(-1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    hit = np.arange(len(w)) == t[..., None]
    dz = (p - hit) * s[..., None]
    loss = np.log(np.exp(z).sum(-1)) - (z * hit).sum(-1)
    return loss, dz @ w, np.einsum("btv,btd->vd", dz, h)


def loss_and_grads(hidden, weight, targets, scale, chunk=DEFAULT_CHUNK):
    def total(hidden, weight):
        loss = cross_entropy(hidden, weight, targets, chunk=chunk)
        return jnp.sum(loss * scale), loss

    grads, loss = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, weight)
    return loss, *grads


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


jitted = jax.jit(loss_and_grads, static_argnums=4)


@pytest.mark.parametrize(
    ("vocab", "chunk"),
    [
        (1, 1),
        (7, 1),
        (7, 8),
        (97, 8),
        (97, 100),
        (256, 100),
        (1000, 8),
        (1000, 4096),
    ],
)
def test_values_and_gradients(vocab, chunk):
    args = inputs(vocab)
    got = jitted(*args, chunk)
    assert [a.dtype for a in got] == [jnp.float32] * 3
    for ours, wanted in zip(got, reference(*args), strict=True):
        close(ours, wanted)


@pytest.mark.parametrize("vocab", [97, 256])
def test_half_precision(vocab):
    """Logits and sums are float32: the loss is that of the rounded inputs, gradients round once."""
    args = inputs(vocab, d=64)
    half = [a.astype(jnp.bfloat16) for a in args[:2]]
    loss, dhidden, dweight = jitted(*half, *args[2:], 8)
    wanted = reference(*half, *args[2:])
    assert loss.dtype == jnp.float32 and dhidden.dtype == dweight.dtype == jnp.bfloat16
    close(loss, wanted[0])
    for got, want in ((dhidden, wanted[1]), (dweight, wanted[2])):
        error = np.linalg.norm(got.astype(jnp.float32) - want) / np.linalg.norm(want)
        assert error < 2.0**-8


def test_large_logits_stay_finite():
    hidden, weight, targets, scale = inputs(97)
    args = (hidden * 1e3, weight, targets, scale)
    for ours, wanted in zip(jitted(*args, 8), reference(*args), strict=True):
        close(ours, wanted, 1e-4)


def test_a_target_outside_the_vocabulary_gives_nan_there_only():
    hidden, weight, targets, _ = inputs(97)
    bad = targets.at[0, 0].set(97).at[1, 2].set(-1).at[2, 4].set(99)  # 99: within the padding
    got = jax.jit(functools.partial(cross_entropy, chunk=10))(hidden, weight, bad)
    assert np.argwhere(np.isnan(got)).tolist() == [[0, 0], [1, 2], [2, 4]]
    # 64 bits from NumPy, which JAX would narrow to the id itself.
    wide = np.asarray(targets, np.int64) + np.where(np.isnan(got), 2**32, 0)
    np.testing.assert_array_equal(np.isnan(cross_entropy(hidden, weight, wide)), np.isnan(got))  # pyright: ignore
    fine = np.isfinite(got)
    close(got[fine], reference(hidden, weight, targets, targets)[0][fine])


def test_masked_out_tokens_leave_no_gradient():
    """The usual idiom for ignored targets: where(mask, loss, 0)."""
    hidden, weight, targets, _ = inputs(97)
    ignored = targets.at[0].set(-100)

    def masked(hidden, weight):
        loss = cross_entropy(hidden, weight, ignored, chunk=10)
        return jnp.sum(jnp.where(ignored >= 0, loss, 0.0))

    got = jax.jit(jax.grad(masked, argnums=(0, 1)))(hidden, weight)
    mask = np.ones(targets.shape)
    mask[0] = 0
    for ours, wanted in zip(got, reference(hidden, weight, targets, mask)[1:], strict=True):
        close(ours, wanted)


def test_nan_in_a_token_reaches_its_loss_only():
    hidden, weight, targets, _ = inputs(97)
    got = jax.jit(functools.partial(cross_entropy, chunk=10))(
        hidden.at[1, 1].set(jnp.nan), weight, targets
    )
    assert np.argwhere(np.isnan(got)).tolist() == [[1, 1]]


def test_under_remat_and_vmap():
    args = inputs(97)
    want = reference(*args)

    def remat(hidden, weight, targets, scale):
        one = jax.checkpoint(functools.partial(cross_entropy, chunk=10))
        loss = lambda h, w: jnp.sum(one(h, w, targets) * scale)  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(hidden, weight)

    for ours, wanted in zip(jax.jit(remat)(*args), want[1:], strict=True):
        close(ours, wanted)
    other = inputs(97, seed=1)
    stacked = [jnp.stack(pair) for pair in zip(args, other, strict=True)]
    both = jax.jit(jax.vmap(functools.partial(loss_and_grads, chunk=10)))(*stacked)
    for i, single in enumerate((want, reference(*other))):
        for ours, wanted in zip(both, single, strict=True):
            close(ours[i], wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(chunk=0), "chunk must be positive, got 0"),
        (dict(weight=np.zeros((7, 11), np.float32)), r"hidden float32\[3, 5, 12\] and weight"),
        (dict(weight=np.zeros((7, 12), np.float16)), "must share dtype and last dimension"),
        (dict(targets=np.zeros((3, 4), np.int32)), r"targets must have shape \[3, 5\], got"),
    ],
)
def test_wrong_arguments(change, message):
    hidden, weight, targets, _ = inputs(7)
    with pytest.raises(ValueError, match=f"cross_entropy: .*{message}"):
        cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets} | change)


# ---- on a mesh ----------------------------------------------------------------------------------

COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def collectives(text):
    """(kind, elements of its largest result) of every collective in a compiled program."""
    found = []
    for results, kind in COLLECTIVE.findall(text):
        shapes = [d.split(",") if d else [] for d in re.findall(r"\w+\[([\d,]*)\]", results)]
        found.append((kind, max(int(np.prod([int(n) for n in s] or [1])) for s in shapes)))
    return found


@pytest.mark.parametrize(("sizes", "vocab"), [((1, 1, 8), 256), ((2, 2, 2), 1000)])
def test_vocabulary_split_over_devices_stays_split(sizes, vocab):
    d, shape = 32, (8, 5)
    args = inputs(vocab, shape, d)
    mesh = make_mesh(MeshConfig(*sizes))
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    table = NamedSharding(mesh, P("tensor", None))
    placed = [jax.device_put(a, s) for a, s in zip(args, (rows, table, rows, rows), strict=True)]
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(functools.partial(loss_and_grads, chunk=64), out_shardings=(rows, rows, table))
            .lower(*placed)
            .compile()
        )
        got = compiled(*placed)
    for ours, wanted in zip(got, reference(*args), strict=True):
        close(ours, wanted)
    found = collectives(compiled.as_text())
    assert any(kind == "all-reduce" for kind, _ in found)  # the parser sees the program
    # No device ever holds rows of the vocabulary that are not its own, nor sums over them.
    tokens, share = 40 // (sizes[0] * sizes[1]), vocab // sizes[2]
    largest = max(share * d if sizes[2] < 8 else 0, tokens * d)
    assert [f for f in found if f[1] > largest] == []
    assert [f for f in found if f[0] in ("all-gather", "all-to-all")] == []
    text = compiled.as_text()
    assert not re.search(rf"f32\[(\d+,)*{vocab}(,\d+)*\]", text), "a whole vocabulary on one device"


# ---- memory -------------------------------------------------------------------------------------

BATCH, LENGTH, WIDTH = 8, 240, 512  # the narrowest that DEFAULT_CHUNK speaks of


def two_walks(hidden, head, targets):
    return jnp.mean(cross_entropy(hidden, head, targets))


def one_walk(hidden, head, targets):
    weights = jnp.full(targets.shape, 1 / targets.size, jnp.float32)
    return weighted_cross_entropy(hidden, head, targets, weights)


def compiled_training_gradient(vocab, dtype, head_loss):
    """Loss and gradients of 4 layers at d 512, 1920 tokens: (temporary bytes, program text)."""
    attention = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=64)
    layer = LayerConfig(attention=attention, ffn=FFNConfig(d_ff=1024))
    config = ModelConfig(vocab_size=vocab, d_model=WIDTH, layers=(layer,) * 4, dtype=dtype)

    def loss(params, tokens, targets):
        out = forward(config, params, tokens)
        ce = head_loss(out.hidden, head_weight(config, params), targets)
        return ce + 2e-5 * jnp.mean(out.stats.l1)

    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    lowered = jax.jit(jax.value_and_grad(loss)).lower(param_shapes(config), tokens, tokens)
    # LLVM's optimisations cost half the compile time; buffers are laid out before them.
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()


@pytest.mark.parametrize(
    ("head_loss", "dtype", "copies"),
    [(two_walks, "float32", 0), (two_walks, "bfloat16", 4), (one_walk, "bfloat16", 8)],
)
def test_peak_memory_does_not_grow_with_the_vocabulary(head_loss, dtype, copies):
    """Within 10 % of the same model at a vocabulary of 1024, plus parameters.

    Counted are temporaries; the parameters and their gradients, float32, are arguments and
    results. So in float32 nothing is left to add. In bfloat16 two further arrays are parameters in
    all but name, 2 bytes each: the head's copy in compute dtype and the gradient of that copy. The
    loss in one walk also keeps that gradient in float32 while it adds up, as it says: 4 bytes.
    """
    small, _ = compiled_training_gradient(1024, dtype, head_loss)
    large, text = compiled_training_gradient(49152, dtype, head_loss)
    parameters = (49152 - 1024) * WIDTH * copies
    print(f"{small:,} bytes at 1024, {large:,} at 49152, of which parameters {parameters:,}")
    assert large <= 1.10 * small + parameters
    tokens = BATCH * LENGTH
    arrays = {
        (kind, dims): int(np.prod([int(n) for n in dims.split(",")]))
        for kind, dims in re.findall(r"\b([a-z]+\d+|pred)\[([\d,]+)\]", text)
    }
    assert arrays["f32", f"49152,{WIDTH}"] == 49152 * WIDTH  # the parser sees the program
    assert {a for a, n in arrays.items() if n >= tokens * 49152} == set()
    # Nor any share of it larger than one chunk.
    of_tokens = {
        a: n for a, n in arrays.items() if re.search(rf"\b({tokens}|{BATCH},{LENGTH})\b", a[1])
    }
    assert max(of_tokens.values()) <= tokens * DEFAULT_CHUNK


@pytest.mark.parametrize(
    ("step", "ramp", "share"),
    [
        (0, 100, 0),
        (50, 100, 0),
        (51, 100, 0.01),
        (100, 100, 0.5),
        (150, 100, 1),
        (999, 100, 1),
        (0, 0, 0),
        (49, 0, 0),
        (50, 0, 1),
        (51, 0, 1),
    ],
)
def test_l1_coefficient(step, ramp, share):
    for given in (step, jnp.int32(step)):
        got = l1_coefficient(given, 2e-5, 50, ramp)
        np.testing.assert_allclose(got, 2e-5 * share, rtol=1e-6)


def test_l1_coefficient_without_warm_up_and_under_jit():
    assert float(l1_coefficient(0, 3.0, 0, 0)) == 3.0
    ramp = jax.jit(jax.vmap(lambda s: l1_coefficient(s, 1.0, 10, 10)))(jnp.arange(30))
    assert ramp.dtype == jnp.float32
    want = np.clip((np.arange(30) - 10) / 10, 0, 1)
    np.testing.assert_allclose(ramp, want, atol=1e-7)
