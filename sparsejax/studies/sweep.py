"""Training runs of a study: the model, the settings, and what is recorded of each run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from sparsejax.analysis.activations import ActivationStats
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.data import open_source
from sparsejax.studies.penalty import penalised
from sparsejax.training.config import TrainConfig
from sparsejax.training.metrics import read_rows
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.stages import train_stage
from sparsejax.training.step import LossConfig
from sparsejax.training.workdir import Workdir

Variant = Literal["relu", "silu", "nongated"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the runs of a study have in common.

    Attributes:
      data: a folder of tokens, or "stdlib".
      runs: folder in which every run has one of its own; a run that is there is not trained again.
      layers: of the model.
      d_model: width, a multiple of 64; heads are 64 wide and d_ff is 8/3 of it, to a multiple of
        128 (half as much again without gate).
      batch_size: sequences per update.
      seq_len: tokens per sequence.
      steps: updates.
      learning_rate: peak.
      evaluations: of the held-out text on the way.
      implementation: engine of the feed-forward op in training: "xla", whose time does not depend
        on sparsity, "triton", or None to choose. It changes no result beyond rounding.
    """

    data: str = "stdlib"
    runs: Path = Path("runs/studies")
    layers: int = 6
    d_model: int = 768
    batch_size: int = 64
    seq_len: int = 1024
    steps: int = 600
    learning_rate: float = 1e-3
    evaluations: int = 12
    implementation: Literal["triton", "xla"] | None = "xla"

    def key(self) -> dict[str, Any]:
        """What results depend on, as JSON values."""
        corpus = source_facts(self.data)["fingerprint"]
        left_out = {"runs", "data", "implementation", "evaluations"}
        own = {k: v for k, v in dataclasses.asdict(self).items() if k not in left_out}
        return {"corpus": corpus} | own

    def told(self) -> dict[str, Any]:
        """`key`, under names that a row's own do not collide with."""
        return {f"parent_{k}": v for k, v in self.key().items()}

    def model(self, variant: Variant) -> ModelConfig:
        """The 125m preset's pattern at this depth and width, on the corpus' vocabulary."""
        heads, d_ff = self.d_model // 64, max(round(self.d_model / 48), 1) * 128
        d_ff = self.d_model * 2 if self.d_model < 128 else d_ff
        heads = max(heads, 1)
        ffn = {
            "relu": FFNConfig(d_ff=d_ff),
            "silu": FFNConfig(d_ff=d_ff, activation="silu"),
            "nongated": FFNConfig(d_ff=d_ff * 3 // 2, gated=False),
        }[variant]
        attention = AttentionConfig(
            num_heads=heads, num_kv_heads=heads, head_dim=self.d_model // heads
        )
        return ModelConfig(
            vocab_size=-(-source_facts(self.data)["vocab_size"] // 128) * 128,
            d_model=self.d_model,
            layers=(LayerConfig(attention=attention, ffn=ffn),) * self.layers,
            context_length=self.seq_len,
            dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
        )


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run.

    Attributes:
      variant: gated ReLU, gated SiLU, or ReLU without gate.
      l1: coefficient of the sparsity term.
      revive: `LossConfig.revive_dead`.
      warmup: share of the steps without the term, and again over which it then grows.
      length: times `Setting.steps`.
      seed: of parameters and data order.
    """

    variant: Variant
    l1: float = 0.0
    revive: float = 0.0
    warmup: float = 0.0
    length: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """Such as relu-0.001-revive; the seed is not in it."""
        parts = [self.variant] if self.variant == "silu" else [self.variant, f"{self.l1:g}"]
        parts += ["revive"] if self.revive else []
        parts += ["warmup"] if self.warmup else []
        parts += ["long"] if self.length > 1 else []
        return "-".join(parts)


def train_run(setting: Setting, spec: RunSpec) -> Path:
    """The folder of the run, trained now unless it was before.

    Raises:
      ValueError: its folder holds a run of other settings.
      StageStoppedError: a signal ended it; the same call goes on with it.
    """
    folder = _folder(setting, spec)
    steps = setting.steps * spec.length
    preset = setting.runs / "models" / f"{spec.variant}-{setting.layers}x{setting.d_model}.json"
    preset.parent.mkdir(parents=True, exist_ok=True)
    preset.write_text(setting.model(spec.variant).to_json())
    # A ramp needs the step, which only the loss of the training step itself knows.
    own = spec.l1 if spec.warmup else 0.0
    config = TrainConfig(
        preset=str(preset),
        data=setting.data,
        workdir=folder,
        steps=steps,
        batch_size=setting.batch_size,
        seq_len=setting.seq_len,
        seed=spec.seed,
        optimizer=OptimizerConfig(learning_rate=setting.learning_rate),
        loss=LossConfig(
            l1_coeff=own,
            l1_start=round(spec.warmup * steps),
            l1_ramp=round(spec.warmup * steps),
            revive_dead=spec.revive,
        ),
        implementation=setting.implementation,
        log_every=max(steps // 60, 1),
        eval_every=max(steps // (setting.evaluations * spec.length), 1),
        checkpoint_every=setting.steps,
        keep=1,
    )
    frozen = spec.variant != "silu" and not spec.warmup
    train_stage(config, functools.partial(penalised, l1_coeff=spec.l1) if frozen else None)
    return folder


def run_record(setting: Setting, spec: RunSpec) -> dict[str, Any]:
    """What tables and pictures need of a finished run, as JSON values."""
    workdir = Workdir(_folder(setting, spec))
    summary = json.loads(workdir.summary.read_text())
    rows = read_rows(workdir.metrics)
    evals = read_rows(workdir.root / "eval.jsonl")
    found, whole = summary["held_out"], summary.get("resumed_from") == 0
    curve = [_curve_point(row, rows, setting) for row in evals]
    best = min(curve, key=lambda point: point["held_out"])
    record = {
        "parameters": summary["parameters"],
        "tokens": summary["tokens"],
        "ce": found["ce"],
        "bits_per_byte": found["bits_per_byte"],
        "held_out_tokens": found["tokens"],
        "best_ce": best["held_out"],
        "best_step": best["step"],
        "nnz": found["nnz"],
        "nnz_per_layer": found["nnz_per_layer"],
        "dead_last_step": rows[-1]["dead_fraction"],
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows[1:] or rows),
        # Of runs in one piece: a summary tells of its own call alone.
        "compile_s": summary["compile_s"] if whole else None,
        "train_s": summary["train_s"] if whole else None,
        "curve": curve,
    }
    activations = workdir.root / "activations.json"
    if activations.exists():
        stats = ActivationStats.from_json(activations.read_text())
        record["layer_stats"] = stats.summary()
        record["positions"] = by_position(stats)
    return record


def by_position(stats: ActivationStats) -> list[dict[str, Any]]:
    """Mean of active neurons at positions 0, 1, 2-3, 4-7, ...: over layers, and of each layer."""
    length = len(stats.layers[0].position_sum)
    edges = [0, *(1 << k for k in range(length.bit_length())), length]
    rows = []
    for low, high in itertools.pairwise(edges):
        if low < high <= length:
            means = [
                float(
                    np.sum(layer.position_sum[low:high]) / np.sum(layer.position_tokens[low:high])
                )
                for layer in stats.layers
            ]
            rows.append({"from": low, "to": high - 1, "nnz": float(np.mean(means)), "each": means})
    return rows


@contextlib.contextmanager
def compile_cache(folder: Path | None) -> Iterator[None]:
    """Keeps compiled programs in `folder` while the block runs; None keeps none.

    Runs that differ in a coefficient or in the seed alone run the same program.
    """
    if folder is None:
        yield
        return
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in zip(names, (str(folder.absolute()), 0.5), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # the folder is read once
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@functools.cache
def source_facts(data: str) -> dict[str, Any]:
    """Size of the vocabulary and fingerprint of a corpus' training text."""
    source = open_source(data)
    return {"vocab_size": source.vocab_size, "fingerprint": source.fingerprint}


def select(specs: Sequence[RunSpec], only: Sequence[str]) -> list[RunSpec]:
    """The specs of these names; all without names.

    Raises:
      ValueError: a name that no spec has.
    """
    known = list(dict.fromkeys(spec.name for spec in specs))
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"--only names {unknown[0]!r}; the runs are {', '.join(known)}")
    return [spec for spec in specs if not only or spec.name in only]


def _folder(setting: Setting, spec: RunSpec) -> Path:
    name = f"{spec.name}-{setting.layers}x{setting.d_model}-{setting.steps * spec.length}"
    return setting.runs / f"{name}-seed{spec.seed}"


def _curve_point(
    row: dict[str, Any], rows: list[dict[str, Any]], setting: Setting
) -> dict[str, Any]:
    """Held-out loss at a step, and the training loss of the last few logged steps before it."""
    before = [r["ce"] for r in rows if r["step"] <= row["step"]][-5:]
    return {
        "step": row["step"],
        "tokens": row["step"] * setting.batch_size * setting.seq_len,
        "held_out": row["ce"],
        "train": statistics.fmean(before) if before else None,
        "nnz": row["nnz"],
    }
