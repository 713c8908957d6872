"""What scripts check of their flags before they begin: no measurement is lost at its end."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax

from sparsejax.config import ModelConfig

PICTURES = (".png", ".pdf", ".svg")
RESULTS = Path("runs/studies/results")  # what studies write, unless told otherwise


def at_least(flags: Any, least: float, *names: str) -> None:
    """Numbers, and lists of one number or more, from `least` on; None stands for a default.

    Args:
      flags: an object with these attributes.
      least: the smallest number allowed.
      names: of attributes.

    Raises:
      ValueError: a smaller number, NaN, or an empty list.
    """
    not_empty(flags, *(name for name in names if isinstance(getattr(flags, name), tuple)))
    for name in names:
        value = getattr(flags, name)
        several = isinstance(value, tuple)
        for number in value if several else () if value is None else (value,):
            if not number >= least:
                what = ": every number must be" if several else " must be"
                raise ValueError(f"{_flag(name)}{what} at least {least}, got {number}")


def check_setting(setting: Any) -> None:
    """The numbers of a `sparsejax.studies.sweep.Setting` are at least 1.

    Raises:
      ValueError: one is not.
    """
    at_least(setting, 1, "layers", "d_model", "batch_size", "seq_len", "steps", "evaluations")


def check_window(window: int, setting: Any) -> None:
    """Raises ValueError if a run of `window` layers is longer than the setting's models."""
    if window > setting.layers:
        raise ValueError(f"--window must be at most --layers, {setting.layers}, got {window}")


def not_empty(flags: Any, *names: str) -> None:
    """Lists that name something.

    Raises:
      ValueError: an empty one.
    """
    for name in names:
        if not getattr(flags, name):
            raise ValueError(
                f"{_flag(name)} is an empty list: name one or more, or leave the flag out"
            )


def check_devices(what: str, needed: int) -> None:
    """As many devices as something needs are here.

    Args:
      what: for messages, such as "--tensor 2".
      needed: devices.

    Raises:
      ValueError: fewer; on a CPU it says how there are more.
    """
    if needed <= jax.device_count():
        return
    hint = ""
    if jax.default_backend() == "cpu":
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        hint = f"; on a CPU, {flag} makes {'two' if needed == 2 else needed}"
    raise ValueError(f"{what} needs more than the {jax.device_count()} devices here{hint}")


def check_gpu(what: str) -> None:
    """Raises ValueError, naming `what` needs one, where there is no GPU."""
    platform = jax.default_backend()
    if platform != "gpu":
        raise ValueError(
            f"{what} needs a CUDA device, and JAX has {platform!r} here; --smoke runs tiny shapes "
            "without one"
        )


def first_layers(config: ModelConfig, layers: int | None, name: str) -> ModelConfig:
    """The model's first `layers` layers; None for all.

    Args:
      config: the model.
      layers: the flag --layers.
      name: the model's, for messages.

    Raises:
      ValueError: more layers than it has.
    """
    if layers is not None and layers > config.num_layers:
        raise ValueError(
            f"--layers must be at most the {config.num_layers} layers of {name!r}, got {layers}"
        )
    return config.replace(layers=config.layers[:layers])


def check_file(flag: str, path: Path | None, *suffixes: str) -> None:
    """Makes the folder of a file that is to be written; None is no file.

    Args:
      flag: the flag that names the file, for messages.
      path: the file; what it holds stays as it is.
      suffixes: endings that it may have; none for any.

    Raises:
      ValueError: a folder, another ending, or a place that cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; name a file in it")
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{flag} must end in {' or '.join(suffixes)}, got {path}")
    check_folder(flag, path.parent)
    if path.exists():
        try:
            path.open("ab").close()
        except OSError as error:
            raise ValueError(f"{flag} {path} cannot be written ({error.strerror})") from None


def with_smoke(args: Any, **values: Any) -> Any:
    """`args` with the values of a smoke test.

    Raises:
      ValueError: a flag was given that they would replace without a word.
    """
    default = type(args)()
    for name, new in values.items():
        _refuse_replaced(name, getattr(args, name), getattr(default, name), new)
    return dataclasses.replace(args, **values)


def _refuse_replaced(name: str, given: Any, default: Any, new: Any) -> None:
    if dataclasses.is_dataclass(given):
        for inner in dataclasses.fields(given):
            _refuse_replaced(inner.name, *(getattr(v, inner.name) for v in (given, default, new)))
    elif given not in (default, new):
        raise ValueError(
            f"{_flag(name)} {given} beside --smoke, which sets {new} there: leave one of them out"
        )


def smoke_results(results: Path) -> Path:
    """Where a smoke run writes: not among real results, unless it was told to."""
    return Path("runs/smoke") if results == RESULTS else results


def check_folder(flag: str, folder: Path) -> None:
    """Makes a folder in which files are to be written.

    Raises:
      ValueError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{flag}: nothing can be written in the folder {folder} ({error.strerror}); name "
            "another place"
        ) from None


def own_settings(args: Any) -> dict[str, Any]:
    """A study's flags under the names study_*, groups among them flattened, for a row of its table.

    Left out are where results go, and `setting`, which rows tell as `Setting.told` does.
    """
    found: dict[str, Any] = {}
    for name, value in dataclasses.asdict(args).items():
        if name not in ("setting", "results", "smoke"):
            found |= value if isinstance(value, dict) else {name: value}
    return {f"study_{name}": value for name, value in found.items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
