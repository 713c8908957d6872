"""Chat templates, by transformers where it is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence


def chat_ids(
    path: str | os.PathLike,
    messages: Sequence[dict[str, str]],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids of a conversation in the folder's own chat template.

    Args:
      path: a Hugging Face folder with tokenizer files and a chat template.
      messages: `{"role": ..., "content": ...}` each, in order.
      add_generation_prompt: end where the model's answer begins.

    Raises:
      ModuleNotFoundError: transformers is not installed (extra `hf`).
      ValueError: the folder has no chat template.
    """
    # By name: an extra's package, which type checkers need not find.
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(os.fspath(path))
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return tokenizer.encode(text, add_special_tokens=False)
