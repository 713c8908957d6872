"""Checkpoints that something has happened to: always noticed, never resumed from, never deleted."""

import gc
import json
import os
import resource
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.training.checkpoint import Checkpointer, CheckpointError, CheckpointWarning


def state_at(step, rows=64):
    """Weights of random bits: they do not compress, so the data files hold them as they are."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rng = np.random.default_rng(step)

    def weights():
        x = rng.integers(0, 2**32, (rows, 48), np.uint32).view(np.float32)
        return np.where(np.isfinite(x), x, np.float32(1))

    tree = {f"layer_{i}": {"gate": weights()} for i in range(3)}
    tree = {"params": tree, "step": np.int32(step)}
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, P("data") if x.ndim else P())), tree
    )


def template_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


TEMPLATE = template_of(state_at(0))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def save(directory, *steps, rows=64):
    with Checkpointer(directory, keep=len(steps)) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_at(step, rows), {"loss": 1.5})
    return directory


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    return save(tmp_path_factory.mktemp("checkpoints"), 90, 100)


@pytest.fixture
def directory(two_steps, tmp_path):
    """A fresh copy of checkpoints 90 and 100."""
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(bytes(data))


def test_100_single_flipped_bits_in_data_files_none_undetected(directory):
    rng = np.random.default_rng(0)
    shutil.rmtree(directory / "90")
    state = state_at(100)
    blocks = []  # (leaf's path, file, where one shard's bytes lie in it)
    for name, layer in state["params"].items():
        for shard in layer["gate"].addressable_shards:
            raw = np.asarray(shard.data).tobytes()
            for file in files_of(directory / "100" / "state"):
                if (start := file.read_bytes().find(raw)) >= 0:
                    blocks.append((f"params/{name}/gate", file, start, len(raw)))
    assert len(blocks) == 6
    detected = 0
    for i in range(100):
        leaf, file, start, size = blocks[i % 6]
        bit = 8 * start + int(rng.integers(8 * size))
        flip(file, bit)
        try:
            Checkpointer(directory).restore(TEMPLATE)
        except FileNotFoundError as error:
            detected += f"the bits of {leaf} are not those that were saved" in str(error)
        flip(file, bit)
    assert detected == 100
    assert bits(Checkpointer(directory).restore(TEMPLATE).state) == bits(state)


def test_flipped_bits_anywhere_never_give_other_values(directory):
    """Metadata, manifests and index nodes too; a flip in bytes that nothing reads is harmless."""
    rng = np.random.default_rng(1)
    shutil.rmtree(directory / "90")
    good = bits(state_at(100))
    noticed = {}
    for file in files_of(directory):
        name = str(file.relative_to(directory))
        noticed[name] = 0
        for bit in rng.integers(8 * file.stat().st_size, size=8):
            flip(file, int(bit))
            try:
                assert bits(Checkpointer(directory).restore(TEMPLATE).state) == good
            except FileNotFoundError:
                noticed[name] += 1
            flip(file, int(bit))
    assert noticed["100/meta/metadata"] == 8
    assert noticed["100/state/manifest.ocdbt"] == 8


def test_flipped_bit_falls_back_naming_the_leaf(directory):
    raw = np.asarray(state_at(100)["params"]["layer_1"]["gate"].addressable_shards[1].data)
    (file,) = [f for f in files_of(directory / "100") if raw.tobytes() in f.read_bytes()]
    flip(file, 8 * file.read_bytes().find(raw.tobytes()) + 3)
    before = {path: path.read_bytes() for path in files_of(directory)}
    with pytest.warns(
        CheckpointWarning,
        match=r"step 100 is passed over: the bits of params/layer_1/gate .* step 90 is used",
    ):
        restored = Checkpointer(directory).restore(TEMPLATE)
    assert restored.step == 90
    assert bits(restored.state) == bits(state_at(90))
    assert {path: path.read_bytes() for path in files_of(directory)} == before
    # Not asked for: the step before is not silently given for it.
    with pytest.raises(FileNotFoundError, match="step 100: the bits of params/layer_1/gate"):
        Checkpointer(directory).restore(TEMPLATE, step=100)
    # A part of the parameters is no template, whole or not.
    params = {"layer_0": TEMPLATE["params"]["layer_0"]}
    with pytest.raises(ValueError, match="differ in 2 leaves"):
        Checkpointer(directory).restore_params(params)


def empty_folder(path):
    shutil.rmtree(path)
    path.mkdir()


def truncate_largest(path):
    largest = max(files_of(path), key=lambda f: f.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def truncate_metadata(path):
    os.truncate(path / "meta" / "metadata", 20)


def delete_data(path):
    shutil.rmtree(path / "state" / "ocdbt.process_0" / "d")


def another_steps_metadata(path):
    shutil.copy(path.parent / "90" / "meta" / "metadata", path / "meta" / "metadata")


def another_steps_arrays(path):
    shutil.rmtree(path / "state")
    shutil.copytree(path.parent / "90" / "state", path / "state")


def arrays_of_another_shape(path):
    save(path / "other", 100, rows=32)
    shutil.rmtree(path / "state")
    (path / "other" / "100" / "state").rename(path / "state")
    shutil.rmtree(path / "other")


def other_text_under_its_own_hash(path):
    file = path / "meta" / "metadata"
    content = json.loads(file.read_text())
    content["body"] = content["body"].replace("1.5", "2.5")
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (empty_folder, "100/meta/metadata and 100/state missing"),
        (truncate_largest, "params/layer_./gate cannot be (read|opened)"),
        (truncate_metadata, "its metadata cannot be read"),
        (delete_data, "params/layer_0/gate cannot be"),
        (lambda path: shutil.rmtree(path / "state"), "100/state missing"),
        (lambda path: (path / "meta" / "metadata").unlink(), "100/meta/metadata missing"),
        (another_steps_metadata, "metadata belongs to step 90"),
        (another_steps_arrays, "the bits of params/layer_0/gate, params/layer_1/gate"),
        (arrays_of_another_shape, r"stored as float32\[32,48\], its metadata says float32\[64,48"),
        (other_text_under_its_own_hash, "does not match its SHA-256"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_is_passed_over_and_a_later_save_moves_it_aside(directory, damage, reason):
    damage(directory / "100")
    before = files_of(directory / "100")
    with Checkpointer(directory, keep=2) as checkpointer:
        with pytest.warns(CheckpointWarning, match=f"step 100 is passed over.*({reason})"):
            restored = checkpointer.restore(TEMPLATE)
        assert (restored.step, bits(restored.state)) == (90, bits(state_at(90)))
        assert checkpointer.all_steps() == [90]
        assert checkpointer.latest_step() == 90
        assert files_of(directory / "100") == before
        with pytest.warns(CheckpointWarning, match="moved aside to damaged-100-1"):
            checkpointer.save(100, state_at(100), {})
        checkpointer.wait()
        assert checkpointer.all_steps() == [90, 100]
        assert bits(checkpointer.restore(TEMPLATE).state) == bits(state_at(100))
        assert len(files_of(directory / "damaged-100-1")) == len(before)
        # Two newer ones, and the damaged folder still neither counts nor goes.
        checkpointer.save(110, state_at(110), {})
        checkpointer.save(120, state_at(120), {})
    assert sorted(os.listdir(directory)) == ["100", "110", "120", "damaged-100-1"]


def test_empty_folders_do_not_push_good_checkpoints_out(directory):
    empty_folder(directory / "100")
    (directory / "200").mkdir()
    (directory / "300").mkdir()
    (directory / "400").write_text("not a folder")
    with Checkpointer(directory, keep=2) as checkpointer:
        assert checkpointer.all_steps() == [90]
        for step in (91, 92, 93):
            if step == 91:
                with pytest.warns(CheckpointWarning, match="damaged-300-1, damaged-200-1"):
                    checkpointer.save(step, state_at(step), {})
            else:
                checkpointer.save(step, state_at(step), {})
        (directory / "50").mkdir()
        checkpointer.save(94, state_at(94), {})
        checkpointer.wait()
        assert checkpointer.all_steps() == [93, 94]
    assert (directory / "50").is_dir()


def test_nothing_whole_says_what_was_tried(directory):
    empty_folder(directory / "100")
    truncate_metadata(directory / "90")
    checkpointer = Checkpointer(directory)
    with pytest.raises(FileNotFoundError, match="is whole") as caught:
        checkpointer.restore(TEMPLATE)
    message = str(caught.value)
    assert "step 100: 100/meta/metadata and 100/state missing" in message
    assert "step 90: its metadata cannot be read" in message
    with pytest.raises(FileNotFoundError, match="step 90"):
        checkpointer.read_extra()
    assert sorted(os.listdir(directory)) == ["100", "90"]


# orbax leaves coroutines of a failed write behind, which Python reports when it collects them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_background_write_is_raised_and_not_listed(directory):
    shutil.rmtree(directory / "90")
    large = state_at(110, rows=4096)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(directory, keep=1) as checkpointer:
        for surfaces in (checkpointer.wait, lambda: checkpointer.save(120, state_at(120), {})):
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # as on a full disk
            try:
                checkpointer.save(110, large, {})
                with pytest.raises(CheckpointError, match="step 110 could not be written"):
                    surfaces()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert checkpointer.all_steps() == [100]
        with pytest.warns(CheckpointWarning, match="step 110 was begun and not completed"):
            assert checkpointer.restore(TEMPLATE).step == 100
        checkpointer.save(110, state_at(110), {})
        checkpointer.wait()
        assert checkpointer.all_steps() == [100, 110]
        assert bits(checkpointer.restore(TEMPLATE).state) == bits(state_at(110))
    assert sorted(os.listdir(directory)) == ["100", "110"]
    gc.collect()


def test_what_an_interrupted_save_left_is_named_and_swept_by_the_next_save(directory):
    (directory / "110.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.all_steps() == [90, 100]
        with pytest.warns(CheckpointWarning, match="step 110 was begun and not completed"):
            assert checkpointer.restore(TEMPLATE).step == 100
        assert (directory / "110.orbax-checkpoint-tmp").is_dir()
        checkpointer.save(105, state_at(105), {})
    assert sorted(os.listdir(directory)) == ["100", "105", "90"]
