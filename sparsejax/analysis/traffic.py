"""What a sharded training step sends, array by array, from the model's config and the split alone.

`traffic` lists what the step of `sparsejax.training.step` sends under a split (data, fsdp, tensor):

weights      an all-gather over fsdp of every matrix in compute dtype, once, and with
             rematerialisation again in the backward pass; the embedding's lookup in float32.
gradients    their sum over data and fsdp. XLA for GPUs makes a reduce-scatter over fsdp and an
             all-reduce of the shares over data of it, except where all three axes are split: there,
             and for CPUs always, it is an all-reduce of everything.
activations  all-reduces over tensor: after the embedding, after each layer's attention and
             feed-forward part, of the gradients of their inputs, and of the head's. XLA for GPUs
             adds the gradients of several products of one input before it sends them.
statistics   counts of neurons, l1 (a scalar of the dense engine on GPUs) and the normaliser of the
             loss. Scalars are left out.

The bytes agree to the last one with what jax 0.10.2 and 0.11.2 compile for eight host devices and,
without running it, for eight H200; the tests compare both. Microbatches repeat weights, gradients
and activations, except that XLA for CPUs gathers the forward pass's weights once for all of them.
The loss is taken to be the fused one (`sparsejax.fused_loss.pays`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from sparsejax import params as params_lib
from sparsejax.analysis.cost import BYTES
from sparsejax.config import ModelConfig
from sparsejax.sharding import AXES, BATCH_AXES, partition_specs


@dataclasses.dataclass(frozen=True)
class Term:
    """Equal arrays that a step sends.

    Attributes:
      what: "weights", "gradients", "activations" or "statistics".
      kind: the collective, as HLO names it.
      axes: the mesh axes it goes over.
      size: bytes of one array, whole within its group.
      count: how many of them.
      once: microbatches do not repeat it.
    """

    what: str
    kind: str
    axes: tuple[str, ...]
    size: float
    count: int = 1
    once: bool = False

    @property
    def bytes(self) -> float:
        """Bytes of all."""
        return self.size * self.count

    def sent(self, sizes: Sequence[int]) -> float:
        """Bytes that each device of a mesh (data, fsdp, tensor) sends, as a ring."""
        n = math.prod(sizes[AXES.index(a)] for a in self.axes)
        return (2 if self.kind == "all-reduce" else 1) * (n - 1) / n * self.bytes


def traffic(
    config: ModelConfig,
    split: Sequence[int],
    rows: int,
    length: int,
    *,
    remat: str = "none",
    accumulate: int = 1,
    sparse: bool = False,
    on: Literal["host", "gpu"] = "gpu",
) -> list[Term]:
    """What one training step sends; see the module.

    Args:
      config: the model.
      split: (data, fsdp, tensor).
      rows: sequences of an update, all devices together.
      length: tokens per sequence.
      remat: as in `Options`.
      accumulate: microbatches.
      sparse: the sparse engine: its input gradients are one array in compute dtype.
      on: what XLA makes of it for host devices or for GPUs.

    Raises:
      ValueError: rows do not divide, or a setting that is not known.
    """
    data, fsdp, tensor = split
    if rows % (data * fsdp * accumulate):
        raise ValueError(
            f"traffic: {rows} rows must divide over data x fsdp x microbatches = "
            f"{data * fsdp * accumulate}"
        )
    if on not in ("host", "gpu"):
        raise ValueError(f"traffic: on must be 'host' or 'gpu', got {on!r}")
    tokens = rows * length // (data * fsdp * accumulate)
    sizes: dict[str, int] = dict(zip(AXES, split, strict=True))
    parts = [
        _parameters(config, sizes, remat, on),
        _activations(config, tokens, sparse, remat, on),
        _statistics(config, tokens, sizes, sparse, on),
    ]
    terms = []
    for term in itertools.chain(*parts):
        axes = tuple(a for a in term.axes if sizes[a] > 1)
        if axes:
            count = term.count * (1 if term.once else accumulate)
            terms.append(dataclasses.replace(term, axes=axes, count=count))
    return terms


def _parameters(config: ModelConfig, sizes: dict[str, int], remat: str, on: str) -> list[Term]:
    """Gathered weights and summed gradients."""
    width = BYTES[config.dtype]
    shapes = params_lib.flatten(params_lib.param_shapes(config))
    specs = params_lib.flatten(partition_specs(params_lib.param_shapes(config)))
    # XLA splits an all-reduce over some axes from a cut along others only where, together, they
    # are all devices.
    scatters = on == "gpu" and sizes["fsdp"] > 1 and (sizes["data"] == 1 or sizes["tensor"] == 1)
    terms = []
    for path, leaf in shapes.items():
        spec = specs[path]
        number = leaf.size / (sizes["tensor"] if "tensor" in spec else 1)
        kind = path.rsplit("/", 1)[-1]
        layer = path.startswith("layer_")
        in_float32 = kind in ("scale", "q_norm", "k_norm", "embedding") or kind.endswith("_bias")
        if kind == "gate_bias":
            in_float32 = False
        size = number * (4 if in_float32 else width)
        if "fsdp" in spec:
            terms.append(Term("weights", "all-gather", ("fsdp",), size, once=on == "host"))
            if layer and remat != "none":
                terms.append(Term("weights", "all-gather", ("fsdp",), size))
        if path == "lm_head/kernel":
            terms.append(Term("gradients", "all-reduce", BATCH_AXES, number * 4))
        elif "fsdp" in spec and scatters:
            terms.append(Term("gradients", "reduce-scatter", ("fsdp",), size))
            share = size / sizes["fsdp"]
            terms.append(Term("gradients", "all-reduce", ("data",), share))
        else:
            once = on == "gpu" and leaf.ndim == 1
            terms.append(Term("gradients", "all-reduce", BATCH_AXES, size, once=once))
            if kind in ("q_norm", "k_norm"):  # each device saw its own heads
                terms.append(Term("gradients", "all-reduce", ("tensor",), size))
        if path == "embed/embedding" and config.tie_embeddings:
            terms.append(
                Term("weights", "all-gather", ("fsdp",), number * width, once=on == "host")
            )
            terms.append(Term("gradients", "all-reduce", BATCH_AXES, number * 4))
    return terms


def _activations(config: ModelConfig, tokens: int, sparse: bool, remat: str, on: str) -> list[Term]:
    """Arrays (tokens, D) that are summed over tensor."""
    numbers, width = tokens * config.d_model, BYTES[config.dtype]

    def term(width: int, count: int = 1) -> Term:
        return Term("activations", "all-reduce", ("tensor",), numbers * width, count)

    terms = [term(4), term(4)]  # the lookup; the gradient of the head's input
    for layer in config.layers:
        if layer.attention is not None:
            # Recomputed, its output is summed again for the norm in front of the FFN.
            again = remat == "full" and layer.ffn is not None
            terms += [term(width, 1 + again), term(width, 3 if on == "host" else 1)]
        if layer.ffn is not None:
            # The dense engine adds the gradients of gate and up in float32.
            apart = 2 if layer.ffn.gated and on == "host" and not sparse else 1
            terms += [term(width), term(width if sparse or on == "host" else 4, apart)]
    return terms


def _statistics(
    config: ModelConfig, tokens: int, sizes: dict[str, int], sparse: bool, on: str
) -> list[Term]:
    def per_token(count: int) -> Term:
        return Term("statistics", "all-reduce", ("tensor",), 4 * tokens, count)

    # Of the loss: maximum, normaliser, the target's logit, and whether the target was found.
    terms = [per_token(4)]
    for layer in config.layers:
        if layer.ffn is not None:
            # nnz, and l1, which XLA for GPUs adds up before it sends it where it can.
            terms.append(per_token(2 if on == "host" or sparse else 1))
            if layer.ffn.activation == "relu":
                neurons = layer.ffn.d_ff
                share = 4 * neurons / sizes["tensor"]
                once = on == "gpu"
                terms.append(Term("statistics", "all-reduce", BATCH_AXES, share, once=once))
                terms.append(Term("statistics", "all-gather", ("tensor",), neurons, once=True))
    layers = len(config.ffn_layers)
    return [*terms, Term("statistics", "all-reduce", BATCH_AXES, 4 * layers, once=on == "gpu")]
