"""A model as lm-evaluation-harness sees one: log-likelihoods, rolling ones, and generation.

The harness is optional: `pip install 'sparsejax[eval]'`.

>>> run_harness(open_model("runs/mine"), ["my_task"], include_path="my_tasks")["results"]

In a launch of several processes each one runs all requests, in step, and gets the same results.
"""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

from sparsejax.evaluation.loglikelihood import encode_pair, rolling_pairs, score_pairs
from sparsejax.evaluation.models import EvalModel
from sparsejax.evaluation.until import GenerationSettings, generate_until


def require_harness() -> None:
    """Raises ModuleNotFoundError where lm-evaluation-harness is not installed."""
    _import("lm_eval")


def harness_model(model: EvalModel, *, batch_size: int = 8, max_new_tokens: int = 256) -> Any:
    """An `lm_eval.api.model.LM` that answers with `model`.

    Args:
      model: needs a tokenizer.
      batch_size: texts at a time, over all devices.
      max_new_tokens: longest generation where a task does not say.

    Raises:
      ModuleNotFoundError: lm-evaluation-harness is not installed.
      ValueError: the model has no tokenizer.
    """
    base: Any = _import("lm_eval.api.model").LM
    model.text_tokenizer()

    class SparseJaxLM(base):
        """See `harness_model`."""

        @property
        def tokenizer_name(self) -> str:
            """Names the tokenizer in the harness's caches of requests."""
            return model.name

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            """(log p(continuation | context), whether it is the greedy one) per request."""
            arguments = [request.args for request in requests]
            pairs = [encode_pair(model, *texts, as_harness=True) for texts in arguments]
            scores = score_pairs(model, pairs, batch_size=batch_size, progress=not disable_tqdm)
            _warn_of_cuts(sum(score.cut > 0 for score in scores), "contexts")
            answers = [(score.logprob, score.greedy) for score in scores]
            return self._remembered("loglikelihood", arguments, answers)

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[float]:
            """log p of each text, every token scored once."""
            arguments = [request.args for request in requests]
            parts = [rolling_pairs(model, text) for (text,) in arguments]
            pairs = [pair for part in parts for pair in part]
            scores = iter(
                score_pairs(model, pairs, batch_size=batch_size, progress=not disable_tqdm)
            )
            answers = [sum(next(scores).logprob for _ in part) for part in parts]
            return self._remembered("loglikelihood_rolling", arguments, answers)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            """The continuation of each context, up to a stop string."""
            arguments = [request.args for request in requests]
            settings = [
                GenerationSettings.from_harness(values, max_new_tokens) for _, values in arguments
            ]
            answers, cut = generate_until(
                model,
                [context for context, _ in arguments],
                settings,
                batch_size=batch_size,
                progress=not disable_tqdm,
            )
            _warn_of_cuts(cut, "prompts")
            return self._remembered("generate_until", arguments, answers)

        def _remembered(self, kind: str, arguments: list[Any], answers: list[Any]) -> list[Any]:
            for key, answer in zip(arguments, answers, strict=True):
                self.cache_hook.add_partial(kind, key, answer)
            return answers

    return SparseJaxLM()


def run_harness(
    model: EvalModel,
    tasks: Sequence[str],
    *,
    include_path: str | os.PathLike | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Runs tasks of lm-evaluation-harness; returns its "results", "versions" and "n-samples".

    Args:
      model: needs a tokenizer.
      tasks: names of tasks. Many download their data.
      include_path: a folder with task files of your own.
      num_fewshot: examples before each question; None as the task says.
      limit: questions per task; None takes all.
      batch_size: texts at a time, over all devices.

    Raises:
      ModuleNotFoundError: lm-evaluation-harness is not installed.
      ValueError: no such task, or as for `harness_model`.
    """
    lm = harness_model(model, batch_size=batch_size)
    manager_class = _import("lm_eval.tasks").TaskManager
    manager = manager_class(include_path=None if include_path is None else str(include_path))
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(f"lm-evaluation-harness knows no task {', '.join(map(repr, unknown))}")
    found = _import("lm_eval").simple_evaluate(
        model=lm,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    return as_json({k: found[k] for k in ("results", "versions", "n-samples") if k in found})


def as_json(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become None, what is unknown its text."""
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, float):  # NumPy's float64 is one
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, bool | int | str | None) else str(value)


def _warn_of_cuts(count: int, what: str) -> None:
    if count:
        warnings.warn(
            f"{count} {what} are longer than the model's context and lost their beginning",
            stacklevel=3,
        )


def _import(name: str) -> Any:
    # By name: an extra's package, which type checkers need not find.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lm_eval":
            raise
        raise ModuleNotFoundError(
            "lm-evaluation-harness is not installed; pip install 'sparsejax[eval]'", name="lm_eval"
        ) from None
