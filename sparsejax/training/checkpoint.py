"""Checkpoints that are proven whole before a run resumes from them; orbax writes the arrays.

orbax stores no checksum and casts to the dtype it is asked for, so both are checked here: first the
metadata (damaged: the step before is tried), then config, structure, shapes and dtypes against the
template (a mismatch is the caller's error), then the digests of the loaded arrays.

In a run of several processes every process makes the same calls. Process 0 reads and writes the
metadata and decides, the others follow. Reading goes without orbax's barriers: a file that only one
process finds damaged makes all of them fall back, instead of leaving the others waiting.
"""

import contextlib
import dataclasses
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from sparsejax.training import checkpoint_meta, digest
from sparsejax.training.checkpoint_folder import META, STATE, CheckpointFolder
from sparsejax.training.checkpoint_meta import LeafMeta, Meta
from sparsejax.training.checkpoint_read import DamagedError, read_arrays
from sparsejax.training.processes import from_all_processes, from_process_0

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; it does not exist, and those before it stay."""


class NonFiniteStateError(ValueError):
    """A state with NaN or infinity was to be saved; it was not, and the checkpoints stay."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over or moved aside; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified checkpoint: `state` has the template's structure and shardings."""

    step: int
    state: Any
    extra: dict[str, Any]


class Checkpointer:
    """Saves and restores a pytree of `jax.Array` under `directory`; a context manager.

    Example:
        with Checkpointer(workdir / "checkpoints") as checkpointer:
            checkpointer.save(100, state, {"config": config_dict, "data": loader_state})
            restored = checkpointer.restore(template)

    Rotation keeps the newest `keep` complete checkpoints and, beyond them, the one that this object
    restored: the only one whose bytes are known to read back right. Damaged and incomplete folders
    do not count and are not removed. Old ones go only after the new one is complete.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 3, async_save: bool = True):
        """Open or create a directory of checkpoints.

        Args:
            directory: folder for the steps, on a file system that all processes share.
            keep: how many complete checkpoints stay, at least 1.
            async_save: write in a background thread, whose errors the next `save`, `wait`,
                `restore` or `close` raises.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        self.directory = Path(directory).resolve()
        self._folder = CheckpointFolder(self.directory)
        self._keep = keep
        self._verified: Meta | None = None  # restored by this object
        self._latest: Meta | None = None  # saved or restored last
        self._saving: int | None = None
        self._async_save = async_save
        self._manager: ocp.CheckpointManager | None = None  # made by the first save

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- saving

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> bool:
        """Write `state` and `extra` as the checkpoint of `step`.

        Returns once the arrays are copied to host memory: the caller may donate their buffers to
        the next training step at once. Afterwards `step` is the newest one: folders of this and
        later steps are moved aside with a `CheckpointWarning`. Only if this object wrote or
        restored the same arrays at this step last, nothing is written (nor `extra`).

        Args:
            step: number of the checkpoint, >= 0.
            state: pytree of `jax.Array`, in a run of several processes global ones.
            extra: JSON values (process 0's are kept); the model's config goes under "config", where
                `restore(expected_config=)` looks for it.

        Returns:
            Whether a checkpoint is being written (False: it was there already).

        Raises:
            NonFiniteStateError: a float leaf is not finite (rotation would remove good checkpoints
                for one that no run should resume from).
            ValueError: a number in `extra` is not finite, or `state` has no arrays or leaves that
                are none.
            CheckpointError: this one, or the one before in the background, could not be written.
        """
        if step < 0:
            raise ValueError(f"step: expected >= 0, got {step}")
        step = operator.index(step)
        self.wait()
        flat = digest.flat_leaves(state)
        summaries = digest.tree_summaries(state)
        if not flat:
            raise ValueError("state: expected at least one array, got an empty tree")
        if bad := [path for path, summary in summaries.items() if not summary.finite]:
            raise NonFiniteStateError(
                f"state of step {step} is not finite in {_some(bad)}; it is not saved, and the "
                f"checkpoints so far stay"
            )
        leaves = {
            path: LeafMeta(leaf.shape, leaf.dtype.name, summaries[path].digest)
            for path, leaf in flat.items()
        }
        meta = Meta(step, leaves, extra)
        encoded = checkpoint_meta.encode(meta)
        if self._is_saved_already(meta):
            return False
        self._make_way(step)
        self._saving, self._latest = step, meta
        # orbax refuses arrays without elements; their shape and dtype in the metadata say it all.
        arrays = {path: leaf for path, leaf in flat.items() if leaf.size}
        items = {STATE: ocp.args.PyTreeSave(arrays), META: ocp.args.JsonSave(encoded)}
        # force: after a damaged checkpoint steps may go back, and orbax would skip them.
        with self._writing():
            self._open_manager().save(step, args=ocp.args.Composite(**items), force=True)
        return True

    def wait(self) -> None:
        """Block until the checkpoint being written is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._manager is not None:
            with self._writing():
                self._manager.wait_until_finished()
        self._saving = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            step, self._saving, self._latest = self._saving, None, None
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}, the ones "
                f"before it stay: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """`wait`, and stop the background threads."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_Rotation(self._steps_to_keep),
                    enable_async_checkpointing=self._async_save,
                    save_root_metadata=False,
                    # What killed saves have left would pile up. Readers do not remove it: it may
                    # be another run's save in progress.
                    cleanup_tmp_directories=True,
                    lightweight_initialize=True,  # else orbax opens, and warns about, every folder
                ),
            )
        return self._manager

    def _is_saved_already(self, meta: Meta) -> bool:
        latest = self._latest
        same = latest is not None and (latest.step, latest.leaves) == (meta.step, meta.leaves)
        return from_process_0(lambda: same and self._folder.is_sound(meta.step))

    def _make_way(self, step: int) -> None:
        """Move aside what lies at `step`, where orbax would delete it, and beyond.

        Later steps are damaged, or belong to a history that this run has gone back on; left there,
        they would be what the next run resumes from.
        """
        if moved := from_process_0(lambda: self._folder.move_aside(step)):
            self._warn(f"step {step} is written anew; moved aside to {', '.join(moved)}")
        self._folder.damaged = {s for s in self._folder.damaged if s < step}
        if self._verified is not None and self._verified.step >= step:
            self._verified = None
        self._open_manager().reload()

    def _steps_to_keep(self, steps: Sequence[int]) -> set[int]:
        complete = [s for s in steps if s == self._saving or self._folder.is_sound(s)]
        keep = set(sorted(complete)[-self._keep :]) | (set(steps) - set(complete))
        return keep | ({self._verified.step} if self._verified else set())

    # ---- what is there

    def all_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending, without those found damaged."""
        return [step for step in self._folder.listed() if self._folder.is_sound(step)]

    def is_empty(self) -> bool:
        """Whether no save was ever completed here, whole or damaged; the same on all processes."""
        kept = self.directory.glob("*-*") if self.directory.is_dir() else ()
        aside = [p for p in kept if p.name.startswith(("damaged-", "replaced-"))]
        return from_process_0(lambda: not self._folder.listed() and not aside)

    def latest_step(self) -> int | None:
        """Newest of `all_steps`, None if there is none."""
        return max(self.all_steps(), default=None)

    def read_extra(self, step: int | None = None) -> dict[str, Any]:
        """The `extra` saved with `step` (default: the newest checkpoint with sound metadata).

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """
        return self._first_sound(step, lambda meta: meta).extra

    def read_digests(self, step: int | None = None) -> dict[str, str]:
        """Digests of the leaves saved with `step`, by path; as `read_extra`."""
        leaves = self._first_sound(step, lambda meta: meta).leaves
        return {path: leaf.digest for path, leaf in leaves.items()}

    # ---- restoring

    def restore(
        self,
        template: Any,
        *,
        step: int | None = None,
        expected_config: dict[str, Any] | None = None,
    ) -> Restored:
        """The newest checkpoint that is whole, laid out as `template` says.

        A damaged one is passed over with a `CheckpointWarning` that names it and what is wrong.
        Nothing is deleted.

        Args:
            template: pytree of `jax.ShapeDtypeStruct` with `sharding` set, for any mesh.
            step: take this one and no other.
            expected_config: compared with `extra["config"]`.

        Returns:
            `Restored(step, state, extra)`; every bit of `state` is as it was saved.

        Raises:
            ValueError: config, structure, shape or dtype differ (nothing is cast).
            FileNotFoundError: no checkpoint is whole; the message says what was tried.
        """
        self.wait()
        restored, meta = self._restore(template, step, expected_config, prefix="")
        self._verified = self._latest = meta
        self._folder.damaged.discard(meta.step)
        if step is None:
            self._warn_of_unfinished(meta.step)
        return restored

    def restore_params(self, template: Any, *, step: int | None = None) -> Restored:
        """Like `restore` for the subtree `params` alone; other leaves are not read or compared.

        Args:
            template: the `params` pytree of `jax.ShapeDtypeStruct` with `sharding` set.
            step: take this one and no other.
        """
        return self._restore(template, step, None, prefix="params/")[0]

    def _restore(
        self, template: Any, step: int | None, expected_config: dict | None, prefix: str
    ) -> tuple[Restored, Meta]:
        wanted = {prefix + path: leaf for path, leaf in digest.flat_leaves(template).items()}
        checkpoint_meta.check_shardings(wanted)

        def load(meta: Meta) -> tuple[Restored, Meta]:
            if expected_config is not None:
                checkpoint_meta.check_config(meta, expected_config)
            leaves = {path: leaf for path, leaf in meta.leaves.items() if path.startswith(prefix)}
            part = dataclasses.replace(meta, leaves=leaves)
            checkpoint_meta.check_template(part, wanted)
            flat = self._load_verified(part, wanted)
            state = jax.tree.unflatten(jax.tree.structure(template), flat.values())
            return Restored(meta.step, state, meta.extra), meta

        return self._first_sound(step, load)

    def _load_verified(self, meta: Meta, wanted: dict[str, Any]) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}
        failure = ""
        try:
            arrays = read_arrays(self._folder.step(meta.step) / STATE, wanted)
        except DamagedError as error:
            failure = str(error)
        if failures := [text for text in from_all_processes(failure) if text]:
            raise DamagedError(failures[0])
        saved = {path: leaf.digest for path, leaf in meta.leaves.items()}
        if bad := digest.differing(digest.tree_digests(arrays), saved):
            raise DamagedError(f"the bits of {_some(bad)} are not those that were saved")
        return arrays

    def _first_sound(self, step: int | None, use: Callable[[Meta], T]) -> T:
        """`use(meta)` of the newest checkpoint (or of `step`) that turns out whole."""
        candidates = from_process_0(lambda: self._folder.listed()[::-1] if step is None else [step])
        failures: dict[int, str] = {}
        for candidate in candidates:
            reason, text = from_process_0(lambda c=candidate: self._folder.read_text(c))
            try:
                if reason:
                    raise DamagedError(reason)
                result = use(checkpoint_meta.decode(text, step=candidate))
            except DamagedError as error:
                failures[candidate] = str(error)
                self._folder.damaged.add(candidate)
                continue
            for passed_over, why in failures.items():
                self._warn(f"step {passed_over} is passed over: {why}; step {candidate} is used")
            return result
        if not candidates:
            raise FileNotFoundError(f"no checkpoint in {self.directory}: it holds no step")
        raise FileNotFoundError(
            f"no checkpoint in {self.directory} is whole:"
            + "".join(f"\n  step {s}: {why}" for s, why in failures.items())
        )

    def _warn_of_unfinished(self, used: int) -> None:
        if later := from_process_0(lambda: self._folder.unfinished_after(used)):
            self._warn(
                f"step {later} was begun and not completed (its save failed, was killed, or still "
                f"goes on in another run); step {used} is used"
            )

    def _warn(self, message: str) -> None:
        warnings.warn(
            f"checkpoints in {self.directory}: {message}", CheckpointWarning, stacklevel=3
        )


class _Rotation(ocp.checkpoint_managers.PreservationPolicy):
    """orbax's hook for what to keep, called by `save` with the new step included."""

    def __init__(self, keep: Callable[[Sequence[int]], set[int]]):
        self._keep = keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        kept = self._keep([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more leaves" if len(paths) > 4 else "")
