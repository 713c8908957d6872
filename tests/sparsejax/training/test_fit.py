"""Residuals are chosen by what the compiled step needs."""

import types
from typing import ClassVar

import pytest

from sparsejax import presets
from sparsejax.modules import Options
from sparsejax.training.fit import compile_fitting

MODEL = presets.get("tiny")
NEEDED = {"full": 950, "compact": 400, None: 400}  # bytes


class Lowered:
    """What `jit(...).lower(...)` gives, as far as it is used; keeps what was compiled."""

    compiled: ClassVar[list[str | None]] = []

    def __init__(self, options):
        self.options = options

    def compile(self):
        self.compiled.append(self.options.residuals)
        arguments = NEEDED[self.options.residuals] - 100
        # Results take the place of half of the arguments.
        sizes = {"argument": arguments, "output": 50, "temp": 100, "alias": 50}
        found = types.SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in sizes.items()})
        return types.SimpleNamespace(memory_analysis=lambda: found, options=self.options)


def choose(limit, options=Options(), model=MODEL):
    Lowered.compiled = []
    compiled, chosen = compile_fitting(Lowered, model, options, limit)
    assert compiled.options == chosen
    return chosen.residuals, Lowered.compiled


def test_full_where_it_fits_and_else_compact():
    assert choose(1056) == ("full", ["full"])  # 950 is at most 90 %
    assert choose(1055) == ("compact", ["full", "compact"])
    one = ("xla",) * (MODEL.num_layers - 1) + ("triton",)
    assert choose(1056, Options(implementation=one)) == ("full", ["full"])


@pytest.mark.parametrize(
    ("limit", "options", "model", "residuals"),
    [
        (None, Options(), MODEL, None),
        (9999, Options(residuals="compact"), MODEL, "compact"),
        (10, Options(residuals="full"), MODEL, "full"),
        (9999, Options(remat="dots"), MODEL, None),
        (9999, Options(implementation="xla"), MODEL, None),
        (9999, Options(implementation=("xla",) * MODEL.num_layers), MODEL, None),
        (9999, Options(), presets.get("tiny-dense"), None),
    ],
    ids=["no limit known", "compact asked", "full asked", "remat", "dense engine", "all", "SiLU"],
)
def test_nothing_is_changed_where_there_is_no_choice(limit, options, model, residuals):
    assert choose(limit, options, model) == (residuals, [residuals])
