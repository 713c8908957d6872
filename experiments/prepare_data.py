r"""Tokenise your own text for training: txt, jsonl or parquet to a folder for `--data`.

    python experiments/prepare_data.py --inputs notes.txt web/*.jsonl --tokenizer tokenizer.json \
        --out corpora/mine

`--tokenizer bytes` needs no tokenizer file; for a model you have, give its own tokenizer.json, or
the folder that holds it. Train on the result with `--data corpora/mine`.
"""

import dataclasses
import signal
import sys
import warnings
from pathlib import Path

import tyro

from sparsejax.data.prepare import prepare_corpus


@dataclasses.dataclass(frozen=True)
class Flags:
    """Tokenise txt, jsonl and parquet files into a corpus folder."""

    inputs: tuple[str, ...]
    """Files, folders or globs. One document is a txt file, a jsonl line or a parquet row."""
    tokenizer: str
    """A Hugging Face tokenizer.json, a folder that holds one, or "bytes"."""
    out: Path
    """Folder to make: train.bin, val.bin, meta.json, tokenizer.json."""
    text_key: str = "text"
    """Key (jsonl) or column (parquet) that holds the text."""
    val_fraction: float = 0.01
    """Share of documents to hold out as "val", chosen by a hash of the text. Of a few documents,
    none may be: raise it then."""
    seed: int = 0
    """Another seed holds out other documents."""
    num_workers: int | None = None
    """Threads that tokenise (default: every usable core). The result does not depend on it."""
    eot_token: str | None = None
    """The tokenizer's end-of-text token, where it has an unusual name."""
    overwrite: bool = False
    """Replace `out` if it is a folder made by this script."""


def main(args: list[str] | None = None) -> int:
    """Runs the script; returns its exit status."""
    flags = tyro.cli(Flags, args=args, description=__doc__)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(
            f"warning: {message}", file=sys.stderr
        )
        try:
            meta = prepare_corpus(**vars(flags))
        except (ValueError, ImportError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted; nothing was written", file=sys.stderr)
            return 130
    for name, split in meta["splits"].items():
        print(
            f"{name}: {split['documents']} documents, {split['tokens']} tokens, "
            f"{split['bytes_per_token_incl_eot']:.3f} bytes per token"
        )
    print(f"wrote {flags.out}; train on it with --data {flags.out}")
    return 0


if __name__ == "__main__":
    # Unwinds like Ctrl-C, so that the unfinished folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
