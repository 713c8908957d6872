"""Work in stages, each in a folder of its own: done ones are skipped, begun ones go on.

A stage that trains is a run (`train_stage`): its folder's summary.json says when it is done, and an
interrupted one resumes from its checkpoint. Any other stage (`run_stage`) is done when its
stage.json is there. Either way the settings lie beside the result, and a stage that was made with
others is an error, never silently taken.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsejax.config import config_differences
from sparsejax.training.config import TrainConfig
from sparsejax.training.initial import weights_digest
from sparsejax.training.loop import train
from sparsejax.training.objective import Objective
from sparsejax.training.processes import from_process_0
from sparsejax.training.run import Run, say
from sparsejax.training.workdir import Workdir

MARKER = "stage.json"

# What may change between the parts of one stage: where and how it runs, not what it computes.
_FREE = ("resume", "stop_at", "workdir", "mesh", "log_every", "eval_every", "eval_batches",
         "checkpoint_every", "keep", "data_workers", "implementation", "remat",
         "residuals")  # fmt: skip


class StageStoppedError(RuntimeError):
    """A stage was interrupted after saving; the same command goes on with it."""


def run_stage(
    folder: Path, settings: dict[str, Any], work: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """`work()`, or what it returned when this stage was done before; JSON values.

    Args:
      folder: the stage's; made if it is absent. `work` writes whatever it likes there, and has to
        cope with what an interrupted attempt left.
      settings: what the result depends on, as JSON values.
      work: returns the result.

    Raises:
      ValueError: the stage was done with other settings, or its marker is damaged.
    """
    settings = json.loads(json.dumps(settings, default=str))
    if done := from_process_0(lambda: _read_marker(folder)):
        _same_settings(folder, settings, done["settings"])
        say(f"{folder.name}: done before")
        return done["result"]
    result = json.loads(json.dumps(work(), default=str))
    from_process_0(lambda: _write_marker(folder, {"settings": settings, "result": result}))
    return result


def train_stage(
    config: TrainConfig, make_objective: Callable[[Run], Objective | None] | None = None
) -> dict[str, Any]:
    """`train(config)` from wherever the folder's run stands; its summary.

    Args:
      config: the run's settings, with a workdir; `resume` is set as the folder needs it.
      make_objective: as for `train`.

    Raises:
      ValueError: the folder's run has other settings, or began with other weights.
      StageStoppedError: a signal or `stop_at` ended it before its last step.
    """
    if config.workdir is None:
        raise ValueError("train_stage: the config needs a workdir")
    workdir = Workdir(config.workdir)
    before = from_process_0(lambda: _begun(workdir))
    _same_start(workdir, config)
    if before is not None:
        now = dataclasses.replace(config, resume=True).resolved().to_dict()
        now = {k: v for k, v in now.items() if k not in _FREE}
        _same_settings(workdir.root, now, {k: v for k, v in before.items() if k not in _FREE})
    begun = from_process_0(lambda: workdir.checkpoints.exists() or workdir.metrics.exists())
    summary = train(dataclasses.replace(config, resume=before is not None or begun), make_objective)
    if summary["status"] != "finished":
        raise StageStoppedError(
            f"{workdir.root} stopped after step {summary['step']} of {config.steps}; the same "
            "command goes on with it"
        )
    return summary


def _begun(workdir: Workdir) -> dict[str, Any] | None:
    if not workdir.config.exists():
        return None
    return json.loads(workdir.config.read_text()).get("train")


def _same_start(workdir: Workdir, config: TrainConfig) -> None:
    """Raises if `init_from` now holds other weights than the run in `workdir` began with."""
    init = config.init_from
    then = from_process_0(lambda: _init_digest(workdir))
    # A run that has begun no longer needs the folder.
    if init is None or then is None or from_process_0(lambda: not Path(init).is_dir()):
        return
    if weights_digest(init) != then:
        raise ValueError(
            f"{workdir.root} began with other weights than {init} holds by now. Remove "
            f"{workdir.root}, and it is made anew from these, or name another folder in the place "
            f"of {workdir.root.parent}"
        )


def _init_digest(workdir: Workdir) -> str | None:
    if not workdir.config.exists():
        return None
    return json.loads(workdir.config.read_text()).get("init_digest")


def _same_settings(folder: Path, now: dict[str, Any], then: dict[str, Any]) -> None:
    if differing := config_differences(then, now):
        raise ValueError(
            f"{folder} was made with other settings (then vs now): {'; '.join(differing[:5])}. "
            f"Use those of then again; or remove {folder} and what came of it, and it is made "
            f"anew; or name another folder in the place of {folder.parent}"
        )


def _read_marker(folder: Path) -> dict[str, Any] | None:
    path = folder / MARKER
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return {"settings": content["settings"], "result": content["result"]}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged; remove it, and the stage is done again") from None


def _write_marker(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / (MARKER + ".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, folder / MARKER)
