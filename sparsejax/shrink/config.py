"""The settings of a whole shrinking; `experiments/shrink.py` makes flags of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sparsejax.analysis import NO_ATTENTION, NO_FFN, Variant
from sparsejax.analysis.devices import get_device
from sparsejax.distill.config import DistillConfig
from sparsejax.distill.objective import DistillLoss
from sparsejax.shrink.plan import Fusing
from sparsejax.training.config import TrainConfig
from sparsejax.training.optimizer import OptimizerConfig

_flat = tyro.conf.arg(name="")
_Hidden = Annotated[Any, tyro.conf.Suppress]


@dataclasses.dataclass(frozen=True)
class ShrinkConfig(TrainConfig):
    """A model made shallower: analysed, selected, cut, fused, recovered, measured.

    The flags of training hold for the recovery.

    Attributes:
      workdir: the model to shrink, a run or a Hugging Face folder.
      out: folder of the stages; the same command goes on where it was left.
      latency_target: a decode step's latency after cutting and fusing, as a share of the model's
        own, 0.67 for two thirds; both are modelled for `device`, `cost_batch` and `cost_context`,
        neither is measured. None for no limit.
      kv_cache_target: bytes of keys and values per device, likewise, but kept before fusing
        already, which changes none of them.
      memory_target: bytes of parameters and cache per device, kept before fusing, which then takes
        a few norms away.
      parameters_target: number of parameters, as memory_target.
      ffn_widths: shares of its neurons that a layer may be left with.
      ffn_removal: layers may lose their feed-forward part altogether.
      multiple: what widths are rounded up to.
      fusing: how attention-free runs are fused.
      analysis_batches: batches of text that layers are scored on.
      device: accelerator whose costs are modelled, whatever this runs on.
      cost_batch: rows decoded together in that model.
      cost_context: positions in the cache; None takes the model's context length.
      recover: distil from the model afterwards.
      teacher_dtype: what the model is kept and computed in as a teacher.
      distill: terms of the distillation loss.
      latency_batches: batch sizes whose decode latency is measured.
      optimizer: AdamW and its schedule, of the recovery.
    """

    out: Path | None = None
    latency_target: float | None = 0.67
    kv_cache_target: float | None = None
    memory_target: float | None = None
    parameters_target: float | None = None
    ffn_widths: tuple[float, ...] = (0.75, 0.5)
    ffn_removal: bool = False
    multiple: int = 16
    fusing: Annotated[Fusing, _flat] = Fusing()
    analysis_batches: int = 8
    device: str = "h200"
    cost_batch: int = 1
    cost_context: int | None = None
    recover: bool = True
    teacher_dtype: Literal["float32", "bfloat16"] | None = None
    distill: Annotated[DistillLoss, _flat] = DistillLoss()
    latency_batches: tuple[int, ...] = (1, 32)
    optimizer: Annotated[OptimizerConfig, _flat] = OptimizerConfig(learning_rate=1e-4)
    preset: _Hidden = None
    init_from: _Hidden = None
    resume: _Hidden = False

    def __post_init__(self):
        super().__post_init__()
        if self.workdir is None or self.out is None:
            raise ValueError("name the model to shrink (--workdir) and a folder for it (--out)")
        if self.out.resolve() == self.workdir.resolve():
            raise ValueError("out must be another folder than workdir, whose model stays as it is")
        if self.analysis_batches < 1 or self.multiple < 1:
            raise ValueError("analysis_batches and multiple must be at least 1")
        if self.cost_context is not None and self.cost_context < 1:
            raise ValueError(
                f"cost_context must be at least 1, got {self.cost_context}; leave --cost-context "
                "out for the model's context length"
            )
        if self.cost_batch < 1:
            raise ValueError(f"cost_batch must be at least 1, got {self.cost_batch}")
        if any(batch < 1 for batch in self.latency_batches):
            raise ValueError(f"latency_batches must be at least 1, got {self.latency_batches}")
        if not all(0 < width < 1 for width in self.ffn_widths):
            raise ValueError(f"ffn_widths must be shares in (0, 1), got {self.ffn_widths}")
        get_device(self.device)
        if not self.targets():
            raise ValueError("one of the targets is needed, such as --latency-target 0.67")
        for name, share in self.targets().items():
            if not 0 < share <= 1:
                flag = f"--{name.replace('_', '-')}-target"
                raise ValueError(
                    f"{name}_target must be a share of the model's own in (0, 1], got {share:g}; "
                    f"for two thirds give {flag} 0.67"
                )

    def targets(self) -> dict[str, float]:
        """Shares of the model's own costs, for `make_plan`."""
        names = ("latency", "kv_cache", "memory", "parameters")
        found = {name: getattr(self, f"{name}_target") for name in names}
        return {name: share for name, share in found.items() if share is not None}

    def variants(self) -> tuple[Variant, ...]:
        """What is tried on every layer."""
        narrow = tuple(Variant(ffn=width) for width in self.ffn_widths)
        return (NO_ATTENTION, *narrow, *((NO_FFN,) if self.ffn_removal else ()))

    def training(self, **changes: Any) -> TrainConfig:
        """The settings of a run on the model's text, with changes."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(TrainConfig)}
        kind = DistillConfig if "teacher" in changes else TrainConfig
        return kind(**shared | {"preset": None, "resume": False} | changes)
