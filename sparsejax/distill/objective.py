"""Distillation as an `Objective` of the training loop: whole models, or blocks on their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from sparsejax.config import ModelConfig
from sparsejax.distill.blockwise import Block, block_errors, choose_blocks
from sparsejax.distill.hidden import hidden_cosines
from sparsejax.distill.layer_map import LayerMap, check_layer_map, derive_layer_map
from sparsejax.distill.logits import distillation_loss
from sparsejax.distill.teacher import Teacher
from sparsejax.losses import DEFAULT_CHUNK
from sparsejax.model import FFNStats, ModelOutput, Options, head_weight
from sparsejax.training.objective import Batch, Terms, run_model
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class DistillLoss:
    """loss = kl_weight KL(teacher || student) + cosine_weight sum over layers (1 - cos) + ...

    Attributes:
      kl_weight: of the divergence on logits.
      cosine_weight: of the cosine distances of hidden states, one per pair of layers.
      lm_weight: of the student's own cross-entropy. The source found it harmful.
      blocks: instead train blocks on their own, on the teacher's activations.
      block_layers: with blocks, the student layers whose blocks are trained; None takes all.

    Source: Puzzle, arXiv 2411.19146.
    """

    kl_weight: float = 1.0
    cosine_weight: float = 1.0
    lm_weight: float = 0.0
    blocks: bool = False
    block_layers: tuple[int, ...] | None = None

    def __post_init__(self):
        weights = ("kl_weight", "cosine_weight", "lm_weight")
        for name in weights:
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not any(getattr(self, name) for name in weights):
            raise ValueError(f"one of {', '.join(weights)} must be positive: all are 0")
        plain = DistillLoss.kl_weight, DistillLoss.cosine_weight, DistillLoss.lm_weight
        if self.blocks and tuple(getattr(self, name) for name in weights) != plain:
            raise ValueError(
                "with blocks the loss is the error of the blocks alone: kl_weight, cosine_weight "
                "and lm_weight have no meaning; leave them out"
            )
        if self.block_layers is not None and not self.blocks:
            raise ValueError("block_layers has no meaning without blocks; pass --blocks too")
        if self.block_layers is not None and not self.block_layers:
            raise ValueError(
                "block_layers is empty, and nothing would be trained: name student layers, or "
                "leave --block-layers out to train all"
            )


@dataclasses.dataclass(frozen=True)
class Distillation:
    """KL on logits and cosines of hidden states; see `DistillLoss`. An `Objective`.

    Attributes:
      student: the model that is trained.
      teacher: the frozen one.
      layer_map: the teacher layer of each student layer.
      weights: of the terms.
      vocab_chunk: logits of one model alive at a time, per token.
    """

    student: ModelConfig
    teacher: Teacher
    layer_map: LayerMap
    weights: DistillLoss = DistillLoss()
    vocab_chunk: int = DEFAULT_CHUNK

    @property
    def frozen(self) -> Params:
        """The teacher's parameters."""
        return self.teacher.params

    def loss(
        self, params: Params, frozen: Params, batch: Batch, weights: Array, options: Options
    ) -> tuple[Array, Terms, FFNStats]:
        """See `Objective.loss`; terms ce, kl and, where they count, cosine and its layers'."""
        w = self.weights
        options = dataclasses.replace(options, capture_hidden=w.cosine_weight > 0)
        out = run_model(self.student, params, batch, options)
        teacher_out = _run_teacher(self.teacher.config, frozen, batch, options)
        loss, kl, ce = self._on_logits(params, frozen, batch, out, teacher_out, weights)
        terms = {"ce": ce, "kl": kl}
        if w.cosine_weight:
            cosines = hidden_cosines(out, teacher_out, self.layer_map, weights)
            loss = loss + w.cosine_weight * jnp.sum(cosines)
            terms |= {"cosine": jnp.sum(cosines), "cosine_per_layer": cosines}
        return loss, terms, out.stats

    def evaluate(
        self, params: Params, frozen: Params, batch: Batch, out: ModelOutput, mask: Array
    ) -> Terms:
        """The divergence from the teacher on held-out text."""
        teacher_out = _run_teacher(self.teacher.config, frozen, batch, Options())
        weights = mask.astype(jnp.float32)
        return {"kl_sum": self._on_logits(params, frozen, batch, out, teacher_out, weights)[1]}

    def _on_logits(
        self,
        params: Params,
        frozen: Params,
        batch: Batch,
        out: ModelOutput,
        teacher_out: ModelOutput,
        weights: Array,
    ) -> tuple[Array, Array, Array]:
        return distillation_loss(
            out.hidden,
            head_weight(self.student, params),
            teacher_out.hidden,
            head_weight(self.teacher.config, frozen),
            batch["targets"],
            weights,
            kl_weight=self.weights.kl_weight,
            lm_weight=self.weights.lm_weight,
            chunk=self.vocab_chunk,
        )

    def trains(self, path: str) -> bool:
        """All parameters."""
        return True

    def describe(self) -> dict[str, Any]:
        """The teacher and the pairing."""
        return {**self.teacher.origin, "layer_map": list(self.layer_map)}


@dataclasses.dataclass(frozen=True)
class BlockDistillation(Distillation):
    """Relative errors of blocks on the teacher's activations, each trained on its own.

    Attributes:
      blocks: student layers, block by block; nothing else is trained.
    """

    blocks: tuple[Block, ...] = ()

    def loss(
        self, params: Params, frozen: Params, batch: Batch, weights: Array, options: Options
    ) -> tuple[Array, Terms, FFNStats]:
        """See `Objective.loss`; the sum of the errors, terms error (their mean) and each one."""
        capture = dataclasses.replace(options, capture_hidden=True)
        teacher_out = _run_teacher(self.teacher.config, frozen, batch, capture)
        errors, found = block_errors(
            self.student,
            params,
            teacher_out,
            self.layer_map,
            self.blocks,
            weights,
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
            options=options,
        )
        # Errors are relative to their microbatch, whose share of the tokens is the sum of weights.
        errors = errors * jnp.sum(weights)
        terms = {"error": jnp.mean(errors), "error_per_layer": errors}
        return jnp.sum(errors), terms, self._stats(found, weights.shape)

    def _stats(self, found: dict[int, Any], shape: tuple[int, ...]) -> FFNStats:
        """Of layers that did not run: nothing active, and no neuron counted as dead."""
        none, zeros = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        layers = self.student.ffn_layers

        def stacked(values: list[Array], dtype: str, *each: int) -> Array:
            return jnp.stack(values) if values else jnp.zeros((0, *each), dtype)

        sparse = [found[i].sparse if i in found else jnp.float32(0) for i in layers]
        return FFNStats(
            l1=stacked([found[i].l1 if i in found else zeros for i in layers], "float32", *shape),
            nnz=stacked([found[i].nnz if i in found else none for i in layers], "int32", *shape),
            sparse=stacked(sparse, "float32"),
            neuron_nnz=tuple(
                found[i].neuron_nnz if i in found else jnp.ones((_width(self.student, i),), "int32")
                for i in self.student.sparse_layers
            ),
        )

    def trains(self, path: str) -> bool:
        """The layers of the blocks; the rest of the student stays bit for bit."""
        return path.startswith(tuple(f"layer_{i}/" for block in self.blocks for i in block))

    def describe(self) -> dict[str, Any]:
        """The teacher, the pairing and the blocks."""
        return super().describe() | {"blocks": [list(block) for block in self.blocks]}


def make_distillation(
    student: ModelConfig,
    teacher: Teacher,
    *,
    layer_map: Sequence[int | None] | None = None,
    weights: DistillLoss = DistillLoss(),
    vocab_chunk: int = DEFAULT_CHUNK,
    seq_len: int | None = None,
) -> Distillation:
    """The objective for these two models, after checking that they fit each other.

    Args:
      student: the model that is trained.
      teacher: the frozen one.
      layer_map: the teacher layer of each student layer; None derives it from the two configs.
      weights: of the terms.
      vocab_chunk: logits of one model alive at a time, per token.
      seq_len: tokens per sequence, checked against the teacher's context length.

    Raises:
      ValueError: vocabularies or widths that do not fit, sequences that the teacher does not take,
        a layer map that is wrong or needed and cannot be derived, or unknown block layers.
    """
    if student.vocab_size != teacher.config.vocab_size:
        raise ValueError(
            f"teacher and student must share one vocabulary: the teacher has vocab_size "
            f"{teacher.config.vocab_size}, the student {student.vocab_size}"
        )
    if seq_len is not None and seq_len > teacher.config.context_length:
        raise ValueError(
            f"seq_len {seq_len} exceeds the teacher's context length "
            f"{teacher.config.context_length}; lower --seq-len"
        )
    layer_wise = weights.blocks or weights.cosine_weight > 0
    if layer_wise and student.d_model != teacher.config.d_model:
        raise ValueError(
            f"hidden states can be compared only at equal width: the teacher has d_model "
            f"{teacher.config.d_model}, the student {student.d_model}; set cosine_weight to 0 to "
            "learn from logits alone"
        )
    if layer_map is not None:
        checked = check_layer_map(teacher.config, student, layer_map)
    else:
        checked = derive_layer_map(teacher.config, student) if layer_wise else ()
    if not weights.blocks:
        return Distillation(student, teacher, checked, weights, vocab_chunk)
    blocks = choose_blocks(student, checked, weights.block_layers)
    return BlockDistillation(student, teacher, checked, weights, vocab_chunk, blocks)


def _run_teacher(
    config: ModelConfig, params: Params, batch: Batch, options: Options
) -> ModelOutput:
    """Its forward pass: nothing is counted and, without a gradient, nothing is kept for one.

    An engine asked for is the student's; a dense teacher may not run on it.
    """
    options = dataclasses.replace(options, implementation=None, count_neurons=False, remat="none")
    return run_model(config, params, batch, options)


def _width(config: ModelConfig, layer: int) -> int:
    ffn = config.layers[layer].ffn
    assert ffn is not None
    return ffn.d_ff
