"""Flags are refused by name, and places to write are made or refused, before anything runs."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import pytest

from sparsejax import presets
from sparsejax.studies.flags import (
    PICTURES,
    RESULTS,
    at_least,
    check_devices,
    check_file,
    check_folder,
    check_setting,
    first_layers,
    not_empty,
    own_settings,
    smoke_results,
    with_smoke,
)
from sparsejax.studies.stages import Recovery
from sparsejax.studies.sweep import Setting


@dataclasses.dataclass(frozen=True)
class Flags:
    """As scripts have them."""

    d_model: int = 4
    calls: int | None = None
    batches: tuple[int, ...] = (1, 8)
    names: tuple[str, ...] = ("a",)
    setting: Setting = Setting()
    recovery: Recovery = Recovery(recover_steps=7)
    results: Path = Path("somewhere")
    smoke: bool = False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 0}, "--d-model must be at least 1, got 0"),
        ({"d_model": float("nan")}, "--d-model must be at least 1, got nan"),
        ({"calls": 0}, "--calls must be at least 1, got 0"),
        ({"batches": (1, 0)}, "--batches: every number must be at least 1, got 0"),
        (
            {"batches": ()},
            "--batches is an empty list: name one or more, or leave the flag out",
        ),
        ({"names": ()}, "--names is an empty list: name one or more, or leave the flag out"),
    ],
)
def test_numbers_and_lists(changes, message):
    def check(flags):
        at_least(flags, 1, "d_model", "calls", "batches")
        not_empty(flags, "names")

    check(Flags())
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(Flags(**changes))


def test_a_setting():
    check_setting(Setting())
    with pytest.raises(ValueError, match=r"^--evaluations must be at least 1, got 0$"):
        check_setting(Setting(evaluations=0))


def test_a_missing_folder_is_made_and_nothing_else(tmp_path):
    path = tmp_path / "new" / "er" / "rows.jsonl"
    check_file("--out", path)
    check_file("--out", None)
    assert path.parent.is_dir() and os.listdir(path.parent) == []
    path.write_text("kept\n")
    check_file("--out", path)
    assert path.read_text() == "kept\n"
    check_folder("--results", tmp_path / "further")
    assert os.listdir(tmp_path / "further") == []


def test_where_nothing_can_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ValueError, match=rf"^--out {re.escape(str(tmp_path))} is a folder; name a"):
        check_file("--out", tmp_path)
    with pytest.raises(ValueError, match=r"^--plot must end in .png or .pdf or .svg, got f.txt$"):
        check_file("--plot", Path("f.txt"), *PICTURES)
    refused = rf"^--out: nothing can be written in the folder {file}/a \(Not a directory\); name an"
    with pytest.raises(ValueError, match=refused):
        check_file("--out", file / "a" / "rows.jsonl")
    with pytest.raises(ValueError, match=rf"^--results: .* the folder {file} \(File exists\)"):
        check_folder("--results", file)
    assert file.read_text() == "kept"


def test_settings_of_a_row():
    assert own_settings(Flags()) == {
        "study_d_model": 4,
        "study_calls": None,
        "study_batches": (1, 8),
        "study_names": ("a",),
        "study_recover_steps": 7,
        "study_recover_rate": 3e-4,
        "study_recover_l1": None,
    }


def test_too_many_devices_are_refused_and_a_cpu_is_told_how_to_have_them(monkeypatch):
    check_devices("--tensor 8", 8)
    told = "--tensor 9 needs more than the 8 devices here"
    how = "; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=9 makes 9"
    with pytest.raises(ValueError, match=f"^{told}{how}$"):
        check_devices("--tensor 9", 9)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=f"^{told}$"):
        check_devices("--tensor 9", 9)


def test_smoke_runs_stay_out_of_real_results():
    assert smoke_results(RESULTS) == Path("runs/smoke")
    assert smoke_results(Path("mine")) == Path("mine")
    assert RESULTS.parts[0] == "runs"  # nor does any study write over the published tables


def test_the_first_layers_of_a_model():
    model = presets.get("tiny")
    assert first_layers(model, None, "tiny") == model
    assert first_layers(model, 2, "tiny").layers == model.layers[:2]
    with pytest.raises(
        ValueError, match=r"^--layers must be at most the 4 layers of 'tiny', got 5$"
    ):
        first_layers(model, 5, "tiny")


def test_a_smoke_test_replaces_no_flag_without_a_word():
    @dataclasses.dataclass(frozen=True)
    class Inner:
        steps: int = 600
        data: str = "stdlib"

    @dataclasses.dataclass(frozen=True)
    class Args:
        inner: Inner = Inner()
        sizes: tuple[int, ...] = (2, 4)
        out: str | None = None

    small = {"inner": Inner(steps=4), "sizes": (1,)}
    assert with_smoke(Args(out="x"), **small) == Args(Inner(steps=4), (1,), "x")
    assert with_smoke(Args(sizes=(1,)), **small).sizes == (1,)
    with pytest.raises(ValueError, match=r"--sizes \(3,\) beside --smoke, which sets \(1,\) there"):
        with_smoke(Args(sizes=(3,)), **small)
    with pytest.raises(ValueError, match="--steps 9 beside --smoke, which sets 4"):
        with_smoke(Args(Inner(steps=9)), **small)
