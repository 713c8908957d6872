"""What each family's config.json says beyond the common keys, and what it cannot say.

| family | architecture | what is its own |
|---|---|---|
| `llama` | LlamaForCausalLM | Llama 2, 3, 3.1 |
| `mistral` | MistralForCausalLM | a sliding window, which must not be shorter than the context |
| `qwen2` | Qwen2ForCausalLM | biases on q, k and v |
| `qwen3` | Qwen3ForCausalLM | norms on queries and keys |
| `llama_sparse_relu` | SparseLlamaForCausalLM | ReLU whatever `hidden_act` says, gated or not |
| `deci` | DeciLMForCausalLM | `block_configs`: every layer its own, parts may be absent |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.convert import deci
from sparsejax.convert.keys import WRITTEN, Keys, read_activation
from sparsejax.convert.safetensors_io import FolderError

Layers = tuple[LayerConfig, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
      name: as `save` takes it.
      model_types: values of config.json's `model_type`, the one written first.
      architecture: value of `architectures`.
      read_layers: (keys, head_dim) -> one LayerConfig per layer.
      write: config -> the family's own keys.
      refuses: config -> why the family cannot express it, empty if it can.
      files: further files of the folder, text by name.
      own_code: its folders bring code of their own, which is the one that we know.
      window: what an absent `sliding_window` means.
      window_switch: whether `use_sliding_window` and `layer_types` can switch it off.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    read_layers: Callable[[Keys, int], Layers]
    write: Callable[[ModelConfig], dict[str, Any]]
    refuses: Callable[[ModelConfig], str]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_code: bool = False
    window: int | None = None
    window_switch: bool = True


def _uniform(keys: Keys, head_dim: int, ffn: FFNConfig, **attention: bool) -> Layers:
    heads = keys.whole("num_attention_heads")
    kv_heads = keys.whole("num_key_value_heads", heads)
    a = AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **attention)
    return (LayerConfig(attention=a, ffn=ffn),) * keys.whole("num_hidden_layers")


def _gated(keys: Keys) -> FFNConfig:
    return FFNConfig(d_ff=keys.whole("intermediate_size"), activation=read_activation(keys))


def _read_llama(keys: Keys, head_dim: int) -> Layers:
    keys.only(attention_bias=(False,), mlp_bias=(False,))
    return _uniform(keys, head_dim, _gated(keys))


def _read_qwen2(keys: Keys, head_dim: int) -> Layers:
    keys.only(mlp_bias=(False,))
    return _uniform(keys, head_dim, _gated(keys), qkv_bias=True)


def _read_qwen3(keys: Keys, head_dim: int) -> Layers:
    keys.only(attention_bias=(False,), mlp_bias=(False,))
    return _uniform(keys, head_dim, _gated(keys), qk_norm=True)


def _read_sparse(keys: Keys, head_dim: int) -> Layers:
    keys.only(attention_bias=(False,), mlp_bias=(False,))
    keys.take("hidden_act")  # the published code replaces it by ReLU
    for key in _SPARSE_TRAINING:
        keys.take(key)
    keys.take("sparsity_use_hybrid_kernel")  # the layout of `down` is seen from its shape
    width = keys.take("sparsity_new_intermediate_size")
    own = keys.whole("intermediate_size")
    d_ff = own if width is None else keys.whole("sparsity_new_intermediate_size")
    ffn = FFNConfig(d_ff=d_ff, gated=bool(keys.take("sparsity_gated_mlp", True)))
    return _uniform(keys, head_dim, ffn)


# Settings of the published training code.
_SPARSE_TRAINING = (
    "sparsity_train_batch_size",
    "sparsity_per_device_train_batch_size",
    "sparsity_max_seq_len",
    "sparsity_max_seq_length",
    "sparsity_tokens_until_dead",
    "sparsity_l1_coeff",
    "sparsity_start_warmup_step",
    "sparsity_end_warmup_step",
    "sparsity_reinitialize",
    "sparsity_do_track",
    "sparsity_mlp_execution_logic",
    "sparsity_baseline_run",
    "sparsity_l0_cutoff",
    "sparsity_l0_cutoff_period",
)


def _write_uniform(config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    assert layer.attention is not None and layer.ffn is not None  # seen to by `refuses`
    return {
        "num_attention_heads": layer.attention.num_heads,
        "num_key_value_heads": layer.attention.num_kv_heads,
        "head_dim": layer.attention.head_dim,
        "intermediate_size": layer.ffn.d_ff,
        "hidden_act": WRITTEN[layer.ffn.activation],
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return _write_uniform(config) | {"attention_bias": False, "mlp_bias": False}


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    return _write_uniform(config) | {"sliding_window": None}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return _write_uniform(config) | {"use_sliding_window": False}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(config) | {"attention_bias": False}


def _write_sparse(config: ModelConfig) -> dict[str, Any]:
    ffn = config.layers[0].ffn
    assert ffn is not None
    return _write_llama(config) | {"sparsity_gated_mlp": ffn.gated}


def _uniform_only(**wanted: bool) -> Callable[[ModelConfig], str]:
    def refuses(config: ModelConfig) -> str:
        if not config.layers:
            return "it has no layers"
        if reason := deci.refuses_everywhere(config):
            return reason
        first = config.layers[0]
        if first.attention is None or first.ffn is None or len(set(config.layers)) > 1:
            return "its layers differ or lack attention or feed-forward parts"
        has = {
            "qkv_bias": first.attention.qkv_bias,
            "qk_norm": first.attention.qk_norm,
            "gated": first.ffn.gated,
            "relu": first.ffn.activation == "relu",
        }
        wrong = [f"{name} is {has[name]}" for name, value in wanted.items() if has[name] != value]
        return ", ".join(wrong)

    return refuses


def _plain(**wanted: bool) -> Callable[[ModelConfig], str]:
    return _uniform_only(**({"qkv_bias": False, "qk_norm": False, "gated": True} | wanted))


# In the order in which `save` tries them.
FAMILIES: tuple[Family, ...] = (
    Family("llama", ("llama",), "LlamaForCausalLM", _read_llama, _write_llama, _plain()),
    Family(
        "mistral",
        ("mistral",),
        "MistralForCausalLM",
        _read_llama,
        _write_mistral,
        _plain(),
        window=4096,
        window_switch=False,
    ),
    Family(
        "qwen2",
        ("qwen2",),
        "Qwen2ForCausalLM",
        _read_qwen2,
        _write_qwen2,
        _plain(qkv_bias=True),
    ),
    Family(
        "qwen3",
        ("qwen3",),
        "Qwen3ForCausalLM",
        _read_qwen3,
        _write_qwen3,
        _plain(qk_norm=True),
    ),
    Family(
        "llama_sparse_relu",
        ("llama_sparse_relu",),
        "SparseLlamaForCausalLM",
        _read_sparse,
        _write_sparse,
        _uniform_only(qkv_bias=False, qk_norm=False, relu=True),
        own_code=True,
    ),
    Family(
        "deci",
        ("nemotron-nas", "deci"),
        "DeciLMForCausalLM",
        deci.read_layers,
        deci.write,
        deci.refuses,
        {deci.CONFIG_FILE: deci.CONFIG_CLASS},
        own_code=True,
    ),
)


def named(name: str) -> Family:
    """The family called `name`.

    Raises:
      ValueError: no such family; lists them.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(f"unknown family {name!r}; known: {', '.join(f.name for f in FAMILIES)}")


def of_config_json(values: dict[str, Any], place: str) -> Family:
    """The family a config.json belongs to.

    Raises:
      FolderError: none is known; lists the known ones.
    """
    model_type, architectures = values.get("model_type"), values.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    for family in FAMILIES:
        if model_type in family.model_types or (
            model_type is None and family.architecture in architectures
        ):
            return family
    known = ", ".join(f"{f.architecture} ({' or '.join(f.model_types)})" for f in FAMILIES)
    raise FolderError(
        f"{place}: unknown architecture {architectures} with model_type {model_type!r}; known: "
        f"{known}"
    )


def for_config(config: ModelConfig) -> Family:
    """The first family that can express `config`.

    Raises:
      ValueError: none can; says why for each.
    """
    reasons = []
    for family in FAMILIES:
        reason = family.refuses(config)
        if not reason:
            return family
        reasons.append(f"{family.name}: {reason}")
    raise ValueError("no Hugging Face format holds this model:\n  " + "\n  ".join(reasons))
