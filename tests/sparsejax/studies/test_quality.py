"""Held-out loss by walking agrees with the model's own logits."""

import jax
import numpy as np
import pytest

import pallas_kernels
from sparsejax import apply, surgery
from sparsejax.data import array_source
from sparsejax.studies.quality import engine_errors, held_out, windows


def text(count):
    ids = np.random.default_rng(0).integers(0, 48, count).astype(np.uint16)
    return ids, array_source(ids, vocab_size=48, eot_id=0, name="words")


def test_windows_cover_the_text_once():
    ids, source = text(5 * 16 + 9)
    batches = windows(source, 16, 2)
    assert [b["tokens"].shape for b in batches] == [(2, 16)] * 3
    kept = [b["targets"][b["loss_mask"].astype(bool)] for b in batches]
    np.testing.assert_array_equal(np.concatenate(kept), ids[1 : 5 * 16 + 1])
    np.testing.assert_array_equal(batches[0]["tokens"][1], ids[16:32])
    assert not batches[2]["loss_mask"][1].any()
    assert len(windows(source, 16, 2, batches=1)) == 1


def test_a_text_without_a_window_is_named():
    with pytest.raises(ValueError, match="words/train has 16 tokens, a window needs 17"):
        windows(text(16)[1], 16, 2)


@pytest.mark.parametrize("parallel", [False, True])
def test_held_out_is_the_mean_of_log_softmax(model, parallel):
    if parallel:
        model = surgery.parallelize_blocks(*model, [(1, 2)])
    _, source = text(3 * 16 + 1)
    batches = windows(source, 16, 2)
    logp = [jax.nn.log_softmax(np.asarray(apply(*model, b["tokens"]))) for b in batches]
    found = [
        np.take_along_axis(np.asarray(p), b["targets"][..., None], -1)[..., 0][b["loss_mask"]]
        for p, b in zip(logp, batches, strict=True)
    ]
    assert held_out(*model, batches) == pytest.approx(-np.concatenate(found).mean(), rel=1e-5)


def test_half_precision_has_an_error_and_float32_none(model):
    config, params = model
    tokens = windows(text(33)[1], 16, 2)[0]["tokens"]
    none = engine_errors(config, params, tokens, None)
    assert none["error_dense"] < 1e-6
    assert none["error_sparse"] is None
    with pallas_kernels.interpret():
        wide = engine_errors(config, params, tokens, "triton")
        half = engine_errors(config.replace(dtype="bfloat16"), params, tokens, "triton")
    # Another engine, so other roundings.
    assert wide["error_dense"] != wide["error_sparse"] < 1e-5
    assert half["error_dense"] != half["error_sparse"]
    assert all(1e-4 < error < 5e-2 for error in half.values())
