"""What is known about a checkpoint besides its arrays: checked JSON, compared with a template.

The text holds the step, the caller's `extra`, and shape, dtype and digest of every leaf, under its
own SHA-256: a damaged text is told from a sound one before anything it says is believed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

CONFIG_KEY = "config"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class LeafMeta:
    """Shape, dtype name and digest (see `sparsejax.training.digest`) of one saved leaf."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Meta:
    """Everything beside the arrays of one checkpoint."""

    step: int
    leaves: dict[str, LeafMeta]
    extra: dict[str, Any]


def encode(meta: Meta) -> dict[str, str]:
    """JSON object {"sha256": ..., "body": canonical JSON text of `meta`}.

    Raises:
        ValueError: `meta.extra` is not strict JSON, which has no NaN or infinity (a loss, say).
    """
    content = {
        "format": _FORMAT,
        "step": meta.step,
        "leaves": {path: dataclasses.asdict(leaf) for path, leaf in meta.leaves.items()},
        "extra": meta.extra,
    }
    try:
        body = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra: expected JSON values with finite numbers only, got {error}; "
            f"step {meta.step} is not saved"
        ) from error
    return {"sha256": _sha256(body), "body": body}


def decode(text: str, *, step: int) -> Meta:
    """Inverse of `encode`.

    Args:
        text: contents of the file.
        step: the step that the directory's name claims.

    Raises:
        ValueError: the text is damaged, of an unknown format, or belongs to another step.
    """
    outer = json.loads(text)
    if not isinstance(outer, dict) or set(outer) != {"sha256", "body"}:
        raise ValueError("metadata is not a checkpoint's")
    if _sha256(str(outer["body"])) != outer["sha256"]:
        raise ValueError("metadata does not match its SHA-256")
    content = json.loads(outer["body"])
    if content["format"] != _FORMAT:
        raise ValueError(f"metadata has format {content['format']}, expected {_FORMAT}")
    if content["step"] != step:
        raise ValueError(f"metadata belongs to step {content['step']}")
    leaves = {
        path: LeafMeta(tuple(leaf["shape"]), leaf["dtype"], leaf["digest"])
        for path, leaf in content["leaves"].items()
    }
    return Meta(step, leaves, content["extra"])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_config(meta: Meta, expected: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names the first key in which the saved config differs."""
    if CONFIG_KEY not in meta.extra:
        raise ValueError(
            f"checkpoint of step {meta.step}: extra has no {CONFIG_KEY!r} to compare with; "
            f"save with extra={{{CONFIG_KEY!r}: ...}} or restore without expected_config"
        )
    expected = json.loads(json.dumps(expected))  # tuples become lists, as in the file
    difference = _first_difference(CONFIG_KEY, expected, meta.extra[CONFIG_KEY])
    if difference:
        path, wanted, found = difference
        raise ValueError(
            f"checkpoint of step {meta.step} was saved under another config: {path} expected "
            f"{wanted}, found {found}; restore with the saved config or use another workdir"
        )


def _first_difference(path: str, expected: Any, found: Any) -> tuple[str, str, str] | None:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found:
                return f"{path}.{key}", repr(expected[key]), "nothing"
            if key not in expected:
                return f"{path}.{key}", "nothing", repr(found[key])
            if difference := _first_difference(f"{path}.{key}", expected[key], found[key]):
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return path, f"{len(expected)} entries", f"{len(found)} entries"
        for i, (e, f) in enumerate(zip(expected, found, strict=True)):
            if difference := _first_difference(f"{path}[{i}]", e, f):
                return difference
        return None
    # 1 == True and 1 == 1.0 in Python; in a config they are different things.
    return (
        None
        if type(expected) is type(found) and expected == found
        else (path, repr(expected), repr(found))
    )


def check_template(meta: Meta, template: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names the leaves in which `template` and the saved tree differ."""
    problems = [
        f"{path}: expected {describe(leaf.shape, leaf.dtype)}, not in the checkpoint"
        for path, leaf in template.items()
        if path not in meta.leaves
    ]
    problems += [
        f"{path}: in the checkpoint ({describe(leaf.shape, leaf.dtype)}), not in the template"
        for path, leaf in meta.leaves.items()
        if path not in template
    ]
    for path, leaf in template.items():
        saved = meta.leaves.get(path)
        if saved is None:
            continue
        if (tuple(leaf.shape), dtype_name(leaf.dtype)) != (saved.shape, saved.dtype):
            problems.append(
                f"{path}: expected {describe(leaf.shape, leaf.dtype)}, "
                f"found {describe(saved.shape, saved.dtype)}"
            )
    if problems:
        shown = "\n  ".join(problems[:8]) + ("\n  ..." if len(problems) > 8 else "")
        raise ValueError(
            f"checkpoint of step {meta.step} and the template differ in {len(problems)} leaves "
            f"(nothing is cast or reshaped; build the template from the saved config):\n  {shown}"
        )


def check_shardings(template: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a template leaf (path -> leaf) that does not say where it goes."""
    for path, leaf in template.items():
        if not isinstance(getattr(leaf, "sharding", None), jax.sharding.Sharding):
            raise ValueError(
                f"template leaf {path!r}: expected a jax.ShapeDtypeStruct with sharding=..., "
                f"got {leaf!r}; without a sharding a checkpoint cannot move to another mesh"
            )


def describe(shape: Any, dtype: Any) -> str:
    """Like "float32[4,8]"."""
    return f"{dtype_name(dtype)}[{','.join(str(n) for n in shape)}]"


def dtype_name(dtype: Any) -> str:
    """Name that `jnp.dtype` reads back, e.g. "bfloat16"."""
    return jnp.dtype(dtype).name
