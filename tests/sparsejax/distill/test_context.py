"""Stages of longer sequences: what each changes, and going on where it stopped."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from sparsejax import RopeConfig
from sparsejax.convert import load_run, save_run
from sparsejax.distill.context import ExtendConfig, Stage, extend_context, staged_model
from sparsejax.params import flatten
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.stages import StageStoppedError

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def folder(cut, tmp_path_factory):
    """One layer is enough here."""
    config, params = cut
    small = config.replace(layers=config.layers[1:])
    params = {k: v for k, v in params.items() if k != "layer_0"}
    params["layer_0"] = params.pop("layer_1")
    path = tmp_path_factory.mktemp("model") / "start"
    save_run(path, small, params)
    return path


def config(folder, workdir, *stages, **changes) -> ExtendConfig:
    base = ExtendConfig(
        init_from=folder,
        workdir=workdir,
        stage=stages or ("seq_len=32,steps=3", "seq_len=64,steps=4,theta=3e4,batch_size=8"),
        log_every=1,
        eval_batches=1,
        checkpoint_every=2,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    return dataclasses.replace(base, **changes)


def test_stages_run_one_after_the_other_and_are_skipped_when_done(folder, tmp_path, capsys):
    # The last stage's updates are far below any parameter's last bit: it shows what it began with.
    last = "seq_len=64,steps=1,scaling=linear,learning_rate=1e-30"
    run = config(folder, tmp_path / "long", "seq_len=32,steps=2", last)
    run = dataclasses.replace(run, optimizer=OptimizerConfig(weight_decay=0))
    first, second = extend_context(run)
    assert [s["step"] for s in (first, second)] == [2, 1]
    assert [s["tokens"] for s in (first, second)] == [2 * 8 * 32, 8 * 64]
    before, middle, after = (
        load_run(p) for p in (folder, tmp_path / "long/stage_0_32", tmp_path / "long/stage_1_64")
    )
    assert middle[0] == before[0]
    assert after[0] == before[0].replace(
        context_length=64,
        rope=RopeConfig(theta=1e4, scaling="linear", factor=2.0, original_context=32),
    )
    gate = "layer_0/ffn/gate"
    assert not np.array_equal(flatten(before[1])[gate], flatten(middle[1])[gate])
    for path, leaf in flatten(after[1]).items():
        np.testing.assert_array_equal(leaf, flatten(middle[1])[path], err_msg=path)
    capsys.readouterr()
    again = extend_context(run)
    assert again == [first, second]
    assert capsys.readouterr().err.count("nothing to do") == 2
    with pytest.raises(ValueError, match=r"stage_0_32 was made with other .*learning_rate"):
        extend_context(dataclasses.replace(run, optimizer=OptimizerConfig(learning_rate=0.1)))
    # What a later stage was made from is not there any more.
    shutil.rmtree(tmp_path / "long/stage_0_32")
    other = dataclasses.replace(run, stage=("seq_len=32,steps=2,learning_rate=1e-2", last))
    with pytest.raises(ValueError, match=r"stage_1_64 began with other weights than .*stage_0_32"):
        extend_context(other)


def test_an_interrupted_stage_goes_on_with_the_same_bits(folder, tmp_path):
    whole, broken = (
        config(folder, tmp_path / name, "seq_len=64,steps=4,theta=3e4")
        for name in ("whole", "broken")
    )
    extend_context(whole)
    with pytest.raises(StageStoppedError, match=r"stage_0_64 stopped after step 3 of 4"):
        extend_context(dataclasses.replace(broken, stop_at=3))
    (summary,) = extend_context(broken)
    assert summary["status"] == "finished"
    ours, theirs = (
        flatten(load_run(tmp_path / name / "stage_0_64")[1]) for name in ("broken", "whole")
    )
    for path in theirs:
        np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)


def test_with_a_teacher(folder, tmp_path):
    run = config(folder, tmp_path / "long", "seq_len=32,steps=1", teacher=folder)
    (summary,) = extend_context(run)
    assert summary["first"]["kl"] < 1e-6
    told = json.loads((tmp_path / "long/stage_0_32/config.json").read_text())
    assert told["objective"]["layer_map"] == [0]
    longer = config(folder, tmp_path / "longer", "seq_len=64,steps=1,theta=3e4", teacher=folder)
    with pytest.raises(ValueError, match="seq_len 64 exceeds the teacher's context length 32"):
        extend_context(longer)


LLAMA = RopeConfig(theta=5e5, scaling="llama3", factor=8.0)


@pytest.mark.parametrize(
    ("rope", "stage", "want", "context"),
    [
        (RopeConfig(), "seq_len=16", RopeConfig(), 32),
        (RopeConfig(), "seq_len=128,theta=1e6", RopeConfig(theta=1e6), 128),
        (RopeConfig(), "seq_len=128,scaling=none", RopeConfig(), 128),
        (
            RopeConfig(),
            "seq_len=128,scaling=llama3",
            RopeConfig(scaling="llama3", factor=4.0, original_context=32),
            128,
        ),
        (
            RopeConfig(),
            "seq_len=128,scaling=linear,factor=3,theta=2e5",
            RopeConfig(theta=2e5, scaling="linear", factor=3.0, original_context=32),
            128,
        ),
        (LLAMA, "seq_len=64,scaling=llama3", dataclasses.replace(LLAMA, factor=16.0), 64),
        (LLAMA, "seq_len=64,factor=9", dataclasses.replace(LLAMA, factor=9.0), 64),
    ],
)
def test_what_a_stage_changes(whole, rope, stage, want, context):
    model = whole[0].replace(rope=rope)
    assert staged_model(model, Stage.parse(stage)) == model.replace(
        rope=want, context_length=context
    )


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("steps=3", "seq_len is missing"),
        ("seq_len=64", r"longer than the model's context 32: say theta=\.\.\. or scaling"),
        ("seq_len=64,factor=2", "a factor needs scaling"),
        ("seq_len=64,scaling=ntk", "scaling must be one of"),
        ("seq_len=long", "seq_len must be int, got 'long'"),
        ("seq_len=64,seq_len=32", "'seq_len=32' is not one field=value"),
        ("seq_len=64,lr=1", "'lr=1' is not one field=value"),
        ("64", "'64' is not one field=value"),
        ("seq_len=64,theta=-1", "theta must be positive"),
        ("seq_len=0", "stage seq_len=0: seq_len must be at least 1, got 0$"),
        ("seq_len=8,steps=0", "stage seq_len=8: steps must be at least 1, got 0; left .* --steps$"),
        ("seq_len=8,batch_size=0", "seq_len=8: batch_size must be at least 1, got 0; .*-size$"),
        ("seq_len=8,learning_rate=0", "seq_len=8: learning_rate must be positive and finite, got"),
        ("seq_len=64,scaling=linear,factor=0", r"seq_len=64: factor must be positive .* got 0\.0;"),
        ("seq_len=64,scaling=linear,factor=nan", "factor must be positive and finite, got nan;"),
    ],
)
def test_wrong_stages(whole, stage, message):
    with pytest.raises(ValueError, match=message):
        staged_model(whole[0], Stage.parse(stage))


def test_wrong_settings(folder, tmp_path):
    for changes, message in (
        ({"stage": ()}, "name a --stage"),
        ({"seq_len": 16}, "belongs into a --stage"),
        ({"resume": True}, "goes on by itself"),
        ({"init_from": None}, "--init-from"),
    ):
        with pytest.raises(ValueError, match=message):
            config(folder, tmp_path, **changes)
