"""The architecture as data: one `LayerConfig` per layer, so that surgery edits a tuple.

Configs are frozen, hashable (usable as static arguments of `jax.jit`), validate themselves, and
round-trip through JSON: `ModelConfig.from_json(config.to_json()) == config`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import types
import typing
from typing import Any, Literal

_FLOATS = ("float32", "bfloat16", "float16")


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ValueError(
                f"{type(config).__name__}: {name} must be positive and finite, got {value}"
            )


def _whole(config: Any, *names: str) -> None:
    """Positive integers, kept as Python's own: widths computed with NumPy must go through JSON."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(
                f"{type(config).__name__}: {name} must be a positive integer, got {value!r}"
            )
        object.__setattr__(config, name, operator.index(value))


def _one_of(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(
            f"{type(config).__name__}: {name} must be one of {list(allowed)}, got {value!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention: q (D, H, K), k and v (D, G, K), o (H, K, D).

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key/value heads G; divides H.
      head_dim: K, even (rotary pairs).
      qkv_bias: biases on q, k and v (Qwen2).
      qk_norm: RMSNorm over K on queries and keys before the rotation (Qwen3).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        _whole(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"AttentionConfig: num_kv_heads must divide num_heads = {self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"AttentionConfig: head_dim must be even for rotary embedding, got {self.head_dim}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNConfig:
    """Feed-forward part: gate, up and down, each (F, D), see `pallas_kernels.gated_ffn`.

    Attributes:
      d_ff: neurons F.
      gated: h = act(x gate^T) * (x up^T) if True, else h = act(x up^T).
      activation: "relu" makes exact zeros; "silu" and "gelu" are dense.
      gate_bias: a bias (F,) on the pre-activation.
    """

    d_ff: int
    gated: bool = True
    activation: Literal["relu", "silu", "gelu"] = "relu"
    gate_bias: bool = False

    def __post_init__(self):
        _whole(self, "d_ff")
        _one_of(self, "activation", ("relu", "silu", "gelu"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: x + attention(norm(x)), then + ffn(norm(.)); either part may be absent.

    Attributes:
      attention: None for a layer without attention.
      ffn: None for a layer without feed-forward part.
      parallel_with_previous: read the same input as the layer before; the deltas add.
    """

    attention: AttentionConfig | None
    ffn: FFNConfig | None
    parallel_with_previous: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the wavelengths.
      scaling: "none"; "linear" (positions divided by `factor`); "llama3" (long wavelengths divided
        by `factor`, short ones kept, a smooth blend between).
      factor: context extension factor.
      low_freq_factor, high_freq_factor, original_context: the blend's bounds ("llama3" only):
        wavelengths over original_context / low_freq_factor positions are scaled in full, those
        under original_context / high_freq_factor not at all.
    """

    theta: float = 1e5
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self):
        _positive(self, "theta", "factor", "low_freq_factor")
        _whole(self, "original_context")
        _one_of(self, "scaling", ("none", "linear", "llama3"))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "RopeConfig: high_freq_factor must exceed low_freq_factor = "
                f"{self.low_freq_factor}, got {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      vocab_size: rows of the embedding V; may exceed the tokenizer's vocabulary (padding rows).
      d_model: residual width D.
      layers: one entry per layer, in order.
      context_length: positions the model is meant for (generation refuses to go beyond).
      rope: rotary position embedding, shared by all layers.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: the output head is the embedding, and there is no `lm_head`.
      init_std: standard deviation of the normal initialiser of all matrices.
      dtype: compute dtype of activations and matmuls.
      param_dtype: dtype the parameters are kept in.
    """

    vocab_size: int
    d_model: int
    layers: tuple[LayerConfig, ...]
    context_length: int = 2048
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    init_std: float = 0.02
    dtype: str = "bfloat16"
    param_dtype: str = "float32"

    def __post_init__(self):
        _whole(self, "vocab_size", "d_model", "context_length")
        _positive(self, "norm_eps", "init_std")
        _one_of(self, "dtype", _FLOATS)
        _one_of(self, "param_dtype", _FLOATS)
        if not isinstance(self.layers, tuple) or not all(
            isinstance(layer, LayerConfig) for layer in self.layers
        ):
            raise ValueError(
                "ModelConfig: layers must be a tuple of LayerConfig, "
                f"got {type(self.layers).__name__}; write layers=tuple([...])"
            )
        if self.layers and self.layers[0].parallel_with_previous:
            raise ValueError(
                "ModelConfig: layer 0 has no layer before it; set its "
                "parallel_with_previous to False"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def ffn_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a feed-forward part (axis L of the statistics)."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.ffn is not None)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose feed-forward activations can be exact zeros (ReLU)."""
        return tuple(
            i for i, layer in enumerate(self.layers) if layer.ffn and layer.ffn.activation == "relu"
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have attention (and so a key/value cache)."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention is not None)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """As nested dicts and lists that JSON can hold."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`.

        Raises:
          ValueError: an unknown, missing or ill-typed field, named by its path.
        """
        return _build(cls, data, "ModelConfig")

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def config_differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Lines `path: ours vs theirs` for every leaf in which two JSON-like values differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(k for k in theirs if k not in ours)]
        return [
            line
            for k in keys
            for line in config_differences(
                ours.get(k, _ABSENT), theirs.get(k, _ABSENT), f"{path}.{k}" if path else str(k)
            )
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            line
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
            for line in config_differences(a, b, f"{path}[{i}]")
        ]
    if isinstance(ours, list) and isinstance(theirs, list):
        return [f"{path}: {len(ours)} entries vs {len(theirs)}"]
    return [] if ours == theirs else [f"{path}: {ours!r} vs {theirs!r}"]


def _build(cls: type, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object with fields, got {data!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = [k for k in data if k not in fields]
    if unknown:
        raise ValueError(f"{path}: unknown field {unknown[0]!r}; known: {sorted(fields)}")
    hints = typing.get_type_hints(cls)
    kwargs = {k: _convert(hints[k], v, f"{path}.{k}") for k, v in data.items()}
    absent = [k for k, f in fields.items() if k not in data and f.default is dataclasses.MISSING]
    if absent:
        raise ValueError(f"{path}: field {absent[0]!r} is missing")
    try:
        return cls(**kwargs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path}: expected a list, got {value!r}")
        return tuple(_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, path)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path)
    if origin is Literal:
        return value
    expected = (int, float) if hint is float else hint
    if not isinstance(value, expected) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{path}: expected {hint.__name__}, got {value!r}")
    return value
