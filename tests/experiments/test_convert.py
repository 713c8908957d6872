"""The script, both ways, and generation from what it writes."""

import importlib.util
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from sparsejax import convert, init_params, presets
from sparsejax.data import ByteTokenizer, HFTokenizer, array_source
from sparsejax.evaluation import open_model, perplexity
from sparsejax.generate import generate
from sparsejax.params import flatten

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "sparsejax" / "convert" / "golden"


def load_script(name):
    path = ROOT / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"{name}_script"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load_script("convert")


@pytest.fixture
def source(tmp_path):
    """A Hugging Face folder with a tokenizer of 64 words."""
    folder = tmp_path / "hf"
    config, params, _ = convert.load(GOLDEN / "llama31")
    convert.save(folder, config, params)
    vocab = {f"w{i}": i for i in range(63)} | {"</s>": 63}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_there_and_back_bit_for_bit(script, source, tmp_path, capsys):
    run, back = tmp_path / "run", tmp_path / "back"
    assert script.main(["--from", str(source), "--to", str(run)]) == 0
    count = sum(leaf.size for leaf in jax.tree.leaves(convert.load(source)[1]))
    line = f"{run}: a run, {count:,} parameters in 2 layers, with 64 tokens\n"
    assert capsys.readouterr().out == line
    assert script.main(["--from", str(run), "--to", str(back)]) == 0
    assert "a Hugging Face folder of the family llama" in capsys.readouterr().out
    (config, params, _), (again, same, tokenizer) = map(convert.load, (source, back))
    assert again == config
    for path, leaf in flatten(params).items():
        assert np.asarray(leaf).tobytes() == np.asarray(flatten(same)[path]).tobytes()
    assert tokenizer.encode("w5 w6") == [5, 6]
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_on_a_mesh_the_files_are_the_same(script, source, tmp_path):
    mesh = ["--mesh.fsdp", "2", "--mesh.tensor", "2"]
    assert script.main(["--from", str(source), "--to", str(tmp_path / "run"), *mesh]) == 0
    back = tmp_path / "back"
    assert script.main(["--from", str(tmp_path / "run"), "--to", str(back), *mesh]) == 0
    weights = "model.safetensors"
    assert (back / weights).read_bytes() == (source / weights).read_bytes()
    with pytest.raises(ValueError, match="the mesh does not fit the model"):
        script.main(["--from", str(source), "--to", str(tmp_path / "no"), "--mesh.tensor", "8"])


def test_a_converted_model_generates(script, source, tmp_path, capsys):
    run = tmp_path / "run"
    script.main(["--from", str(source), "--to", str(run)])
    capsys.readouterr()
    flags = ["--prompt", "w1 w2 w3", "--max-new-tokens", "8", "--temperature", "0"]
    assert load_script("generate").main(["--workdir", str(run), *flags]) == 0
    config, params, _ = convert.load(source)
    want = generate(config, params, [[1, 2, 3]], max_new_tokens=8, eos_id=63)[0]
    text = ["w1", "w2", "w3", *(f"w{i}" for i in want if i != 63)]
    assert capsys.readouterr().out.split() == text


def test_a_run_of_bytes_goes_out_without_a_tokenizer(script, tmp_path, capsys):
    config = presets.tiny()
    params = init_params(config, jax.random.key(0))
    convert.save_run(tmp_path / "run", config, params, ByteTokenizer())
    arguments = ["--from", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]
    assert script.main([*arguments, "--dtype", "bfloat16"]) == 0
    told = "without a tokenizer: its tokens are bytes (--tokenizer bytes)\n"
    assert capsys.readouterr().out.endswith(told)
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    loaded = convert.load(tmp_path / "hf")[0]
    assert loaded.layers == config.layers
    assert loaded.param_dtype == "bfloat16"
    with pytest.raises(ValueError, match="holds checkpoints already"):
        convert.save_run(tmp_path / "run", config, init_params(config, jax.random.key(0)))


def test_the_report(script, source, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 60}" for i in range(300)))
    arguments = ["--from", str(source), "--to", str(tmp_path / "run"), "--report", str(text)]
    assert script.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("256 tokens\n")  # two rows of the context's 128
    assert "by FLOPs alone the sparse path gains 1.00x on the model as it is" in out


def test_the_report_of_a_folder_without_a_tokenizer(script, source, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 60}" for i in range(300)))
    config = presets.tiny()
    convert.save(tmp_path / "bytes", config, init_params(config, jax.random.key(0)))

    def report(folder, *flags):
        out = tmp_path / f"run of {folder.name}"
        arguments = ["--from", str(folder), "--to", str(out), "--report", str(text)]
        assert script.main([*arguments, *flags]) == 0
        told = capsys.readouterr().out
        assert "without a tokenizer" in told
        return told

    assert len(text.read_bytes()) > 1024
    told = report(tmp_path / "bytes", "--tokenizer", "bytes", "--report-tokens", "1024")
    assert told.startswith("1024 tokens\n")
    named = shutil.move(source / "tokenizer.json", tmp_path / "tokenizer.json")
    assert report(source, "--tokenizer", str(named)).startswith("256 tokens\n")
    # Ids that the model does not have would be another row of its embedding.
    with pytest.raises(ValueError, match="tokenizer has 257 ids, but the model has only 64:"):
        report(source, "--tokenizer", "bytes")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "holds neither checkpoints/"),
        (["--from", str(GOLDEN / "qwen2"), "--family", "llama"], "--family has no meaning where"),
        (["--from", str(GOLDEN / "qwen2"), "--step", "3"], "--step has no meaning where"),
        (["--from", str(GOLDEN / "qwen2"), "--report", "x.txt"], "--report needs a tokenizer"),
        (["--from", str(GOLDEN / "qwen2"), "--tokenizer", "bytes"], "meaning without that"),
        (["--from", "x", "--report-tokens", "0"], "--report-tokens must be at least 1, got 0"),
    ],
)
def test_flags_that_do_not_fit(script, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        script.main(["--from", str(tmp_path), "--to", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_a_damaged_folder_ends_with_one_line(source, tmp_path):
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"mlp_bias": True}))
    result = subprocess.run(
        [sys.executable, "experiments/convert.py", "--from", source, "--to", tmp_path / "run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == (
        f"convert.py: {source}/config.json: 'mlp_bias' = True changes the mathematics and is not "
        "supported\n"
    )


def test_a_folder_is_not_converted_into_itself(script, source):
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    with pytest.raises(ValueError, match=r"holds config.json already; name another folder"):
        script.main(["--from", str(source), "--to", str(source)])
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


def test_a_target_that_cannot_be_written_is_one_line(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    flags = ["--from", str(source), "--to", str(tmp_path / "file")]
    monkeypatch.setattr(sys, "argv", ["convert.py", *flags])
    # In this process: `SystemExit` with a text shows it and leaves with status 1.
    with pytest.raises(SystemExit, match=r"^convert\.py: [^\n]+$"):
        runpy.run_path(str(ROOT / "experiments" / "convert.py"), run_name="__main__")


IDS = {
    "config.json": {"bos_token_id": 62, "eos_token_id": [63, 5], "pad_token_id": None},
    "generation_config.json": {"bos_token_id": 62, "eos_token_id": [63, 5], "pad_token_id": 7},
}


def special_ids(folder):
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "do_sample")
    found = {}
    for name in IDS:
        if (folder / name).is_file():
            values = json.loads((folder / name).read_text())
            found[name] = {key: values[key] for key in keys if key in values}
    return found


@pytest.fixture
def with_bos(source):
    """The folder, its tokenizer putting w62 in front, its configs naming several ids."""
    made = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    made.post_processor = processors.TemplateProcessing(
        single="w62 $A", special_tokens=[("w62", 62)]
    )
    made.save(str(source / "tokenizer.json"))
    for name, ids in IDS.items():
        file = source / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({k: v for k, v in values.items() if k not in ids} | ids))
    return source


@pytest.mark.parametrize("tokenizer", [True, False])
def test_special_ids_survive_the_way_through_a_run(tokenizer, script, with_bos, tmp_path):
    if not tokenizer:
        (with_bos / "tokenizer.json").unlink()
    assert special_ids(with_bos) == IDS
    script.main(["--from", str(with_bos), "--to", str(tmp_path / "run")])
    script.main(["--from", str(tmp_path / "run"), "--to", str(tmp_path / "back")])
    assert special_ids(tmp_path / "back") == IDS
    config, params, found = convert.load(with_bos)
    convert.save(tmp_path / "direct", config, params, found)
    assert special_ids(tmp_path / "direct") == (IDS if tokenizer else {"config.json": {}})


def test_ids_that_a_folder_does_not_name_are_not_invented(script, source, tmp_path):
    assert special_ids(source) == {"config.json": {}}
    script.main(["--from", str(source), "--to", str(tmp_path / "run")])
    script.main(["--from", str(tmp_path / "run"), "--to", str(tmp_path / "back")])
    assert special_ids(tmp_path / "back") == {"config.json": {}}
    # A tokenizer from elsewhere: its end mark is known, and nothing else.
    shutil.copy(source / "tokenizer.json", tmp_path / "tokenizer.json")
    config, params, _ = convert.load(source)
    convert.save(tmp_path / "own", config, params, HFTokenizer(tmp_path / "tokenizer.json"))
    end = {"eos_token_id": 63}
    assert special_ids(tmp_path / "own") == dict.fromkeys(IDS, end)


def test_texts_end_with_any_id_that_the_folder_names(script, source, tmp_path, capsys):
    """A chat model's generation_config.json names the end of a turn beside the end of a text."""
    config, params, _ = convert.load(source)
    free = generate(config, params, [[1, 2, 3]], max_new_tokens=8)[0]
    end = next(i for i in free[::-1] if i != 63)
    named = shutil.copytree(source, tmp_path / "named")
    (named / "generation_config.json").write_text(json.dumps({"eos_token_id": [63, end]}))
    run = tmp_path / "run"
    script.main(["--from", str(named), "--to", str(run)])
    capsys.readouterr()
    flags = ["--prompt", "w1 w2 w3", "--max-new-tokens", "8", "--temperature", "0"]
    upto = min(free.index(i) for i in (end, 63) if i in free)
    want = ["w1", "w2", "w3", *(f"w{i}" for i in free[:upto])]
    for folder in (named, run):
        assert load_script("generate").main(["--workdir", str(folder), *flags]) == 0
        assert capsys.readouterr().out.split() == want


def test_a_folder_and_the_run_made_from_it_begin_texts_alike(script, with_bos, tmp_path, capsys):
    run = tmp_path / "run"
    script.main(["--from", str(with_bos), "--to", str(run)])
    script.main(["--from", str(run), "--to", str(tmp_path / "back")])
    capsys.readouterr()
    config, params, tokenizer = convert.load(with_bos)
    assert tokenizer.prefix == convert.load_run(run)[2].prefix == (62,)
    main = load_script("generate").main
    flags = ["--prompt", "w1 w2 w3", "--max-new-tokens", "8", "--temperature", "0"]

    def text(folder, *more):
        assert main(["--workdir", str(folder), *flags, *more]) == 0
        return capsys.readouterr().out.split()

    def continued(prompt):
        ends = [63, *np.atleast_1d(IDS["generation_config.json"]["eos_token_id"]).tolist()]
        new = generate(config, params, [prompt], max_new_tokens=8, eos_id=ends)[0]
        return ["w1", "w2", "w3", *(f"w{i}" for i in new if i not in ends)]

    assert continued([62, 1, 2, 3]) != continued([1, 2, 3])
    for folder in (with_bos, run, tmp_path / "back"):
        assert text(folder) == continued([62, 1, 2, 3])
        assert text(folder, "--no-bos") == continued([1, 2, 3])

    ids = np.random.default_rng(0).integers(0, 62, 300)
    corpus = array_source(ids.astype(np.uint16), tokenizer=tokenizer)
    opened = [open_model(folder) for folder in (with_bos, run)]
    theirs, ours = (perplexity(model, corpus, window=16).nats for model in opened)
    assert ours == theirs
    assert perplexity(open_model(run, bos=False), corpus, window=16).nats != theirs
    # A run converted before this was recorded does without, as it did.
    meta = json.loads((run / "tokenizer" / "meta.json").read_text())
    assert meta.pop("prefix") == [62]
    (run / "tokenizer" / "meta.json").write_text(json.dumps(meta))
    assert open_model(run).prefix == ()
    assert text(run) == continued([1, 2, 3])
    assert text(run, "--bos") == continued([62, 1, 2, 3])
