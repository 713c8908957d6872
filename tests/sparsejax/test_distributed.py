"""Launch arguments from fake environments, written out, and two real processes that meet."""

import os
import socket
import subprocess
import sys

import pytest

from sparsejax.distributed import initialize, launch_arguments


def arguments(coordinator, size, rank, ids=None):
    expected = {
        "coordinator_address": coordinator,
        "num_processes": size,
        "process_id": rank,
        "cluster_detection_method": "deactivate",
    }
    return expected if ids is None else expected | {"local_device_ids": ids}


# Two hosts. Job 5000: port 61440 + 5000 % 4096 = 62344.
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}


# The same hosts, this process being the last of `tasks` on the second.
def slurm_tasks(tasks, **changed):
    return (
        SLURM
        | {
            "SLURM_NTASKS": str(2 * tasks),
            "SLURM_PROCID": str(2 * tasks - 1),
            "SLURM_LOCALID": str(tasks - 1),
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)",
        }
        | changed
    )


AT = "gpu03:62344"


def test_slurm_one_process_per_node_takes_all_its_gpus():
    assert launch_arguments(SLURM) == arguments(AT, 2, 1)


def test_slurm_one_process_per_gpu_takes_the_local_one():
    assert launch_arguments(slurm_tasks(8)) == arguments(AT, 16, 15, [7])


def test_slurm_several_gpus_per_process_in_equal_shares():
    assert launch_arguments(slurm_tasks(2)) == arguments(AT, 4, 3, [4, 5, 6, 7])


def test_slurm_counts_gpus_of_the_node_where_cuda_visible_devices_is_not_set():
    env = slurm_tasks(2)
    del env["CUDA_VISIBLE_DEVICES"]
    assert launch_arguments(env) == arguments(AT, 4, 3, [4, 5, 6, 7])


@pytest.mark.parametrize("visible", ["0", "7", "GPU-8f2a1c"])
def test_slurm_gpus_per_task_shows_each_task_its_own_gpu(visible):
    # Index 7 exists on the host but not for this task: it sees one device, number 0.
    env = slurm_tasks(8, SLURM_GPUS_PER_TASK="1", CUDA_VISIBLE_DEVICES=visible)
    assert launch_arguments(env) == arguments(AT, 16, 15)
    del env["SLURM_GPUS_PER_TASK"]  # bound otherwise: one visible of eight tells it too
    assert launch_arguments(env) == arguments(AT, 16, 15)


@pytest.mark.parametrize(
    "binding",
    [
        {"SLURM_GPUS_PER_TASK": "a100:4"},
        {"SLURM_GPU_BIND": "per_task:4"},
        {"SLURM_NTASKS_PER_GPU": "1"},
    ],
)
def test_slurm_binding_of_several_gpus_per_task(binding):
    env = slurm_tasks(2, CUDA_VISIBLE_DEVICES="0,1,2,3", **binding)
    assert launch_arguments(env) == arguments(AT, 4, 3)


def test_slurm_gpus_per_task_without_binding_still_takes_its_share():
    env = slurm_tasks(4, SLURM_GPUS_PER_TASK="2", SLURM_GPU_BIND="none")
    assert launch_arguments(env) == arguments(AT, 8, 7, [6, 7])


def test_slurm_subset_of_devices_is_indexed_from_zero():
    # jax counts within CUDA_VISIBLE_DEVICES, so GPUs 4 and 6 are 0 and 1.
    env = slurm_tasks(2, CUDA_VISIBLE_DEVICES="4,6")
    assert launch_arguments(env) == arguments(AT, 4, 3, [1])
    assert launch_arguments(SLURM | {"CUDA_VISIBLE_DEVICES": "4,6"}) == arguments(AT, 2, 1)


def test_slurm_without_any_gpu():
    env = slurm_tasks(2, CUDA_VISIBLE_DEVICES="NoDevFiles")
    assert launch_arguments(env) == arguments(AT, 4, 3)
    assert launch_arguments(env | {"CUDA_VISIBLE_DEVICES": ""}) == arguments(AT, 4, 3)


def test_slurm_gpus_per_process_overrules_the_even_share():
    assert launch_arguments(slurm_tasks(2), gpus_per_process=2) == arguments(AT, 4, 3, [2, 3])
    assert launch_arguments(SLURM, gpus_per_process=4) == arguments(AT, 2, 1, [0, 1, 2, 3])


def test_gpus_per_process_within_what_the_launcher_shows():
    bound = slurm_tasks(4, SLURM_GPUS_PER_TASK="2", CUDA_VISIBLE_DEVICES="0,1")
    assert launch_arguments(bound, gpus_per_process=2) == arguments(AT, 8, 7)
    assert launch_arguments(bound, gpus_per_process=1) == arguments(AT, 8, 7, [0])


def test_gpus_that_cannot_be_shared_are_an_error():
    # Eight for each of two, on a host of eight.
    with pytest.raises(ValueError, match="would take GPUs 8 to 15, but 8 are visible"):
        launch_arguments(slurm_tasks(2), gpus_per_process=8)
    with pytest.raises(ValueError, match="3 processes on this host cannot share its 8 GPUs"):
        launch_arguments(slurm_tasks(3))
    with pytest.raises(ValueError, match="2 processes on this host cannot share its 1 GPUs"):
        launch_arguments(slurm_tasks(2, CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_ON_NODE="1"))
    with pytest.raises(ValueError, match="would take GPUs 6 to 8, but 8 are visible"):
        launch_arguments(slurm_tasks(3), gpus_per_process=3)
    with pytest.raises(ValueError, match="gpus_per_process: expected at least 1, got 0"):
        launch_arguments(SLURM, gpus_per_process=0)


def test_a_lone_slurm_task_is_a_single_process():
    assert launch_arguments(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    # A one-task step in an allocation of eight.
    step = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert launch_arguments(SLURM | step) is None


def test_a_batch_script_outside_of_srun_is_a_single_process():
    env = {key: value for key, value in SLURM.items() if "STEP" not in key}
    assert launch_arguments(env | {"SLURM_NTASKS": "16"}) is None


def test_no_launcher_is_a_single_process():
    assert launch_arguments({}) is None
    assert launch_arguments({"CUDA_VISIBLE_DEVICES": "0,1", "MASTER_ADDR": "10.0.0.1"}) is None


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchrun_like_environment():
    # No word of the number of GPUs: one each, as is the custom with LOCAL_RANK.
    assert launch_arguments(TORCHRUN) == arguments("10.0.0.1:29500", 4, 3, [1])
    env = TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert launch_arguments(env) == arguments("10.0.0.1:29500", 4, 3, [2, 3])


def test_torchrun_itself_already_listens_on_the_master_port():
    env = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launch_arguments(env) == arguments("10.0.0.1:29501", 4, 3, [1])


def test_torchrun_one_process_per_node_takes_all_gpus():
    env = TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert launch_arguments(env) == arguments("10.0.0.1:29500", 4, 3)


def test_torchrun_without_the_local_size_is_not_guessed():
    env = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}
    with pytest.raises(ValueError, match="Set LOCAL_WORLD_SIZE"):
        launch_arguments(env)
    assert launch_arguments(env, gpus_per_process=1) == arguments("10.0.0.1:29500", 4, 3, [1])
    # Each process sees one GPU: nothing to guess.
    seen = env | {"CUDA_VISIBLE_DEVICES": "1"}
    assert launch_arguments(seen) == arguments("10.0.0.1:29500", 4, 3)


def test_torchrun_inside_a_slurm_step_is_the_innermost_launcher():
    assert launch_arguments(SLURM | TORCHRUN) == arguments("10.0.0.1:29500", 4, 3, [4, 5, 6, 7])


def test_torchrun_missing_variables_are_named():
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match="not MASTER_ADDR and MASTER_PORT"):
        launch_arguments(env)
    assert launch_arguments(env | {"WORLD_SIZE": "1"}) is None


MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    # Job 1531576320 = 373920 * 4096: port 61440 + 373920 % 4096 = 62624.
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def test_open_mpi():
    assert launch_arguments(MPI) == arguments("10.96.0.1:62624", 4, 2, [2])
    env = MPI | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert launch_arguments(env) == arguments("10.96.0.1:62624", 4, 2, [4, 5])


def test_open_mpi_over_ipv6():
    env = MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fe80::b9b,2620::2]:43370"}
    assert launch_arguments(env) == arguments("[fe80::b9b]:62624", 4, 2, [2])


def test_mpirun_inside_a_slurm_allocation_counts_before_slurm():
    assert launch_arguments(SLURM | MPI)["coordinator_address"] == "10.96.0.1:62624"


def test_open_mpi_without_an_address_asks_for_one():
    env = {key: value for key, value in MPI.items() if "orte" not in key}
    with pytest.raises(ValueError, match="Set JAX_COORDINATOR_ADDRESS"):
        launch_arguments(env)
    env["JAX_COORDINATOR_ADDRESS"] = "10.0.0.9:1234"
    assert launch_arguments(env) == arguments("10.0.0.9:1234", 4, 2, [2])
    assert launch_arguments(env | {"OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_variables_of_jax_overrule_the_launcher():
    for env, ids in ((SLURM, None), (MPI, [2]), (TORCHRUN, [1])):
        address = env | {"JAX_COORDINATOR_ADDRESS": "head:99"}
        found = launch_arguments(address)
        assert found == arguments("head:99", found["num_processes"], found["process_id"], ids)
        port = launch_arguments(env | {"JAX_COORDINATOR_PORT": "77"})
        assert port["coordinator_address"].endswith(":77")
    # jax reads this one itself.
    env = slurm_tasks(3, JAX_LOCAL_DEVICE_IDS="5")
    assert launch_arguments(env) == arguments(AT, 6, 5)


FLAGS = {"coordinator_address": "10.0.0.1:1234", "num_processes": 2, "process_id": 1}


def test_explicit_flags_win_over_every_launcher():
    expected = arguments("10.0.0.1:1234", 2, 1)
    assert launch_arguments({}, **FLAGS) == expected
    assert launch_arguments(SLURM | TORCHRUN | MPI, **FLAGS) == expected
    assert launch_arguments(SLURM, **FLAGS | {"num_processes": 1, "process_id": 0}) is None


def test_explicit_flags_for_several_processes_on_one_host():
    local = FLAGS | {"coordinator_address": "localhost:1234"}
    assert launch_arguments({}, **local, gpus_per_process=4) == arguments(
        "localhost:1234", 2, 1, [4, 5, 6, 7]
    )
    # Four processes of two GPUs on each host of eight: number 5 is the second of the second host.
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    fifth = FLAGS | {"num_processes": 8, "process_id": 5}
    assert launch_arguments(eight, **fifth, gpus_per_process=2) == arguments(
        "10.0.0.1:1234", 8, 5, [2, 3]
    )
    with pytest.raises(ValueError, match="set CUDA_VISIBLE_DEVICES"):
        launch_arguments({}, **fifth, gpus_per_process=2)


@pytest.mark.parametrize("missing", list(FLAGS))
def test_an_incomplete_set_of_flags_names_the_missing_ones(missing):
    some = {name: value for name, value in FLAGS.items() if name != missing}
    with pytest.raises(ValueError, match=f"missing: {missing}\\."):
        launch_arguments({}, **some)
    others = "missing: " + ", ".join(name for name in FLAGS if name != missing)
    with pytest.raises(ValueError, match=others):
        launch_arguments({}, **{missing: FLAGS[missing]})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"process_id": 2}, "process_id: expected 0 to 1 for 2 processes, got 2"),
        ({"process_id": -1}, "process_id: expected 0 to 1 for 2 processes, got -1"),
        ({"num_processes": 0}, "num_processes: expected at least 1, got 0"),
        ({"coordinator_address": "10.0.0.1"}, "coordinator_address: expected host:port"),
    ],
)
def test_flags_out_of_range(changed, message):
    with pytest.raises(ValueError, match=message):
        launch_arguments({}, **FLAGS | changed)


def test_a_single_process_initialises_nothing():
    assert initialize(env={}) is False


def test_joining_after_a_device_was_touched_is_an_error():
    import jax

    jax.devices()
    with pytest.raises(RuntimeError, match="must be called before"):
        initialize(env={}, **FLAGS | {"coordinator_address": "localhost:1"})


PROCESS = """
import sys
from sparsejax.distributed import initialize

rank, address = int(sys.argv[1]), sys.argv[2]
flags = dict(coordinator_address=address, num_processes=2, process_id=rank)
assert initialize(**flags)
assert initialize(**flags), "a second call does nothing"
try:
    initialize(coordinator_address=address, num_processes=3, process_id=rank)
except RuntimeError as error:
    assert "already joined" in str(error)
else:
    raise AssertionError("another launch was accepted")

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

values = multihost_utils.process_allgather(jnp.float32(10 * (rank + 1)))
total = float(values.sum())
print("met:", jax.process_index(), jax.local_device_count(), jax.device_count(), total)
"""


def test_two_processes_on_this_machine_meet():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (out, err)) in enumerate(zip(processes, results, strict=True)):
        assert process.returncode == 0, err
        # Process, its devices, all devices, 10 + 20 (Gloo writes lines of its own).
        assert f"met: {rank} 2 4 30.0" in out
