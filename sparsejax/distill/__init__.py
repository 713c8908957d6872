"""Recovery after surgery: a student learns from the model it was made of.

| name | what |
|---|---|
| `distill(DistillConfig(...))` | a whole run, as experiments/distill.py makes it |
| `make_distillation` | the objective alone, for `sparsejax.training.loop.train` or a step |
| `layer_map_of`, `derive_layer_map` | which teacher layer a student layer is compared with |
| `distillation_loss`, `hidden_cosines`, `block_errors` | the terms |
"""

from sparsejax.distill.blockwise import block_errors, blocks_of
from sparsejax.distill.config import DistillConfig, distill
from sparsejax.distill.hidden import cosine_distance, hidden_cosines
from sparsejax.distill.layer_map import LayerMap, check_layer_map, derive_layer_map, layer_map_of
from sparsejax.distill.logits import distillation_loss
from sparsejax.distill.objective import (
    BlockDistillation,
    Distillation,
    DistillLoss,
    make_distillation,
)
from sparsejax.distill.teacher import Teacher, load_teacher

__all__ = [
    "BlockDistillation",
    "DistillConfig",
    "DistillLoss",
    "Distillation",
    "LayerMap",
    "Teacher",
    "block_errors",
    "blocks_of",
    "check_layer_map",
    "cosine_distance",
    "derive_layer_map",
    "distill",
    "distillation_loss",
    "hidden_cosines",
    "layer_map_of",
    "load_teacher",
    "make_distillation",
]
