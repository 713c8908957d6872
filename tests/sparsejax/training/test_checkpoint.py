"""Checkpoints that nothing has happened to: every bit back, on any mesh, and nothing cast."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.training.checkpoint import Checkpointer, CheckpointWarning

CONFIG = {"d_model": 8, "layers": [{"width": 16}, {"width": None}], "act": "relu"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt_state: Any


def make_state(seed=0, sharding=None):
    """A train state with every kind of leaf: float widths, integers, keys, empty, scalar."""
    rng = np.random.default_rng(seed)
    params = {
        "layer_0": {"gate": rng.standard_normal((16, 8)), "up": rng.standard_normal((16, 8))},
        "embed": {"embedding": rng.standard_normal((32, 8))},
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    params["head.x y"] = {"0.0": jnp.asarray(rng.standard_normal((8, 4)), jnp.bfloat16)}
    state = State(jnp.int32(16777217), params, optax.adamw(1e-3).init(params))
    more = {
        "key": jax.random.key_data(jax.random.key(seed)),
        "mask": jnp.asarray(rng.integers(0, 2, 8).astype(bool)),
        "none": jnp.zeros((0, 8)),
        "small": jnp.asarray(rng.integers(-128, 128, (8, 2)), jnp.int8),
        "half": jnp.asarray(rng.standard_normal(8), jnp.float16),
    }
    state = dataclasses.replace(state, opt_state=(state.opt_state, more))
    return place(state, sharding or NamedSharding(mesh_of(8), P()))


def mesh_of(*shape, axis_type=AxisType.Auto):
    names = ("data", "fsdp", "tensor")[: len(shape)]
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, names, (axis_type,) * len(shape), devices=devices)


def place(tree, sharding):
    """Leaves that divide go by `sharding`, the others are replicated on its mesh."""

    def put(x):
        fits = x.size and x.ndim >= len(sharding.spec) and all(n % 4 == 0 for n in x.shape)
        return jax.device_put(x, sharding if fits else NamedSharding(sharding.mesh, P()))

    return jax.tree.map(put, tree)


def template_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_round_trip(tmp_path):
    state = make_state()
    extra = {"config": CONFIG, "data": {"position": 12345678901234567890, "epoch": 0.1}}
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.save(7, state, extra)
        checkpointer.wait()
        assert checkpointer.all_steps() == [7]
        assert checkpointer.latest_step() == 7
        assert checkpointer.read_extra() == extra
    restored = Checkpointer(tmp_path / "checkpoints").restore(
        template_of(state), expected_config={**CONFIG, "layers": tuple(CONFIG["layers"])}
    )
    assert (restored.step, restored.extra) == (7, extra)
    assert_same_bits(restored.state, state)
    for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert a.sharding == b.sharding


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_saved_on_eight_devices_restored_on_four_two_and_one(tmp_path, axis_type):
    mesh = mesh_of(2, 2, 2, axis_type=axis_type)
    state = make_state(1, NamedSharding(mesh, P(("fsdp", "data"), "tensor")))
    assert len(state.params["embed"]["embedding"].addressable_shards[0].data) == 8
    with Checkpointer(tmp_path) as checkpointer, jax.set_mesh(mesh):
        checkpointer.save(1, state, {"config": CONFIG})
    for shape, spec in [((2, 2), P("fsdp")), ((2,), P(None, "data")), ((1,), P("data"))]:
        other = mesh_of(*shape, axis_type=axis_type)
        moved = place(state, NamedSharding(other, spec))
        with jax.set_mesh(other):
            restored = Checkpointer(tmp_path).restore(template_of(moved))
        assert_same_bits(restored.state, state)
        kernel = restored.state.params["embed"]["embedding"]
        assert kernel.sharding == NamedSharding(other, spec)
        # A step under the new mesh, with donation, must go through.
        donate = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
        assert_same_bits(donate(restored.state), state)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    leaf = jax.ShapeDtypeStruct((), jnp.int32, sharding=single)
    with pytest.raises(ValueError, match="differ in 18 leaves"), jax.set_mesh(mesh):
        Checkpointer(tmp_path).restore({"step": leaf})


def test_params_alone(tmp_path):
    state = make_state(2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, {"config": CONFIG})
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=single), state.params
    )
    restored = Checkpointer(tmp_path).restore_params(template)
    assert (restored.step, restored.extra) == (3, {"config": CONFIG})
    assert_same_bits(restored.state, state.params)
    assert restored.state["embed"]["embedding"].sharding == single
    del template["layer_0"]["gate"]
    with pytest.raises(ValueError, match=r"params/layer_0/gate: in the checkpoint \(float32\[16,8"):
        Checkpointer(tmp_path).restore_params(template)


def test_exact_though_the_buffers_are_donated_at_once(tmp_path):
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * -3, s), donate_argnums=0)
    for spec in (P("data"), P()):
        sharding = NamedSharding(mesh_of(8), spec)
        host = np.random.default_rng(0).standard_normal((1024, 256)).astype(np.float32)
        state = {"params": {"a": jax.device_put(host, sharding)}}
        expected, donated = {}, []
        with Checkpointer(tmp_path / str(spec), keep=4) as checkpointer:
            for step in range(4):
                expected[step] = {"params": {"a": host}}
                before = state["params"]["a"]
                checkpointer.save(step, state, {})
                for _ in range(3):
                    # Followed on the host: looking at the array itself would forbid its donation.
                    state, host = update(state), host * np.float32(-3)
                donated.append(before.is_deleted())
            # Whole buffers are really overwritten. Shards on a CPU are not: orbax writes from them
            # in place, which JAX notices, and it copies instead.
            assert any(donated) or spec == P("data")
            checkpointer.wait()
            for step in range(4):
                restored = checkpointer.restore(template_of(state), step=step)
                assert_same_bits(restored.state, expected[step])


def test_keeps_the_newest_and_the_one_restored(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state, {})
        checkpointer.wait()
        assert checkpointer.all_steps() == [3, 4]
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.restore(template_of(state)).step == 4
        for step in (5, 6, 7):
            checkpointer.save(step, state, {})
        checkpointer.wait()
        assert checkpointer.all_steps() == [4, 6, 7]
        assert checkpointer.restore(template_of(state)).step == 7
        checkpointer.save(8, state, {})
    assert Checkpointer(tmp_path).all_steps() == [7, 8]
    assert sorted(os.listdir(tmp_path)) == ["7", "8"]


def test_synchronous_saving(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path, keep=1, async_save=False) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step, state, {})
            assert checkpointer.all_steps() == [step]


def test_the_same_state_again_writes_nothing(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(5, state, {"run": 1})
        assert not checkpointer.save(5, state, {"run": 2})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(template_of(state))
        assert not checkpointer.save(5, state, {"run": 3})
        assert checkpointer.read_extra() == {"run": 1}
    assert os.listdir(tmp_path) == ["5"]


def test_going_back_moves_the_abandoned_steps_aside(tmp_path):
    old, new = make_state(0), make_state(1)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, old, {})
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.restore(template_of(old), step=10).step == 10
        with pytest.warns(CheckpointWarning, match=r"step 20 is .* replaced-30-1, replaced-20-1"):
            checkpointer.save(20, new, {})
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.all_steps() == [10, 20]
    assert_same_bits(checkpointer.restore(template_of(new)).state, new)
    assert sorted(os.listdir(tmp_path)) == ["10", "20", "replaced-20-1", "replaced-30-1"]


def with_leaf(state, leaf):
    return dataclasses.replace(state, step=leaf)


def test_nothing_is_cast(tmp_path):
    """An int32 16777217 read as float32 would silently be 16777216."""
    state = make_state()
    template = template_of(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {"config": CONFIG})
    as_float = jax.ShapeDtypeStruct((), jnp.float32, sharding=state.step.sharding)
    with pytest.raises(ValueError, match=r"step: expected float32\[\], found int32\[\]"):
        Checkpointer(tmp_path).restore(with_leaf(template, as_float))
    as_vector = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=state.step.sharding)
    with pytest.raises(ValueError, match=r"step: expected int32\[1\], found int32\[\]"):
        Checkpointer(tmp_path).restore(with_leaf(template, as_vector))
    restored = Checkpointer(tmp_path).restore(template).state
    assert restored.step.dtype == jnp.int32
    assert int(restored.step) == 16777217


def test_another_config_is_an_error_that_names_the_key_and_not_a_reason_to_fall_back(tmp_path):
    state = make_state()
    other = {**CONFIG, "layers": [{"width": 16}, {"width": 32}]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {"config": other})
        checkpointer.save(2, state, {"config": CONFIG})
    with pytest.raises(ValueError, match=r"config\.layers\[1\]\.width expected 32, found None"):
        Checkpointer(tmp_path).restore(template_of(state), expected_config=other)
    template = template_of(state)
    del template.params["layer_0"]["up"]
    template.params["layer_1"] = template.params["layer_0"]
    with pytest.raises(ValueError, match="step 2 and the template differ in 2 leaves") as caught:
        Checkpointer(tmp_path).restore(template)
    assert "params/layer_1/gate: expected float32[16,8], not in the checkpoint" in str(caught.value)
    assert "params/layer_0/up: in the checkpoint" in str(caught.value)


def test_template_without_sharding(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    with pytest.raises(ValueError, match=r"'step': expected a jax.ShapeDtypeStruct with sharding"):
        Checkpointer(tmp_path).restore(bare)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_not_finite_never_replace_good_ones(tmp_path, value):
    good = make_state()
    gate = good.params["layer_0"]["gate"].at[15, 7].set(value)
    bad = dataclasses.replace(
        good, params={**good.params, "layer_0": {**good.params["layer_0"], "gate": gate}}
    )
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, good, {})
        for step in (2, 3):
            with pytest.raises(ValueError, match=r"step . is not finite in params/layer_0/gate"):
                checkpointer.save(step, bad, {})
            with pytest.raises(ValueError, match="extra: expected JSON values with finite numbers"):
                checkpointer.save(step, good, {"loss": float(value)})
        assert checkpointer.all_steps() == [1]
    assert Checkpointer(tmp_path).restore(template_of(good)).step == 1


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        Checkpointer(tmp_path, keep=0)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="step: expected >= 0, got -1"):
            checkpointer.save(-1, {"a": jnp.ones(2)}, {})
        with pytest.raises(ValueError, match="expected at least one array"):
            checkpointer.save(1, {"a": {}}, {})
        with pytest.raises(ValueError, match=r"leaf 'a': expected a jax.Array, got int"):
            checkpointer.save(1, {"a": 3}, {})
        with pytest.raises(ValueError, match=r"extra: .*set is not JSON"):
            checkpointer.save(1, {"a": jnp.ones(2)}, {"x": {1}})
    assert os.listdir(tmp_path) == []


def test_nothing_there(tmp_path):
    template = template_of(make_state())
    missing = tmp_path / "nowhere"
    for directory in (tmp_path, missing):
        with pytest.raises(FileNotFoundError, match="it holds no step"):
            Checkpointer(directory).restore(template)
        with pytest.raises(FileNotFoundError, match="it holds no step"):
            Checkpointer(directory).read_extra()
        assert Checkpointer(directory).all_steps() == []
    assert not missing.exists()  # reading makes no folders
