"""Turns, and that a timed call is one whose work is done."""

import jax
import numpy as np

from sparsejax.studies import timing
from sparsejax.studies.timing import Model, in_turns, time_models


def test_everybody_runs_once_per_repetition_and_begins_in_turn():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = in_turns(runs, 3, 2)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert list(times) == ["a", "b", "c"]
    assert all(0 <= t.least <= t.ms <= t.most for t in times.values())
    calls.clear()
    in_turns(runs, 1, 1, warm=False)
    assert "".join(calls) == "abc"


def test_models_of_one_config_share_programs_and_all_work_is_waited_for(model, monkeypatch):
    lowered, waited = [], []
    lower, wait = timing._lower, jax.block_until_ready

    def count(*args):
        lowered.append(args[0])
        return lower(*args)

    def note(tree):
        waited.append(jax.tree.leaves(tree))
        return wait(tree)

    monkeypatch.setattr(timing, "_lower", count)
    config, params = model
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    models = {"a": Model(config, params), "b": Model(config, other)}
    monkeypatch.setattr(jax, "block_until_ready", note)
    found = time_models(models, seq_len=4, steps=3, batch=2, reps=1, calls=2)
    assert [list(times) for times in found.values()] == [["a", "b"], ["a", "b"]]
    assert len(lowered) == 1
    # Twice (warm and timed) for both models: two calls' new ids, then two calls' next ids.
    shapes = [[np.shape(leaf) for leaf in leaves] for leaves in waited]
    assert shapes == [[(1, 3), (1, 3)]] * 4 + [[(2,), (2,)]] * 4
