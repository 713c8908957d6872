"""A trained model made shallower, from analysis to recovery: `shrink(ShrinkConfig(...))`."""

from sparsejax.shrink.config import ShrinkConfig
from sparsejax.shrink.measure import DecodeTime, decode_time, measure
from sparsejax.shrink.pipeline import shrink, table
from sparsejax.shrink.plan import Fusing, Plan, make_plan

__all__ = [
    "DecodeTime",
    "Fusing",
    "Plan",
    "ShrinkConfig",
    "decode_time",
    "make_plan",
    "measure",
    "shrink",
    "table",
]
