"""A small model with confident opinions, tokenizers made on the spot, and a slow reference."""

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import sparsejax
from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.data import ByteTokenizer, HFTokenizer
from sparsejax.evaluation import EvalModel
from sparsejax.sharding import MeshConfig, make_mesh, tree_shardings

TEXT = """The sparse transformer reads a line of text, and most of its neurons stay silent.
Räksmörgås, naïve, 東京 and 🙂 are text too.
def neuron(x): return max(0, x)
"""


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    """2 layers, one without attention; context 32, vocabulary 320."""
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    layers = (
        LayerConfig(attention=attention, ffn=FFNConfig(d_ff=64)),
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=32)),
    )
    return ModelConfig(
        vocab_size=320,
        d_model=32,
        layers=layers,
        context_length=32,
        init_std=0.4,
        dtype="float32",
    )


@pytest.fixture(scope="session")
def model(config) -> EvalModel:
    """The model on one device, for bytes."""
    mesh = make_mesh(devices=jax.devices()[:1])
    params = sparsejax.init_params(config, jax.random.key(0))
    params = jax.device_put(params, tree_shardings(mesh, params))
    return EvalModel("small", config, params, mesh, ByteTokenizer())


@pytest.fixture(scope="session")
def model_on_eight(config) -> EvalModel:
    """The same on a mesh of 2 x 2 x 2 devices."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = sparsejax.init_params(config, jax.random.key(0))
    params = jax.device_put(params, tree_shardings(mesh, params))
    return EvalModel("small", config, params, mesh, ByteTokenizer())


@pytest.fixture(scope="session")
def reference(config, model):
    """ids -> (n, V) float64 log p of the token after each of them, one row at a time."""

    def log_probabilities(ids) -> np.ndarray:
        padded = np.zeros((1, config.context_length), np.int32)
        padded[0, : len(ids)] = ids
        logits = sparsejax.apply(config, model.params, padded)[0, : len(ids)]
        logits = np.asarray(logits, np.float64)
        peak = logits.max(-1, keepdims=True)
        return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))

    return log_probabilities


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> HFTokenizer:
    """A byte-level BPE of 320 ids: <|endoftext|> is 0, and <s> (1) goes in front of a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return HFTokenizer(path)
