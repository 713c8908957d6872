"""What Slurm's abbreviated lists mean, written out."""

import pytest

from sparsejax import launchers

STEP = {"SLURM_JOB_ID": "4097", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("nodelist", "first", "count"),
    [
        ("node001", "node001", 1),
        ("node001,host2", "node001", 2),
        ("node[001-004]", "node001", 4),
        ("gpu[003-005,9]-ib,login1", "gpu003-ib", 5),
        ("rack[1-2]n[07,09-10]", "rack1n07", 6),
        ("host2,node[1-3]", "host2", 4),
    ],
)
def test_node_lists(nodelist, first, count):
    env = STEP | {"SLURM_NTASKS": str(2 * count), "SLURM_STEP_NODELIST": nodelist}
    place = launchers.find(env)
    assert place is not None
    assert place.coordinator == f"{first}:61441"
    assert place.local_size == 2  # an even spread over `count` hosts


@pytest.mark.parametrize(
    ("counts", "node", "tasks_here"),
    [("4(x2),1", 0, 4), ("4(x2),1", 1, 4), ("4(x2),1", 2, 1), ("1,8", 0, 1), ("1,8", 1, 8)],
)
def test_tasks_per_node_lists(counts, node, tasks_here):
    env = STEP | {
        "SLURM_NTASKS": "9",
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_NODEID": str(node),
    }
    place = launchers.find(env)
    assert place is not None
    assert place.local_size == tasks_here


def test_counts_of_the_allocation_are_not_taken_for_those_of_the_step():
    # The allocation has 8 tasks a node, this step 2: the sum tells them apart.
    env = STEP | {
        "SLURM_NTASKS": "16",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }
    place = launchers.find(env)
    assert place is not None
    assert (place.size, place.local_size) == (4, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE: expected counts"),
        ({"SLURM_NTASKS": "7"}, "cannot tell how many of 7 tasks run on each of 2 hosts"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS: expected a whole number, got 'many'"),
        ({"SLURM_GPUS_ON_NODE": "a100:some"}, "expected a number of GPUs"),
    ],
)
def test_unreadable_variables_are_named(changed, message):
    env = STEP | {"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n[1-2]"} | changed
    with pytest.raises(ValueError, match=message):
        launchers.find(env)


def test_a_missing_variable_is_named():
    env = STEP | {"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n[1-2]"}
    del env["SLURM_LOCALID"]
    with pytest.raises(ValueError, match="lacks SLURM_LOCALID"):
        launchers.find(env)
