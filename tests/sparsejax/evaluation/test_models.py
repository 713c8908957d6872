"""Models out of folders of either kind, with their tokenizers; what cannot be opened."""

from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from sparsejax import convert
from sparsejax.data import ByteTokenizer, array_source
from sparsejax.evaluation import open_model, perplexity
from sparsejax.sharding import MeshConfig, make_mesh

GOLDEN = Path(__file__).parents[1] / "convert" / "golden"


@pytest.fixture(scope="module")
def run(model, bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "run"
    convert.save_run(folder, model.config, model.params, bpe)
    return folder


@pytest.fixture(scope="module")
def hf(model, bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "hf"
    convert.save(folder, model.config, model.params, bpe, dtype="bfloat16")
    return folder


def test_a_run(run, model, bpe):
    opened = open_model(run)
    assert (opened.name, opened.step, opened.prefix) == (str(run), 0, ())
    assert opened.config == model.config
    assert opened.tokenizer.encode("a line") == bpe.encode("a line")
    assert opened.num_tokens == bpe.vocab_size
    assert open_model(run, bos=True).prefix == (1,)
    assert open_model(run, context_length=16).config.context_length == 16


def test_a_hugging_face_folder(hf, model):
    opened = open_model(hf)
    assert (opened.step, opened.prefix) == (None, (1,))
    assert opened.config.dtype == "float32"  # half precision is slow on a CPU
    assert {leaf.dtype.name for leaf in jax.tree.leaves(opened.params)} == {"bfloat16"}
    assert open_model(hf, bos=False).prefix == ()
    assert open_model(hf, dtype="bfloat16").config.dtype == "bfloat16"


def test_both_give_the_same_loss_on_any_mesh(run, hf, bpe):
    source = array_source(np.arange(2, 66, dtype=np.uint16), tokenizer=bpe)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    one = perplexity(open_model(run), source, window=16)
    eight = perplexity(open_model(run, mesh), source, window=16)
    np.testing.assert_allclose(eight.position_nats, one.position_nats, rtol=2e-5)
    rounded = perplexity(open_model(hf, mesh, bos=False), source, window=16)
    assert rounded.nats == pytest.approx(one.nats, rel=0.02)


def test_tokenizers(run, model, bpe, tmp_path):
    convert.save_run(tmp_path / "bare", model.config, model.params)
    bare = open_model(tmp_path / "bare")
    assert bare.tokenizer is None and bare.num_tokens == 320
    with pytest.raises(ValueError, match="has no tokenizer"):
        bare.text_tokenizer()
    assert isinstance(open_model(tmp_path / "bare", tokenizer="bytes").tokenizer, ByteTokenizer)
    named = open_model(tmp_path / "bare", tokenizer=str(bpe.path))
    assert named.tokenizer.vocab_size == 320
    with pytest.raises(ValueError, match="puts nothing in front"):
        open_model(tmp_path / "bare", tokenizer="bytes", bos=True)
    with pytest.raises(ValueError, match=r"has 257 ids, but the model .* has only 64"):
        open_model(GOLDEN / "llama31", tokenizer="bytes")


def test_what_cannot_be_opened(run, hf, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        open_model(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="holds no model"):
        open_model(tmp_path)
    (tmp_path / "interrupted" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no .*checkpoint"):
        open_model(tmp_path / "interrupted")
    with pytest.raises(ValueError, match="step is for runs"):
        open_model(hf, step=3)
    for length in (33, 0):
        with pytest.raises(ValueError, match="must be at least 1 and at most the model's 32"):
            open_model(run, context_length=length)
    with pytest.raises(ValueError, match="the mesh does not fit the model"):
        open_model(run, make_mesh(MeshConfig(tensor=8)))


def test_the_first_token_of_a_tokenizer_without_letters(hf, tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"is": 0, "yes": 1, "<s>": 2, "</s>": 3}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<s>", "</s>"])
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    words.save(str(tmp_path / "words.json"))
    assert open_model(hf, tokenizer=str(tmp_path / "words.json")).prefix == (2,)
