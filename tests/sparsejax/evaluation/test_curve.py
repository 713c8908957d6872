"""The table and the picture of the loss by position."""

import csv

import numpy as np
import pytest

from sparsejax.evaluation import Perplexity, write_curve
from sparsejax.evaluation.curve import _octaves, write_text


def test_what_is_written(tmp_path):
    tokens = np.array([3, 2, 0, 1])
    nats = np.array([9.0, 4.0, 0.0, 1.5])
    result = Perplexity("c", 6, 6, 14.5, 5, None, 4, 4, nats, tokens, np.zeros(2))
    table, picture = write_curve(result, tmp_path / "new")
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["position", "tokens", "nats_per_token"], ["0", "3", "3.0"], ["1", "2", "2.0"],
                    ["3", "1", "1.5"]]  # fmt: skip
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert {p.name for p in (tmp_path / "new").iterdir()} == {table.name, picture.name}


def test_means_of_ranges():
    positions, tokens = np.arange(64), np.arange(64) + 1
    nats = 1 / (positions + 1.0)
    middles, means = _octaves(positions, tokens, nats)
    # The last range but one holds 54 to 63, from 2 ** 5.75 on; 64 stands alone.
    assert means[-2] == pytest.approx(10 / sum(range(54, 64)))
    assert 54 < middles[-2] < 63 and middles[-1] == 64
    assert means[0] == 1.0


def test_files_are_whole_or_absent(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "half of a pair: \ud800")
    assert file.read_text() == "before"
