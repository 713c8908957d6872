"""Generation up to a stop string, against plain generation cut by hand."""

import dataclasses

import pytest

from sparsejax.evaluation.until import GenerationSettings, generate_until
from sparsejax.generate import generate

PROMPTS = ["def ", "", "the line of text", "x"]


@pytest.fixture(scope="module")
def plain(model):
    """Greedy continuations of 12 tokens."""
    rows = [list(prompt.encode()) or [256] for prompt in PROMPTS]
    found = generate(
        model.config, model.params, rows, max_new_tokens=12, eos_id=256, num_tokens=257
    )
    return [bytes(i for i in ids if i < 256).decode(errors="replace") for ids in found]


def test_without_stops(model, plain):
    wanted = GenerationSettings(max_new_tokens=12)
    assert generate_until(model, PROMPTS, [wanted] * 4, batch_size=4) == (plain, 0)
    assert generate_until(model, [], []) == ([], 0)


def test_each_prompt_has_its_own_settings(model, plain):
    stop = plain[1][4:6]
    wanted = [
        GenerationSettings(max_new_tokens=12),
        GenerationSettings((stop, "never this"), 12),
        GenerationSettings(max_new_tokens=12),
        GenerationSettings((plain[3][0],), 12),
    ]
    want = [plain[0], plain[1][: plain[1].index(stop)], plain[2], ""]
    assert 0 < len(want[1]) < len(plain[1])
    assert generate_until(model, PROMPTS, wanted, batch_size=4)[0] == want


def test_sampling_does_not_depend_on_the_others(model):
    wanted = [GenerationSettings(max_new_tokens=8, temperature=1.0)] * 4
    whole = generate_until(model, PROMPTS, wanted, batch_size=4)[0]
    others = generate_until(model, ["one", PROMPTS[1], "another", PROMPTS[3]], wanted, batch_size=4)
    assert [others[0][1], others[0][3]] == [whole[1], whole[3]]
    assert generate_until(model, PROMPTS, wanted, batch_size=4, seed=1)[0] != whole


def test_long_prompts_lose_their_beginning(model):
    wanted = [GenerationSettings(max_new_tokens=12)]
    long, cut = generate_until(model, ["y" * 50 + "z" * 20], wanted, batch_size=4)
    assert (long, cut) == (generate_until(model, ["z" * 20], wanted, batch_size=4)[0], 1)
    with pytest.raises(ValueError, match=r"max_new_tokens must be in \[0, .* = 31\], got 32"):
        generate_until(model, ["a"], [GenerationSettings(max_new_tokens=32)])


def test_with_a_prefix_and_merges(model, bpe):
    with_bpe = dataclasses.replace(model, tokenizer=bpe, prefix=(1,))
    ids = [1, *bpe.encode("a naïve line")]
    options = {"max_new_tokens": 8, "eos_id": 0, "num_tokens": bpe.vocab_size}
    new, *_ = generate(model.config, model.params, [ids] * 4, **options)
    want = bpe.decode([*ids[1:], *(i for i in new if i)])[len("a naïve line") :]
    wanted = [GenerationSettings(max_new_tokens=8)]
    assert generate_until(with_bpe, ["a naïve line"], wanted, batch_size=4)[0] == [want]


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, GenerationSettings()),
        ({"until": "\n"}, GenerationSettings(("\n",))),
        ({"until": ["a", "b"], "max_gen_toks": 5}, GenerationSettings(("a", "b"), 5)),
        ({"max_new_tokens": 7, "do_sample": False, "temperature": 0.7}, GenerationSettings((), 7)),
        ({"do_sample": True}, GenerationSettings(temperature=1.0)),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9}, GenerationSettings((), 256, 0.5, 0.9, 3)),
    ],
)
def test_settings_of_tasks(values, want):
    assert GenerationSettings.from_harness(values, 256) == want
    with pytest.raises(ValueError, match="'num_beams' = 4 is not supported"):
        GenerationSettings.from_harness(values | {"num_beams": 4}, 256)
