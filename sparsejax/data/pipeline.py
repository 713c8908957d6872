"""Batches for training: windows over a token array, shuffled, split over processes, resumable.

    windows of seq_len + 1 tokens, stride seq_len          (N windows per epoch)
    -> shuffle (another order each epoch) -> repeat        one global order of rows
    -> this process's batches                              step s: rows [s B, (s + 1) B)
    -> worker processes (optional)

The global order depends on the corpus, `seq_len` and `seed` alone. Process p of P takes the p-th of
P equal blocks of a step's rows, so the blocks joined in process order are the batch of a single
process. Batches run across epoch borders: no window is dropped there. Workers share out whole
batches by number; an iterator batched in front of the workers would make each of them drop rows.
"""

import json
import types
from collections.abc import Iterator
from typing import Any, Self

import grain
import numpy as np
from absl import flags

from sparsejax.data.sources import TokenSource
from sparsejax.data.windows import Batch, ProcessBatches, Windows

_STATE_VERSION = 1
_BATCHES_AHEAD_PER_WORKER = 2


class Loader:
    """Iterator over one process's batches; made by `make_loader`.

    Attributes:
        num_windows: rows of one epoch, over all processes.
        num_batches: global batches until it ends; None when it repeats forever.
        step: global batches given so far, those before a restore included.
    """

    def __init__(
        self,
        iterator: grain.DatasetIterator,
        *,
        identity: dict[str, Any],
        num_batches: int | None,
    ):
        self._iterator = iterator
        self._identity = identity
        self._closed = False
        self.num_windows: int = identity["num_windows"]
        self.num_batches = num_batches
        self.step = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise ValueError("this Loader is closed; make another with make_loader")
        batch = next(self._iterator)
        self.step += 1
        if self._identity["worker_count"]:  # views of shared memory, which ends with the worker
            batch = {key: np.array(array) for key, array in batch.items()}
        return batch

    def state(self) -> dict[str, Any]:
        """Where the loader stands and what it reads, as plain JSON; equal on all processes."""
        state = {
            "version": _STATE_VERSION,
            "step": self.step,
            "grain": self._iterator.get_state(),
            "identity": self._identity,
        }
        return json.loads(json.dumps(state))

    def restore(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which `state` was taken.

        Without worker processes the position is counted in global batches, so another
        `process_count` is accepted.

        Args:
            state: from `state()`, maybe of another process or run.

        Raises:
            ValueError: the state is of another corpus or loader (the message gives both values of
                whatever differs), is incomplete, or lies beyond the end.
        """
        missing = {"version", "step", "grain", "identity"} - set(state)
        if missing:
            raise ValueError(f"data state lacks {', '.join(sorted(missing))}; it is damaged")
        if state["version"] != _STATE_VERSION:
            raise ValueError(
                f"data state has version {state['version']}, this code reads {_STATE_VERSION}"
            )
        saved, step = state["identity"], state["step"]
        differing = [
            f"{key}: saved {saved.get(key)!r}, now {value!r}"
            for key, value in self._identity.items()
            if saved.get(key) != value
        ]
        other_processes = saved.get("process_count") != self._identity["process_count"]
        if other_processes and saved.get("worker_count") == self._identity["worker_count"] == 0:
            differing = [text for text in differing if not text.startswith("process_count:")]
        if differing:
            raise ValueError(
                "the data state was saved by another loader, resuming would repeat or skip "
                "tokens; make the loader as it was. " + "; ".join(differing)
            )
        if self.num_batches is not None and not 0 <= step <= self.num_batches:
            raise ValueError(
                f"the data state stands at step {step}, this loader ends after {self.num_batches}"
            )
        if saved["worker_count"] == 0 and state["grain"] != {"next_index": step}:
            raise ValueError(
                f"data state is damaged: step {step}, but the reader stands at {state['grain']}"
            )
        self._iterator.set_state(state["grain"])
        self.step = step

    def close(self) -> None:
        """Ends the worker processes. The loader gives no more batches."""
        if not self._closed:
            self._closed = True
            self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


def _check_arguments(
    batch_size: int,
    seq_len: int,
    seed: int,
    process_index: int,
    process_count: int,
    worker_count: int,
    num_epochs: int | None,
) -> None:
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("seq_len", seq_len, 1),
        ("seed", seed, 0),
        ("process_count", process_count, 1),
        ("worker_count", worker_count, 0),
        ("num_epochs", 1 if num_epochs is None else num_epochs, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if seed >= 1 << 32:
        raise ValueError(f"seed must be below 2**32, got {seed}")
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index must be in 0..{process_count - 1} (process_count is {process_count}), "
            f"got {process_index}"
        )
    if batch_size % process_count:
        raise ValueError(
            f"batch_size {batch_size} (over all processes) does not divide by process_count "
            f"{process_count}; use a multiple of {process_count}"
        )


def make_loader(
    source: TokenSource,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    worker_count: int = 0,
    mask_documents: bool = False,
    shuffle: bool = True,
    num_epochs: int | None = None,
    drop_remainder: bool = True,
) -> Loader:
    """Batches of contiguous windows over a corpus, b = batch_size / process_count rows each.

    Each batch holds `tokens` (b, T) and `targets` (b, T), int32, targets being the next tokens;
    with `mask_documents` also `segment_ids` (b, T), `positions` (b, T) and `loss_mask` (b, T), see
    `document_arrays`. The last (len(tokens) - 1) % T targets of a corpus are never seen.

    Args:
        source: the corpus.
        batch_size: rows of one step over all processes.
        seq_len: T, tokens per row.
        seed: order of the windows, in [0, 2**32).
        process_index: which process this is.
        process_count: how many processes share the batch.
        worker_count: worker processes that read ahead; 0 reads in this process. Batches are the
            same for every count. A script that uses workers needs `if __name__ == "__main__":`.
        mask_documents: add the arrays that keep documents in one row apart.
        shuffle: another random order of windows each epoch; False reads in corpus order.
        num_epochs: stop after so many passes; None repeats forever.
        drop_remainder: with `num_epochs`, leave out the windows after the last full batch. False
            completes the last batch with rows whose `loss_mask` is False (every batch then has a
            `loss_mask`, padding has segment id 0), so that an evaluation sees each window once.

    Raises:
        ValueError: a corpus shorter than one window, no full batch in it, a batch that does not
            divide among the processes, or a number out of range.
    """
    _check_arguments(
        batch_size, seq_len, seed, process_index, process_count, worker_count, num_epochs
    )
    windows = Windows(source, seq_len)
    if len(windows) == 0:
        raise ValueError(
            f"corpus {source.label} has {len(source.tokens)} tokens, too few for one window of "
            f"seq_len + 1 = {seq_len + 1}; use a longer text or seq_len of at most "
            f"{max(0, len(source.tokens) - 1)}"
        )
    if len(windows) > 1 << 32:
        raise ValueError(
            f"corpus {source.label} has {len(windows)} windows of seq_len {seq_len}; the shuffle "
            f"handles 2**32. Use a larger seq_len"
        )
    if num_epochs is None and not drop_remainder:
        raise ValueError("drop_remainder=False needs num_epochs: endless data has no last batch")
    order = grain.MapDataset.source(windows)
    if shuffle:
        order = order.seed(seed).shuffle()
    batches = ProcessBatches(
        order.repeat(num_epochs),
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
        seq_len=seq_len,
        eot_id=source.eot_id,
        mask_documents=mask_documents,
        drop_remainder=drop_remainder,
    )
    if len(batches) == 0:
        raise ValueError(
            f"corpus {source.label} has {len(windows)} windows of seq_len {seq_len}; {num_epochs} "
            f"epoch(s) of them are less than one batch of {batch_size}. Lower batch_size, or give "
            f"drop_remainder=False"
        )
    # The data is in memory or mapped: reader threads would only wait for each other.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.source(batches).to_iter_dataset(reading)
    if worker_count:
        if not flags.FLAGS.is_parsed():  # grain's workers read absl flags, which we do not use
            flags.FLAGS.mark_as_parsed()
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(worker_count, _BATCHES_AHEAD_PER_WORKER)
        )
    identity = {
        "fingerprint": source.fingerprint,
        "num_windows": len(windows),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "seed": seed,
        "shuffle": shuffle,
        "worker_count": worker_count,
        "process_count": process_count,
        "mask_documents": mask_documents,
    }
    return Loader(
        iter(dataset),
        identity=identity,
        num_batches=None if num_epochs is None else len(batches),
    )
