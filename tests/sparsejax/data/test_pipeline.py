"""Batches against windows cut by hand: order, epochs, processes, masks, resuming."""

import dataclasses
import json
import pickle

import grain
import numpy as np
import pytest

from sparsejax.data import array_source, document_arrays, make_loader, open_source
from sparsejax.data.windows import Windows

T = 5


def make_source(num_windows=20, seed=0, name="corpus"):
    """Distinct windows: the ids count up, every 7th or so is the end mark 0."""
    tokens = np.arange(1, num_windows * T + 4)
    rng = np.random.default_rng(seed)
    tokens[rng.random(len(tokens)) < 1 / 7] = 0
    return array_source(tokens, vocab_size=2000, eot_id=0, name=name)


def windows_of(source, seq_len=T):
    count = (len(source.tokens) - 1) // seq_len
    return [tuple(source.tokens[i * seq_len : i * seq_len + seq_len + 1]) for i in range(count)]


def rows_of(batches):
    """Windows put together again from inputs and targets."""
    rows = []
    for batch in batches:
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        whole = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)
        rows += [tuple(row) for row in whole.tolist()]
    return rows


def take(loader, count):
    return [next(loader) for _ in range(count)]


def loader_of(source, **overrides):
    arguments = {"batch_size": 4, "seq_len": T, "seed": 3} | overrides
    return make_loader(source, **arguments)


def test_unshuffled_batches_are_the_windows_in_order():
    source = make_source()
    loader = loader_of(source, shuffle=False, num_epochs=1)
    assert (loader.num_windows, loader.num_batches) == (20, 5)
    batches = list(loader)
    assert rows_of(batches) == windows_of(source)
    assert loader.step == 5
    for batch in batches:
        assert set(batch) == {"tokens", "targets"}
        for array in batch.values():
            assert (array.dtype, array.shape) == (np.int32, (4, T))


def test_each_epoch_has_every_window_once_in_its_own_order():
    source = make_source()
    rows = rows_of(take(loader_of(source), 15))
    epochs = [rows[i : i + 20] for i in (0, 20, 40)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(windows_of(source))
        assert epoch != windows_of(source)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_batches_run_across_the_epoch_border_and_lose_nothing():
    source = make_source(num_windows=10)  # 4 does not divide 10
    rows = rows_of(take(loader_of(source), 5))
    assert sorted(rows) == sorted(2 * windows_of(source))
    assert sorted(rows[:10]) == sorted(rows[10:]) == sorted(windows_of(source))


def test_the_order_follows_the_seed_alone():
    source = make_source()
    rows = rows_of(take(loader_of(source), 5))
    assert rows_of(take(loader_of(source), 5)) == rows
    assert rows_of(take(loader_of(source, batch_size=2), 10)) == rows
    assert rows_of(take(loader_of(source, mask_documents=True), 5)) == rows
    assert rows_of(take(loader_of(source, seed=4), 5)) != rows


def test_finite_data_leaves_out_or_completes_the_last_batch():
    source = make_source(num_windows=10)
    dropped = loader_of(source, num_epochs=1)
    assert dropped.num_batches == 2
    rows = rows_of(dropped)
    assert len(set(rows)) == 8
    with pytest.raises(StopIteration):
        next(dropped)

    for mask_documents in (False, True):
        options = {"num_epochs": 1, "drop_remainder": False, "mask_documents": mask_documents}
        padded = loader_of(source, **options)
        assert padded.num_batches == 3
        batches = list(padded)
        assert rows_of(batches)[:8] == rows
        assert sorted(rows_of(batches)[:10]) == sorted(windows_of(source))
        kept = np.concatenate([batch["loss_mask"] for batch in batches])
        assert kept.dtype == bool
        assert not kept[10:].any()
        last = batches[-1]
        assert (last["tokens"][2:] == source.eot_id).all()
        if mask_documents:
            inner = np.concatenate([batch["tokens"] for batch in batches])[:10]
            np.testing.assert_array_equal(kept[:10], inner != 0)
            assert (last["segment_ids"][:2] > 0).all()
            assert not last["segment_ids"][2:].any()
        else:
            assert kept[:10].all()
    # Each process completes its own block.
    parts = [list(loader_of(source, process_index=p, process_count=4, **options)) for p in range(4)]
    for step, batch in enumerate(batches):
        for key, whole in batch.items():
            joined = np.concatenate([part[step][key] for part in parts])
            np.testing.assert_array_equal(joined, whole)


@pytest.mark.parametrize("process_count", [2, 4])
def test_blocks_of_the_processes_joined_are_the_batch_of_one(process_count):
    source = make_source(num_windows=10)
    options = {"batch_size": 8, "mask_documents": True}
    whole = take(loader_of(source, **options), 7)
    parts = [
        take(loader_of(source, process_index=p, process_count=process_count, **options), 7)
        for p in range(process_count)
    ]
    for step, batch in enumerate(whole):
        for key in batch:
            joined = np.concatenate([part[step][key] for part in parts])
            np.testing.assert_array_equal(joined, batch[key])


def test_document_arrays_against_a_walk_over_the_tokens():
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((6, 40)) < 0.2, 9, rng.integers(0, 9, (6, 40)))
    tokens[0, :] = 1  # no document ends
    tokens[1, :] = 9  # each token ends one
    tokens[2, -1] = tokens[3, 0] = 9
    arrays = document_arrays(tokens, 9)
    for row in range(6):
        segment, position = 1, 0
        for t in range(40):
            assert arrays["segment_ids"][row, t] == segment
            assert arrays["positions"][row, t] == position
            assert arrays["loss_mask"][row, t] == (tokens[row, t] != 9)
            position += 1
            if tokens[row, t] == 9:
                segment, position = segment + 1, 0
    assert arrays["segment_ids"].dtype == arrays["positions"].dtype == np.int32
    assert arrays["loss_mask"].dtype == bool


def test_masked_batches_hold_the_arrays_of_their_rows():
    batch = next(loader_of(make_source(), mask_documents=True))
    assert set(batch) == {"tokens", "targets", "segment_ids", "positions", "loss_mask"}
    for row in range(4):
        expected = document_arrays(batch["tokens"][row], 0)
        for key, array in expected.items():
            np.testing.assert_array_equal(batch[key][row], array)


def test_an_id_beyond_the_vocabulary_stops_the_batch_that_reads_it():
    source = make_source()
    tokens = source.tokens.copy()
    tokens[57] = 2000  # in window 11, checked when read
    loader = loader_of(
        dataclasses.replace(source, tokens=tokens), batch_size=1, shuffle=False, num_epochs=1
    )
    take(loader, 11)
    with pytest.raises(ValueError, match=r"corpus/train: token 57 has id 2000, outside .* of 2000"):
        next(loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 103}, r"has 103 tokens, too few .* seq_len \+ 1 = 104; .* at most 102"),
        ({"batch_size": 21, "num_epochs": 1}, r"20 windows of seq_len 5; 1 epoch.* batch of 21"),
        ({"batch_size": 6, "process_count": 4}, "6 .* does not divide by process_count 4"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"seq_len": 2.0}, "seq_len must be an integer of at least 1, got 2.0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": 2**32}, "seed must be below"),
        ({"num_epochs": 0}, "num_epochs must be an integer of at least 1, got 0"),
        ({"worker_count": -1}, "worker_count must be an integer of at least 0, got -1"),
        ({"process_index": 2, "process_count": 2}, r"process_index must be in 0\.\.1 .* got 2"),
        ({"drop_remainder": False}, "drop_remainder=False needs num_epochs"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        loader_of(make_source(), **arguments)


def test_one_window_is_enough():
    source = array_source(np.arange(T + 1), vocab_size=9, eot_id=0)
    loader = loader_of(source, batch_size=2)
    assert rows_of(take(loader, 2)) == windows_of(source) * 4
    with pytest.raises(ValueError, match="too few"):
        loader_of(array_source(np.arange(T), vocab_size=9, eot_id=0))


class Checkpointable:
    """A loader under the names that grain's own checkpoint test calls."""

    def __init__(self, **arguments):
        self._arguments = arguments

    def __iter__(self):
        loader = loader_of(make_source(num_windows=10), num_epochs=3, **self._arguments)
        loader.get_state, loader.set_state = loader.state, loader.restore
        return loader


@pytest.mark.parametrize("arguments", [{}, {"mask_documents": True, "drop_remainder": False}])
def test_every_state_gives_the_rest_of_the_run(arguments):
    grain.experimental.assert_equal_output_after_checkpoint(Checkpointable(**arguments))


@pytest.mark.parametrize("num_windows", [10, 20])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_resuming_at_an_epoch_border_follows_that_epoch(num_windows, offset):
    """Borders after batch 5 (20 windows) and inside batch 2 (10 windows, batches of 4)."""
    source = make_source(num_windows)
    unbroken = rows_of(take(loader_of(source), 20))
    for border in (num_windows // 4, 2 * num_windows // 4):
        step = border + offset
        before = loader_of(source)
        take(before, step)
        state = json.loads(json.dumps(before.state()))
        assert state["step"] == step
        after = loader_of(source)
        take(after, 3)  # a loader that has read is set back as well
        after.restore(state)
        assert after.step == step
        assert rows_of(take(after, 20 - step)) == unbroken[4 * step :]
        assert rows_of(take(before, 20 - step)) == unbroken[4 * step :]


def test_another_number_of_processes_continues_the_same_batches():
    source = make_source()
    unbroken = rows_of(take(loader_of(source), 12))
    first = loader_of(source, process_index=1, process_count=2)
    take(first, 7)
    state = first.state()
    assert loader_of_state(source, state, 1, 12) == unbroken[28:]
    assert loader_of_state(source, state, 4, 12) == unbroken[28:]


def loader_of_state(source, state, process_count, stop):
    parts = []
    for index in range(process_count):
        loader = loader_of(source, process_index=index, process_count=process_count)
        loader.restore(state)
        parts.append(take(loader, stop - state["step"]))
    rows = []
    for step in zip(*parts, strict=True):
        for batch in step:
            rows += rows_of([batch])
    return rows


def test_state_of_all_processes_is_equal():
    states = []
    for index in range(2):
        loader = loader_of(make_source(), process_index=index, process_count=2)
        take(loader, 3)
        states.append(loader.state())
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("key", "now", "message"),
    [
        ("batch_size", 2, "batch_size: saved 4, now 2"),
        ("seq_len", 4, "seq_len: saved 5, now 4"),
        ("seed", 4, "seed: saved 3, now 4"),
        ("shuffle", False, "shuffle: saved True, now False"),
        ("mask_documents", True, "mask_documents: saved False, now True"),
        ("worker_count", 2, "worker_count: saved 0, now 2"),
    ],
)
def test_another_loader_is_refused_with_both_values(key, now, message):
    source = make_source()
    state = loader_of(source).state()
    loader = loader_of(source, **{key: now})
    with pytest.raises(ValueError, match=message):
        loader.restore(state)
    loader.close()


def test_another_corpus_is_refused_with_both_values():
    state = loader_of(make_source()).state()
    other = make_source(seed=1)  # as long, other tokens
    with pytest.raises(ValueError, match=r"fingerprint: saved 'corpus, 103 .*', now 'corpus, 103 "):
        loader_of(other).restore(state)
    with pytest.raises(ValueError, match="num_windows: saved 20, now 21"):
        loader_of(make_source(num_windows=21)).restore(state)
    with pytest.raises(ValueError, match="now 'renamed, 103"):
        loader_of(make_source(name="renamed")).restore(state)


def test_another_number_of_processes_or_workers_is_refused_with_workers():
    source = make_source()
    state = loader_of(source).state()
    state["identity"] |= {"worker_count": 2, "process_count": 2}
    with pytest.raises(ValueError, match=r"worker_count: saved 2, now 0; process_count: saved 2"):
        loader_of(source).restore(state)
    with loader_of(source, worker_count=2) as loader:
        with pytest.raises(ValueError, match="process_count: saved 2, now 1"):
            loader.restore(state)
        assert loader.step == 0


def test_damaged_states_are_refused():
    loader = loader_of(make_source(), num_epochs=1)
    state = loader.state()
    with pytest.raises(ValueError, match="lacks grain, identity"):
        loader.restore({"version": 1, "step": 0})
    with pytest.raises(ValueError, match="version 2, this code reads 1"):
        loader.restore(state | {"version": 2})
    with pytest.raises(ValueError, match="step 6, this loader ends after 5"):
        loader.restore(state | {"step": 6, "grain": {"next_index": 6}})
    with pytest.raises(ValueError, match="damaged: step 2, but the reader stands at"):
        loader.restore(state | {"step": 2})
    assert len(list(loader)) == 5


def test_a_closed_loader_says_so():
    with loader_of(make_source()) as loader:
        next(loader)
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    loader.close()


def test_mapped_tokens_travel_to_workers_as_a_path(tmp_path):
    tokens = np.arange(100_000, dtype=np.uint16) % 2000
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    source = array_source(mapped, vocab_size=2000, eot_id=0)
    assert source.tokens is mapped
    pickled = pickle.dumps(Windows(source, T))
    assert len(pickled) < 2000
    np.testing.assert_array_equal(pickle.loads(pickled)[7], tokens[35:41])
    # A part of a mapped file does not start where the file does: it travels whole.
    part = Windows(dataclasses.replace(source, tokens=mapped[50:]), T)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(part))[7], tokens[85:91])


def test_the_default_corpus_gives_text():
    source = open_source("stdlib", "val")
    batch = next(make_loader(source, batch_size=2, seq_len=64, seed=0))
    assert batch["tokens"].max() < 257
    text = source.tokenizer.decode(batch["tokens"][0].tolist())
    assert text.encode() in source.tokens.astype(np.uint8).tobytes()
