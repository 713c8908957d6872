"""Hugging Face checkpoints, read and written.

>>> config, params, tokenizer = sparsejax.convert.load("path/to/folder", dtype="bfloat16")
>>> sparsejax.convert.save("path/to/other", config, params, tokenizer)
"""

from sparsejax.convert.chat import chat_ids
from sparsejax.convert.families import FAMILIES
from sparsejax.convert.load import load
from sparsejax.convert.report import LayerSparsity, SparsityReport, sparsity_report
from sparsejax.convert.run_folder import load_run, save_run
from sparsejax.convert.safetensors_io import FolderError
from sparsejax.convert.save import save
from sparsejax.data.token_ids import read_token_ids

__all__ = [
    "FAMILIES",
    "FolderError",
    "LayerSparsity",
    "SparsityReport",
    "chat_ids",
    "load",
    "load_run",
    "read_token_ids",
    "save",
    "save_run",
    "sparsity_report",
]
