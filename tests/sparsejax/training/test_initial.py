"""Runs that start from given weights: what they hold, on which devices, and what is refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

import sparsejax
from sparsejax import MeshConfig, convert
from sparsejax.data import DataNotFoundError, HFTokenizer
from sparsejax.data.prepare import prepare_corpus
from sparsejax.distill import DistillConfig
from sparsejax.params import flatten
from sparsejax.training.checkpoint import Checkpointer
from sparsejax.training.config import TrainConfig
from sparsejax.training.initial import folder_kind, initial_config, weights_digest
from sparsejax.training.load import load_model
from sparsejax.training.loop import train
from sparsejax.training.metrics import read_rows
from sparsejax.training.run import prepare
from sparsejax.training.step import LossConfig


@pytest.fixture(scope="module")
def params(micro):
    return sparsejax.init_params(micro.replace(init_std=0.3), jax.random.key(7))


@pytest.fixture(scope="module")
def run_folder(micro, params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("given") / "run"
    convert.save_run(folder, micro, params)
    return folder


@pytest.fixture(scope="module")
def hf_folder(micro, params, tmp_path_factory):
    """The same weights in bfloat16."""
    folder = tmp_path_factory.mktemp("given") / "hf"
    convert.save(folder, micro, params, dtype="bfloat16")
    return folder


def config(folder, workdir, **changes) -> TrainConfig:
    base = TrainConfig(
        init_from=folder,
        workdir=workdir,
        steps=6,
        seq_len=16,
        log_every=1,
        eval_batches=1,
        checkpoint_every=3,
        loss=LossConfig(l1_coeff=0.0),
    )
    return dataclasses.replace(base, **changes)


def start(run_config):
    run = prepare(run_config)
    return run, run._fresh_state()


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)])
@pytest.mark.parametrize("kind", ["run", "hf"])
def test_the_state_holds_the_given_weights(kind, mesh, params, run_folder, hf_folder, tmp_path):
    folder = run_folder if kind == "run" else hf_folder
    run, state = start(config(folder, tmp_path / "new", mesh=mesh))
    assert folder_kind(folder) == kind
    want = flatten(params)
    for path, leaf in flatten(state.params).items():
        kept = want[path] if kind == "run" else want[path].astype("bfloat16").astype("float32")
        assert leaf.dtype == "float32"
        assert np.asarray(leaf).tobytes() == np.asarray(kept).tobytes()
    for leaf, template in zip(jax.tree.leaves(state), jax.tree.leaves(run.template), strict=True):
        assert leaf.sharding.is_equivalent_to(template.sharding, leaf.ndim)
        assert (leaf.shape, leaf.dtype) == (template.shape, template.dtype)
    assert int(state.step) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))


def test_a_run_starts_there_and_a_resume_does_not_read_it_again(
    micro, params, run_folder, tmp_path
):
    given, workdir = tmp_path / "given", tmp_path / "new"
    shutil.copytree(run_folder, given)
    special = {"config.json": {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}}
    (given / "tokenizer").mkdir(exist_ok=True)
    (given / "tokenizer" / "token_ids.json").write_text(json.dumps(special))
    run = config(given, workdir, steps=4, stop_at=2, checkpoint_every=2)
    train(run)
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["train"]["init_from"] == str(given)
    assert saved["config"] == micro.to_dict()
    assert convert.read_token_ids(workdir / "tokenizer") == special
    first = read_rows(workdir / "metrics.jsonl")[0]["ce"]
    prepared = prepare(config(given, tmp_path / "same"))
    with prepared.loader(prepared.source) as loader:
        batch = next(loader)
    logits = np.asarray(sparsejax.apply(micro, params, batch["tokens"]), np.float64)
    at_target = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    assert first == pytest.approx((np.log(np.exp(logits).sum(-1)) - at_target).mean(), rel=1e-5)
    shutil.rmtree(given)
    resumed = prepare(dataclasses.replace(run, stop_at=None, resume=True))
    with (
        Checkpointer(resumed.workdir.checkpoints) as checkpointer,
        resumed.loader(resumed.source) as loader,
        jax.set_mesh(resumed.mesh),
    ):
        assert int(resumed.start(checkpointer, loader).step) == loader.step == 2
    # The trained run is itself something to start from.
    _, state = start(config(workdir, tmp_path / "third"))
    trained = flatten(load_model(workdir).params)
    for path, leaf in flatten(state.params).items():
        np.testing.assert_array_equal(leaf, trained[path])


def test_a_run_that_never_saved_starts_there_again(run_folder, tmp_path):
    workdir = tmp_path / "new"
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "config.json").write_text("{}")
    run = config(run_folder, workdir, resume=True)
    assert run.model() == initial_config(run_folder)


def test_the_preset_may_agree(micro, micro_file, run_folder, hf_folder, tmp_path):
    assert config(run_folder, tmp_path, preset=micro_file).model() == micro
    found = config(hf_folder, tmp_path, preset=micro_file).model()
    assert (found.dtype, found.param_dtype) == ("bfloat16", "float32")
    assert found.replace(dtype="float32") == micro


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "tiny"}, r"preset 'tiny' is not the model of init_from .*d_model: 128 vs 32"),
        ({"mesh": MeshConfig(tensor=8)}, "the mesh does not fit the model"),
        ({"seq_len": 64}, "seq_len 64 exceeds the context length 32 of init_from"),
        ({"init_from": "absent"}, "no folder absent"),
        ({"init_from": __file__}, r"test_initial\.py is a file; expected a run or a Hugging Face"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(
    run_folder, tmp_path, changes, message
):
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}"):
        train(config(run_folder, tmp_path / "new", **changes))
    assert not (tmp_path / "new").exists()


def test_weights_of_another_tokenizer_are_refused(micro, params, tmp_path):
    vocab = {f"w{i}": i for i in range(256)} | {"</s>": 256}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    made.save(str(tmp_path / "tokenizer.json"))
    words = HFTokenizer(tmp_path / "tokenizer.json")
    convert.save(tmp_path / "hf", micro, params, words)
    convert.save_run(tmp_path / "run", micro, params, words)
    for kind, place in (("hf", "hf"), ("run", "run/tokenizer")):
        with pytest.raises(ValueError, match="another tokenizer than that of") as caught:
            train(config(tmp_path / kind, tmp_path / "new"))
        assert str(caught.value) == (
            f"corpus stdlib/train was tokenised with another tokenizer than that of "
            f"{tmp_path / kind} (corpus vs model): id 0 is '\\x00' vs 'w0'; prepare the text with "
            "the model's own: python experiments/prepare_data.py --inputs TEXT --tokenizer "
            f"{tmp_path / place}/tokenizer.json --out FOLDER"
        )
        assert not (tmp_path / "new").exists()
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "w1"}\n' * 40)
    prepare_corpus([text], tmp_path / "hf", tmp_path / "corpus", val_fraction=0, progress=False)
    for kind in ("run", "hf"):
        own = config(tmp_path / kind, tmp_path / "new", data=str(tmp_path / "corpus"))
        assert prepare(own).source.vocab_size == 257


def test_float16_folders_are_trained_in_bfloat16(micro, params, tmp_path):
    convert.save(tmp_path / "half", micro, params, dtype="float16")
    found = initial_config(tmp_path / "half")
    assert (found.dtype, found.param_dtype) == ("bfloat16", "float32")


def test_the_preset_is_tiny_where_nothing_is_said():
    assert TrainConfig().model() == sparsejax.presets.tiny()
    assert TrainConfig().resolved().preset == "tiny"
    assert TrainConfig().resolved().loss.l1_coeff == 1e-2


def test_the_digest_tells_weights_apart(micro, params, run_folder, hf_folder, tmp_path):
    found = {"run": weights_digest(run_folder), "hf": weights_digest(hf_folder)}
    assert len(set(found.values())) == 2  # of other bytes
    other = jax.tree.map(lambda leaf: leaf, params)
    other["layer_0"]["ffn"]["down"] = other["layer_0"]["ffn"]["down"].at[0, 0].add(1e-3)
    for name, tree in {"same": params, "other": other}.items():
        convert.save_run(tmp_path / name / "run", micro, tree)
        convert.save(tmp_path / name / "hf", micro, tree, dtype="bfloat16")
        for kind, digest in found.items():
            assert (weights_digest(tmp_path / name / kind) == digest) == (name == "same")


def test_the_corpus_of_the_run_that_is_started_from(micro, params, run_folder, tmp_path):
    text = tmp_path / "text"
    lines = [json.dumps({"text": f"document {n}"}) for n in range(300)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    prepare_corpus([tmp_path / "notes.jsonl"], "bytes", text, val_fraction=0.1, progress=False)
    step = jax.numpy.int32(0)
    extra = {"config": micro.to_dict(), "data": {"name": str(text)}}
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        checkpointer.save(0, {"params": params, "step": step}, extra)

    def resolved(kind=TrainConfig, **settings):
        return kind(workdir=tmp_path / "new", **settings).resolved().data

    assert resolved() == "stdlib"
    assert resolved(init_from=tmp_path / "run") == str(text)
    assert resolved(init_from=tmp_path / "run", data="stdlib") == "stdlib"
    assert TrainConfig(workdir=tmp_path / "run", resume=True).resolved().data == str(text)
    # `save_run` writes no text: a student made by surgery takes its teacher's.
    assert resolved(init_from=run_folder) == "stdlib"
    assert resolved(DistillConfig, init_from=run_folder, teacher=tmp_path / "run") == str(text)
    # A corpus that was moved is missed, not replaced by another.
    text.rename(tmp_path / "moved")
    with pytest.raises(DataNotFoundError, match=f"no corpus '{text}'"):
        prepare(config(tmp_path / "run", tmp_path / "new"))
