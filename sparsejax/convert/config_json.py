"""config.json <-> ModelConfig: the keys all families share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from sparsejax.config import ModelConfig
from sparsejax.convert import families
from sparsejax.convert.keys import Keys, pass_keys, read_rope, write_rope
from sparsejax.convert.safetensors_io import FolderError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      FolderError: no such file, or it holds something else.
    """
    if not file.is_file():
        raise FolderError(f"{file.parent} has no {file.name}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise FolderError(f"{file} holds no JSON object")
    return values


def from_hf(
    values: dict[str, Any],
    place: str = "config.json",
    *,
    context_length: int | None = None,
    ignore_keys: Collection[str] = (),
) -> ModelConfig:
    """The model a config.json describes, in float32.

    Args:
      values: the file's content.
      place: its name in messages.
      context_length: use the model up to here only (allows a sliding window that is no shorter).
      ignore_keys: unknown keys that the caller knows to leave the mathematics alone.

    Raises:
      FolderError: an unknown architecture, a key that is missing or of another type, or one that
        changes the mathematics and is not supported.
    """
    family = families.of_config_json(values, place)
    keys = Keys(values, place, ignore_keys)
    _check_code(keys, family, ignore_keys)
    keys.only(
        quantization_config=(),
        compression_config=(),
        is_encoder_decoder=(False,),
        add_cross_attention=(False,),
        tie_encoder_decoder=(False,),
        is_decoder=(True, False),
        pruned_heads=({},),
    )
    d_model, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    stored = keys.take("head_dim")
    if stored is None and d_model % heads:
        raise FolderError(
            f"{place}: hidden_size = {d_model} does not divide by num_attention_heads = {heads}, "
            "and there is no head_dim"
        )
    head_dim = d_model // heads if stored is None else keys.whole("head_dim")
    context = keys.whole("max_position_embeddings")
    if context_length is not None and not 1 <= context_length <= context:
        raise ValueError(
            f"context_length must be at least 1 and at most max_position_embeddings = {context}, "
            f"got {context_length}"
        )
    context = context if context_length is None else context_length
    with _placed(place):
        layers = family.read_layers(keys, head_dim)
    _check_window(keys, family, context, len(layers))
    tied = keys.take("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise FolderError(f"{place}: 'tie_word_embeddings' must be true or false, got {tied!r}")
    with _placed(place):
        rope = read_rope(keys)
    eps = keys.real("rms_norm_eps", 1e-6)
    init_std, vocab_size = keys.real("initializer_range", 0.02), keys.whole("vocab_size")
    keys.finish()
    with _placed(place):
        return ModelConfig(
            vocab_size=vocab_size,
            d_model=d_model,
            layers=layers,
            context_length=context,
            rope=rope,
            norm_eps=eps,
            tie_embeddings=tied,
            init_std=init_std or 0.02,  # only for what may be initialised anew
            dtype="float32",
            param_dtype="float32",
        )


@contextlib.contextmanager
def _placed(place: str) -> Iterator[None]:
    """What a part of a config refuses is an error of the file that the values stand in."""
    try:
        yield
    except FolderError:
        raise
    except ValueError as error:
        raise FolderError(f"{place}: {error}") from error


def _check_code(keys: Keys, family: families.Family, ignored: Collection[str]) -> None:
    """A model class of another name, or from the folder itself, may compute anything."""
    if family.own_code:
        return
    known, names = family.architecture, keys.take("architectures")
    vouch = f": it is not {known}; if it computes the same, "
    if names and "architectures" not in ignored:
        names = names if isinstance(names, list) else [names]
        if known.lower() not in [str(name).lower() for name in names]:
            raise keys.unsupported("architectures", hint=vouch + pass_keys("architectures"))
    code = keys.take("auto_map")
    if code and "auto_map" not in ignored and any("Model" in str(name) for name in code):
        raise keys.unsupported("auto_map", hint=vouch + pass_keys("auto_map"))


def _check_window(keys: Keys, family: families.Family, context: int, n: int) -> None:
    """A sliding window changes nothing up to its length, and is refused where it does."""
    types = keys.take("layer_types")
    if types is not None and not (
        isinstance(types, list) and all(isinstance(entry, str) for entry in types)
    ):
        raise FolderError(f"{keys.place}: 'layer_types' must be a list of texts, got {types!r}")
    if types is not None and len(types) != n:
        raise FolderError(
            f"{keys.place}: 'layer_types' must have num_hidden_layers = {n} entries, got "
            f"{len(types)}"
        )
    if types is not None and set(types) - {"full_attention", "sliding_attention"}:
        raise keys.unsupported("layer_types")
    window, used = keys.take("sliding_window"), keys.take("use_sliding_window", True)
    if "sliding_window" not in keys.values:
        window = family.window
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise FolderError(
            f"{keys.place}: 'sliding_window' must be a whole number or null, got {window!r}"
        )
    if types is not None and "sliding_attention" in types and window is None:
        raise FolderError(
            f"{keys.place}: 'layer_types' has windows, but no 'sliding_window' is set"
        )
    full = types is not None and "sliding_attention" not in types
    if window is None or (family.window_switch and (not used or full)):
        return
    if window < context:
        absent = "" if "sliding_window" in keys.values else f" (absent, it means {window})"
        raise keys.unsupported(
            "sliding_window",
            hint=f"{absent}: the window is shorter than the context of {context}; pass "
            f"context_length={window} (--context-length {window}) to use the model up to there",
        )


def to_hf(config: ModelConfig, family: families.Family) -> dict[str, Any]:
    """The config.json of `config` (without the dtype).

    Raises:
      ValueError: the family cannot express the model; says why.
    """
    if reason := family.refuses(config):
        raise ValueError(f"family {family.name!r} cannot hold this model: {reason}")
    return {
        "architectures": [family.architecture],
        "model_type": family.model_types[0],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "use_cache": True,
        **write_rope(config.rope),
        **family.write(config),
    }
