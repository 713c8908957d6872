"""`Options.implementation` as one engine per layer."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.testing import assert_close
from sparsejax import Options, apply, forward, generate, init_params
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
SPARSE = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=48))
CONFIG = ModelConfig(
    vocab_size=40,
    d_model=16,
    layers=(
        SPARSE,
        LayerConfig(attention=ATTENTION, ffn=None),
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=32, activation="silu")),
        dataclasses.replace(SPARSE, parallel_with_previous=True),
        SPARSE,
    ),
    context_length=32,
    init_std=0.3,
    dtype="float32",
)
PARAMS = init_params(CONFIG, jax.random.key(0))
TOKENS = jax.random.randint(jax.random.key(1), (2, 8), 0, CONFIG.vocab_size)
MIXED = ("triton", "no engine: no FFN", None, "xla", "triton")


def logits(engines, **options):
    with pallas_kernels.interpret():
        return apply(CONFIG, PARAMS, TOKENS, options=Options(implementation=engines, **options))


def test_a_tuple_computes_what_its_engines_do():
    dense = logits("xla")
    np.testing.assert_array_equal(logits(("xla",) * 5), dense)
    # By its name alone the sparse engine would be asked of the SiLU layer too.
    for engines in (("triton", None, "xla", "triton", "triton"), MIXED):
        assert_close(logits(engines), dense)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_named_layers_run_the_sparse_engine(remat):
    options = Options(implementation=MIXED, remat=remat)
    with pallas_kernels.interpret():
        stats = forward(CONFIG, PARAMS, TOKENS, options=options).stats
    # Layers 0, 2, 3 and 4 have a feed-forward part.
    np.testing.assert_array_equal(stats.sparse, [1, 0, 0, 1])
    expected = forward(CONFIG, PARAMS, TOKENS, options=Options(implementation="xla")).stats
    np.testing.assert_array_equal(stats.nnz, expected.nnz)


# A whole step, with its norm of gradients, is in training/test_step.py.
@pytest.mark.slow
def test_gradients_are_those_of_the_dense_engine():
    def loss(engines, params):
        options = Options(implementation=engines, count_neurons=True)
        out = forward(CONFIG, params, TOKENS, options=options)
        weights = np.cos(np.arange(out.hidden.size, dtype=np.float32)).reshape(out.hidden.shape)
        return (weights * out.hidden).sum() + out.stats.l1.sum()

    grads = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    with pallas_kernels.interpret():
        value, found = grads(("xla", None, "xla", "triton", "xla"), PARAMS)
    wanted, expected = grads("xla", PARAMS)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(assert_close, found, expected)


def test_equal_tuples_share_a_program():
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(options, params):
        traced.append(options.implementation)
        return forward(CONFIG, params, TOKENS, options=options).hidden

    for engines in (("xla",) * 5, tuple(["xla"] * 5), (None,) * 5):
        run(Options(implementation=engines), PARAMS)
    assert traced == [("xla",) * 5, (None,) * 5]
    a, b = (Options(implementation=tuple(["xla", None])) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a != Options(implementation=("xla", "xla"))
    assert [o.implementation for o in a.per_layer(2)] == ["xla", None]
    assert Options("xla").per_layer(2) == (Options("xla"),) * 2


def test_generation_takes_a_tuple():
    prompts = [[1, 2, 3], [4]]
    with pallas_kernels.interpret():
        found = generate.generate(
            CONFIG, PARAMS, prompts, max_new_tokens=3, options=Options(implementation=MIXED)
        )
    assert found == generate.generate(CONFIG, PARAMS, prompts, max_new_tokens=3)


def test_bad_tuples_are_refused():
    for engines in ((), ("xla",) * 4, ("xla",) * 6):
        message = f"^Options: implementation must have one entry .* 5 layers, got {len(engines)}; "
        with pytest.raises(ValueError, match=message):
            apply(CONFIG, PARAMS, TOKENS, options=Options(implementation=engines))
    with pytest.raises(ValueError, match=r"must be one of \['triton', 'xla'\] or None, got 'cuda'"):
        apply(CONFIG, PARAMS, TOKENS, options=Options(implementation=("cuda",) * 5))
    message = r"^implementation must be an engine's name, .* got \['xla'\]; write tuple\(\.\.\.\)$"
    with pytest.raises(ValueError, match=message):
        Options(implementation=["xla"])  # pyright: ignore
    with pytest.raises(ValueError, match=r"^implementation must be .* got \('xla', 3\)$"):
        Options(implementation=("xla", 3))  # pyright: ignore
