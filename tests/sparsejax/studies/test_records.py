"""Records are found by their keys, also after reading the file again."""

import csv
import re

import pytest

from sparsejax.studies.records import Budget, Records, check_same_settings, write_csv


def test_found_again(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    records = Records(path)
    assert records.find({"l1": 1e-3, "sizes": (1, 2)}) is None
    records.add({"l1": 1e-3, "sizes": (1, 2), "seed": 0}, {"ce": 1.5})
    records.add({"l1": 1e-3, "sizes": (1, 2), "seed": 1}, {"ce": 1.6})
    again = Records(path)
    assert again.find({"sizes": (1, 2), "seed": 1, "l1": 0.001})["ce"] == 1.6
    assert again.find({"l1": 1e-3, "sizes": (1, 2)}) is None  # a part of a key is no key
    again.add({"l1": 1e-3, "sizes": [1, 2], "seed": 0}, {"ce": 1.4})
    assert [r["ce"] for r in again.all(sizes=(1, 2))] == [1.4, 1.6]
    assert again.all(seed=2) == []
    assert all(r["jax"] and "cpu" in r["device"] for r in Records(path).all())


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": {}}\n{"ce": 1}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl: line 2 is no record"):
        Records(path)


def test_tables_may_have_rows_of_different_columns(tmp_path):
    write_csv(tmp_path / "t.csv", [{"a": 1, "b": 0.123456789}, {"a": 2, "c": "x"}])
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"a": "1", "b": "0.123457", "c": ""}, {"a": "2", "b": "", "c": "x"}]


def test_a_budget_without_limit_is_never_spent():
    assert not Budget(None).spent and Budget(0.0).spent and not Budget(1e6).spent


def test_a_table_of_other_settings_is_not_overwritten(tmp_path):
    path = tmp_path / "new" / "table.csv"
    settings = {"steps": 2, "rate": 1 / 3, "sizes": (2, 4), "limit": None, "corpus": "a, b"}
    check_same_settings(path, settings)
    write_csv(path, [{"ce": 1.5} | settings, {"ce": 1.6, "more": 1} | settings])
    check_same_settings(path, settings)
    message = (
        f"{path} holds results of other settings (there vs now): steps '2' vs '3'; limit '' vs "
        "'5'; long 'not told' vs '0.5'. Name another --results, or delete the file"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_same_settings(path, settings | {"steps": 3, "limit": 5, "long": 0.5})
    write_csv(path, [])
    check_same_settings(path, settings)
