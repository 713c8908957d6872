"""The folder of checkpoints on disk: which steps it holds, and what their metadata say.

Layout: one folder per step, named by its number, renamed into place when complete.

    100/state/       the arrays, a flat mapping path -> array in orbax's OCDBT format
    100/meta/        step, extra, and each leaf's shape, dtype and digest, under a SHA-256
    damaged-100-1/   was 100, moved aside when a later save went back to step 100 or before it
    replaced-100-1/  the same, but it seemed whole

Folders moved aside are never read again nor deleted.

Everything here is this process's view. What a run of several processes has to agree on goes through
`sparsejax.training.processes`.
"""

import re
from pathlib import Path

from sparsejax.training import checkpoint_meta

STATE, META = "state", "meta"
_META_FILE = "metadata"  # the name that orbax's JSON handler gives the file
_UNFINISHED = re.compile(r"(0|[1-9]\d*)\.orbax-checkpoint-tmp.*")


class CheckpointFolder:
    """Steps under `root`; `damaged` collects those whose arrays turned out wrong."""

    def __init__(self, root: Path):
        self.root = root
        self.damaged: set[int] = set()

    def step(self, step: int) -> Path:
        """The folder of one step."""
        return self.root / str(step)

    def listed(self) -> list[int]:
        """Steps that have a folder, whatever is in it, ascending."""
        if not self.root.is_dir():
            return []
        names = [entry.name for entry in self.root.iterdir() if entry.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

    def read_text(self, step: int) -> tuple[str, str]:
        """(why `step` cannot be used as far as its metadata tells, the metadata's text)."""
        file = self.step(step) / META / _META_FILE
        needed = (file, self.step(step) / STATE)
        if missing := [str(path.relative_to(self.root)) for path in needed if not path.exists()]:
            return f"{' and '.join(missing)} missing", ""
        try:
            text = file.read_text()
            checkpoint_meta.decode(text, step=step)
        except (OSError, ValueError) as error:
            return f"its metadata cannot be read ({type(error).__name__}: {error})", ""
        return "", text

    def is_sound(self, step: int) -> bool:
        """Whether the metadata are whole and the arrays have not been found damaged."""
        return step not in self.damaged and not self.read_text(step)[0]

    def move_aside(self, step: int) -> list[str]:
        """Rename the folders of `step` and all later steps; returns the new names."""
        moved = []
        for later in [s for s in self.listed() if s >= step][::-1]:
            kind = "replaced" if self.is_sound(later) else "damaged"
            k = 1
            while (aside := self.root / f"{kind}-{later}-{k}").exists():
                k += 1
            self.step(later).rename(aside)
            moved.append(aside.name)
        return moved

    def unfinished_after(self, step: int) -> int | None:
        """Newest step above `step` of which there is only an unfinished save."""
        names = (_UNFINISHED.fullmatch(entry.name) for entry in self.root.iterdir())
        return max((int(m[1]) for m in names if m and int(m[1]) > step), default=None)
