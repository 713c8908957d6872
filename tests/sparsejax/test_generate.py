import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import (
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    Options,
    RopeConfig,
    decoding,
    model,
)
from sparsejax.attention import init_cache
from sparsejax.generate import ENDED, compute_params, generate, row_keys, stream
from sparsejax.params import flatten, param_shapes
from sparsejax.sampling import make_sampling

V, D = 61, 32


def attention(**changes):
    fields = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8} | changes
    return AttentionConfig(**fields)


def layer(attn, d_ff=48, **changes):
    return LayerConfig(attention=attn, ffn=FFNConfig(d_ff=d_ff) if d_ff else None, **changes)


def config(*layers, **changes):
    fields = {"vocab_size": V, "d_model": D, "context_length": 64, "dtype": "float32"}
    return ModelConfig(layers=layers, **fields | changes)


LLAMA3 = RopeConfig(theta=100.0, scaling="llama3", factor=4.0, original_context=16)
GROUPED = config(layer(attention(num_kv_heads=2)))
UNTIED = config(layer(attention(qkv_bias=True, qk_norm=True)), rope=LLAMA3, tie_embeddings=False)
CONFIGS = {
    "grouped": GROUPED,
    "biases, norms, scaled rope": UNTIED,
    "uneven and parallel layers": config(
        layer(None),
        layer(attention(num_heads=2, num_kv_heads=1, head_dim=16), d_ff=0),
        layer(attention(num_kv_heads=2), parallel_with_previous=True),
        layer(None, d_ff=16, parallel_with_previous=True),
        layer(attention(), d_ff=0),
    ),
    "no attention": config(layer(None)),
}
NEW = 37  # new tokens: with prompts of up to 11 ids, the programs are shared between the tests
every_config = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def random_params(config, seed=0):
    """Every leaf random: biases of zeros and norms of ones would hide errors."""
    rng = np.random.default_rng(seed)

    def leaf(path, spec):
        values = rng.normal(scale=spec.shape[0] ** -0.5, size=spec.shape)
        name = jax.tree_util.keystr(path, simple=True, separator="/").rsplit("/")[-1]
        values *= 3 if name in ("q", "k") else 1  # attention that looks at single positions
        return jnp.asarray(values + (name in ("scale", "q_norm", "k_norm")), spec.dtype)

    return jax.tree_util.tree_map_with_path(leaf, param_shapes(config))


def prompts_of(*lengths, seed=0, below=V):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, below, n).tolist() for n in lengths]


def uncached_logits(config, params, ids):
    """Logits (T, V) of one sequence, padded so that one program serves all lengths."""
    padded = np.zeros((1, config.context_length), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(sparsejax.apply(config, params, padded))[0, : len(ids)]


def naive_greedy(config, params, prompt, steps):
    """Runs the whole sequence anew for every token; refuses choices that rounding could turn."""
    ids = list(prompt)
    for _ in range(steps):
        logits = uncached_logits(config, params, ids)[-1]
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-4 * np.abs(logits).max()
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("options",))
def cached_logits(config, params, tokens, positions, cache, options):
    out = model.forward(config, params, tokens, positions=positions, cache=cache, options=options)
    return model.logits(config, params, out.hidden), out.cache


def logits_through_cache(config, params, tokens, lengths, cache_dtype=None):
    """Logits (B, T, V): a right-padded prefill of `lengths`, then rows at their own positions."""
    rows, total = tokens.shape
    width = max(lengths)
    cache = init_cache(config, rows, total, cache_dtype)
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))
    prompt = np.where(positions < np.array(lengths)[:, None], tokens[:, :width], 0)
    logits, cache = cached_logits(
        config, params, prompt, positions, cache, options=Options(fresh_cache=True)
    )
    out = np.full((rows, total, config.vocab_size), np.nan, np.float32)
    for row, length in enumerate(lengths):
        out[row, :length] = logits[row, :length]
    at = np.array(lengths, np.int32)
    while (at < total).any():
        feed = np.minimum(at, total - 1)  # a finished row writes its last token again
        token = np.take_along_axis(tokens, feed[:, None], axis=1)
        logits, cache = cached_logits(
            config, params, token, feed[:, None], cache, options=Options()
        )
        out[np.arange(rows), feed] = logits[:, 0]
        at = at + 1
    return out


@every_config
def test_cached_logits_equal_uncached_ones_at_every_position(name):
    config = CONFIGS[name]
    params = random_params(config)
    tokens = np.array(prompts_of(12, 12, 12), np.int32)
    expected = np.stack([uncached_logits(config, params, row) for row in tokens])
    found = logits_through_cache(config, params, tokens, lengths=[5, 1, 8])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@every_config
def test_greedy_equals_the_naive_loop_that_runs_each_prompt_alone(name):
    config = CONFIGS[name]
    params = random_params(config)
    prompts = prompts_of(3, 1, 9)
    expected = [naive_greedy(config, params, prompt, 12) for prompt in prompts]
    found = generate(config, params, prompts, max_new_tokens=NEW)
    assert [row[:12] for row in found] == expected
    assert {len(row) for row in found} == {NEW}
    assert len({i for row in expected for i in row}) > 3  # the model says more than one thing


def test_a_batch_equals_each_prompt_alone():
    params, prompts = random_params(GROUPED), prompts_of(3, 1, 9, seed=1)
    together = generate(GROUPED, params, prompts, max_new_tokens=NEW)
    for prompt, ids in zip(prompts, together, strict=True):
        assert generate(GROUPED, params, [prompt], max_new_tokens=NEW) == [ids]


def test_generation_reaches_the_end_of_the_context():
    config = GROUPED.replace(context_length=23)
    [prompt] = prompts_of(20)
    found = generate(config, random_params(GROUPED), [prompt], max_new_tokens=3)
    assert found == [naive_greedy(GROUPED, random_params(GROUPED), prompt, 3)]


def test_a_row_draws_by_its_own_key_whatever_its_neighbours():
    params, prompts = random_params(GROUPED), prompts_of(4, 2, 7)
    settings = {"max_new_tokens": NEW, "temperature": 1.5, "top_p": 0.9}
    key = jax.random.key(7)
    together = generate(GROUPED, params, prompts, key=key, **settings)
    keys = row_keys(key, 3)
    for row in range(3):
        alone = generate(GROUPED, params, [prompts[row]], key=keys[row : row + 1], **settings)
        assert alone == [together[row]]
    assert generate(GROUPED, params, prompts, key=keys, **settings) == together
    assert generate(GROUPED, params, prompts, key=jax.random.key(8), **settings) != together
    old = jax.random.PRNGKey(7)  # the same key in its older form
    assert generate(GROUPED, params, prompts, key=old, **settings) == together
    # The same prompt twice draws two texts.
    first, second, _ = generate(GROUPED, params, [[1], [1], [2]], key=key, **settings)
    assert first != second


def test_the_stream_gives_the_same_ids_step_by_step():
    params, prompts = random_params(GROUPED), prompts_of(4, 2, 11)
    expected = np.array(generate(GROUPED, params, prompts, max_new_tokens=NEW))
    assert NEW > decoding.MAX_STEPS_PER_CALL
    for steps_per_call in (1, 5):
        steps = stream(GROUPED, params, prompts, max_new_tokens=NEW, steps_per_call=steps_per_call)
        np.testing.assert_array_equal(np.stack(list(steps), axis=1), expected)
    assert generate(GROUPED, params, prompts, max_new_tokens=0) == [[], [], []]


def test_eos_ends_a_row_and_is_its_last_id():
    params, prompts = random_params(GROUPED), prompts_of(4, 2, 9, seed=2)
    free = generate(GROUPED, params, prompts, max_new_tokens=NEW)
    # An id that row 0 says, though not at once, and another row never.
    eos = next(i for i in free[0] if free[0].index(i) > 1 and any(i not in row for row in free))
    cut = [row[: row.index(eos) + 1] if eos in row else row for row in free]
    assert {len(row) < NEW for row in cut} == {True, False}
    assert generate(GROUPED, params, prompts, max_new_tokens=NEW, eos_id=eos) == cut
    first, *_, last = stream(GROUPED, params, prompts, max_new_tokens=NEW, eos_id=eos)
    assert ENDED not in first
    assert last[0] == ENDED
    # Several ids end a row, each its own.
    second = next(row[3] for row in cut if len(row) == NEW)
    ends = [min((r.index(i) + 1 for i in (eos, second) if i in r), default=NEW) for r in free]
    both = [row[:end] for row, end in zip(free, ends, strict=True)]
    assert (
        generate(GROUPED, params, prompts, max_new_tokens=NEW, eos_id=[eos, second]) == both != cut
    )
    # When all rows have ended, the stream ends too.
    same = {"max_new_tokens": NEW, "eos_id": eos}
    for many in (1, 4):
        steps = stream(GROUPED, params, prompts[:1] * 3, **same, steps_per_call=many)
        assert [ids.tolist() for ids in steps] == [[i] * 3 for i in cut[0]]


def test_padding_ids_of_the_vocabulary_are_never_emitted():
    params, real = random_params(UNTIED), 23
    kernel = params["lm_head"]["kernel"]
    params = params | {"lm_head": {"kernel": kernel.at[:, real:].multiply(5.0)}}
    prompts = prompts_of(3, 5, 2, below=real)
    assert naive_greedy(UNTIED, params, prompts[0], 1)[0] >= real
    rows = generate(
        UNTIED,
        params,
        prompts,
        max_new_tokens=NEW,
        num_tokens=real,
        temperature=50.0,
        key=jax.random.key(0),
    )
    assert {i for row in rows for i in row} == set(range(real))


def prefill_arguments(config, *, rows, slots, cache_dtype=None):
    """Arguments of `decoding._prefill`, shaped as `stream` makes them."""
    return (
        config,
        Options(fresh_cache=True),
        slots,
        cache_dtype,
        random_params(config),
        np.ones((rows, 16), np.int32),
        np.full(rows, 9, np.int32),
        np.zeros(rows, bool),
        decoding.Chooser(make_sampling(config.vocab_size), None, np.array([-1], np.int32)),
    )


def test_only_layers_with_attention_hold_a_cache():
    config = CONFIGS["uneven and parallel layers"]
    arguments = prefill_arguments(config, rows=2, slots=32)
    cache = jax.eval_shape(lambda: decoding._prefill(*arguments)[0].cache)
    assert sorted(cache) == ["layer_1", "layer_2", "layer_4"]
    floats = [2 * 2 * 32 * heads * width for heads, width in ((1, 16), (2, 8), (4, 8))]
    assert sum(leaf.size * 4 for leaf in jax.tree.leaves(cache)) == 4 * sum(floats)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("float32")}
    arguments = prefill_arguments(CONFIGS["no attention"], rows=2, slots=32)
    assert jax.eval_shape(lambda: decoding._prefill(*arguments)[0].cache) == {}


def test_a_mesh_changes_no_token_and_shares_the_cache():
    model_config = config(layer(attention(num_kv_heads=2, qkv_bias=True)), vocab_size=64)
    params, prompts = random_params(model_config), prompts_of(3, 9, 6)  # rows that do not divide
    mesh = sparsejax.make_mesh(sparsejax.MeshConfig(data=2, fsdp=2, tensor=2))
    expected = [naive_greedy(model_config, params, prompt, 12) for prompt in prompts]
    seen = []
    for ids in stream(model_config, params, prompts, max_new_tokens=12, mesh=mesh):
        assert jax.sharding.get_abstract_mesh().empty  # the caller's code is outside
        seen.append(ids.tolist())
    assert np.array(seen).T.tolist() == expected
    arguments = prefill_arguments(model_config, rows=4, slots=32)[4:]
    decoder = decoding.Decoder(model_config, mesh=mesh)
    state, _ = decoder.prefill(*arguments, slots=32, cache_dtype=None)
    for leaf in jax.tree.leaves(state.cache):
        assert {shard.data.nbytes * 8 for shard in leaf.addressable_shards} == {leaf.nbytes}


def test_bfloat16_errs_no_more_with_the_cache_than_without():
    exact, half = GROUPED, GROUPED.replace(dtype="bfloat16")
    params, tokens = random_params(exact), np.array(prompts_of(12, 12, 12), np.int32)
    reference = np.stack([uncached_logits(exact, params, row) for row in tokens])
    rms = lambda logits: np.sqrt(np.mean((np.asarray(logits) - reference) ** 2))  # noqa: E731
    bound = 1.5 * rms(np.stack([uncached_logits(half, params, row) for row in tokens]))
    assert 0 < rms(logits_through_cache(half, params, tokens, [3, 6, 1])) <= bound
    # A float32 model may keep its cache in half precision too.
    assert 0 < rms(logits_through_cache(exact, params, tokens, [3, 6, 1], "bfloat16")) <= bound


def test_the_cache_has_the_dtype_asked_for():
    arguments = prefill_arguments(GROUPED, rows=3, slots=48, cache_dtype="bfloat16")
    cache = jax.eval_shape(lambda: decoding._prefill(*arguments)[0].cache)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
    settings = {"max_new_tokens": NEW, "cache_dtype": "bfloat16"}
    found = generate(GROUPED, random_params(GROUPED), prompts_of(3, 4, 5), **settings)
    assert {len(row) for row in found} == {NEW}


def test_parameters_cast_once_give_the_same_ids():
    half = GROUPED.replace(dtype="bfloat16")
    params = random_params(half)
    cast = compute_params(half, params)
    dtypes = {path.rsplit("/")[-1]: leaf.dtype.name for path, leaf in flatten(cast).items()}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {"scale"}
    assert len(dtypes) == 9
    assert compute_params(GROUPED, params) is params
    tokens = np.array(prompts_of(12, 12, 12), np.int32)
    # XLA may leave out a cast to half precision that it would undo at once, as on a CPU; told not
    # to, it gives the same bits either way.
    run = jax.jit(
        functools.partial(sparsejax.apply, half),
        compiler_options={"xla_allow_excess_precision": False},
    )
    np.testing.assert_array_equal(run(cast, tokens), run(params, tokens))
    prompts = prompts_of(4, 7, 2)
    found = generate(half, params, prompts, max_new_tokens=NEW)
    assert found == generate(half, cast, prompts, max_new_tokens=NEW)


def test_one_program_serves_all_prompts_of_a_bucket_and_all_temperatures():
    def programs(*lengths, temperature, top_p):
        generate(
            GROUPED,
            random_params(GROUPED),
            prompts_of(*lengths),
            max_new_tokens=NEW,
            temperature=temperature,
            top_p=top_p,
            key=jax.random.key(0),
        )
        return decoding._prefill._cache_size(), decoding._decode._cache_size()

    compiled = programs(3, 2, 1, temperature=0.5, top_p=0.9)
    assert programs(11, 4, 8, temperature=1.5, top_p=0.3) == compiled


def test_decoding_updates_the_cache_in_place():
    arrays = prefill_arguments(GROUPED, rows=3, slots=48)[4:]
    decoder = decoding.Decoder(GROUPED)
    state, _ = decoder.prefill(*arrays, slots=48, cache_dtype=None)
    before = jax.tree.leaves(state.cache)
    places = [leaf.unsafe_buffer_pointer() for leaf in before]
    state, _ = decoder.decode(arrays[0], state, arrays[-1], 3)
    after = jax.tree.leaves(state.cache)
    assert all(leaf.is_deleted() for leaf in before)
    assert sorted(leaf.unsafe_buffer_pointer() for leaf in after) == sorted(places)


def test_prefill_makes_logits_of_one_position_per_row():
    text = decoding._prefill.lower(*prefill_arguments(GROUPED, rows=3, slots=48)).as_text()
    assert f"tensor<3x1x{V}xf32>" in text
    assert f"3x16x{V}" not in text
    assert f"3x16x{D}" in text  # shapes are written like this


def test_parameters_that_are_not_finite_are_an_error_not_a_text():
    params = random_params(UNTIED)
    table = params["embed"]["embedding"].at[5, 0].set(np.nan)
    params = params | {"embed": {"embedding": table}}
    with pytest.raises(
        FloatingPointError, match="logits of prompt 1 are not finite at new token 0"
    ):
        generate(UNTIED, params, [[1, 2], [3, 5], [7]], max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "prompts is empty; pass at least one prompt"),
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty; .* end-of-text id"),
        ({"prompts": [1, 2]}, r"prompts\[0\] must be a list of token ids, got 1; .* wrap a single"),
        ({"prompts": ["ab"]}, r"prompts\[0\] must be a list of token ids, got 'ab'; .*tokenizer"),
        ({"prompts": [[0.5]]}, r"prompts\[0\] must be a list of token ids"),
        ({"prompts": [[1, 61]]}, r"prompts\[0\]\[1\] is 61, outside the vocabulary 0\.\.60"),
        ({"prompts": [[-1]]}, r"prompts\[0\]\[0\] is -1, outside the vocabulary"),
        ({"prompts": [[7]], "num_tokens": 7}, r"is 7, outside the vocabulary 0\.\.6"),
        (
            {"prompts": [[1], [1] * 60]},
            r"prompts\[1\] has 60 ids; with max_new_tokens = 5 .* 65 positions, beyond "
            r"context_length = 64; .* at most 64",
        ),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"temperature": -1.0}, "temperature must be 0 .* got -1"),
        ({"temperature": 1.0}, r"key is needed when temperature > 0; pass key=jax\.random\.key"),
        (
            {"temperature": 1.0, "key": jax.random.split(jax.random.key(0), 3)},
            r"key must be one key or one per prompt, shape \(\) or \(1,\), got \(3,\)",
        ),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
        ({"num_tokens": 62}, r"num_tokens must be in \[1, vocab_size = 61\], got 62"),
        ({"eos_id": 61}, r"eos_id must be an id of the vocabulary, 0\.\.60, got 61"),
        ({"steps_per_call": 0}, r"steps_per_call must be in \[1, 32\], got 0"),
        ({"params": {}}, "embed/embedding: missing"),
    ],
)
def test_bad_arguments_are_refused_at_once(changes, message):
    arguments = {"params": random_params(GROUPED), "prompts": [[1, 2]], "max_new_tokens": 5}
    with pytest.raises(ValueError, match=message):
        stream(GROUPED, **arguments | changes)  # not even started
