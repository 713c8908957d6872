"""Stages that do not train: done once, with the settings they were done with."""

import pytest

from sparsejax.training.stages import run_stage


def test_work_is_done_once(tmp_path):
    calls = []

    def work():
        calls.append(1)
        return {"path": tmp_path, "numbers": (1, 2.5)}

    folder = tmp_path / "stage"
    want = {"path": str(tmp_path), "numbers": [1, 2.5]}
    assert run_stage(folder, {"a": (1, 2)}, work) == want
    assert run_stage(folder, {"a": [1, 2]}, work) == want
    assert len(calls) == 1
    told = r"stage was made with other settings \(then vs now\): a\[1\]: 2 vs 3\. Use those of "
    fixes = rf"then again; or remove {folder} and .* another folder in the place of {tmp_path}$"
    with pytest.raises(ValueError, match=told + fixes):
        run_stage(folder, {"a": [1, 3]}, work)


def test_work_that_fails_is_done_again(tmp_path):
    def fails():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_stage(tmp_path, {}, fails)
    assert run_stage(tmp_path, {}, lambda: {"x": 1}) == {"x": 1}


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}}'])
def test_a_damaged_marker_is_told(tmp_path, content):
    (tmp_path / "stage.json").write_text(content)
    with pytest.raises(ValueError, match=r"stage.json is damaged; remove it"):
        run_stage(tmp_path, {}, dict)
