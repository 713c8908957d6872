"""Text to ids and back, whole and as a stream."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from sparsejax.data import ByteTokenizer, HFTokenizer, StreamDecoder, Tokenizer, prompt_ids

TEXTS = [
    "",
    "a",
    "Hello, world\r\n",
    "naïve 東京 🙂👩‍👩‍👧 end",
    "the \ufffd mark",
    " \n\t ",
    "\x00\x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_the_utf8_of_the_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "b"]) == [ids, [98]]


def test_byte_end_mark_is_256_and_decodes_to_nothing():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.decode([72, 256, 105]) == "Hi"


@pytest.mark.parametrize("bad", [257, -1, 50303])
def test_an_id_without_a_token_is_an_error(bad, bpe_file):
    with pytest.raises(ValueError, match=rf"ids\[1\] is {bad}"):
        ByteTokenizer().decode([72, bad])
    if bad != 257:
        with pytest.raises(ValueError, match=rf"ids\[1\] is {bad}; tokenizer.json has ids 0..319"):
            HFTokenizer(bpe_file).decode([72, bad])


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face_file_round_trips(text, bpe_file):
    tokenizer = HFTokenizer(bpe_file)
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(ByteTokenizer(), Tokenizer)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text]) == [tokenizer.encode(text)]
    reference = tokenizers.Tokenizer.from_file(str(bpe_file))
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_a_text_cannot_fake_a_document_end(bpe_file):
    text = "one<|endoftext|>two"
    ids = HFTokenizer(bpe_file).encode(text)
    assert 0 not in ids
    assert HFTokenizer(bpe_file).decode(ids) == text
    assert HFTokenizer(bpe_file, parse_special=True).encode(text).count(0) == 1


def test_stored_truncation_padding_and_template_are_not_applied(bpe_file, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(bpe_file))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "a line that is longer than four tokens"
    tokenizer = HFTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode(text) == HFTokenizer(bpe_file).encode(text)
    assert tokenizer.encode_batch([text, "b"])[1] == HFTokenizer(bpe_file).encode("b")


def test_end_of_text_token_is_found_or_named(bpe_file, sentencepiece_file, tmp_path):
    assert HFTokenizer(bpe_file).eot_id == 0
    assert HFTokenizer(sentencepiece_file).eot_id == 2
    assert HFTokenizer(sentencepiece_file, eot_token="<s>").eot_id == 1
    assert HFTokenizer(sentencepiece_file, eot_id=1).eot_id == 1
    with pytest.raises(ValueError, match=r"eot_id is 320; .* has ids 0\.\.319"):
        HFTokenizer(bpe_file, eot_id=320)

    content = json.loads(bpe_file.read_text().replace("<|endoftext|>", "<|stop|>"))
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"looked for <\|endoftext\|>, <\|end_of_text\|>, </s>.*"):
        HFTokenizer(file)
    with pytest.raises(ValueError, match=r"tokens are <\|stop\|>\. .*--eot-token"):
        HFTokenizer(file, eot_token="<|halt|>")
    assert HFTokenizer(file, eot_token="<|stop|>").eot_id == 0


def test_ids_beyond_the_count_of_tokens_are_in_the_vocabulary(bpe_file, tmp_path):
    content = json.loads(bpe_file.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 500, "content": "<|late|>"})
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    vocabulary = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    assert HFTokenizer(file).vocab_size == max(vocabulary.values()) + 1


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer file .*absent\.json"):
        HFTokenizer(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text('{"model": 3')
    with pytest.raises(ValueError, match=r"broken\.json is no Hugging Face tokenizer"):
        HFTokenizer(tmp_path / "broken.json")


def _stream(tokenizer, ids, sizes):
    decoder, pieces, start = StreamDecoder(tokenizer), [], 0
    for size in sizes:
        pieces.append(decoder.push(ids[start : start + size]))
        start += size
    assert start >= len(ids)
    return pieces, decoder.flush()


def test_stream_holds_back_an_unfinished_character():
    pieces, rest = _stream(ByteTokenizer(), "aé🙂!".encode(), [1] * 8)
    assert pieces == ["a", "", "é", "", "", "", "🙂", "!"]
    assert rest == ""
    decoder = StreamDecoder(ByteTokenizer())
    assert decoder.push([0xF0, 0x9F]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push([65]) == "A"  # flushed means ready for the next text


@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
def test_stream_pieces_join_to_the_whole_text(kind, bpe_file, sentencepiece_file):
    files = {"bpe": bpe_file, "sentencepiece": sentencepiece_file}
    tokenizer = ByteTokenizer() if kind == "bytes" else HFTokenizer(files[kind])
    rng = np.random.default_rng(0)
    texts = [*TEXTS, "the a on the 東京.é the", "🙂🙂 the  on", "a" * 40]
    for text in texts:
        ids = tokenizer.encode(text)
        for _ in range(10):
            sizes = [*rng.integers(1, 4, size=len(ids)), 1]
            pieces, rest = _stream(tokenizer, ids, sizes)
            assert "".join(pieces) + rest == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_stream_of_random_ids_joins_to_the_whole_text(kind, bpe_file):
    """What an untrained model makes: bytes that are mostly no UTF-8."""
    tokenizer = ByteTokenizer() if kind == "bytes" else HFTokenizer(bpe_file)
    rng = np.random.default_rng(1)
    for _ in range(50):
        ids = rng.integers(0, tokenizer.vocab_size, size=60).tolist()
        pieces, rest = _stream(tokenizer, ids, [1] * 60)
        assert "".join(pieces) + rest == tokenizer.decode(ids)
        assert sum(map(bool, pieces)) > 5  # it does stream


def test_what_a_model_has_in_front_of_a_text(bpe_file, tmp_path):
    content = tokenizers.Tokenizer.from_file(str(bpe_file))
    end = content.token_to_id("<|endoftext|>")
    content.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    content.save(str(tmp_path / "tokenizer.json"))
    plain = HFTokenizer(tmp_path / "tokenizer.json")
    assert (plain.prefix, plain.added_in_front()) == ((), (end,))
    assert HFTokenizer(bpe_file).added_in_front() == ()
    model = HFTokenizer(tmp_path / "tokenizer.json", prefix=[end])
    ids = plain.encode("the")
    assert model.encode("the") == ids
    assert prompt_ids(model, "the") == [end, *ids] == content.encode("the").ids
    assert prompt_ids(plain, "the") == ids
    assert prompt_ids(plain, "") == prompt_ids(model, "") == [end]
    assert prompt_ids(ByteTokenizer(), "é") == [0xC3, 0xA9]
    assert repr(model) == (
        f"HFTokenizer('{tmp_path}/tokenizer.json', {plain.vocab_size} ids, eot_id={end} "
        f"'<|endoftext|>', prefix=[{end}])"
    )
    assert repr(ByteTokenizer()) == "ByteTokenizer()"
    with pytest.raises(ValueError, match=r"prefix is \[-1\]; .* has ids 0"):
        HFTokenizer(bpe_file, prefix=[-1])
