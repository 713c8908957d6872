"""Export: bit for bit back, and (where it is installed) what transformers makes of it."""

import importlib.util
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import tokenizers
from tokenizers import models, pre_tokenizers

from sparsejax import FFNConfig, LayerConfig, apply, init_params, presets, surgery
from sparsejax.convert import FolderError, chat_ids, load, save
from sparsejax.data import HFTokenizer
from sparsejax.generate import generate
from sparsejax.params import flatten
from sparsejax.sharding import MeshConfig, make_mesh, tree_shardings

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="torch (and transformers), as oracles, are not installed; golden/ stands in for them",
)

needs_transformers_alone = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("jinja2") is None,
    reason="transformers and jinja2 are not installed",
)


def same_bits(ours, theirs):
    ours, theirs = flatten(ours), flatten(theirs)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert leaf.dtype == theirs[path].dtype, path
        assert leaf.shape == theirs[path].shape, path
        assert np.asarray(leaf).tobytes() == np.asarray(theirs[path]).tobytes(), path


def stored(folder):
    """The folder's tensors, as the safetensors package reads them."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.flax.load_file(file)
    return tensors


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_wrote_comes_out_as_it_went_in(name, tmp_path):
    config, params, _ = load(GOLDEN / name)
    save(tmp_path, config, params, max_shard_bytes=30_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    same_bits(stored(GOLDEN / name), stored(tmp_path))
    again, params_again, _ = load(tmp_path)
    assert again == config
    same_bits(params, params_again)


def unequal():
    """4 layers, 4 heads, 2 key/value heads; one layer without attention, one wide, one empty."""
    config = presets.tiny("dense").replace(d_model=64, vocab_size=96, tie_embeddings=False)
    a, f = config.layers[0].attention, FFNConfig(d_ff=256, activation="silu")
    grouped = presets.AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16)
    assert a is not None
    wide = FFNConfig(d_ff=768, activation="silu")
    layers = (
        LayerConfig(attention=grouped, ffn=f),
        LayerConfig(attention=None, ffn=wide),
        LayerConfig(attention=grouped, ffn=FFNConfig(d_ff=100, activation="silu")),
        LayerConfig(attention=None, ffn=None),
    )
    return config.replace(layers=layers)


def test_a_model_with_unequal_layers_goes_out_as_deci(tmp_path):
    config = unequal()
    params = init_params(config, jax.random.key(0))
    assert save(tmp_path, config, params) == "deci"
    blocks = json.loads((tmp_path / "config.json").read_text())["block_configs"]
    assert [b["attention"]["no_op"] for b in blocks] == [False, True, False, True]
    assert [b["attention"]["n_heads_in_group"] for b in blocks] == [2, None, 2, None]
    assert blocks[1]["ffn"]["ffn_mult"] == 18.0  # 768 = 2 * 18 * 64 / 3
    assert blocks[2]["ffn"]["intermediate_size"] == 100  # no multiple of 256
    again, params_again, _ = load(tmp_path)
    assert again == config
    same_bits(params, params_again)


def test_a_fused_model_goes_out_as_deci(tmp_path):
    config = presets.tiny("dense")
    params = init_params(config, jax.random.key(0))
    config, params = surgery.remove_attention(config, params, (1, 2))
    config, params = surgery.fuse_ffns(config, params, [(1, 2)])[:2]
    assert [layer.attention is None for layer in config.layers] == [False, True, False]
    assert save(tmp_path, config, params) == "deci"
    again, back, _ = load(tmp_path)
    assert again == config
    same_bits(params, back)
    assert stored(tmp_path)["model.layers.1.mlp.up_proj.weight"].shape == (1024, 128)
    parallel = surgery.parallelize_blocks(config, params, [(0, 1)])
    with pytest.raises(ValueError, match="layer 1 runs in parallel with the one before"):
        save(tmp_path / "parallel", *parallel[:2])


def test_untied_heads_stay_untied_and_tied_ones_have_no_head(tmp_path):
    for tied in (False, True):
        config = presets.tiny().replace(tie_embeddings=tied)
        params = init_params(config, jax.random.key(1))
        folder = tmp_path / str(tied)
        assert save(folder, config, params) == "llama"
        tensors = stored(folder)
        assert ("lm_head.weight" in tensors) is not tied
        if not tied:
            head = np.asarray(params["lm_head"]["kernel"]).T
            np.testing.assert_array_equal(tensors["lm_head.weight"], head)
            assert not np.array_equal(head, np.asarray(params["embed"]["embedding"]))
        assert load(folder)[0].tie_embeddings is tied


def test_another_dtype_is_rounded_once(tmp_path):
    config = presets.tiny()
    params = init_params(config, jax.random.key(2))
    save(tmp_path, config, params, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    same_bits(load(tmp_path)[1], rounded)


def test_a_sharded_model(tmp_path):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    config = presets.tiny()
    params = init_params(config, jax.random.key(3))
    save(tmp_path, config, jax.device_put(params, tree_shardings(mesh, params)))
    same_bits(load(tmp_path)[1], params)


def make_tokenizer(folder, words):
    folder.mkdir()
    vocab = {f"w{i}": i for i in range(words - 1)} | {"</s>": words - 1}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
    template += "{% if add_generation_prompt %}w7{% endif %}"
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return HFTokenizer(folder / "tokenizer.json")


def test_the_tokenizer_goes_along_and_padding_rows_are_never_emitted(tmp_path):
    """152,064 rows of which 399 have no token: export keeps them, generation never emits them."""
    rows, ids = 152_064, 151_665
    tokenizer = make_tokenizer(tmp_path / "made", ids)
    config = presets.tiny("dense").replace(vocab_size=rows, d_model=16)
    config = config.replace(layers=config.layers[:1])
    params = init_params(config, jax.random.key(8))
    # Rows without a token that would win everywhere.
    table = params["embed"]["embedding"]
    params = params | {"embed": {"embedding": table.at[ids:].set(table[: rows - ids] * 20)}}
    save(tmp_path / "out", config, params, tokenizer)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(range(ids, rows))
    assert generation["eos_token_id"] == ids - 1
    again, loaded, found = load(tmp_path / "out")
    same_bits(params, loaded)  # the padding rows too
    assert (again.vocab_size, found.vocab_size, found.eot_id) == (rows, ids, ids - 1)
    assert found.encode("w3 w1") == [3, 1]
    free = generate(again, loaded, [[1, 2, 3]], max_new_tokens=8)
    kept = generate(again, loaded, [[1, 2, 3]], max_new_tokens=8, num_tokens=found.vocab_size)
    assert max(free[0]) >= ids > max(kept[0])


def test_a_tokenizer_with_more_ids_than_rows(tmp_path):
    config, params, _ = load(GOLDEN / "llama31")
    large = make_tokenizer(tmp_path / "made", 65)
    with pytest.raises(ValueError, match="has ids up to 64, but the embedding has vocab_size = 64"):
        save(tmp_path / "out", config, params, large)
    save(tmp_path / "out", config, params)
    shutil.copy(large.path, tmp_path / "out" / "tokenizer.json")
    with pytest.raises(ValueError, match="has ids up to 64, but the embedding has vocab_size = 64"):
        load(tmp_path / "out")


def test_arguments_that_do_not_fit(tmp_path):
    config = presets.tiny()
    params = init_params(config, jax.random.key(4))
    with pytest.raises(ValueError, match="family 'qwen3' cannot hold this model: qk_norm is False"):
        save(tmp_path, config, params, family="qwen3")
    with pytest.raises(ValueError, match="dtype must be one of"):
        save(tmp_path, config, params, dtype="float8")
    with pytest.raises(ValueError, match="final_norm/scale: missing"):
        save(tmp_path, config, {k: v for k, v in params.items() if k != "final_norm"})
    assert list(tmp_path.iterdir()) == []


# Where transformers is installed, it reads what is written.


@needs_transformers
@pytest.mark.parametrize("name", ["llama31", "llama_linear", "mistral", "qwen2", "qwen3"])
def test_transformers_reads_it_and_writes_it_back(name, tmp_path):
    import torch
    import transformers

    config, params, _ = load(GOLDEN / name, dtype="float32")
    family = {"mistral": "mistral"}.get(name)
    save(tmp_path / "ours", config, params, family=family)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = np.random.default_rng(1).integers(0, 64, (2, 12))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    got = apply(config, params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path / "theirs")
    again, back, _ = load(tmp_path / "theirs")
    assert again == config
    same_bits(params, back)


@needs_transformers
def test_a_relu_model_is_a_relu_model_in_transformers(tmp_path):
    import torch
    import transformers

    config = presets.tiny()
    params = init_params(config, jax.random.key(5))
    save(tmp_path, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = np.random.default_rng(2).integers(0, 272, (2, 16))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    got = apply(config, params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@needs_transformers
def test_unequal_layers_in_transformers_own_parts_and_back(tmp_path):
    import torch
    import transformers

    spec = importlib.util.spec_from_file_location("make_golden", GOLDEN.parent / "make_golden.py")
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    config = unequal()
    params = init_params(config, jax.random.key(6))
    save(tmp_path / "ours", config, params)
    base = {
        **{"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 256},
    }
    theirs = transformers.LlamaConfig(**base)
    theirs._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(theirs)
    parts.unequal_layers(model, base, ((2, 256), (None, 768), (2, 100), (None, None)))
    weights = {k: torch.tensor(np.asarray(v)) for k, v in stored(tmp_path / "ours").items()}
    model.load_state_dict(weights, strict=True)
    tokens = np.random.default_rng(3).integers(0, 96, (2, 16))
    with torch.no_grad():
        want = model(torch.tensor(tokens), use_cache=False).logits.numpy()
    got = apply(config, params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path / "theirs")
    own = (tmp_path / "ours" / "config.json").read_text()
    (tmp_path / "theirs" / "config.json").write_text(own)
    again, back, _ = load(tmp_path / "theirs")
    assert again == config
    same_bits(params, back)


@needs_transformers_alone
def test_transformers_reads_the_config_of_unequal_layers(tmp_path):
    import transformers

    config = unequal()
    save(tmp_path, config, init_params(config, jax.random.key(7)))
    read = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert (read.model_type, read.num_hidden_layers) == ("nemotron-nas", 4)
    # What vLLM's model of this type asks for.
    first, second, third, last = read.block_configs
    assert (first.attention.no_op, first.attention.n_heads_in_group) == (False, 2)
    assert (second.attention.no_op, second.ffn.ffn_mult) == (True, 18.0)
    assert (hasattr(third.ffn, "ffn_mult"), third.ffn.intermediate_size) == (False, 100)
    assert last.ffn.no_op
    read.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["block_configs"][1]["ffn"]["ffn_mult"] == 18.0


@needs_transformers_alone
def test_chat_templates(tmp_path):
    make_tokenizer(tmp_path / "made", 50)
    messages = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]
    assert chat_ids(tmp_path / "made", messages) == [3, 4, 49, 5, 49, 7]
    assert chat_ids(tmp_path / "made", messages, add_generation_prompt=False) == [3, 4, 49, 5, 49]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "pytorch_model.bin"])
def test_what_another_model_left_is_not_mixed_with_this_one(name, tmp_path):
    config, params, _ = load(GOLDEN / "llama31")
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"holds {name} of another model already"):
        save(tmp_path, config, params)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "{}"


def test_a_tokenizer_that_lies_in_its_place_already(tmp_path):
    config, params, _ = load(GOLDEN / "llama31")
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    save(tmp_path, config, params, HFTokenizer(tmp_path / "tokenizer.json"))
    assert load(tmp_path)[2].vocab_size == 2


def test_killed_while_writing(tmp_path, monkeypatch):
    """What is there then does not load, and the next save does not mix with it."""
    config, params, _ = load(GOLDEN / "llama31")
    written = []

    def replace(part, file):
        written.append(file.name)
        if len(written) == 2:
            raise KeyboardInterrupt
        os.rename(part, file)

    with monkeypatch.context() as patch:
        patch.setattr("sparsejax.convert.safetensors_io.os.replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, config, params, max_shard_bytes=30_000)
    with pytest.raises(FolderError, match=r"has no config.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"holds model-00001-of-.*safetensors already"):
        save(tmp_path, config, params)
