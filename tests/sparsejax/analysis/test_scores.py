"""Scores of single layers against surgery on the whole model and NumPy, cost, and refusals."""

import csv
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import MeshConfig, make_mesh, surgery
from sparsejax.analysis import (
    NO_ATTENTION,
    NO_FFN,
    BlockScores,
    Choice,
    Variant,
    block_scores,
    steps,
)
from sparsejax.sharding import tree_shardings
from tests.sparsejax.analysis.test_dependency import BATCHES, CONFIG, LAYERS, UNIFORM
from tests.sparsejax.analysis.test_dependency import np_contributions as contributions_of
from tests.sparsejax.test_model import EMPTY, SMOOTH, np_model, random_params

HALF = Variant(ffn=0.5)
BOTH = Variant(attention=False, ffn=0.5)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def np_score(config, params, child, batches):
    """Mean KL per token of a changed model, both in float64."""
    found = []
    for tokens in batches:
        p, q = (log_softmax(np_model(*m, tokens)[0]) for m in ((config, params), child))
        found.append((np.exp(p) * (p - q)).sum(-1))
    return np.concatenate(found).mean()


def by_surgery(config, params, i, choice, ranking):
    layer = config.layers[i]
    if layer.attention and not choice.attention:
        config, params = surgery.remove_attention(config, params, i)
    if layer.ffn and not choice.d_ff:
        config, params = surgery.remove_ffn(config, params, i)
    elif layer.ffn and choice.d_ff < layer.ffn.d_ff:
        keep = np.sort(np.argsort(-ranking[i], kind="stable")[: choice.d_ff])
        config, params, _ = surgery.prune_ffn(config, params, i, keep=keep)
    return config, params


def test_equal_to_surgery_on_the_whole_model():
    params = random_params(CONFIG)
    variants = (NO_ATTENTION, NO_FFN, HALF, BOTH, Variant(ffn=20))
    got = block_scores(CONFIG, params, iter(BATCHES), variants, multiple=4)
    ranking = surgery.channel_contribution(CONFIG, params, BATCHES)
    # FULL has 40 neurons, SMOOTH 17, NO_ATTENTION 25; halves of 17 and 25 round up to 12 and 16.
    full = [(True, 40), (False, 40), (True, 0), (True, 20), (False, 20)]
    assert {i: list(found) for i, found in got.kl.items()} == {
        0: full,
        1: [(True, 17), (False, 17), (True, 0), (True, 12), (False, 12)],
        2: [(False, 25), (False, 0), (False, 16), (False, 20)],
        3: [(False, 0)],
        4: full,
        5: [(True, 0), (False, 0)],
        6: full,
    }
    for i, found in got.kl.items():
        now, *others = found
        assert found[now] == 0
        for choice in others:
            want = np_score(CONFIG, params, by_surgery(CONFIG, params, i, choice, ranking), BATCHES)
            assert want > 1e-4
            np.testing.assert_allclose(found[choice], want, rtol=2e-4)
    for i, value in got.contributions.items():
        np.testing.assert_allclose(value, ranking[i], rtol=1e-6)
    assert got.tokens == 36


def test_cosine_and_norm():
    params = random_params(CONFIG)
    got = block_scores(CONFIG, params, BATCHES, ())
    cosine, norm = [[] for _ in LAYERS], [[] for _ in LAYERS]
    for tokens in BATCHES:
        x = np.asarray(params["embed"]["embedding"], np.float64)[tokens]
        read = x
        for i, added in enumerate(contributions_of(CONFIG, params, tokens)):
            read = read if LAYERS[i].parallel_with_previous else x
            y, h = read + added["block"], added["block"]
            lengths = [np.linalg.norm(a, axis=-1) for a in (read, y, h)]
            cosine[i].append((read * y).sum(-1) / lengths[0] / lengths[1])
            norm[i].append(lengths[2] / lengths[0])
            x = x + h
    np.testing.assert_allclose(got.cosine, np.mean(cosine, (1, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(got.relative_norm, np.mean(norm, (1, 2, 3)), rtol=1e-5)
    assert got.cosine[3] == 1 and got.relative_norm[3] == 0
    assert got.forwards == 1 and all(len(found) == 1 for found in got.kl.values())
    assert got.contributions is None


def test_masked_positions_do_not_count():
    params = random_params(UNIFORM)
    mask = np.arange(9) < [[6], [4]]
    rows = {"tokens": BATCHES[0], "loss_mask": mask}
    got = block_scores(UNIFORM, params, [rows, {**rows, "loss_mask": ~mask}])
    whole = block_scores(UNIFORM, params, BATCHES[:1])
    some = block_scores(UNIFORM, params, [rows])
    assert (got.tokens, some.tokens) == (18, 10)
    for i in range(6):
        for choice in whole.kl[i]:
            np.testing.assert_allclose(got.kl[i][choice], whole.kl[i][choice], rtol=1e-5)
    np.testing.assert_allclose(got.cosine, whole.cosine, rtol=1e-5)
    assert some.kl[0][Choice(False, 17)] != pytest.approx(whole.kl[0][Choice(False, 17)], rel=1e-3)


def test_zero_inputs_are_left_out_and_told():
    params = random_params(UNIFORM)
    params["embed"]["embedding"] = params["embed"]["embedding"].at[7].set(0.0)
    tokens = np.where(np.arange(9) < 2, 7, BATCHES[0])
    tokens[:, 2:] = np.where(tokens[:, 2:] == 7, 8, tokens[:, 2:])
    with pytest.warns(UserWarning, match="input or output is zero, most in layer 0: 4 of 18"):
        got = block_scores(UNIFORM, params, [tokens], ())
    rows = {"tokens": tokens, "loss_mask": tokens != 7}
    want = block_scores(UNIFORM, params, [rows], ())
    np.testing.assert_allclose(got.cosine[0], want.cosine[0], rtol=1e-6)
    np.testing.assert_allclose(got.relative_norm[0], want.relative_norm[0], rtol=1e-6)
    with pytest.warns(UserWarning, match="most in layer 0: 18 of 18"):
        got = block_scores(UNIFORM, params, [np.full((2, 9), 7)], ())
    assert np.isnan(got.cosine[0]) and np.isnan(got.relative_norm[0])


def test_the_prefix_is_shared():
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        real = steps._part
        patch.setattr(steps, "_part", lambda *args: calls.append(args[1]) or real(*args))
        got = block_scores(UNIFORM, random_params(UNIFORM), BATCHES)
    # Two passes, then per layer i the later layers twice, and the FFN whose attention is gone.
    want = 2 * 12 + sum(2 * 2 * (5 - i) + 1 for i in range(6))
    assert len(calls) == 2 * want and got.forwards == want / 12
    assert got.forwards < 2 * 6 / 2 + 2.5  # v m / 2 and little more


def test_on_a_mesh():
    layer = dataclasses.replace(
        LAYERS[0], ffn=dataclasses.replace(LAYERS[0].ffn, d_ff=32, gate_bias=False)
    )
    config = UNIFORM.replace(layers=(layer,) * 3)
    params = random_params(config)
    batches = [np.concatenate([b, b]) for b in BATCHES]
    variants = (NO_ATTENTION, NO_FFN, HALF)
    want = block_scores(config, params, batches, variants)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    split = jax.device_put(params, tree_shardings(mesh, params))
    got = block_scores(config, split, batches, variants)
    for i in range(3):
        for choice, value in want.kl[i].items():
            np.testing.assert_allclose(got.kl[i][choice], value, rtol=1e-4)
    with pytest.raises(ValueError, match="does not divide over the mesh axis 'tensor' = 2"):
        block_scores(config, split, batches, [Variant(ffn=17)])


def test_given_contributions_are_used_and_checked():
    params = random_params(UNIFORM)
    backwards = {i: np.arange(17.0)[::-1] for i in range(6)}
    got = block_scores(UNIFORM, params, BATCHES, [HALF], contributions=backwards)
    for i in (0, 5):
        child = by_surgery(UNIFORM, params, i, Choice(True, 9), backwards)
        want = np_score(UNIFORM, params, child, BATCHES)
        np.testing.assert_allclose(got.kl[i][Choice(True, 9)], want, rtol=2e-4)
    with pytest.raises(ValueError, match=re.escape("[1, 2, 3, 4, 5] are missing")):
        block_scores(UNIFORM, params, BATCHES, [HALF], contributions={0: np.ones(17)})


def test_removal_choices_and_files(tmp_path):
    params = random_params(CONFIG)
    got = block_scores(CONFIG, params, BATCHES[:1], (NO_ATTENTION, NO_FFN, HALF))
    attention, ffn = got.removal("attention"), got.removal("ffn")
    assert [i for i in range(7) if np.isnan(attention[i])] == [2, 3]
    assert [i for i in range(7) if np.isnan(ffn[i])] == [3, 5]
    assert attention[0] == got.kl[0][Choice(False, 40)] and ffn[6] == got.kl[6][Choice(True, 0)]
    with pytest.raises(ValueError, match="'attention' or 'ffn', got 'block'"):
        got.removal("block")
    assert got.choices()[4] == (
        (True, 40),
        (True, 20),
        (True, 0),
        (False, 40),
        (False, 20),
        (False, 0),
    )
    got.save(tmp_path / "scores")
    back = BlockScores.load(tmp_path / "scores")
    assert back.kl == got.kl and [list(k) for k in back.kl.values()] == [
        list(k) for k in got.kl.values()
    ]
    assert (back.tokens, back.forwards) == (got.tokens, got.forwards)
    for name in ("cosine", "relative_norm"):
        np.testing.assert_array_equal(getattr(back, name), getattr(got, name))
    assert back.contributions.keys() == got.contributions.keys()
    np.testing.assert_array_equal(back.contributions[6], got.contributions[6])
    got.to_csv(tmp_path / "scores.csv")
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(found) for found in got.kl.values())
    for row in rows:
        choice = Choice(row["attention"] == "1", int(row["d_ff"]))
        assert float(row["kl"]) == got.kl[int(row["layer"])][choice]


def test_few_layers():
    one = UNIFORM.replace(layers=(SMOOTH,))
    got = block_scores(one, random_params(one), BATCHES)
    assert list(got.kl) == [0] and (got.removal("ffn") > 0).all()
    # By default those parts are removed that there are.
    bare = dataclasses.replace(SMOOTH, attention=None)
    for layers, tried in (((), 0), ((EMPTY,), 0), ((bare,), 1), ((EMPTY, bare), 1)):
        config = UNIFORM.replace(layers=layers)
        got = block_scores(config, random_params(config), BATCHES)
        assert len(got.kl) == len(layers)
        assert sum(len(found) - 1 for found in got.kl.values()) == tried


def test_wrong_requests():
    params = random_params(UNIFORM)
    for ffn in (1.5, -1, True, "half", float("nan")):
        with pytest.raises(ValueError, match="ffn must be a fraction"):
            Variant(ffn=ffn)
    for variant in (Variant(), Variant(ffn=18), Variant(ffn=17)):
        with pytest.raises(ValueError, match="changes no layer of this model"):
            block_scores(UNIFORM, params, BATCHES, [variant])
    for variant, multiple, told in (
        (
            Variant(ffn=0.75),
            64,
            "what stays of the widths [17], rounded up to multiple = 64, is all of them; lower "
            "multiple or ffn",
        ),
        (Variant(ffn=18), 1, "the widths are [17], and ffn = 18 is no less; lower ffn"),
        (Variant(), 1, "it asks for nothing that a layer has to give; leave it out"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            block_scores(UNIFORM, params, BATCHES, [variant], multiple=multiple)
    with pytest.raises(ValueError, match="attention must be True or False, got 1"):
        Variant(attention=1)  # pyright: ignore[reportArgumentType]
    assert Variant(ffn=np.float32(0.5)) == Variant(ffn=jnp.array(0.5)) == Variant(ffn=0.5)  # pyright: ignore
    assert Variant(np.False_, np.int64(3)) == Variant(False, 3)  # pyright: ignore
    with pytest.raises(ValueError, match=re.escape("variants must be Variant(...), got 0.5")):
        block_scores(UNIFORM, params, BATCHES, [0.5])  # pyright: ignore[reportArgumentType]
    for variants in ([NO_FFN], [Variant(ffn=0.5)]):  # the second goes through the text twice
        with pytest.raises(ValueError, match="block_scores: batches hold no tokens"):
            block_scores(UNIFORM, params, [], variants)
    params["layer_2"]["ffn"]["down"] = params["layer_2"]["ffn"]["down"].at[3].set(np.nan)
    with pytest.raises(ValueError, match="contribution of layer 2 is not finite on 18 of 18"):
        block_scores(UNIFORM, params, BATCHES)
    params = random_params(UNIFORM)
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[0, 7].set(np.nan)
    with pytest.raises(
        ValueError, match="outputs are not finite on 18 of 18 tokens: the output head"
    ):
        block_scores(UNIFORM, params, BATCHES)
    params["final_norm"]["scale"] = jnp.full((24,), np.inf)
    with pytest.raises(ValueError, match="the model's hidden states are not finite"):
        block_scores(UNIFORM, params, BATCHES)
