"""Small tokenizers made on the spot, so that no file is needed."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = """The sparse transformer reads a line of text, and most of its neurons stay silent.
Räksmörgås, naïve, 東京 and 🙂 are text too.

\tA line that starts with a tab;  two  spaces   and a trailing one 
def neuron(x): return max(0, x)
"""


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory):
    """A byte-level BPE of 320 ids whose <|endoftext|> is 0."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory):
    """Llama-2 style: a leading space is added, unknown characters fall back to bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.", "▁a", "▁t", "he", "▁the", "on"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "n")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
