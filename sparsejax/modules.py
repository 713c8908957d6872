"""The transformer as thin Flax Linen modules; the mathematics is in the functions they call.

The parameter tree is described in `sparsejax.params.param_shapes`. Parameters are kept in
`config.param_dtype` and cast to `config.dtype` where they are used; norm scales, biases and the
embedding lookup are read in float32.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import FFNOutput
from sparsejax import rope
from sparsejax.attention import (
    Cache,
    LayerCache,
    cached_attention,
    causal_attention,
    token_positions,
    write_cache,
)
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.ffn import Residuals, ffn
from sparsejax.params import leaf_initializer
from sparsejax.sharding import BATCH_AXES, constrain, gather_fsdp
from sparsejax.types import Hidden

REMAT_POLICIES = {
    "none": None,
    # Recompute everything inside a layer from its input.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Keep the results of weight matmuls, recompute the rest.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run a forward pass; nothing here changes what it computes.

    Attributes:
      implementation: engine of `gated_ffn`, None to choose; or a tuple of these, one per layer of
        the model (entries of layers without feed-forward part are not read), such as
        `sparsejax.analysis.pick_engines` gives.
      remat: "none", "dots" or "full", see `REMAT_POLICIES`.
      residuals: what the sparse engine keeps for its backward pass, see `gated_ffn`; None takes
        "compact" without rematerialisation and "full" with it, where they live for one layer only.
      count_neurons: also count the tokens on which each neuron of a ReLU layer fires.
      fresh_cache: the cache given is empty, so a prompt need not read it (prefill).
      capture_hidden: also return the residual stream between layers (`ModelOutput.hidden_states`).
    """

    implementation: str | tuple[str | None, ...] | None = None
    remat: str = "none"
    residuals: Residuals | None = None
    count_neurons: bool = False
    fresh_cache: bool = False
    capture_hidden: bool = False

    def __post_init__(self):
        if self.remat not in REMAT_POLICIES:
            raise ValueError(f"remat must be one of {list(REMAT_POLICIES)}, got {self.remat!r}")
        given = self.implementation
        for engine in given if isinstance(given, tuple) else (given,):
            if engine is not None and not isinstance(engine, str):
                raise ValueError(
                    "implementation must be an engine's name, None, or a tuple of these with one "
                    f"entry per layer, got {given!r}"
                    + ("; write tuple(...)" if isinstance(given, list) else "")
                )

    def per_layer(self, num_layers: int) -> tuple[Options, ...]:
        """These options for each layer alone, `implementation` narrowed to that layer's engine.

        Raises:
          ValueError: `implementation` is a tuple of another length.
        """
        given = self.implementation
        if not isinstance(given, tuple):
            return (self,) * num_layers
        if len(given) != num_layers:
            raise ValueError(
                f"Options: implementation must have one entry for each of the model's {num_layers} "
                f"layers, got {len(given)}; give layers without feed-forward part None, or name "
                "one engine for all layers"
            )
        return tuple(dataclasses.replace(self, implementation=engine) for engine in given)

    def residuals_or_default(self) -> Residuals:
        """What the sparse engine keeps."""
        return self.residuals or ("compact" if self.remat == "none" else "full")


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, back to x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype)


class _Module(nn.Module):
    """A module that reads parameters in compute dtype or `dtype`, gathered over fsdp."""

    config: ModelConfig

    def weight(self, name: str, *shape: int, dtype: str | None = None) -> Array:
        path = "/".join((*self.path, name))
        init = leaf_initializer(self.config, path)
        value = self.param(name, init, shape, jnp.dtype(self.config.param_dtype))
        if dtype != "as stored":
            value = value.astype(dtype or self.config.dtype)
        return gather_fsdp(value, path)


class RMSNorm(_Module):
    """`rms_norm` with a learned scale (D,)."""

    @nn.compact
    def __call__(self, x: Hidden) -> Hidden:
        """Normalises the last axis."""
        scale = self.weight("scale", x.shape[-1], dtype="float32")
        return rms_norm(x, scale, self.config.norm_eps)


class Attention(_Module):
    """Grouped-query attention with rotary positions; q (D, H, K), k, v (D, G, K), o (H, K, D)."""

    attention: AttentionConfig
    options: Options

    @nn.compact
    def __call__(
        self,
        x: Hidden,
        positions: Array | None,
        segment_ids: Array | None,
        cache: LayerCache | None,
    ) -> tuple[Hidden, LayerCache | None]:
        """Returns the delta (B, T, D) and the updated cache."""
        a, d = self.attention, self.config.d_model
        at = token_positions(positions, *x.shape[:2])
        heads = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads}
        projected = {}
        for name, n in heads.items():
            y = jnp.einsum("btd,dhk->bthk", x, self.weight(name, d, n, a.head_dim))
            if a.qkv_bias:
                # In float32 so that the bias gradient, a sum over all tokens, is one too.
                bias = self.weight(f"{name}_bias", n, a.head_dim, dtype="float32")
                y = (y.astype(jnp.float32) + bias).astype(y.dtype)
            if a.qk_norm and name != "v":
                scale = self.weight(f"{name}_norm", a.head_dim, dtype="float32")
                y = rms_norm(y, scale, self.config.norm_eps)
            if name != "v":
                y = rope.rotate(y, at, self.config.rope)
            projected[name] = constrain(y, BATCH_AXES, None, "tensor", None)
        q, k, v = projected["q"], projected["k"], projected["v"]
        if cache is None:
            out = causal_attention(q, k, v, segment_ids)
        elif self.options.fresh_cache:
            cache = write_cache(k, v, positions, cache)
            out = causal_attention(q, k, v, None)
        else:
            out, cache = cached_attention(q, k, v, positions, cache)
        o = self.weight("o", a.num_heads, a.head_dim, d)
        return jnp.einsum("bthk,hkd->btd", out, o), cache


class FFN(_Module):
    """`sparsejax.ffn.ffn` on gate, up and down, each (F, D)."""

    ffn: FFNConfig
    options: Options

    @nn.compact
    def __call__(self, x: Hidden) -> FFNOutput:
        """Returns y (B, T, D), l1 and nnz (B, T)."""
        f, shape = self.ffn, (self.ffn.d_ff, self.config.d_model)
        engine = self.options.implementation
        assert not isinstance(engine, tuple)  # `Options.per_layer` comes first
        return ffn(
            x,
            self.weight("gate", *shape) if f.gated else None,
            self.weight("up", *shape),
            self.weight("down", *shape),
            gate_bias=self.weight("gate_bias", f.d_ff) if f.gate_bias else None,
            activation=f.activation,
            implementation=engine,
            count_neurons=self.options.count_neurons and f.activation == "relu",
            residuals=self.options.residuals_or_default(),
        )


class Layer(_Module):
    """delta = attention(norm(x)) + ffn(norm(x + attention(norm(x)))); either part may be absent."""

    layer: LayerConfig
    options: Options

    @nn.compact
    def __call__(
        self,
        x: Hidden,
        positions: Array | None,
        segment_ids: Array | None,
        cache: LayerCache | None,
    ) -> tuple[Hidden, FFNOutput | None, LayerCache | None]:
        """Returns the delta to add to the residual stream, the FFN's output and the cache."""
        delta = jnp.zeros_like(x)
        if self.layer.attention is not None:
            normed = RMSNorm(self.config, name="attn_norm")(x)
            attend = Attention(self.config, self.layer.attention, self.options, name="attn")
            delta, cache = attend(normed, positions, segment_ids, cache)
        stats = None
        if self.layer.ffn is not None:
            normed = RMSNorm(self.config, name="ffn_norm")(x + delta)
            stats = FFN(self.config, self.layer.ffn, self.options, name="ffn")(normed)
            delta = delta + stats.y
            # y is part of delta now; only the statistics travel on.
            stats = dataclasses.replace(stats, y=jnp.zeros((0,), x.dtype))
        return delta, stats, cache


class Transformer(nn.Module):
    """Embedding, layers, final norm: tokens (B, T) -> hidden states (B, T, D)."""

    config: ModelConfig
    options: Options = Options()

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[Hidden, list[FFNOutput], Cache | None]:
        """Returns normed hidden states, one FFNOutput per layer with an FFN, and the new cache."""
        if cache is None:  # with one, None tells the layers that a plain copy writes it
            positions = token_positions(positions, *tokens.shape)
        x = Embed(self.config, name="embed")(tokens, inference=cache is not None)
        remat = self.options.remat
        layer_cls = Layer if remat == "none" else nn.remat(Layer, policy=REMAT_POLICIES[remat])
        options = self.options.per_layer(self.config.num_layers)
        base, outputs = x, []
        self._capture(x)
        new_cache = None if cache is None else dict(cache)
        for i, layer in enumerate(self.config.layers):
            # A run of parallel layers reads what its first layer read; all deltas add to x.
            base = base if layer.parallel_with_previous else x
            if layer.attention is None and layer.ffn is None:
                self._capture(x)
                continue
            name = f"layer_{i}"
            apply = layer_cls(self.config, layer, options[i], name=name)
            layer_cache = None if cache is None else cache.get(name)
            delta, stats, layer_cache = apply(base, positions, segment_ids, layer_cache)
            x = constrain(x + delta, BATCH_AXES, None, None)
            self._capture(x)
            if stats is not None:
                outputs.append(stats)
            if new_cache is not None and layer_cache is not None:
                new_cache[name] = layer_cache
        return RMSNorm(self.config, name="final_norm")(x), outputs, new_cache

    def _capture(self, x: Array) -> None:
        if self.options.capture_hidden:
            self.sow("residual", "stream", x)


class Embed(_Module):
    """Rows of embedding (V, D)."""

    @nn.compact
    def __call__(self, tokens: Array, inference: bool = False) -> Hidden:
        """Looks up tokens (B, T)."""
        vocab, d = self.config.vocab_size, self.config.d_model
        # Read in float32: the gradient adds up all occurrences of a token, and a bfloat16 sum
        # stands still after some 256 of them. Without a gradient only the rows are cast.
        dtype = "as stored" if inference else "float32"
        table = self.weight("embedding", vocab, d, dtype=dtype)
        # Indexing would take -1 for the last row; here any id outside the vocabulary gives NaN.
        # Narrow ids widen first, wide ones are compared before they narrow.
        wide = tokens if tokens.dtype.itemsize >= 4 else tokens.astype(jnp.int32)
        ids = jnp.where((wide >= 0) & (wide < vocab), wide, vocab).astype(jnp.int32)
        x = jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)
        return constrain(x.astype(self.config.dtype), BATCH_AXES, None, None)
