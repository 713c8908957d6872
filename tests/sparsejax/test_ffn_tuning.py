"""The rule that picks a value, values that do not run, and results that must not change."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import FFNConfig, tuning
from pallas_kernels.gated_ffn import config as configs
from sparsejax import ffn_benchmark as bench
from sparsejax import ffn_tuning

CASE = ffn_tuning.Case("forward", 96, 32, 128, "float32", (4.0, 8.0))


@pytest.mark.parametrize(
    ("medians", "chosen"),
    [
        ({1: [1.0, 2.0], 2: [0.9, 1.9], 4: [0.95, 2.0]}, 2),
        # By 0.8 % over both cases, and a tie: noise.
        ({1: [1.0, 2.0], 2: [0.992, 1.984]}, 1),
        ({1: [1.0, 2.0], 2: [1.0, 2.0]}, 1),
        ({2: [1.0, 2.0], 1: [1.0, 2.0], 4: [0.98, 1.96]}, 4),
        # Times count relative to the current value's, however long a case takes: -10 % and +5 %.
        ({1: [1.0, 100.0], 2: [0.9, 105.0]}, 2),
        ({1: [1.0, 100.0], 2: [1.05, 90.0]}, 2),
        # -4 % and +3 % is no gain of 1 %.
        ({1: [1.0, 100.0], 2: [0.96, 103.0]}, 1),
        # 8 did not run and is not there; the current one alone stays.
        ({1: [3.0, 3.0]}, 1),
    ],
)
def test_the_best_by_more_than_noise(medians, chosen):
    assert ffn_tuning.choose(1, medians) == chosen


@pytest.fixture
def tuner(monkeypatch):
    """Warps of 4 do not trace, of 8 do not run, of 16 do not compile; 2 is twice as fast as 1."""

    def form(case, config):
        if config.list_warps == 4:
            raise ValueError("too many registers\nand more lines")

        def fail(x):
            raise ValueError("too much shared memory")

        def run(x, pre, up, down):
            if config.list_warps == 8:
                x = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return x * (1.5 if config.walk_warps == 8 else 1.0), jnp.sum(pre > 0)

        return run

    monkeypatch.setattr(ffn_tuning.Case, "form", form)
    monkeypatch.setattr(
        bench, "in_turns", lambda programs, *_: {v: [1 / int(v), 2 / int(v)] for v in programs}
    )
    return ffn_tuning.Tuner(CASE, repeats=2, calls=1)


def test_values_that_do_not_run_are_passed_over(tuner, monkeypatch):
    start = CASE.start
    trials = {trial.value: trial for trial in tuner.sweep("list_warps", (2, 4, 8))}
    assert list(trials) == [1, 2, 4, 8]
    assert trials[4].error == "ValueError: too many registers"
    assert "Error" in trials[8].error and not trials[8].times and not trials[4].times
    assert [v for v, trial in trials.items() if trial.chosen] == [2]
    assert trials[2].error is None and trials[2].ms(8.0) == 0.75
    assert tuner.config == FFNConfig(**{**vars(start), "list_warps": 2})
    assert tuner.compiled == 3  # 4 never came so far
    # The program of the current value is there already.
    assert [t.value for t in tuner.sweep("list_chunk", (1024, 512))] == [512, 1024]
    assert tuner.compiled == 4
    assert tuner.check() == 0.0
    monkeypatch.setattr(ffn_tuning._Attempt, "compile", lambda self: MemoryError("too large"))
    [_, failed] = tuner.sweep("list_warps", (16,))
    assert (failed.error, failed.chosen) == ("MemoryError: too large", False)


def test_what_does_not_run_to_begin_with_is_an_error(tuner):
    tuner.config = FFNConfig(list_warps=4)
    with pytest.raises(RuntimeError, match="does not run: ValueError: too many registers"):
        tuner.sweep("walk_warps", (1, 2))


def test_settings_that_change_results_are_an_error(tuner):
    tuner.sweep("walk_warps", (8,))
    with pytest.raises(RuntimeError, match=r"a result \[96, 32\] is 0.5 away from the default"):
        tuner.check()


def case(mode="forward", tokens=16384, d_ff=2816, nnz=(15.0, 30.0), d_model=1024):
    return ffn_tuning.Case(mode, tokens, d_model, d_ff, "bfloat16", nnz)


def test_fields_of_each_mode_are_swept_over_values_that_can_be_set():
    with pallas_kernels.interpret():
        for one, names in (
            (case(), {"list_chunk", "list_warps", "walk_warps"}),
            (case(tokens=8, nnz=(900.0,)), {"decode_neurons", "decode_depth"}),
            (case("train"), set(ffn_tuning.BACKWARD)),
        ):
            assert set(one.fields()) == names
            for name, values in one.fields().items():
                assert len(values) > 1
                for value in values:
                    assert getattr(FFNConfig(**{name: value}), name) == value
        assert set(case("train").known_fields()) == {*ffn_tuning.FORWARD, *ffn_tuning.BACKWARD}


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (case("train", tokens=64), "tokens must be more than 64 in training, got 64"),
        (case(tokens=4), "tokens must be more than 4, got 4"),
        (case(nnz=(15.0, 231.0)), "nnz must be at most 230.4 for F = 2816, got 231"),
        (case("train", nnz=(60.0,)), "nnz must be at most 45 in training for F = 2816, got 60"),
    ],
)
def test_what_would_time_other_kernels(one, message):
    with pallas_kernels.interpret(), pytest.raises(ValueError, match=re.escape(message)):
        one.fields()


def test_only_what_the_engine_runs():
    with pytest.raises(pallas_kernels.UnsupportedError, match="needs a CUDA device"):
        case().fields()
    with pallas_kernels.interpret(), pytest.raises(pallas_kernels.UnsupportedError, match="16"):
        case(d_model=1000).fields()


def test_arguments_have_the_activity_asked_for():
    for nnz, (_, pre, *_) in case(tokens=512, d_model=64).arguments().items():
        assert float(jnp.mean(jnp.sum(pre > 0, axis=1))) == pytest.approx(nnz, rel=0.15)


def test_an_entry_keeps_what_was_measured_before(monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H200")
    key = tuning.Bucket("NVIDIA H200", "bfloat16", 16384, 1024, 2048)
    other = key._replace(width=2048)
    table = {key: {"walk_warps": 2, "hot_neurons": 64}, other: {"grad_rows": 256}}
    monkeypatch.setattr(configs, "MEASURED", table)
    trials = [
        ffn_tuning.Trial("walk_warps", 1, {15.0: [0.1, 0.3, 0.4], 30.0: [0.5, 0.6, 0.7]}),
        ffn_tuning.Trial("walk_warps", 2, {}, error="too much shared memory"),
        ffn_tuning.Trial("walk_warps", 4, {15.0: [0.2], 30.0: [0.31234567]}, chosen=True),
    ]
    text = ffn_tuning.entry(case(), trials, "ms, " + "a long word " * 12)
    assert "# 1 / 4: 0.3 / 0.2 at 15, 0.6 / 0.3123 at 30. 2: does not run." in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert eval(f"{{\n{text}\n}}", {"tuning": tuning}) == {
        key: {"walk_warps": 4, "hot_neurons": 64}
    }
