"""What a layer may become: attention kept or removed, and a width of its feed-forward part."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from sparsejax import surgery
from sparsejax.checks import scalar
from sparsejax.config import LayerConfig, ModelConfig
from sparsejax.params import param_shapes


class Choice(NamedTuple):
    """One variant of one layer.

    Attributes:
      attention: whether there is attention.
      d_ff: neurons of the feed-forward part, 0 for none.
    """

    attention: bool
    d_ff: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change to try on every layer.

    Attributes:
      attention: False removes attention.
      ffn: what stays of the feed-forward part: a fraction (a float up to 1.0) or a number of
        neurons (an integer); 0 removes it.
    """

    attention: bool = True
    ffn: float | int = 1.0

    def __post_init__(self):
        attention, value = scalar(self.attention), scalar(self.ffn)
        if not isinstance(attention, bool):
            raise ValueError(f"Variant: attention must be True or False, got {self.attention!r}")
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not whole and not (isinstance(value, float) and 0 <= value <= 1):
            raise ValueError(
                "Variant: ffn must be a fraction (float in [0, 1]) or a number of neurons (int), "
                f"got {self.ffn!r}"
            )
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "ffn", value)


def choice_of(layer: LayerConfig) -> Choice:
    """The layer as it is."""
    return Choice(layer.attention is not None, 0 if layer.ffn is None else layer.ffn.d_ff)


def chosen_layer(layer: LayerConfig, choice: Choice) -> LayerConfig:
    """The config of the layer after `choice`."""
    ffn = layer.ffn
    if ffn is not None and choice.d_ff != ffn.d_ff:
        ffn = dataclasses.replace(ffn, d_ff=choice.d_ff) if choice.d_ff else None
    return dataclasses.replace(
        layer, attention=layer.attention if choice.attention else None, ffn=ffn
    )


def resolve(layer: LayerConfig, variant: Variant, multiple: int = 1) -> Choice | None:
    """What `variant` makes of a layer, None if it changes nothing or asks for more than there is.

    Widths are rounded up to `multiple` as `surgery.prune_ffn` does.
    """
    now = choice_of(layer)
    if not variant.ffn or not now.d_ff:
        width = 0
    elif isinstance(variant.ffn, int) and variant.ffn > now.d_ff:
        return None
    else:
        # The very rule, planned on a model of this layer alone.
        alone = dataclasses.replace(layer, attention=None, parallel_with_previous=False)
        model = ModelConfig(vocab_size=1, d_model=1, layers=(alone,))
        plan = surgery.prune_ffn(model, param_shapes(model), 0, keep=variant.ffn, multiple=multiple)
        width = plan[2].layers[0].after
    choice = Choice(now.attention and variant.attention, width)
    return None if choice == now else choice


def why_unchanged(config: ModelConfig, variant: Variant, multiple: int) -> str:
    """Why `variant` changes no layer of the model, and what would."""
    widths = sorted({layer.ffn.d_ff for layer in config.layers if layer.ffn is not None})
    if any(resolve(layer, variant) is not None for layer in config.layers):
        return (
            f"what stays of the widths {widths}, rounded up to multiple = {multiple}, is all of "
            "them; lower multiple or ffn"
        )
    if isinstance(variant.ffn, int) and widths and variant.ffn >= widths[-1]:
        return f"the widths are {widths}, and ffn = {variant.ffn} is no less; lower ffn"
    if not variant.attention:
        return "no layer has attention to remove; leave it out"
    return "it asks for nothing that a layer has to give; leave it out"
