"""No key that changes the mathematics is passed over, in any family."""

import json
from pathlib import Path

import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig, presets
from sparsejax.convert import FAMILIES, FolderError, families
from sparsejax.convert.config_json import from_hf, read_json, to_hf

GOLDEN = Path(__file__).parent / "golden"


def values(name, **changes):
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama31", "attention_bias", True),
        ("llama31", "mlp_bias", True),
        ("llama31", "hidden_act", "gelu"),
        ("llama31", "hidden_act", "relu2"),
        ("llama31", "partial_rotary_factor", 0.5),
        ("llama31", "quantization_config", {"quant_method": "awq"}),
        ("llama31", "final_logit_softcapping", 30.0),
        ("llama31", "attn_logit_softcapping", 50.0),
        ("llama31", "residual_multiplier", 0.22),
        ("llama31", "never_heard_of", 1),
        ("llama31", "sliding_window", 127),
        ("llama31", "is_encoder_decoder", True),
        ("mistral", "sliding_window", 127),
        ("qwen2", "mlp_bias", True),
        ("qwen3", "attention_bias", True),
        ("qwen3", "layer_types", ["full_attention", "linear_attention"]),
        ("llama_sparse_relu", "mlp_bias", True),
        ("deci", "attention_bias", True),
        ("deci", "mlp_bias", True),
        ("deci", "position_embedding_type", "mistral_yarn"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(name, key, value):
    with pytest.raises(FolderError) as error:
        from_hf(values(name, **{key: value}))
    assert str(error.value).startswith(f"config.json: {key!r} = {value!r} ")
    assert "the mathematics and is not supported" in str(error.value)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("attention", "replace_with_linear", True),
        ("attention", "window_length", 512),
        ("attention", "num_sink_tokens", 4),
        ("attention", "unshifted_sink", True),
        ("attention", "mamba", {}),
        ("attention", "never_heard_of", 1),
        ("ffn", "replace_with_linear", True),
        ("ffn", "moe", {"num_local_experts": 4}),
        ("ffn", "gated", False),
        ("ffn", "hidden_act", "gelu"),
        ("ffn", "never_heard_of", 1),
    ],
)
def test_blocks_that_we_cannot_compute_are_refused_by_name(part, key, value):
    changed = values("deci")
    changed["block_configs"][3][part][key] = value
    with pytest.raises(FolderError) as error:
        from_hf(changed)
    place = f"config.json: block_configs[3].{part}: {key!r} = {value!r} "
    assert str(error.value).startswith(place)


def test_an_unknown_key_may_be_vouched_for_and_null_says_nothing():
    plain = from_hf(values("llama31"))
    assert from_hf(values("llama31", tuned_by="me"), ignore_keys=("tuned_by",)) == plain
    assert from_hf(values("llama31", never_heard_of=None)) == plain


def test_an_unknown_architecture_lists_the_known():
    with pytest.raises(FolderError) as error:
        from_hf({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    message = str(error.value)
    assert "unknown architecture ['MambaForCausalLM'] with model_type 'mamba'" in message
    assert all(f.architecture in message and f.model_types[0] in message for f in FAMILIES)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_missing_and_ill_typed_keys(key):
    changed = values("llama31")
    del changed[key]
    with pytest.raises(FolderError, match=f"config.json: key '{key}' is missing"):
        from_hf(changed)
    with pytest.raises(FolderError, match=f"'{key}' must be a positive integer, got '32'"):
        from_hf(values("llama31", **{key: "32"}))


def test_rope_in_the_old_and_in_the_new_keys():
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    want = RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_context=8192)
    old = {"rope_theta": 5e5, "rope_scaling": llama3 | {"rope_type": "llama3"}}
    new = {"rope_parameters": llama3 | {"rope_type": "llama3", "rope_theta": 5e5}}
    none = {"rope_parameters": None}
    assert from_hf(values("llama31", **none | old)).rope == want
    assert from_hf(values("llama31", **new)).rope == want
    assert from_hf(values("llama31", **old | new)).rope == want
    assert from_hf(values("llama31", **none)).rope == RopeConfig(theta=1e4)
    assert from_hf(values("llama31", **none, rope_theta=7)).rope == RopeConfig(theta=7.0)
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hf(values("llama31", **none | linear)).rope == RopeConfig(
        theta=1e4, scaling="linear", factor=2.0
    )
    other = old["rope_scaling"] | {"factor": 4.0}
    with pytest.raises(FolderError, match="are not the same rotary embedding"):
        from_hf(values("llama31", **new, rope_theta=5e5, rope_scaling=other))
    with pytest.raises(FolderError, match=r"'rope_theta' = 10.0 and rope_parameters.rope_theta"):
        from_hf(values("llama31", **new, rope_theta=10.0))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_scaling: 'rope_type' = 'yarn' changes the m"),
        ({"type": "dynamic", "factor": 4.0}, "rope_scaling: 'type' = 'dynamic' changes the math"),
        ({"rope_type": "linear"}, "rope_scaling: key 'factor' is missing"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "rope_scaling: 'mscale' = 1.0 is"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5"),
        ({"full_attention": {"rope_type": "default"}}, "'rope_scaling' = .* changes the math"),
    ],
)
def test_rope_that_we_cannot_compute(rope, message):
    with pytest.raises(FolderError, match=message):
        from_hf(values("llama31", rope_parameters=None, rope_scaling=rope))


def test_a_window_counts_from_its_length_on():
    assert from_hf(values("mistral", sliding_window=128)).context_length == 128
    short = values("mistral", sliding_window=100)
    with pytest.raises(
        FolderError, match="shorter than the context of 128; pass context_length=10"
    ):
        from_hf(short)
    assert from_hf(short, context_length=100).context_length == 100
    unused = values("qwen2", sliding_window=4, use_sliding_window=False)
    assert from_hf(unused) == from_hf(values("qwen2"))
    used = values("qwen2", sliding_window=4, use_sliding_window=True)
    types = ["full_attention", "sliding_attention"]
    with pytest.raises(FolderError, match="'sliding_window' = 4"):
        from_hf(used | {"layer_types": types})
    with pytest.raises(ValueError, match="at most max_position_embeddings = 128, got 129"):
        from_hf(values("qwen2"), context_length=129)


@pytest.mark.parametrize(("name", "key"), [("qwen3", "layer_types"), ("deci", "block_configs")])
def test_every_list_has_one_entry_per_layer(name, key):
    changed = values(name)
    changed[key] = changed[key][:-1]
    with pytest.raises(FolderError, match=f"'{key}' must have num_hidden_layers = "):
        from_hf(changed)


def test_widths_of_published_blocks():
    """Values of the 253B model: d 16384, multipliers 0.4875 to 4.875."""
    base = values("deci", hidden_size=16384, num_attention_heads=128, num_hidden_layers=1)
    for mult, want in ((0.4875, 5376), (0.975, 10752), (1.4625, 16128), (4.875, 53248)):
        block = {"attention": {"no_op": False, "n_heads_in_group": 16}, "ffn": {"ffn_mult": mult}}
        config = from_hf(base | {"block_configs": [block]})
        assert config.layers[0].ffn.d_ff == want
        assert config.layers[0].attention.num_kv_heads == 8
        written = to_hf(config, families.named("deci"))
        assert from_hf(written) == config
        assert "intermediate_size" not in written["block_configs"][0]["ffn"]


def test_biases_with_unequal_layers():
    config = build(attention={"qkv_bias": True}, ffn={"activation": "silu"})
    config = config.replace(layers=(config.layers[0], LayerConfig(attention=None, ffn=None)))
    family = families.for_config(config)
    written = to_hf(config, family)
    assert (family.name, written["qkv_bias"], written["attention_bias"]) == ("deci", True, False)
    assert from_hf(written).layers == config.layers


def test_the_first_deci_models_list_their_key_value_heads():
    changed = values("llama31", model_type="deci", architectures=["DeciLMForCausalLM"])
    changed["num_key_value_heads_per_layer"] = [4, 1]
    config = from_hf(changed)
    assert [layer.attention.num_kv_heads for layer in config.layers] == [4, 1]
    assert [layer.ffn.d_ff for layer in config.layers] == [48, 48]


@pytest.mark.parametrize("name", sorted(folder.name for folder in GOLDEN.iterdir()))
def test_configs_survive_the_way_out_and_back(name):
    config = from_hf(values(name))
    family = families.of_config_json(values(name), "config.json")
    assert from_hf(to_hf(config, family)) == config
    assert (
        families.for_config(config).name
        == {
            **{"llama2": "llama", "llama31": "llama", "llama_linear": "llama", "mistral": "llama"},
            "llama_sparse_relu": "llama",  # as Llama with hidden_act relu
            **{"qwen2": "qwen2", "qwen3": "qwen3", "deci": "deci"},
        }[name]
    )


def test_a_relu_model_keeps_its_relu():
    assert to_hf(presets.tiny(), families.named("llama"))["hidden_act"] == "relu"
    nongated = presets.tiny("nongated")
    written = to_hf(nongated, families.for_config(nongated))
    assert (written["model_type"], written["sparsity_gated_mlp"]) == ("llama_sparse_relu", False)
    assert from_hf(written).layers == nongated.layers


def build(attention=None, ffn=None, **changes):
    a = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, **(attention or {}))
    layer = LayerConfig(attention=a, ffn=FFNConfig(d_ff=16, **(ffn or {})))
    return ModelConfig(vocab_size=8, d_model=32, layers=(layer,) * 2).replace(**changes)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (build(ffn={"gate_bias": True}), "layer 0 has a gate_bias"),
        (build(attention={"qk_norm": True, "qkv_bias": True}), "attention has qk_norm"),
        (build(ffn={"gated": False, "activation": "silu"}), "not gated"),
        (build(layers=()), "no layer has attention"),
    ],
)
def test_models_that_no_format_holds(config, reason):
    with pytest.raises(ValueError, match="no Hugging Face format holds this model") as error:
        families.for_config(config)
    assert reason in str(error.value)


def test_a_family_that_cannot_hold_the_model_says_why():
    with pytest.raises(ValueError, match="'qwen2' cannot hold this model: qkv_bias is False"):
        to_hf(build(), families.named("qwen2"))
    with pytest.raises(ValueError, match="unknown family 'gpt2'; known: llama, mistral, qwen2"):
        families.named("gpt2")


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FolderError, match=r"has no config\.json"):
        read_json(tmp_path / "config.json")
    for text, message in (("{", "is not valid JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(FolderError, match=message):
            read_json(tmp_path / "config.json")


def test_a_mistral_has_a_window_unless_it_says_that_it_has_none():
    changed = values("mistral", max_position_embeddings=8192)
    del changed["sliding_window"]
    with pytest.raises(FolderError, match=r"'sliding_window' = None .*\(absent, it means 4096\)"):
        from_hf(changed)
    assert from_hf(changed, context_length=4096).context_length == 4096
    assert from_hf(changed | {"sliding_window": None}).context_length == 8192
    # Neither of these is a key of that family, whose window stays.
    for other in ({"use_sliding_window": False}, {"layer_types": ["full_attention"] * 2}):
        with pytest.raises(FolderError, match="'sliding_window' = 127 changes the mathematics"):
            from_hf(values("mistral", sliding_window=127, **other))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sliding_window", "4", "'sliding_window' must be a whole number or null, got '4'"),
        ("layer_types", 3, "'layer_types' must be a list of texts, got 3"),
        ("layer_types", [["x"], "full_attention"], "'layer_types' must be a list of texts"),
        ("hidden_act", ["silu"], "'hidden_act' = .'silu'. changes the mathematics"),
        ("rope_theta", "x", "'rope_theta' must be a number, got 'x'"),
        ("rope_parameters", {"rope_theta": float("nan")}, "theta must be positive and finite"),
        ("rms_norm_eps", -1.0, "norm_eps must be positive and finite"),
        ("num_key_value_heads", 3, "num_kv_heads must divide num_heads = 4, got 3"),
        ("head_dim", 7, "head_dim must be even"),
        ("architectures", 5, "'architectures' = 5 changes the mathematics"),
    ],
)
def test_values_that_cannot_be_are_errors_of_the_file(key, value, message):
    with pytest.raises(FolderError, match=f"config.json: .*{message}"):
        from_hf(values("qwen2", **{key: value}))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (1, r"block_configs\[3\]: expected a JSON object, got 1"),
        ({"attention": 1}, r"block_configs\[3\].attention: expected a JSON object, got 1"),
        ({"ffn": {"ffn_mult": "x"}}, "'ffn_mult' must be a number, got 'x'"),
        ({"ffn": {"ffn_mult": float("nan")}}, "'ffn_mult' must be positive and finite, got nan"),
        ({"ffn": {"ffn_mult": -1.0}}, "'ffn_mult' must be positive and finite, got -1.0"),
        ({"attention": {"num_key_value_heads": "a"}}, "must be a positive integer, got 'a'"),
    ],
)
def test_damaged_blocks(block, message):
    changed = values("deci")
    whole = changed["block_configs"][3]
    changed["block_configs"][3] = whole | block if isinstance(block, dict) else block
    with pytest.raises(FolderError, match=message):
        from_hf(changed)


def test_code_of_another_model_is_not_passed_over():
    own = {"AutoConfig": "my.MyConfig", "AutoModelForCausalLM": "my.MyModel"}
    for key, value in (("architectures", ["MyModel"]), ("auto_map", own)):
        with pytest.raises(FolderError, match=f"'{key}' = .*it is not LlamaForCausalLM"):
            from_hf(values("llama31", **{key: value}))
        vouched = from_hf(values("llama31", **{key: value}), ignore_keys=(key,))
        assert vouched == from_hf(values("llama31"))
    from_hf(values("llama31", auto_map={"AutoTokenizer": ["my.MyTokenizer", None]}))
    from_hf(values("llama31", architectures=["LLaMAForCausalLM"]))  # as the first files have it


def test_no_context_is_no_wish_for_all_of_it():
    with pytest.raises(ValueError, match="context_length must be at least 1"):
        from_hf(values("llama31"), context_length=0)


def test_json_that_is_too_deep(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(FolderError, match="is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_all_keys_that_are_not_known_are_named_at_once():
    foreign = values("llama31", foo_scale=2.0, tuned_by="me", nothing=None)
    with pytest.raises(FolderError) as error:
        from_hf(foreign)
    assert str(error.value) == (
        "config.json: 'foo_scale' = 2.0, 'tuned_by' = 'me' are not known keys, so they may change "
        "the mathematics and are not supported; if not, pass ignore_keys=('foo_scale', 'tuned_by') "
        "(experiments/convert.py: --ignore-keys foo_scale tuned_by)"
    )
    assert from_hf(foreign, ignore_keys=("foo_scale", "tuned_by")) == from_hf(values("llama31"))
    with pytest.raises(FolderError) as error:
        from_hf(values("llama31", attention_bias=True, mlp_bias=True))
    assert str(error.value) == (
        "config.json: 'attention_bias' = True, 'mlp_bias' = True change the mathematics and are "
        "not supported"
    )


def test_a_key_of_a_block_can_be_vouched_for_too():
    changed = values("deci")
    changed["block_configs"][3]["ffn"]["note"] = "mine"
    with pytest.raises(FolderError, match=r"block_configs\[3\].ffn: 'note' .* --ignore-keys note"):
        from_hf(changed)
    assert from_hf(changed, ignore_keys=("note",)) == from_hf(values("deci"))
