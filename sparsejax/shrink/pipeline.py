"""The stages of shrinking a model, each in a folder of its own under `out`.

1_analyse  scores.npz dependency.npz, csv and png   what every layer is worth, what depends on what
2_select   the plan in stage.json                    what is removed, narrowed and fused
3_cut      model/ (a run's folder)                   the model after surgery
4_recover  a run of distillation                     the model afterwards
5_report   report.json                               before, after surgery, after recovery
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax

from sparsejax import surgery
from sparsejax.analysis import (
    BlockScores,
    Dependency,
    apply_selection,
    block_dependency,
    block_scores,
    plots,
)
from sparsejax.convert import save_run
from sparsejax.data import ByteTokenizer, HFTokenizer
from sparsejax.distill.config import DistillConfig
from sparsejax.shrink.config import ShrinkConfig
from sparsejax.shrink.measure import measure
from sparsejax.shrink.plan import make_plan, read_selection
from sparsejax.training.evaluate import to_device
from sparsejax.training.initial import (
    initial_config,
    initial_params,
    initial_tokenizer,
    weights_digest,
)
from sparsejax.training.run import Run, prepare, say
from sparsejax.training.stages import run_stage, train_stage
from sparsejax.training.workdir import WorkdirLock

# Settings that the analysis depends on; those of later stages are theirs alone.
_TEXT = ("data", "batch_size", "seq_len", "seed", "mask_documents")


def shrink(config: ShrinkConfig) -> dict[str, Any]:
    """Runs the stages that are not done; the report, {"before", "cut", "after", "plan"}.

    Raises:
      ValueError: settings that do not fit each other, the model or what lies in `out`; limits that
        cannot be kept.
      FileNotFoundError: no model.
      StageStoppedError: a signal ended the recovery; the same call goes on with it.
      WorkdirInUseError: another call works in `out`.
    """
    source, out = config.workdir, config.out
    assert source is not None and out is not None
    run = prepare(config.training(init_from=source, workdir=out))
    config = dataclasses.replace(config, data=run.config.data)
    with WorkdirLock(out):
        return _stages(config, run, out, source)


def _stages(config: ShrinkConfig, run: Run, out: Path, source: Path) -> dict[str, Any]:
    about = {"model": str(source), "config": initial_config(source).to_dict()}
    about["weights"] = weights_digest(source)
    about |= {name: getattr(config, name) for name in _TEXT}
    with jax.set_mesh(run.mesh):
        _analyse(config, run, out / "1_analyse", about)
        scores = BlockScores.load(out / "1_analyse" / "scores.npz")
        plan = _select(config, run, out, scores)
        _cut(config, run, out / "3_cut", plan, scores, about["weights"])
    model = out / "3_cut" / "model"
    if config.recover:
        recovery = config.training(
            init_from=model,
            workdir=out / "4_recover",
            teacher=source,
            teacher_dtype=config.teacher_dtype,
            layer_map=tuple(plan["layer_map"]),
            distill=config.distill,
        )
        assert isinstance(recovery, DistillConfig)
        train_stage(recovery, recovery.objective)
    places = {"before": source, "cut": model}
    places |= {"after": out / "4_recover"} if config.recover else {}
    return _report(config, run, out / "5_report", places, plan)


def _analyse(config: ShrinkConfig, run: Run, folder: Path, about: dict[str, Any]) -> None:
    variants = [dataclasses.asdict(v) for v in config.variants()]
    settings = about | {
        "variants": variants,
        "multiple": config.multiple,
        "batches": config.analysis_batches,
    }

    def work() -> dict[str, Any]:
        say(f"scoring the layers of {config.workdir} on {config.analysis_batches} batches")
        folder.mkdir(parents=True, exist_ok=True)
        model, params = run.model, _params(config, run)
        with run.loader(run.source, worker_count=0) as loader:
            batches = [
                to_device(run.mesh, batch)
                for batch in itertools.islice(loader, config.analysis_batches)
            ]
        scores = block_scores(model, params, batches, config.variants(), multiple=config.multiple)
        dependency = block_dependency(model, params, batches)
        for found, name in ((scores, "scores"), (dependency, "dependency")):
            found.save(folder / f"{name}.npz")
            found.to_csv(folder / f"{name}.csv")
        plots.plot_scores(scores, folder / "scores.png")
        plots.plot_dependency(dependency, folder / "dependency.png")
        return {"tokens": scores.tokens, "forwards": scores.forwards + dependency.forwards}

    run_stage(folder, settings, work)


def _cost_setting(config: ShrinkConfig, run: Run) -> dict[str, Any]:
    return {
        "device": config.device,
        "batch": config.cost_batch,
        "context": config.cost_context or run.model.context_length,
        "tensor": run.mesh.shape["tensor"],
    }


def _select(config: ShrinkConfig, run: Run, out: Path, scores: BlockScores) -> dict[str, Any]:
    setting = _cost_setting(config, run)
    settings = {"targets": config.targets(), "cost": setting}
    settings |= dataclasses.asdict(config.fusing)

    def work() -> dict[str, Any]:
        dependency = Dependency.load(out / "1_analyse" / "dependency.npz")
        plan = make_plan(
            run.model,
            scores,
            config.targets(),
            dependency=dependency,
            fusing=config.fusing,
            **setting,
        )
        return plan.to_dict()

    plan = run_stage(out / "2_select", settings, work)
    kept = [i for i, (attention, _) in enumerate(plan["choices"]) if attention]
    say(
        f"attention stays in layers {kept}; fused: {plan['groups']}; modelled for {config.device}, "
        "of the model's own: "
        + ", ".join(f"{name} {share:.3f}" for name, share in plan["ratios"].items())
    )
    return plan


def _cut(
    config: ShrinkConfig,
    run: Run,
    folder: Path,
    plan: dict[str, Any],
    scores: BlockScores,
    weights: str,
) -> None:
    def work() -> dict[str, Any]:
        # An interrupted attempt may have left a part of it.
        shutil.rmtree(folder / "model", ignore_errors=True)
        selection = read_selection(plan["choices"], scores)
        model, params = apply_selection(run.model, _params(config, run), selection, donate=True)
        groups = [tuple(group) for group in plan["groups"]]
        norm: Any = config.fusing.fuse_norm
        model, params = surgery.fuse_ffns(model, params, groups, norm, donate=True)
        assert config.workdir is not None
        tokenizer = initial_tokenizer(config.workdir)
        assert tokenizer is None or isinstance(tokenizer, HFTokenizer | ByteTokenizer)
        save_run(folder / "model", model, params, tokenizer)
        return {"config": model.to_dict()}

    settings = {"weights": weights, "plan": plan, "norm": config.fusing.fuse_norm}
    run_stage(folder, settings, work)


def _report(
    config: ShrinkConfig, run: Run, folder: Path, places: dict[str, Path], plan: dict[str, Any]
) -> dict[str, Any]:
    context = config.cost_context or run.model.context_length
    settings: dict[str, Any] = {
        "places": {name: str(path) for name, path in places.items()},
        "weights": {name: weights_digest(path) for name, path in places.items()},
        "batches": list(config.latency_batches),
        "context": context,
        "eval_batches": config.eval_batches,
        "plan": plan,
    }
    if config.recover:
        names = ("steps", "optimizer", "loss", "distill", *_TEXT)
        everything = dataclasses.asdict(config)
        settings["recovery"] = {name: everything[name] for name in names}

    modelled = _cost_setting(config, run) | {"targets": config.targets()}

    def work() -> dict[str, Any]:
        report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "devices": run.mesh.size}
        report |= {"modelled": modelled, "plan": plan}
        for name, path in places.items():
            say(f"measuring the model {name}: {path}")
            model, params = initial_config(path), initial_params(path, run.mesh)
            report[name] = measure(run, model, params, config.latency_batches, context)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=1))
        return report

    return run_stage(folder, settings, work)


def _params(config: ShrinkConfig, run: Run) -> Any:
    assert config.workdir is not None
    return initial_params(config.workdir, run.mesh)


def table(report: dict[str, Any]) -> str:
    """The report as lines of text, one per figure; and where its figures are from."""
    names = [name for name in ("before", "cut", "after") if name in report]
    first = report["before"]

    def line(label: str, values: list[float | None], shown: str) -> str:
        cells = []
        for value in values:
            if value is None:
                cells.append("-".rjust(20))
                continue
            share = f" ({value / values[0]:.3f})" if values[0] and value is not values[0] else ""
            cells.append((format(value, shown) + share).rjust(20))
        return label.ljust(34) + "".join(cells)

    rows = ["".ljust(34) + "".join(name.rjust(20) for name in names)]
    for key, label, shown in (
        ("ce", "held-out cross-entropy, nats", ".4f"),
        ("parameters", "parameters", ",d"),
        ("kv_cache_bytes", f"KV bytes at {first['kv_cache_context']} positions", ",.0f"),
        ("layers", "layers", "d"),
        ("attentions", "layers with attention", "d"),
    ):
        rows.append(line(label, [report[name][key] for name in names], shown))
    for k, timed in enumerate(first["decode"]):
        values = [report[name]["decode"][k]["ms_per_step"] for name in names]
        rows.append(line(f"decode step at batch {timed['batch']}, ms", values, ".3f"))
    if first["held_out_tokens"]:
        rows.append(f"held-out cross-entropy: over {first['held_out_tokens']:,} tokens")
    if first["decode"]:
        # Reports that were written before this was told have neither.
        number = f"{report['devices']} x " if "devices" in report else ""
        rows.append(f"decode steps: measured on {number}{report['device']}")
    if modelled := report.get("modelled"):
        shares = []
        for name, share in report["plan"]["ratios"].items():
            target = modelled["targets"].get(name)
            told = "" if target is None else f" (target {target:g})"
            shares.append(f"{name} {share:.3f}{told}")
        rows.append(
            f"targets: costs modelled for {modelled['tensor']} x {modelled['device']} (--device), "
            f"batch {modelled['batch']} and {modelled['context']} positions, cut and fused over "
            f"the model's own: {', '.join(shares)}"
        )
    return "\n".join(rows)
