"""The rule that picks a value, values that do not run, and results that must not change."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import FFNConfig
from pallas_kernels.testing import assert_kernels, lower_for_cuda
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
    assert tuner.config == dataclasses.replace(start, list_warps=2)
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


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("one", [case(), case(tokens=8), case("train", d_model=2048, d_ff=5632)])
def test_the_least_and_largest_values_lower_for_cuda(one):
    with pallas_kernels.interpret():
        fields = one.known_fields()
    x, weight = (
        jax.ShapeDtypeStruct((rows, one.d_model), jnp.bfloat16) for rows in (one.tokens, one.d_ff)
    )
    arrays = [x, weight, weight, weight]
    if one.mode == "train":
        arrays += [x, jax.ShapeDtypeStruct((one.tokens,), jnp.float32)]
        kernel = "gated_ffn_grad_weights"
    elif one.decodes:
        arrays, kernel = [tuple(arrays)], "gated_ffn_decode_hidden"
    else:
        arrays[1], kernel = jax.ShapeDtypeStruct((one.tokens, one.d_ff), x.dtype), "gated_ffn_walk"
    for end in (0, -1):
        values = {name: values[end] for name, values in fields.items()}
        config = dataclasses.replace(one.start, **values)
        assert_kernels(lower_for_cuda(one.form(config), *arrays), kernel)


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
