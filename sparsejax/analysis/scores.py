"""What the model loses when one layer is changed and all others stay."""

from __future__ import annotations

import csv
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sparsejax import surgery
from sparsejax.analysis.choices import Choice, Variant, choice_of, resolve, why_unchanged
from sparsejax.analysis.kl import CHUNK, kl_divergence
from sparsejax.analysis.steps import Batch, Walk, add, on_mesh, read_batches
from sparsejax.analysis.tokenwise import input_output, not_finite
from sparsejax.checks import host_batches, listed, whole_number
from sparsejax.config import LayerConfig, ModelConfig
from sparsejax.model import head_weight
from sparsejax.surgery.neurons import contributions_for
from sparsejax.types import Params

NO_ATTENTION = Variant(attention=False)
NO_FFN = Variant(ffn=0)
_NAME = "block_scores"


@dataclasses.dataclass(frozen=True, eq=False)
class BlockScores:
    """Result of `block_scores`.

    Attributes:
      kl: {layer: {Choice(attention, d_ff): KL}}, nats per token, means over tokens; 0 for the layer
        as it is.
      cosine: (m,) mean over tokens of cos(x, x + h), x the input of a layer and h what it adds.
      relative_norm: (m,) mean over tokens of |h| / |x|. Tokens on which input or output is zero
        count in neither; NaN if there are no others.
      contributions: {layer: (F,)}, `surgery.channel_contribution`, by which narrow layers were
        made; None if there were none.
      tokens: tokens seen.
      forwards: parts of layers applied over parts of the model, mean of the batches: the cost in
        full forward passes.
    """

    kl: dict[int, dict[Choice, float]]
    cosine: np.ndarray
    relative_norm: np.ndarray
    contributions: dict[int, np.ndarray] | None = dataclasses.field(repr=False)  # many
    tokens: int
    forwards: float

    def choices(self) -> dict[int, tuple[Choice, ...]]:
        """For each layer, every pair of a kind of attention and a width that occur in `kl`."""
        return {i: full_grid(found) for i, found in self.kl.items()}

    def removal(self, part: str) -> np.ndarray:
        """(m,) KL of removing "attention" or "ffn" alone; NaN where not measured."""
        if part not in ("attention", "ffn"):
            raise ValueError(f"removal: part must be 'attention' or 'ffn', got {part!r}")
        values = np.full(len(self.kl), np.nan)
        for i, found in self.kl.items():
            # The layer as it is: its own KL is 0 by definition, and it comes first.
            now = next(iter(found))
            gone = Choice(False, now.d_ff) if part == "attention" else Choice(now.attention, 0)
            values[i] = found.get(gone, np.nan) if gone != now else np.nan
        return values

    def to_csv(self, path: str | Path) -> None:
        """Writes one row per choice: layer, attention, d_ff, kl, cosine, relative_norm."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["layer", "attention", "d_ff", "kl", "cosine", "relative_norm"])
            for i, found in self.kl.items():
                statistics = [repr(float(self.cosine[i])), repr(float(self.relative_norm[i]))]
                for choice, kl in found.items():
                    rows.writerow([i, int(choice.attention), choice.d_ff, repr(kl), *statistics])

    def save(self, path: str | Path) -> None:
        """Writes everything to an .npz file, for `BlockScores.load`."""
        rows = [(i, *choice, kl) for i, found in self.kl.items() for choice, kl in found.items()]
        arrays: dict[str, Any] = {
            "rows": np.asarray(rows, np.float64).reshape(-1, 4),
            "cosine": self.cosine,
            "relative_norm": self.relative_norm,
            "tokens": self.tokens,
            "forwards": self.forwards,
        }
        arrays |= {f"contributions_{i}": c for i, c in (self.contributions or {}).items()}
        with Path(path).open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> BlockScores:
        """What `save` wrote."""
        with np.load(path) as file:
            kl: dict[int, dict[Choice, float]] = {i: {} for i in range(len(file["cosine"]))}
            for i, attention, d_ff, value in file["rows"]:
                kl[int(i)][Choice(bool(attention), int(d_ff))] = float(value)
            prefix = "contributions_"
            found = {int(n.removeprefix(prefix)): file[n] for n in file if n.startswith(prefix)}
            return cls(
                kl=kl,
                cosine=file["cosine"],
                relative_norm=file["relative_norm"],
                contributions=found or None,
                tokens=int(file["tokens"]),
                forwards=float(file["forwards"]),
            )


def full_grid(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Every pair of a kind of attention and a width among `choices`, the widest first."""
    choices = tuple(choices)
    kinds = sorted({c.attention for c in choices}, reverse=True)
    widths = sorted({c.d_ff for c in choices}, reverse=True)
    return tuple(Choice(kind, width) for kind in kinds for width in widths)


def block_scores(
    config: ModelConfig,
    params: Params,
    batches: Iterable[Any],
    variants: Iterable[Variant] | None = None,
    *,
    multiple: int = 1,
    contributions: Mapping[int, np.ndarray] | None = None,
    chunk: int = CHUNK,
) -> BlockScores:
    """Mean over tokens of KL(model || model with one layer changed), for each layer and variant.

    The changed model is what surgery would make: `remove_attention`, `remove_ffn`, `prune_ffn` by
    channel contribution. A variant that changes nothing in a layer (no attention to remove), or
    that asks for more neurons than it has, is left out there. Passes share what comes before the
    changed layer, so that v variants of m layers cost about v m / 2 forward passes; three residual
    streams are alive at a time, and logits of a few positions. Parameters may lie on a mesh.

    Args:
      config: the model.
      params: its parameters.
      batches: as for `block_dependency`. Seen twice if there are widths to try and `contributions`
        are not given, so tokens are kept in host memory then.
      variants: what to try in each layer; None takes `NO_ATTENTION` and `NO_FFN`, as far as the
        model has such parts; an empty list gives `cosine` and `relative_norm` alone.
      multiple: what widths are rounded up to.
      contributions: {layer: (F,)}, which neurons stay in narrow layers (the highest); None takes
        `surgery.channel_contribution` on `batches`.
      chunk: logits alive at a time, per token.

    Returns:
      BlockScores.

    Raises:
      ValueError: no tokens in `batches`, a variant that changes no layer, contributions missing,
        or numbers that are NaN or infinite.

    Source: replace-1-block scoring of Puzzle, arXiv 2411.19146; cosine and relative norm as in FFN
    Fusion, arXiv 2503.18908.
    """
    walk = Walk(config, params)
    multiple = whole_number(_NAME, "multiple", multiple)
    if variants is None:
        parts = ((NO_ATTENTION, config.attention_layers), (NO_FFN, config.ffn_layers))
        variants = [variant for variant, layers in parts if layers]
    variants = listed(_NAME, "variants", variants, "a list of Variant(...)")
    choices = _resolve_all(config, tuple(variants), multiple)
    narrow = {
        (i, c.d_ff)
        for i, found in choices.items()
        for c in found
        if c.d_ff and c.d_ff != choice_of(config.layers[i]).d_ff
    }
    if narrow:
        absent = sorted({i for i, _ in narrow} - set(contributions or {}))
        if contributions is not None and absent:
            raise ValueError(
                f"{_NAME}: contributions must hold every layer that is narrowed; {absent} are "
                "missing"
            )
        if contributions is None:
            # To go through twice, without fields that analyses do not read.
            batches = host_batches(_NAME, batches)
            batches = list(batches) if isinstance(batches, Iterator) else batches
            layers = sorted({i for i, _ in narrow})
            with on_mesh(params):
                contributions = contributions_for(_NAME, config, params, batches, layers)
    totals: dict[tuple[int, Choice], float] = {(i, c): 0.0 for i in choices for c in choices[i]}
    m = config.num_layers
    cosine, norm, used, tokens, seen = np.zeros(m), np.zeros(m), np.zeros(m), 0, 0
    with on_mesh(params):
        for batch in read_batches(_NAME, host_batches(_NAME, batches)):
            parent, statistics, found = jax.device_get(
                _score_batch(walk, params, batch, choices, contributions, chunk)
            )
            _check_finite(parent, statistics, found, batch.count)
            for i, (cosines, norms, zero, _) in statistics.items():
                cosine[i] += cosines
                norm[i] += norms
                used[i] += batch.count - zero
            for key, (kl, _) in found.items():
                totals[key] += float(kl)
            tokens, seen = tokens + batch.count, seen + 1
    if (used < tokens).any():
        i = int(np.argmin(used))
        warnings.warn(
            f"{_NAME}: cosine and relative_norm leave out tokens on which input or output is zero, "
            f"most in layer {i}: {int(tokens - used[i])} of {tokens}",
            stacklevel=2,
        )
    used[used == 0] = np.nan
    cosine, norm = cosine / used, norm / used
    kl = {
        i: {choice_of(layer): 0.0} | {c: totals[i, c] / tokens for c in choices[i]}
        for i, layer in enumerate(config.layers)
    }
    kept = dict(contributions) if narrow and contributions else None
    return BlockScores(kl, cosine, norm, kept, tokens, walk.forwards() / seen)


def _resolve_all(
    config: ModelConfig, variants: tuple[Variant, ...], multiple: int
) -> dict[int, tuple[Choice, ...]]:
    known: dict[tuple[LayerConfig, Variant], Choice | None] = {}
    choices: dict[int, dict[Choice, None]] = {i: {} for i in range(config.num_layers)}
    for variant in variants:
        if not isinstance(variant, Variant):
            raise ValueError(f"{_NAME}: variants must be Variant(...), got {variant!r}")
        changes = False
        for i, layer in enumerate(config.layers):
            key = (layer, variant)
            if key not in known:
                known[key] = resolve(layer, variant, multiple)
            if (choice := known[key]) is not None:
                choices[i][choice], changes = None, True
        if not changes:
            reason = why_unchanged(config, variant, multiple)
            raise ValueError(f"{_NAME}: {variant} changes no layer of this model: {reason}")
    return {i: tuple(found) for i, found in choices.items()}


def _score_batch(
    walk: Walk,
    params: Params,
    batch: Batch,
    choices: Mapping[int, tuple[Choice, ...]],
    contributions: Mapping[int, np.ndarray] | None,
    chunk: int,
):
    """(tokens on which the model is not finite, statistics per layer, (KL sum, bad) per choice)."""
    layers = walk.config.layers
    core = walk.config.replace(layers=())
    head = {k: v for k, v in params.items() if k in ("embed", "lm_head")}
    stream = walk.embed(batch)
    whole = stream
    if any(choices.values()):
        # Once to know how it ends, so that no more than the stream has to be kept below.
        for i in range(len(layers)):
            whole = walk.step(i, whole, batch)
    parent = walk.finish(whole) if any(choices.values()) else None
    statistics: dict[int, Any] = {}
    found: dict[tuple[int, Choice], Any] = {}
    for i, layer in enumerate(layers):
        read = walk.read(i, stream)
        attention, ffn = walk.parts(i, read, batch)
        both = add(attention, ffn)
        added = jnp.zeros_like(read) if both is None else both
        statistics[i] = input_output(read, added, batch.mask)
        now = choice_of(layer)
        for choice in choices[i]:
            kept = attention if choice.attention else None
            if choice.d_ff == 0:
                new = None
            else:
                only = walk.layer(i)
                if choice.d_ff != now.d_ff:
                    assert contributions is not None
                    only = _narrow(walk.config, params, i, choice.d_ff, contributions[i])
                new = walk.part("ffn", i, add(read, kept), batch, only)
            child = walk.after(i, add(stream.x, add(kept, new)), read)
            for j in range(i + 1, len(layers)):
                child = walk.step(j, child, batch)
            found[i, choice] = _kl(core, head, parent, walk.finish(child), batch.mask, chunk)
        stream = walk.after(i, add(stream.x, both), read)
    return not_finite(walk.finish(stream), batch.mask), statistics, found


def _narrow(
    config: ModelConfig, params: Params, i: int, width: int, scores: np.ndarray
) -> tuple[LayerConfig, Params]:
    """Layer i with `width` neurons, as `surgery.prune_ffn` makes it, on a model of it alone."""
    layer = dataclasses.replace(config.layers[i], parallel_with_previous=False)
    alone = {k: v for k, v in params.items() if not k.startswith("layer_")}
    alone["layer_0"] = params[f"layer_{i}"]
    # The width was rounded before; all of it is a multiple or the layer's whole width.
    model, new, _ = surgery.prune_ffn(
        config.replace(layers=(layer,)), alone, 0, keep=width, scores=scores
    )
    return model.layers[0], new["layer_0"]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _kl(
    core: ModelConfig, head: Params, parent: Array, child: Array, mask: Array, chunk: int
) -> tuple[Array, Array]:
    """Sum over tokens of the KL divergence, and tokens on which it is not finite."""
    kl = kl_divergence(parent, child, head_weight(core, head), chunk=chunk)
    finite = jnp.isfinite(kl)
    return jnp.sum(jnp.where(mask & finite, kl, 0.0)), jnp.sum(mask & ~finite, dtype=jnp.int32)


def _check_finite(
    parent: np.ndarray, statistics: Mapping[int, Any], found: Mapping[Any, Any], tokens: int
) -> None:
    for i, (*_, bad) in statistics.items():
        if bad:
            raise ValueError(
                f"{_NAME}: input or contribution of layer {i} is not finite on {bad} of {tokens} "
                "tokens: ids outside the vocabulary (masked positions need valid ones too), or "
                "parameters that are not finite"
            )
    if parent:
        raise ValueError(
            f"{_NAME}: the model's hidden states are not finite on {parent} of {tokens} tokens: "
            "ids outside the vocabulary, or parameters that are not finite"
        )
    for (i, choice), (_, bad) in found.items():
        if bad:
            raise ValueError(
                f"{_NAME}: with layer {i} as {choice} the model's outputs are not finite on {bad} "
                f"of {tokens} tokens: the output head is not finite, or it overflows; compute in a "
                "wider dtype, config.replace(dtype='float32')"
            )
