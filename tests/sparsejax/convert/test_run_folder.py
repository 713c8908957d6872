"""A converted model as a run's folder, on a mesh and without its tokenizer."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from sparsejax import init_params, presets
from sparsejax.convert import load, load_run, save, save_run
from sparsejax.data import ByteTokenizer
from sparsejax.evaluation import open_model
from sparsejax.params import flatten
from sparsejax.sharding import MeshConfig, make_mesh
from sparsejax.training.load import load_model

GOLDEN = Path(__file__).parent / "golden"


def test_on_a_mesh(tmp_path):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    config, params, _ = load(GOLDEN / "qwen2", mesh)
    save_run(tmp_path, config, params)
    again, back, tokenizer = load_run(tmp_path, mesh)
    assert (again, tokenizer) == (config, None)
    for path, leaf in flatten(params).items():
        assert flatten(back)[path].sharding == leaf.sharding
        assert np.asarray(flatten(back)[path]).tobytes() == np.asarray(leaf).tobytes()
    assert load_model(tmp_path).step == 0
    assert json.loads((tmp_path / "config.json").read_text())["model"] == config.to_dict()


def test_a_run_whose_tokenizer_is_no_longer_in_its_place(tmp_path):
    config, params, _ = load(GOLDEN / "llama31")
    save_run(tmp_path / "run", config, params)
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    assert load_run(tmp_path / "run")[2] is None


def test_a_run_of_bytes_stays_one(tmp_path):
    config = presets.tiny()
    params = init_params(config, jax.random.key(0))
    save_run(tmp_path / "run", config, params, ByteTokenizer())
    again, back, tokenizer = load_run(tmp_path / "run")
    assert (again, type(tokenizer)) == (config, ByteTokenizer)
    assert open_model(tmp_path / "run").text_tokenizer().encode("é") == list("é".encode())
    save_run(tmp_path / "cut", again, back, tokenizer)  # as surgery does
    assert type(load_run(tmp_path / "cut")[2]) is ByteTokenizer
    save(tmp_path / "hf", again, back, tokenizer)  # bytes have no tokenizer.json
    assert load(tmp_path / "hf")[2] is None
    with pytest.raises(ValueError, match=r"ByteTokenizer\(\) has ids up to 256, but .* 64 rows"):
        save(tmp_path / "small", *load(GOLDEN / "qwen2")[:2], ByteTokenizer())


def test_a_folder_with_checkpoints_is_not_written_over(tmp_path):
    config, params, _ = load(GOLDEN / "llama31")
    save_run(tmp_path, config, params)
    before = jax.tree.map(np.asarray, load_run(tmp_path)[1])
    with pytest.raises(ValueError, match="holds checkpoints already"):
        save_run(tmp_path, config, params)
    jax.tree.map(np.testing.assert_array_equal, before, load_run(tmp_path)[1])
    with pytest.raises(FileNotFoundError, match="holds no run"):
        load_run(tmp_path / "absent")


def test_the_folder_that_the_model_came_from_keeps_its_config(tmp_path):
    config, params, _ = load(GOLDEN / "llama31")
    save(tmp_path, config, params)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"holds config.json already; name another folder"):
        save_run(tmp_path, config, params)
    assert (tmp_path / "config.json").read_bytes() == before
    assert not (tmp_path / "checkpoints").exists()
    save_run(tmp_path / "run", config, params)
    with pytest.raises(ValueError, match=r"holds config.json of another model already"):
        save(tmp_path / "run", config, params)
    assert load_run(tmp_path / "run")[0] == config
