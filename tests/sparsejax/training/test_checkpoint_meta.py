"""A checkpoint's metadata: told from damaged text, and compared to the last key."""

import json

import jax.numpy as jnp
import pytest

from sparsejax.training.checkpoint_meta import (
    LeafMeta,
    Meta,
    check_config,
    check_template,
    decode,
    encode,
)

META = Meta(
    7,
    {"params/w": LeafMeta((2, 3), "bfloat16", "00ff"), "step": LeafMeta((), "int32", "11")},
    {"config": {"width": 8, "layers": [1, 2.5, None, True], "note": '\u00fc \n "'}},
)


def test_round_trip_and_every_flipped_bit():
    text = json.dumps(encode(META))
    assert decode(text, step=7) == META
    data = text.encode()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ValueError):  # noqa: PT011  damaged text fails in many ways
            decode(flipped.decode(), step=7)


def test_belongs_to_its_step():
    with pytest.raises(ValueError, match="metadata belongs to step 7"):
        decode(json.dumps(encode(META)), step=8)


@pytest.mark.parametrize("text", ["[]", "{}", '{"sha256": 1}', "null", ""])
def test_other_json(text):
    with pytest.raises(ValueError, match=r"not a checkpoint's|Expecting value"):
        decode(text, step=7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"width": 9}, r"config\.width expected 9, found 8"),
        ({"width": True}, r"config\.width expected True, found 8"),
        ({"width": 8.0}, r"config\.width expected 8.0, found 8"),
        ({"layers": (1, 2.5, None)}, r"config\.layers expected 3 entries, found 4 entries"),
        ({"layers": (1, 2.5, 0, True)}, r"config\.layers\[2\] expected 0, found None"),
        ({"more": 1}, r"config\.more expected 1, found nothing"),
        ({"layers": {"a": 1}}, r"config\.layers expected {'a': 1}, found \[1, 2.5, None, True\]"),
    ],
)
def test_config_differs(config, message):
    with pytest.raises(ValueError, match=message):
        check_config(META, META.extra["config"] | config)


def test_config_is_the_same_though_tuples_became_lists():
    check_config(META, META.extra["config"] | {"layers": (1, 2.5, None, True)})
    saved = {key: META.extra["config"][key] for key in ("layers", "note")}
    with pytest.raises(ValueError, match=r"config\.width expected nothing, found 8"):
        check_config(META, saved)
    with pytest.raises(ValueError, match="extra has no 'config'"):
        check_config(Meta(7, {}, {}), {})


def test_template_differences_are_all_listed():
    good = {"params/w": jnp.zeros((2, 3), jnp.bfloat16), "step": jnp.int32(0)}
    check_template(META, good)
    many = {f"x{i}": jnp.zeros(1) for i in range(12)}
    turned = good | {"params/w": jnp.zeros((3, 2), jnp.bfloat16)}
    with pytest.raises(ValueError, match="differ in 13 leaves") as caught:
        check_template(META, turned | many)
    assert "x0: expected float32[1], not in the checkpoint" in str(caught.value)
    assert str(caught.value).endswith("...")
    with pytest.raises(
        ValueError, match=r"params/w: expected bfloat16\[3,2\], found bfloat16\[2,3"
    ):
        check_template(META, turned)
