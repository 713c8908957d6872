"""Configs: JSON both ways, every refusal by name, hashing, and differences."""

import dataclasses
import json

import numpy as np
import pytest

from sparsejax import presets
from sparsejax.config import (
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    config_differences,
)

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True, qk_norm=True)
FFN = FFNConfig(d_ff=24, gated=False, activation="gelu", gate_bias=True)
ODD = ModelConfig(
    vocab_size=97,
    d_model=12,
    layers=(
        LayerConfig(attention=None, ffn=FFN),
        LayerConfig(attention=ATTENTION, ffn=None, parallel_with_previous=True),
        LayerConfig(attention=None, ffn=None),
        LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=7)),
    ),
    context_length=33,
    rope=RopeConfig(theta=123.5, scaling="llama3", factor=2.5, original_context=64),
    norm_eps=1e-6,
    tie_embeddings=False,
    init_std=0.125,
    dtype="float16",
    param_dtype="bfloat16",
)


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(presets.get(name), id=name) for name in presets.names()),
        pytest.param(ODD, id="odd"),
        pytest.param(ODD.replace(layers=()), id="no layers"),
    ],
)
def test_json_round_trip(config):
    text = config.to_json()
    again = ModelConfig.from_json(text)
    assert again == config and hash(again) == hash(config)
    assert again.to_json() == text
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_json_holds_every_field():
    data = json.loads(ODD.to_json())
    assert set(data) == {f.name for f in dataclasses.fields(ModelConfig)}
    assert data["layers"][0]["attention"] is None and data["layers"][1]["ffn"] is None
    assert data["layers"][1]["attention"] == dataclasses.asdict(ATTENTION)
    assert data["layers"][3]["ffn"] == {
        "d_ff": 7,
        "gated": True,
        "activation": "relu",
        "gate_bias": False,
    }
    assert data["rope"]["theta"] == 123.5


def test_optional_json_fields_take_their_defaults():
    least = {"vocab_size": 5, "d_model": 4, "layers": [{"attention": None, "ffn": {"d_ff": 3}}]}
    layer = LayerConfig(attention=None, ffn=FFNConfig(d_ff=3))
    assert ModelConfig.from_dict(least) == ModelConfig(vocab_size=5, d_model=4, layers=(layer,))


def test_hash_tells_configs_apart():
    others = [
        ODD.replace(norm_eps=2e-6),
        ODD.replace(layers=ODD.layers[:-1]),
        ODD.replace(layers=(*ODD.layers[:-1], dataclasses.replace(ODD.layers[-1], ffn=None))),
        ODD.replace(rope=dataclasses.replace(ODD.rope, factor=3.0)),
    ]
    assert len({ODD, *others, ODD.replace()}) == 1 + len(others)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ODD.d_model = 5  # pyright: ignore


def test_layer_lists():
    assert ODD.num_layers == 4
    assert ODD.ffn_layers == (0, 3)
    assert ODD.sparse_layers == (3,)
    assert ODD.attention_layers == (1, 3)


def test_numpy_integers_become_python_ones():
    ffn = FFNConfig(d_ff=np.int64(24))  # pyright: ignore
    assert type(ffn.d_ff) is int
    config = ModelConfig(vocab_size=9, d_model=8, layers=(LayerConfig(attention=None, ffn=ffn),))
    assert ModelConfig.from_json(config.to_json()) == config


def attention(**changes):
    return AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8} | changes)


REFUSED = {
    "no heads": (lambda: attention(num_heads=0), "num_heads must be a positive integer, got 0"),
    "negative heads": (lambda: attention(num_kv_heads=-1), "num_kv_heads must be a positive"),
    "heads do not divide": (
        lambda: attention(num_kv_heads=3),
        "num_kv_heads must divide num_heads = 4, got 3",
    ),
    "odd head": (lambda: attention(head_dim=7), "head_dim must be even for rotary .*, got 7"),
    "fractional head": (lambda: attention(head_dim=8.0), r"head_dim must be .* integer, got 8\.0"),
    "true as a number": (lambda: attention(num_kv_heads=True), "num_kv_heads .*, got True"),
    "no neurons": (lambda: FFNConfig(d_ff=0), "FFNConfig: d_ff must be a positive integer, got 0"),
    "activation": (
        lambda: FFNConfig(d_ff=1, activation="tanh"),  # pyright: ignore
        r"activation must be one of \['relu', 'silu', 'gelu'\], got 'tanh'",
    ),
    "theta": (lambda: RopeConfig(theta=-1.0), r"theta must be positive and finite, got -1\.0"),
    "theta nan": (lambda: RopeConfig(theta=float("nan")), "theta must be positive"),
    "factor": (lambda: RopeConfig(factor=0.0), "factor must be positive"),
    "factor inf": (lambda: RopeConfig(factor=float("inf")), "factor must be positive and finite"),
    "low": (lambda: RopeConfig(low_freq_factor=0.0), "low_freq_factor must be positive"),
    "context": (lambda: RopeConfig(original_context=0), "original_context must be a positive"),
    "bands": (
        lambda: RopeConfig(low_freq_factor=4.0, high_freq_factor=4.0),
        r"high_freq_factor must exceed low_freq_factor = 4\.0, got 4\.0",
    ),
    "scaling": (
        lambda: RopeConfig(scaling="yarn"),  # pyright: ignore
        r"scaling must be one of \['none', 'linear', 'llama3'\], got 'yarn'",
    ),
    "vocab": (lambda: ODD.replace(vocab_size=0), "vocab_size must be a positive integer, got 0"),
    "d_model": (lambda: ODD.replace(d_model=-8), "d_model must be a positive integer, got -8"),
    "length": (lambda: ODD.replace(context_length=0), "context_length must be a positive"),
    "eps": (lambda: ODD.replace(norm_eps=0.0), "norm_eps must be positive"),
    "std": (lambda: ODD.replace(init_std=-0.1), "init_std must be positive"),
    "dtype": (lambda: ODD.replace(dtype="int8"), r"ModelConfig: dtype must be one of .*'int8'"),
    "param dtype": (lambda: ODD.replace(param_dtype="f32"), "param_dtype must be one of .*'f32'"),
    "list of layers": (
        lambda: ODD.replace(layers=list(ODD.layers)),
        r"layers must be a tuple of LayerConfig, got list; write layers=tuple\(\[\.\.\.\]\)",
    ),
    "layer of another type": (lambda: ODD.replace(layers=(FFN,)), "must be a tuple of LayerConfig"),
    "parallel first": (
        lambda: ODD.replace(layers=(dataclasses.replace(ODD.layers[1]),)),
        "layer 0 has no layer before it; set its parallel_with_previous to False",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def edit(path, value):
    """ODD as a dict with the entry at `path` replaced, or removed where value is `...`."""
    data = node = ODD.to_dict()
    for key in path[:-1]:
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("depth",), 3, r"^ModelConfig: unknown field 'depth'; known: \['context_length', "),
        (("layers", 1, "mlp"), {}, r"^ModelConfig\.layers\[1\]: unknown field 'mlp'; known: "),
        (("layers", 3, "ffn", "width"), 3, r"^ModelConfig\.layers\[3\]\.ffn: unknown .*'width'"),
        (("d_model",), ..., "^ModelConfig: field 'd_model' is missing"),
        (("layers", 2, "ffn"), ..., r"^ModelConfig\.layers\[2\]: field 'ffn' is missing"),
        (
            ("layers", 1, "attention", "head_dim"),
            ...,
            r"^ModelConfig\.layers\[1\]\.attention: field 'head_dim' is missing",
        ),
        (("d_model",), "12", r"^ModelConfig\.d_model: expected int, got '12'"),
        (("d_model",), 12.0, r"^ModelConfig\.d_model: expected int, got 12\.0"),
        (("d_model",), True, r"^ModelConfig\.d_model: expected int, got True"),
        (("norm_eps",), "tiny", r"^ModelConfig\.norm_eps: expected float, got 'tiny'"),
        (("tie_embeddings",), 1, r"^ModelConfig\.tie_embeddings: expected bool, got 1"),
        (("dtype",), None, r"^ModelConfig\.dtype: expected str, got None"),
        (("rope",), None, r"^ModelConfig\.rope: expected an object with fields, got None"),
        (("layers",), {}, r"^ModelConfig\.layers: expected a list, got \{\}"),
        (("layers", 0), 5, r"^ModelConfig\.layers\[0\]: expected an object with fields, got 5"),
        (
            ("layers", 3, "ffn", "d_ff"),
            -7,
            r"^ModelConfig\.layers\[3\]\.ffn: FFNConfig: d_ff must be a positive integer, got -7",
        ),
        (
            ("layers", 0, "ffn", "activation"),
            ["relu"],
            r"^ModelConfig\.layers\[0\]\.ffn: .*activation must be one of",
        ),
    ],
)
def test_bad_json_is_named_by_its_path(path, value, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(edit(path, value))


def test_an_integer_may_stand_for_a_float():
    assert ModelConfig.from_dict(edit(("rope", "theta"), 500000)).rope.theta == 5e5


def test_config_differences():
    other = ODD.replace(
        norm_eps=1e-5,
        layers=(*ODD.layers[:3], dataclasses.replace(ODD.layers[3], ffn=FFNConfig(d_ff=8))),
    )
    assert config_differences(ODD.to_dict(), ODD.to_dict()) == []
    assert sorted(config_differences(ODD.to_dict(), other.to_dict())) == [
        "layers[3].ffn.d_ff: 7 vs 8",
        "norm_eps: 1e-06 vs 1e-05",
    ]
    fewer = ODD.replace(layers=ODD.layers[:2])
    assert config_differences(ODD.to_dict(), fewer.to_dict()) == ["layers: 4 entries vs 2"]


def test_config_differences_of_absent_keys_and_parts():
    assert config_differences({"a": 1}, {"b": None}) == ["a: 1 vs absent", "b: absent vs None"]
    assert config_differences({"a": "absent"}, {}) == ["a: 'absent' vs absent"]
    assert config_differences({"ffn": None}, {"ffn": {"d_ff": 3}}) == ["ffn: None vs {'d_ff': 3}"]
