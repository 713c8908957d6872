"""How good is a model? Perplexity, multiple choice, and lm-evaluation-harness.

>>> model = sparsejax.evaluation.open_model("runs/mine")
>>> result = sparsejax.evaluation.perplexity(model, sparsejax.data.open_source("stdlib", "val"))
>>> result.nats_per_token, result.bits_per_byte
"""

from sparsejax.evaluation.curve import write_curve
from sparsejax.evaluation.harness import harness_model, require_harness, run_harness
from sparsejax.evaluation.loglikelihood import Pair, PairScore, encode_pair, score_pairs
from sparsejax.evaluation.models import EvalModel, bos_choice, open_model
from sparsejax.evaluation.multiple_choice import (
    MultipleChoice,
    Question,
    multiple_choice,
    read_questions,
)
from sparsejax.evaluation.perplexity import Perplexity, perplexity
from sparsejax.evaluation.results import Results

__all__ = [
    "EvalModel",
    "MultipleChoice",
    "Pair",
    "PairScore",
    "Perplexity",
    "Question",
    "Results",
    "bos_choice",
    "encode_pair",
    "harness_model",
    "multiple_choice",
    "open_model",
    "perplexity",
    "read_questions",
    "require_harness",
    "run_harness",
    "score_pairs",
    "write_curve",
]
