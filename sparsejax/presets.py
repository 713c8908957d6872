"""Named model configurations. `get("2b")`, or a function per family: `tiny()`, `published("2b")`.

| names | what |
|---|---|
| `tiny` | 4 layers, d 128, byte vocabulary; float32; trains on two CPU cores in minutes |
| `125m` | 12 layers, d 768 |
| `0.5b` `1b` `1.5b` `2b` | published sizes (arXiv 2603.23198): d 2048, 8 / 18 / 28 / 38 layers |
| `llama-3.1-8b` `-70b` `-405b` | shapes of Llama 3.1, for planning (no weights) |

The first three rows exist as sparse (gated ReLU, the plain name), `-dense` (gated SiLU) and
`-nongated` (ReLU without a gate and with a wider d_ff: 8192 where the gated one has 5632).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig

VARIANTS = ("sparse", "dense", "nongated")
_PUBLISHED_LAYERS = {"0.5b": 8, "1b": 18, "1.5b": 28, "2b": 38}
# d_model, layers, query heads, d_ff; all with 8 key/value heads of width 128.
_LLAMA = {
    "8b": (4096, 32, 32, 14336),
    "70b": (8192, 80, 64, 28672),
    "405b": (16384, 126, 128, 53248),
}


def tiny(variant: str = "sparse") -> ModelConfig:
    """4 layers, d 128, 4 heads x 32, d_ff 512 (768 not gated), vocabulary 272, context 256."""
    return ModelConfig(
        vocab_size=272,  # 256 bytes and an end-of-text token, padded to a multiple of 16
        d_model=128,
        layers=_uniform(4, 4, 4, 32, _ffn(variant, 512, 768)),
        context_length=256,
        rope=RopeConfig(theta=1e4),
        init_std=0.05,
        dtype="float32",
    )


def small_125m(variant: str = "sparse") -> ModelConfig:
    """12 layers, d 768, 12 heads x 64, d_ff 2048 (3072 not gated), vocabulary 49152."""
    return ModelConfig(
        vocab_size=49152,
        d_model=768,
        layers=_uniform(12, 12, 12, 64, _ffn(variant, 2048, 3072)),
    )


def published(size: str, variant: str = "sparse") -> ModelConfig:
    """d 2048, 32 heads x 64, d_ff 5632 (8192 not gated), vocabulary 49152, tied, rope 1e5."""
    _known("size", size, _PUBLISHED_LAYERS)
    return ModelConfig(
        vocab_size=49152,
        d_model=2048,
        layers=_uniform(_PUBLISHED_LAYERS[size], 32, 32, 64, _ffn(variant, 5632, 8192)),
    )


def llama31(size: str) -> ModelConfig:
    """Shapes of Llama 3.1 `8b`, `70b` or `405b`: untied, SiLU, Llama-3 rope scaling, 131072."""
    _known("size", size, _LLAMA)
    d_model, layers, heads, d_ff = _LLAMA[size]
    return ModelConfig(
        vocab_size=128256,
        d_model=d_model,
        layers=_uniform(layers, heads, 8, 128, FFNConfig(d_ff=d_ff, activation="silu")),
        context_length=131072,
        rope=RopeConfig(theta=5e5, scaling="llama3", factor=8.0),
        tie_embeddings=False,
    )


def names() -> list[str]:
    """All preset names, as `get` takes them."""
    bases = ["tiny", "125m", *_PUBLISHED_LAYERS]
    suffixes = ["", "-dense", "-nongated"]
    return [b + s for b in bases for s in suffixes] + [f"llama-3.1-{s}" for s in _LLAMA]


def get(name: str) -> ModelConfig:
    """The preset called `name`.

    Raises:
      ValueError: no such preset; lists the known names.
    """
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown preset {name!r}{hint}; known presets: {', '.join(names())}")
    if name.startswith("llama-3.1-"):
        return llama31(name.removeprefix("llama-3.1-"))
    base, _, variant = name.partition("-")
    variant = variant or "sparse"
    if base == "tiny":
        return tiny(variant)
    if base == "125m":
        return small_125m(variant)
    return published(base, variant)


def _ffn(variant: str, d_ff: int, d_ff_nongated: int) -> FFNConfig:
    _known("variant", variant, VARIANTS)
    if variant == "nongated":
        return FFNConfig(d_ff=d_ff_nongated, gated=False)
    return FFNConfig(d_ff=d_ff, activation="relu" if variant == "sparse" else "silu")


def _known(argument: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{argument} must be one of {list(known)}, got {value!r}")


def _uniform(n: int, heads: int, kv_heads: int, head_dim: int, ffn: FFNConfig):
    attention = AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    return (LayerConfig(attention=attention, ffn=ffn),) * n
