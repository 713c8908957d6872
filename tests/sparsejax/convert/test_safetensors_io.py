"""Files as the safetensors package reads and writes them, and every kind of damage."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy

from sparsejax.convert.safetensors_io import (
    FolderError,
    Tensor,
    open_folder,
    read,
    read_header,
    write_folder,
)

RNG = np.random.default_rng(0)


def tensor(array):
    return Tensor(array.shape, array.dtype, lambda: array)


@pytest.fixture
def arrays():
    """Not square, not symmetric, of three dtypes and an odd number of halves."""
    return {
        "half": RNG.standard_normal((3, 5)).astype(np.float16),
        "wide": RNG.standard_normal((7, 4)).astype(np.float32),
        "brain": RNG.standard_normal((2, 3, 4)).astype(jnp.bfloat16),
    }


@pytest.fixture
def sharded(tmp_path, arrays):
    write_folder(tmp_path, {k: tensor(v) for k, v in arrays.items()}, max_shard_bytes=60)
    return tmp_path


def test_the_package_reads_what_is_written(tmp_path, arrays):
    write_folder(tmp_path, {name: tensor(array) for name, array in arrays.items()})
    file = tmp_path / "model.safetensors"
    got = safetensors.flax.load_file(file)
    assert set(got) == set(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(got[name]), array)
    with safetensors.safe_open(file, framework="np") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize("view", ["transposed", "strided", "Fortran"])
def test_views_are_written_by_element_not_by_byte(tmp_path, view):
    base = np.arange(35, dtype=np.float32).reshape(5, 7)
    array = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "Fortran": np.asfortranarray(base),
    }[view]
    write_folder(tmp_path, {"x": tensor(array)})
    got = safetensors.numpy.load_file(tmp_path / "model.safetensors")["x"]
    np.testing.assert_array_equal(got, array)


def test_what_the_package_writes_is_read(tmp_path, arrays):
    copies = {name: jnp.asarray(array) for name, array in arrays.items()}
    safetensors.flax.save_file(copies, tmp_path / "model.safetensors")
    entries = open_folder(tmp_path)
    assert set(entries) == set(arrays)
    for name, array in arrays.items():
        got = read(entries[name])
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_shards_and_index(sharded, arrays):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 30 + 112 + 48
    assert index["weight_map"] == {
        "half": "model-00001-of-00003.safetensors",
        "wide": "model-00002-of-00003.safetensors",
        "brain": "model-00003-of-00003.safetensors",
    }
    for name, entry in open_folder(sharded).items():
        np.testing.assert_array_equal(read(entry), arrays[name])


def test_a_folder_with_weights_is_not_written_over(sharded, arrays):
    with pytest.raises(ValueError, match=r"holds model-00001-of-00003.safetensors already"):
        write_folder(sharded, {"wide": tensor(arrays["wide"])})


def test_a_missing_shard(sharded):
    name = "model-00002-of-00003.safetensors"
    (sharded / name).unlink()
    with pytest.raises(FolderError, match=f"missing shard {name}; .* has tensor wide in it"):
        open_folder(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(FolderError, match=f"missing shard {name} \\(and it has no model.safe"):
        open_folder(sharded)


def test_shards_without_their_index_are_complete_all_the_same(sharded, arrays):
    (sharded / "model.safetensors.index.json").unlink()
    assert set(open_folder(sharded)) == set(arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new": "model-00009-of-00003.safetensors"}, "missing shard model-00009-of-00003"),
        ({"new": "../model.safetensors"}, "which is not a file of the folder"),
        ({"new": "model-00001-of-00003.safetensors"}, "lacks tensor new, which"),
        ({"half": "model-00002-of-00003.safetensors"}, "lacks tensor half"),
    ],
)
def test_an_index_that_does_not_fit(sharded, change, message):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= change
    file.write_text(json.dumps(index))
    with pytest.raises(FolderError, match=message):
        open_folder(sharded)


def test_a_tensor_the_index_does_not_name(tmp_path, arrays):
    write_folder(tmp_path, {k: tensor(v) for k, v in arrays.items()}, max_shard_bytes=100)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    assert len(set(index["weight_map"].values())) == 3
    (tmp_path / index["weight_map"]["half"]).unlink()
    both = {"half": arrays["half"], "stray": arrays["wide"]}
    safetensors.numpy.save_file(both, tmp_path / index["weight_map"]["half"])
    with pytest.raises(FolderError, match=r"holds tensor stray, which .* does not name"):
        open_folder(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 50, -1])
def test_a_truncated_file(tmp_path, arrays, keep):
    write_folder(tmp_path, {"wide": tensor(arrays["wide"])})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(FolderError, match=r"model.safetensors is truncated"):
        open_folder(tmp_path)


def test_a_file_that_is_too_long(tmp_path, arrays):
    write_folder(tmp_path, {"wide": tensor(arrays["wide"])})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(FolderError, match=r"is damaged: it has .* bytes, its header asks for"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1, 2]", "the header is no JSON object"),
        (b"{broken", "no JSON where JSON is expected"),
        (b'{"x": {"dtype": "F32", "shape": [2]}}', "the header's entry of x is damaged"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "of shape .2. and dtyp"),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', "has the offsets"),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "x does not begin wher"),
    ],
)
def test_a_damaged_header(tmp_path, header, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    with pytest.raises(FolderError, match=message):
        read_header(file)


def test_folders_without_weights(tmp_path):
    with pytest.raises(FolderError, match="is no folder"):
        open_folder(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FolderError, match=r"neither model.safetensors nor .*\.bin files are not"):
        open_folder(tmp_path)


def test_a_tensor_that_is_not_what_was_announced(tmp_path, arrays):
    wrong = Tensor((4, 7), np.dtype(np.float32), lambda: arrays["wide"])
    with pytest.raises(ValueError, match=r"x: expected float32 \[4, 7\], got float32 \[7, 4\]"):
        write_folder(tmp_path, {"x": wrong})
    assert not (tmp_path / "model.safetensors").exists()


def test_a_single_file_beside_the_index_of_others(sharded, arrays):
    safetensors.numpy.save_file({"wide": arrays["wide"]}, sharded / "model.safetensors")
    with pytest.raises(FolderError, match=r"holds model.safetensors, which .*index.json does not"):
        open_folder(sharded)
    (sharded / "model.safetensors").unlink()
    assert set(open_folder(sharded)) == set(arrays)


@pytest.mark.parametrize("entry", ['"shape": [1.5]', '"shape": ["1"]', '"shape": [1], "dtype": []'])
def test_header_entries_of_another_type(tmp_path, entry):
    header = f'{{"x": {{"dtype": "F32", "data_offsets": [0, 4], {entry}}}}}'.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    with pytest.raises(FolderError, match="the header's entry of x is damaged"):
        read_header(file)


def test_an_index_that_is_too_deep(sharded):
    (sharded / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(FolderError, match="is damaged: no JSON where"):
        open_folder(sharded)


def test_a_full_disk_leaves_nothing_behind(tmp_path, arrays):
    def fails():
        raise OSError(28, "No space left on device")

    wide = tensor(arrays["wide"])
    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path, {"x": wide, "y": Tensor(wide.shape, wide.dtype, fails)})
    assert not list(tmp_path.iterdir())
    write_folder(tmp_path, {"x": wide})  # the next attempt is not barred
