"""The whole pipeline on a very small model: stages, going on, what comes out."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from sparsejax import surgery
from sparsejax.convert import load_run, save_run
from sparsejax.params import count, flatten
from sparsejax.shrink import Fusing, ShrinkConfig, shrink, table
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.stages import StageStoppedError
from sparsejax.training.workdir import WorkdirInUseError, WorkdirLock

pytestmark = [pytest.mark.usefixtures("one_device"), pytest.mark.slow]


def config(source, out, **changes) -> ShrinkConfig:
    base = ShrinkConfig(
        workdir=source,
        out=out,
        kv_cache_target=0.5,
        latency_target=None,
        ffn_widths=(),
        fusing=Fusing(fuse_last=True),
        analysis_batches=1,
        latency_batches=(2,),
        steps=6,
        seq_len=16,
        log_every=1,
        eval_batches=1,
        checkpoint_every=3,
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def done(source, one_device, tmp_path_factory):
    """Interrupted in the recovery, then finished."""
    run = config(source, tmp_path_factory.mktemp("shrunk") / "out")
    with pytest.raises(StageStoppedError, match="4_recover stopped after step 3 of 6"):
        shrink(dataclasses.replace(run, stop_at=3))
    assert not (run.out / "5_report").exists()
    return run, shrink(run)


def test_stages_leave_what_they_say(done):
    run, report = done
    assert {p.name for p in run.out.iterdir()} == {
        ".lock", "1_analyse", "2_select", "3_cut", "4_recover", "5_report",
    }  # fmt: skip
    made = {p.name for p in (run.out / "1_analyse").iterdir()}
    assert made >= {"scores.npz", "dependency.csv", "scores.png", "dependency.png"}
    assert json.loads((run.out / "5_report" / "report.json").read_text()) == report


def test_weak_attention_goes_and_its_layers_are_fused(done, model):
    run, report = done
    assert report["plan"]["groups"] == [[1, 2]]
    assert report["plan"]["layer_map"] == [0, 2, 3]
    cut, params, _ = load_run(run.out / "3_cut" / "model")
    removed = surgery.remove_attention(*model, [1, 2])
    want_config, want = surgery.fuse_ffns(*removed, [(1, 2)])
    assert cut == want_config
    for path, leaf in flatten(want).items():
        np.testing.assert_array_equal(flatten(params)[path], leaf, err_msg=path)


def test_the_report_counts_right(done, model):
    run, report = done
    _, params, _ = load_run(run.out / "4_recover")
    for name, attentions, tree in (
        ("before", 4, model[1]),
        ("cut", 2, params),
        ("after", 2, params),
    ):
        found = report[name]
        assert found["attentions"] == attentions
        assert found["parameters"] == count(tree)
        assert found["kv_cache_bytes"] == attentions * 2 * 2 * 8 * 64 * 4
        assert [t["batch"] for t in found["decode"]] == [2]
        assert all(t["ms_least"] <= t["ms_per_step"] <= t["ms_most"] for t in found["decode"])
        assert found["held_out_tokens"] == 8 * 16
    recovery = json.loads((run.out / "4_recover" / "summary.json").read_text())
    assert recovery["last"]["kl"] < recovery["first"]["kl"]
    np.testing.assert_allclose(report["after"]["ce"], recovery["held_out"]["ce"], rtol=1e-5)
    assert report["cut"]["ce"] != report["before"]["ce"]
    told = table(report)
    assert "decode step at batch 2, ms" in told and "(0.500)" in told
    assert "\nheld-out cross-entropy: over 128 tokens\ndecode steps: measured on 1 x cpu\n" in told
    ratios = report["plan"]["ratios"]
    assert told.splitlines()[-1] == (
        "targets: costs modelled for 1 x h200 (--device), batch 1 and 64 positions, cut and fused "
        f"over the model's own: latency {ratios['latency']:.3f}, kv_cache 0.500 (target 0.5), "
        f"memory {ratios['memory']:.3f}, parameters {ratios['parameters']:.3f}"
    )
    before = {key: value for key, value in report.items() if key not in ("devices", "modelled")}
    assert table(before).endswith("decode steps: measured on cpu")


def test_done_stages_are_skipped(done, capsys):
    run, report = done
    capsys.readouterr()
    assert shrink(run) == report
    told = capsys.readouterr().err
    for stage in ("1_analyse", "2_select", "3_cut", "5_report"):
        assert f"{stage}: done before" in told
    assert "nothing to do: the run has done 6 steps" in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_target": 0.8}, r"2_select was made with other .*targets.kv_cache: 0.5 vs 0.8"),
        ({"analysis_batches": 2}, r"1_analyse was made with other .*batches: 1 vs 2"),
        ({"steps": 7}, r"4_recover was made with other .*steps: 6 vs 7"),
        ({"latency_batches": (1,)}, r"5_report was made with other"),
    ],
)
def test_other_settings_are_refused_by_the_stage_they_change(done, changes, message):
    with pytest.raises(ValueError, match=message):
        shrink(dataclasses.replace(done[0], **changes))


def test_stages_of_other_weights_are_refused(done, tmp_path):
    run, _ = done
    shutil.copytree(run.workdir, tmp_path / "kept")
    config, params, tokenizer = load_run(run.workdir)
    params["layer_0"]["ffn"]["down"] = params["layer_0"]["ffn"]["down"] * 2
    shutil.rmtree(run.workdir)
    try:
        save_run(run.workdir, config, params, tokenizer)
        with pytest.raises(ValueError, match=r"1_analyse was made with other .*weights"):
            shrink(run)
    finally:
        shutil.rmtree(run.workdir)
        shutil.move(tmp_path / "kept", run.workdir)


def test_a_cut_that_was_interrupted_is_made_again(done, tmp_path):
    run, report = done
    cut = run.out / "3_cut"
    before = {p: leaf for p, leaf in flatten(load_run(cut / "model")[1]).items()}
    (cut / "stage.json").rename(tmp_path / "stage.json")  # as if killed before its marker
    (cut / "model" / "config.json").unlink()
    assert shrink(run) == report
    for path, leaf in flatten(load_run(cut / "model")[1]).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


def test_two_calls_in_one_folder_do_not_mix(done):
    with WorkdirLock(done[0].out), pytest.raises(WorkdirInUseError, match="in use by another"):
        shrink(done[0])


def test_wrong_settings(source, tmp_path):
    for changes, message in (
        ({"out": None}, "--out"),
        ({"out": source}, "another folder than workdir"),
        ({"kv_cache_target": None}, "one of the targets is needed"),
        (
            {"latency_target": 67.0},
            r"latency_target must be a share of the model's own in \(0, 1\], got 67; for two "
            "thirds give --latency-target 0.67$",
        ),
        ({"memory_target": 0.0}, "memory_target .* got 0; .* give --memory-target 0.67$"),
        ({"parameters_target": float("nan")}, "parameters_target .* got nan"),
        ({"device": "h20"}, r"unknown device 'h20' \(did you mean 'h200'\?\)"),
        ({"ffn_widths": (1.5,)}, r"shares in \(0, 1\)"),
        (
            {"cost_context": 0},
            "cost_context must be at least 1, got 0; leave --cost-context out for",
        ),
        ({"cost_batch": 0}, "cost_batch must be at least 1, got 0$"),
        ({"latency_batches": (1, 0)}, r"latency_batches must be at least 1, got \(1, 0\)$"),
    ):
        with pytest.raises(ValueError, match=message):
            config(source, **{"out": tmp_path / "out"} | changes)
    with pytest.raises(FileNotFoundError, match="no folder"):
        shrink(config(tmp_path / "nowhere", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_decode_time_needs_room(model):
    from sparsejax import make_mesh
    from sparsejax.shrink import decode_time

    mesh = make_mesh(devices=jax.devices()[:1])
    small = model[0].replace(context_length=6)
    with pytest.raises(ValueError, match="need a context of 7 positions, the model has 6"):
        decode_time(small, model[1], mesh, 1)
