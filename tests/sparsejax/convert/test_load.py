"""Small models of every family against what transformers computed from them (golden/)."""

import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, apply, init_params, rope
from sparsejax.convert import FolderError, load, save
from sparsejax.generate import generate
from sparsejax.params import flatten
from sparsejax.sharding import MeshConfig, make_mesh

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    folder = GOLDEN / request.param
    config, params, tokenizer = load(folder, dtype="float32")
    assert tokenizer is None
    with np.load(folder / "golden.npz") as arrays:
        return config, params, dict(arrays)


def test_all_families_have_a_golden_model():
    assert set(NAMES) == {
        *("llama2", "llama31", "llama_linear", "mistral", "qwen2", "qwen3"),
        *("llama_sparse_relu", "deci"),
    }


def test_logits_of_random_ids_and_repeats_and_behind_left_padding(golden):
    config, params, want = golden
    tokens, mask = want["tokens"], want["mask"]
    width = mask.shape[1]
    # Padding is a document of its own; one call, so that one program serves both.
    both = np.concatenate([tokens, np.pad(want["padded"], ((0, 0), (0, 20 - width)))])
    places = np.tile(np.arange(20), (5, 1))
    places[3:, :width] = np.clip(np.cumsum(mask, axis=1) - 1, 0, None)
    documents = np.ones((5, 20), np.int32)
    documents[3:, :width] = mask
    documents[3:, width:] = 2
    got = apply(
        config,
        params,
        jnp.asarray(both, jnp.int32),
        positions=jnp.asarray(places, jnp.int32),
        segment_ids=jnp.asarray(documents),
    )
    assert np.ptp(want["logits"]) > 5  # differences are seen
    np.testing.assert_allclose(got[:3], want["logits"], rtol=0, atol=1e-4)
    real = mask.astype(bool)
    np.testing.assert_allclose(
        np.asarray(got[3:, :width])[real], want["padded_logits"][real], rtol=0, atol=1e-4
    )


def test_greedy_generation_is_the_same_over_64_tokens(golden):
    config, params, want = golden
    prompts = [
        row[keep].tolist()
        for row, keep in zip(want["padded"], want["mask"].astype(bool), strict=True)
    ]
    assert len({len(p) for p in prompts}) == 2
    got = generate(config, params, prompts, max_new_tokens=64)
    assert want["greedy"].shape == (2, 64)
    assert got == want["greedy"].tolist()


def test_rotary_tables_far_out(golden):
    config, _, want = golden
    head_dim = next(layer.attention.head_dim for layer in config.layers if layer.attention)
    half = head_dim // 2
    unit = jnp.concatenate([jnp.ones((1, 3, 1, half)), jnp.zeros((1, 3, 1, half))], axis=-1)
    at = jnp.asarray([[0, 1000, 8192]], jnp.int32)
    turned = np.asarray(rope.rotate(unit, at, config.rope))[0, :, 0]
    # One unit in the last place of a float32 angle of 8192 is 1e-3.
    for got, name in ((turned[:, :half], "rope_cos"), (turned[:, half:], "rope_sin")):
        np.testing.assert_allclose(got, want[name][:, :half], rtol=0, atol=2e-3)


def test_a_scaling_that_is_not_applied_would_be_seen():
    for name in ("llama31", "llama_linear", "deci"):
        with np.load(GOLDEN / name / "golden.npz") as want:
            config = load(GOLDEN / name)[0]
            half = want["rope_cos"].shape[1] // 2
            plain = config.rope.theta ** (-np.arange(half) / half)
            assert np.abs(np.cos(1000 * plain) - want["rope_cos"][1, :half]).max() > 0.1


def test_what_was_read():
    qwen2 = load(GOLDEN / "qwen2")[0]
    assert qwen2.tie_embeddings and qwen2.layers[0].attention.qkv_bias
    qwen3 = load(GOLDEN / "qwen3")[0]
    assert not qwen3.tie_embeddings and qwen3.layers[0].attention.qk_norm
    assert qwen3.layers[0].attention.head_dim == 16 != qwen3.d_model // 4
    sparse = load(GOLDEN / "llama_sparse_relu")[0]
    assert sparse.tie_embeddings
    assert sparse.layers[0].ffn.activation == "relu" and sparse.layers[0].ffn.gated
    deci = load(GOLDEN / "deci")[0]
    assert [a and a.num_kv_heads for a in (x.attention for x in deci.layers)] == [
        2,
        None,
        4,
        1,
        None,
    ]
    assert [f and f.d_ff for f in (x.ffn for x in deci.layers)] == [256, 512, None, 96, None]


def test_layouts_against_the_package_that_wrote_the_files():
    config, params, _ = load(GOLDEN / "qwen2")
    raw = safetensors.numpy.load_file(GOLDEN / "qwen2" / "model.safetensors")
    one = "model.layers.1.self_attn."
    ours = params["layer_1"]["attn"]
    for i in range(4):  # head i of q are rows 8 i to 8 i + 8
        rows = slice(8 * i, 8 * i + 8)
        np.testing.assert_array_equal(ours["q"][:, i], raw[one + "q_proj.weight"][rows].T)
        np.testing.assert_array_equal(ours["q_bias"][i], raw[one + "q_proj.bias"][rows])
        np.testing.assert_array_equal(ours["o"][i], raw[one + "o_proj.weight"][:, rows].T)
    mlp = params["layer_1"]["ffn"]
    np.testing.assert_array_equal(mlp["gate"], raw["model.layers.1.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(mlp["down"], raw["model.layers.1.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(params["embed"]["embedding"], raw["model.embed_tokens.weight"])
    assert "lm_head" not in params and "lm_head.weight" not in raw


def test_the_files_dtype_is_kept_unless_another_is_asked_for():
    config, params, _ = load(GOLDEN / "mistral")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    wide = load(GOLDEN / "mistral", dtype="float32")[1]
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf.astype(jnp.float32), flatten(wide)[path])
    with pytest.raises(ValueError, match=r"dtype must be one of \['float32', 'bfloat16', 'float"):
        load(GOLDEN / "mistral", dtype="float64")


def test_on_a_mesh_every_device_gets_its_part():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = load(GOLDEN / "qwen2", mesh)[1]
    alone = load(GOLDEN / "qwen2")[1]
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf, flatten(alone)[path])
    assert params["layer_0"]["ffn"]["down"].sharding.shard_shape((48, 32)) == (24, 16)
    with pytest.raises(ValueError, match="does not divide over 'tensor' = 8"):
        load(GOLDEN / "qwen2", make_mesh(MeshConfig(tensor=8)))


def test_one_tensor_at_a_time(tmp_path):
    """What is allocated on the way stays below the result and three of the largest tensors."""
    attention = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=64)
    layer = LayerConfig(attention=attention, ffn=FFNConfig(d_ff=512, activation="silu"))
    config = ModelConfig(vocab_size=512, d_model=512, layers=(layer,) * 3)
    params = init_params(config, jax.random.key(0))
    save(tmp_path, config, params, max_shard_bytes=5_000_000)
    result = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert result > 20 * largest
    for dtype in ("float32", "bfloat16"):
        tracemalloc.start()
        loaded = load(tmp_path, dtype=dtype)[1]
        jax.block_until_ready(loaded)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        kept = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
        # NumPy's arrays are traced, and XLA keeps the aligned ones as they are.
        assert largest <= peak < kept + 3 * largest


def copy(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    return folder


def edit(folder, change):
    """Applies `change` to the folder's tensors, with the safetensors package."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def test_tensors_that_do_not_fit_are_listed_by_name(tmp_path):
    folder = copy("llama31", tmp_path)

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
        tensors["model.norm.weight"] = np.ones(33, np.float32)

    edit(folder, change)
    with pytest.raises(FolderError) as error:
        load(folder)
    assert str(error.value).splitlines() == [
        f"the tensors of {folder} do not fit its config.json:",
        "  model.norm.weight: expected shape [32], got [33]",
        "  model.layers.1.mlp.up_proj.weight: missing, expected shape [48, 32]",
        "  model.layers.2.mlp.up_proj.weight: not in the config, shape [48, 32]",
    ]


def test_a_transposed_weight_is_a_wrong_shape(tmp_path):
    folder = copy("llama31", tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    with pytest.raises(FolderError, match=r"down_proj.weight: expected shape \[32, 48\], got \[48"):
        load(folder)


def test_dtypes_that_are_refused(tmp_path):
    folder = copy("llama31", tmp_path)
    edit(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(FolderError, match=r"model.norm.weight has dtype I8; expected one of F32"):
        load(folder)
    edit(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.float16)}))
    with pytest.raises(FolderError, match=r"mixes dtypes .*model.norm.weight is F16.*dtype="):
        load(folder)
    assert load(folder, dtype="float32")[1]["final_norm"]["scale"].dtype == jnp.float32


def test_tied_and_untied_heads(tmp_path):
    folder = copy("llama31", tmp_path)  # tied
    head = "lm_head.weight"
    edit(folder, lambda t: t.update({head: t["model.embed_tokens.weight"].copy()}))
    assert "lm_head" not in load(folder)[1]
    edit(folder, lambda t: t.update({head: 2 * t["model.embed_tokens.weight"]}))
    with pytest.raises(FolderError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
    config, params, _ = load(folder)
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["lm_head"]["kernel"].T, 2 * params["embed"]["embedding"])
    edit(folder, lambda t: t.pop(head))
    with pytest.raises(FolderError, match=r"lm_head.weight: missing, expected shape \[64, 32\]"):
        load(folder)


def test_computed_tables_of_old_files_are_left_out(tmp_path):
    folder = copy("llama31", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda t: t.update({name: np.ones(8, np.float32)}))
    assert load(folder)[0] == load(GOLDEN / "llama31")[0]


def test_down_as_the_published_sparse_kernel_keeps_it(tmp_path):
    folder = copy("llama31", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "llama_sparse_relu", "sparsity_use_hybrid_kernel": True}
    (folder / "config.json").write_text(json.dumps(values))
    want = load(folder)[1]["layer_0"]["ffn"]["down"]
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    np.testing.assert_array_equal(load(folder)[1]["layer_0"]["ffn"]["down"], want)


def test_a_second_copy_of_a_tied_embedding_in_a_dtype_that_we_do_not_read(tmp_path):
    folder = copy("llama31", tmp_path)
    edit(folder, lambda t: t.update({"lm_head.weight": np.zeros((64, 32), np.int8)}))
    with pytest.raises(FolderError, match=r"lm_head.weight has dtype I8; expected one of F32"):
        load(folder)


def test_numbers_that_a_dtype_does_not_have(tmp_path):
    """Rounding never makes an infinity: float16 ends at 65504."""
    folder = copy("llama31", tmp_path)
    name = "model.norm.weight"
    edit(folder, lambda t: t[name].__setitem__(3, -70000))
    with pytest.raises(ValueError, match=r"model.norm.weight holds -70000, which float16 has no"):
        load(folder, dtype="float16")
    config, params, _ = load(folder, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"final_norm/scale holds -70144, which float16 has no"):
        save(tmp_path / "out", config, params, dtype="float16")
    # The largest that rounds to a finite number, and infinities that were there before.
    edit(folder, lambda t: t[name].__setitem__(slice(3, 5), (65519, np.inf)))
    scale = load(folder, dtype="float16")[1]["final_norm"]["scale"]
    assert scale[3] == 65504 and np.isinf(scale[4])
