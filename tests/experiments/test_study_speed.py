"""`experiments/study_speed.py --smoke`: checkpoints whole and without dead neurons."""

import csv
import sys

import numpy as np
import pytest

from sparsejax import benchmark, param_shapes, surgery
from sparsejax.analysis import ActivationStats, LayerActivations
from sparsejax.config import FFNConfig, LayerConfig, ModelConfig
from sparsejax.studies.records import Records


@pytest.mark.slow
def test_every_case_has_its_variants_and_is_measured_once(run_study):
    results = run_study("speed")
    records = Records(results / "study_speed.jsonl").all()
    found = [(r["key"]["pruned"], r["key"]["mode"]) for r in records]
    assert found == [(p, m) for p in (False, True) for m in ("train", "decode")]
    whole, dropped = records[0], records[2]
    # Neurons that are dead on the training text may speak on this one; here there are none.
    assert whole["d_ff"] == dropped["d_ff"] == [64]
    assert dropped["ce"] == pytest.approx(whole["ce"], rel=1e-6)
    for record in records:
        rows = {row["variant"]: row for row in record["rows"]}
        training = record["key"]["mode"] == "train"
        variants = ["dense_silu", "dense_relu", "sparse_relu"]
        assert list(rows) == [*variants, "picked"] if training else variants
        if training:  # so small a layer is dense
            assert rows["picked"]["engines"] == ["xla"]
            assert rows["picked"]["nnz_seen"] == rows["dense_relu"]["nnz_seen"]
        fastest = min(rows["dense_silu"]["ms"], rows["dense_relu"]["ms"])
        for row in rows.values():
            assert row["ratio_to_fastest_dense"] == pytest.approx(fastest / row["ms"])
            assert row["peak_bytes"] > 0 and row["joules_per_token"] is None
        assert rows["dense_silu"]["nnz_seen"] == [64.0]
        assert 0 < rows["sparse_relu"]["nnz_seen"][0] < 64
        assert rows["sparse_relu"]["sparse_per_layer"] == [0.0]
        # float32 on a CPU, and both engines are the dense one.
        assert record["error_dense"] < 1e-5
        assert record["error_sparse"] is None  # no sparse engine on a CPU
    with (results / "study_speed.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 14 and {row["checkpoint"] for row in table} == {"L1 0.01"}
    before = (results / "study_speed.jsonl").read_text()
    run_study("speed")
    assert (results / "study_speed.jsonl").read_text() == before


def test_engines_are_picked_by_what_training_text_activates(run_study):
    """Refused flags load the script; nothing runs."""
    with pytest.raises(ValueError, match=r"^--results: nothing"):
        run_study("speed", "--results", __file__)
    script = sys.modules["study_speed"]
    layer = LayerConfig(attention=None, ffn=FFNConfig(d_ff=2816))
    config = ModelConfig(vocab_size=8, d_model=1024, layers=(layer,) * 2)
    found = []
    for index, nnz in enumerate((2, 900)):
        histogram, fired = np.zeros(2817, np.int64), np.zeros(2816, np.int64)
        histogram[nnz], fired[1 : 2 * nnz + 1] = 100, 50
        found.append(LayerActivations(index, histogram, fired, fired[:1], fired[:1]))
    stats = ActivationStats(tuple(found), 100)
    shape = benchmark.Shape(32, 1024)
    for mode in ("prefill", "train"):
        assert script.engines_of(config, stats, mode, shape) == ("triton", "xla")
    assert script.engines_of(config, stats, "decode", shape) is None
    assert script.engines_of(config, stats, "prefill", benchmark.Shape(1, 64)) is None
    # Without dead neurons: the same counts, of fewer neurons.
    shapes = param_shapes(config)
    smaller, _, report = surgery.drop_dead_neurons(config, shapes, stats, multiple=128)
    kept = script.of_kept(stats, report)
    assert [layer.d_ff for layer in kept.layers] == [128, 1920]
    for before, after in zip(stats.layers, kept.layers, strict=True):
        assert (after.mean, after.maximum, after.tokens) == (before.mean, before.maximum, 100)
        np.testing.assert_array_equal(after.fired, before.fired[: after.d_ff])
    assert script.engines_of(smaller, kept, "train", shape) == ("xla", "xla")


def test_refused_before_anything_runs(run_study):
    with pytest.raises(ValueError, match=r"^--results: nothing can be written in the folder"):
        run_study("speed", "--results", __file__)
    script = sys.modules["study_speed"]
    for changes, message in (
        ({"modes": ()}, "^--modes is an empty list"),
        ({"decode_rows": (1, 0)}, "^--decode-rows: every number must be at least 1, got 0$"),
        ({"decode_steps": 1024}, "^--decode-steps 1024 leave no room .* --seq-len 1024"),
        ({"setting": script.Setting(evaluations=0)}, "^--evaluations must be at least 1, got 0$"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Args(**changes))
