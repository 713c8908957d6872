"""Agreement between processes; with two of them it is tested beside the checkpoints."""

import pytest

from sparsejax.training.processes import from_all_processes, from_process_0


def test_one_process_agrees_with_itself():
    assert from_process_0(lambda: {1: {2}}) == {1: {2}}  # nothing is encoded on the way
    assert from_all_processes("x") == ["x"]


def test_its_error_is_raised_as_it_is():
    def fail():
        raise OSError("disk gone")

    with pytest.raises(OSError, match=r"^disk gone$"):
        from_process_0(fail)
