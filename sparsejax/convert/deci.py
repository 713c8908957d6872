"""DeciLM / Nemotron-NAS: `block_configs` with one entry per layer, whose parts may be absent.

A feed-forward width is written as `ffn_mult` m, meaning floor(2 m D / 3) rounded up to a multiple
of 256; newer files give `intermediate_size` instead, which holds any width.
"""

from __future__ import annotations

import math
from typing import Any

from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.convert.keys import WRITTEN, Keys, read_activation
from sparsejax.convert.safetensors_io import FolderError

_MULTIPLE = 256
# Neither transformers nor vLLM brings a config class for this model type; they ask the folder.
CONFIG_FILE = "configuration_decilm.py"
CONFIG_CLASS = '''"""Lets transformers, and servers built on it, read this folder's config.json."""

from transformers import LlamaConfig


class Part(dict):
    """A dict whose entries are attributes too."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        return Part(value) if isinstance(value, dict) else value


class DeciLMConfig(LlamaConfig):
    """Llama's settings, and one entry of `block_configs` per layer."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs=None, **kwargs):
        super().__init__(**kwargs)
        self.block_configs = [Part(block) for block in block_configs or []]
'''


def width(ffn_mult: float, d_model: int) -> int:
    """floor(2 * ffn_mult * d_model / 3), rounded up to a multiple of 256."""
    return -(-int(2 * ffn_mult * d_model / 3) // _MULTIPLE) * _MULTIPLE


def read_layers(keys: Keys, head_dim: int) -> tuple[LayerConfig, ...]:
    """One LayerConfig per block."""
    keys.only(attention_bias=(False,), mlp_bias=(False,), bias=(False,))
    keys.only(o_proj_bias=(False,), logit_scale=(1, 1.0))
    keys.take("num_key_value_heads")  # replaced by the blocks' own
    heads, n = keys.whole("num_attention_heads"), keys.whole("num_hidden_layers")
    activation, bias = read_activation(keys), bool(keys.take("qkv_bias", False))
    d_model = keys.whole("hidden_size")
    blocks, per_layer = keys.take("block_configs"), keys.take("num_key_value_heads_per_layer")
    if blocks is None:
        if per_layer is None:
            raise FolderError(f"{keys.place}: key 'block_configs' is missing")
        ffn = FFNConfig(d_ff=keys.whole("intermediate_size"), activation=activation)
        _check_length(keys, "num_key_value_heads_per_layer", per_layer, n)
        layers = [
            LayerConfig(attention=_attention(heads, g, head_dim, bias), ffn=ffn) for g in per_layer
        ]
        return tuple(layers)
    keys.take("intermediate_size")
    _check_length(keys, "block_configs", blocks, n)
    layers = []
    for i, block in enumerate(blocks):
        place = f"{keys.place}: block_configs[{i}]"
        outer = _object(keys, block, place)
        attention = _object(keys, outer.take("attention", {}), f"{place}.attention")
        ffn = _object(keys, outer.take("ffn", {}), f"{place}.ffn")
        layers.append(
            LayerConfig(
                attention=_read_attention(attention, heads, head_dim, bias),
                ffn=_read_ffn(ffn, d_model, activation),
            )
        )
        outer.only(parallel_blocks=())
        outer.finish(harmless=())
    return tuple(layers)


def _object(keys: Keys, values: Any, place: str) -> Keys:
    if not isinstance(values, dict):
        raise FolderError(f"{place}: expected a JSON object, got {values!r}")
    return Keys(values, place, keys.ignored)


def _check_length(keys: Keys, key: str, values: Any, n: int) -> None:
    if not isinstance(values, list) or len(values) != n:
        got = len(values) if isinstance(values, list) else repr(values)
        raise FolderError(f"{keys.place}: {key!r} must have num_hidden_layers = {n} entries, {got}")


def _attention(heads: int, kv_heads: int, head_dim: int, bias: bool) -> AttentionConfig:
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, qkv_bias=bias)


def _read_attention(keys: Keys, heads: int, head_dim: int, bias: bool) -> AttentionConfig | None:
    no_op = bool(keys.take("no_op", False))
    keys.only(replace_with_linear=(False,))
    group, kv_heads = keys.take("n_heads_in_group"), keys.take("num_key_value_heads")
    if no_op:
        return None  # the rest of the entry says nothing then
    keys.only(window_length=(), num_sink_tokens=(), unshifted_sink=(False,), sparsify=())
    keys.only(use_prefill_window_in_sink_attention=(False,), mamba=(), llama4=())
    keys.finish(harmless=())
    if kv_heads is None:
        group = keys.whole("n_heads_in_group") if group is not None else None
        if group is None or heads % group:
            raise FolderError(
                f"{keys.place}: 'n_heads_in_group' must divide num_attention_heads = {heads}, got "
                f"{group}"
            )
        kv_heads = heads // group
    return _attention(heads, kv_heads, head_dim, bias)


def _read_ffn(keys: Keys, d_model: int, activation: Any) -> FFNConfig | None:
    no_op = bool(keys.take("no_op", False))
    keys.only(replace_with_linear=(False,))
    if no_op:
        return None
    if keys.take("hidden_act") is not None:
        activation = read_activation(keys)
    keys.only(sparsify=(), gated=(True,), moe=())
    size, mult = keys.take("intermediate_size"), keys.take("ffn_mult")
    keys.finish(harmless=())
    if size is None and mult is None:
        raise FolderError(f"{keys.place}: has neither 'ffn_mult' nor 'intermediate_size'")
    if size is None and not 0 < keys.real("ffn_mult") < math.inf:
        raise FolderError(f"{keys.place}: 'ffn_mult' must be positive and finite, got {mult!r}")
    d_ff = keys.whole("intermediate_size") if size is not None else width(mult, d_model)
    return FFNConfig(d_ff=d_ff, activation=activation)


def refuses_everywhere(config: ModelConfig) -> str:
    """Why no Hugging Face format at all holds `config`, empty if that is not so."""
    for i, layer in enumerate(config.layers):
        if layer.parallel_with_previous:
            return f"layer {i} runs in parallel with the one before (parallel_with_previous)"
        if layer.ffn is not None and layer.ffn.gate_bias:
            return f"layer {i} has a gate_bias"
    return ""


def refuses(config: ModelConfig) -> str:
    """Why DeciLM's config cannot express `config`, empty if it can."""
    if reason := refuses_everywhere(config):
        return reason
    attention = [layer.attention for layer in config.layers if layer.attention is not None]
    ffns = [layer.ffn for layer in config.layers if layer.ffn is not None]
    if not attention:
        return "no layer has attention, so nothing says the number of heads"
    if any(a.qk_norm for a in attention):
        return "attention has qk_norm"
    if len({a.qkv_bias for a in attention}) > 1:
        return "some layers have qkv_bias and some do not"
    if len({(a.num_heads, a.head_dim) for a in attention}) > 1:
        return "the number or width of query heads differs between layers"
    if not all(f.gated for f in ffns):
        return "a feed-forward layer is not gated"
    if len({f.activation for f in ffns}) > 1:
        return "activations differ between layers"
    return ""


def write(config: ModelConfig) -> dict[str, Any]:
    """The keys of a model whose layers may all differ."""
    attention = next(layer.attention for layer in config.layers if layer.attention is not None)
    activation = next((layer.ffn.activation for layer in config.layers if layer.ffn), "silu")
    # vLLM reads qkv_bias; attention_bias would put a bias on the output projection too.
    bias = {"qkv_bias": True} if attention.qkv_bias else {}
    return bias | {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": None,
        "head_dim": attention.head_dim,
        "hidden_act": WRITTEN[activation],
        "attention_bias": False,
        "mlp_bias": False,
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "block_configs": [_write_block(layer, config.d_model) for layer in config.layers],
    }


def _write_block(layer: LayerConfig, d_model: int) -> dict[str, Any]:
    a, f = layer.attention, layer.ffn
    attention = {
        "no_op": a is None,
        "replace_with_linear": False,
        "n_heads_in_group": None if a is None else a.num_heads // a.num_kv_heads,
        "window_length": None,
        "num_sink_tokens": None,
        "use_prefill_window_in_sink_attention": False,
        "unshifted_sink": False,
        "sparsify": None,
    }
    ffn: dict[str, Any] = {"no_op": f is None, "replace_with_linear": False, "sparsify": None}
    if f is None:
        ffn["ffn_mult"] = None
    else:
        mult = round(f.d_ff * 3 / (2 * d_model), 6)  # some readers round to 6 places
        if width(mult, d_model) == f.d_ff:
            ffn["ffn_mult"] = mult
        else:
            ffn["intermediate_size"] = f.d_ff
    return {"attention": attention, "ffn": ffn}
