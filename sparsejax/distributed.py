"""From a launcher's environment to the arguments of `jax.distributed.initialize`.

jax finds Slurm and Open MPI by itself, but then gives every process one GPU: the one whose index is
the process' rank on its host. With one process per host the other GPUs idle in silence, and where
the launcher has already bound each task to a GPU of its own (`srun --gpus-per-task=1`), that index
does not exist. So rank, size, coordinator and GPUs are worked out here, as a pure function of the
environment, and jax's own detection is switched off.

Which GPUs a process drives, as indices into what CUDA shows it:
- one process on the host: all of them;
- bound by the launcher (it sees only its own): all of them;
- otherwise the GPUs of the host in equal, consecutive shares, by rank on the host; one each where
  their number is not in the environment.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from sparsejax import launchers


class _Flags(NamedTuple):
    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None


_active: dict[str, Any] | None = None


def launch_arguments(
    env: Mapping[str, str],
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    gpus_per_process: int | None = None,
) -> dict[str, Any] | None:
    """Keyword arguments for `jax.distributed.initialize`; None where this is the only process.

    The first that applies: the three flags, the variables of torchrun (RANK, WORLD_SIZE,
    MASTER_ADDR), of Open MPI's mpirun, of a Slurm step (srun). The innermost launcher wins, so
    torchrun or mpirun inside a Slurm allocation count before Slurm. Launchers' choices can be
    overridden by jax's own variables JAX_COORDINATOR_ADDRESS, JAX_COORDINATOR_PORT and
    JAX_LOCAL_DEVICE_IDS.

    Args:
      env: the environment, usually `os.environ`.
      coordinator_address: `host:port` of process 0. All three of these flags, or none.
      num_processes: number of processes in the whole launch.
      process_id: 0 to num_processes - 1.
      gpus_per_process: GPUs that each process drives, where the rule above is not what is wanted.
        A single process drives all it sees, whatever this says.

    Returns:
      `coordinator_address`, `num_processes`, `process_id`, `cluster_detection_method="deactivate"`,
      and `local_device_ids` only where the process must not take every GPU that it sees. On a
      machine without GPUs the last one has no effect.

    Raises:
      ValueError: some of the three flags are missing, a variable is missing or no number, or the
        GPUs cannot be shared evenly.
    """
    if gpus_per_process is not None and gpus_per_process < 1:
        raise ValueError(f"gpus_per_process: expected at least 1, got {gpus_per_process}")
    flags = _Flags(coordinator_address, num_processes, process_id)
    place = _place_from_flags(env, flags, gpus_per_process) or launchers.find(env)
    if place is None or place.size == 1:
        return None
    if not 0 <= place.rank < place.size:
        raise ValueError(
            f"process_id: expected 0 to {place.size - 1} for {place.size} processes, "
            f"got {place.rank} (from {place.source})"
        )
    arguments: dict[str, Any] = {
        "coordinator_address": place.coordinator,
        "num_processes": place.size,
        "process_id": place.rank,
        "cluster_detection_method": "deactivate",
    }
    # jax reads JAX_LOCAL_DEVICE_IDS itself where no ids are passed.
    if not env.get("JAX_LOCAL_DEVICE_IDS"):
        ids = _local_device_ids(env, place, gpus_per_process)
        if ids is not None:
            arguments["local_device_ids"] = ids
    return arguments


def initialize(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    gpus_per_process: int | None = None,
    env: Mapping[str, str] | None = None,
) -> bool:
    """Join the other processes of this launch, if there are any; True where there are.

    Call it first thing in a program, before anything touches a device. A second call with the same
    outcome does nothing.

    Args: those of `launch_arguments`; `env` defaults to `os.environ`.

    Raises:
      RuntimeError: a device was touched before (from jax), or an earlier call joined otherwise.
    """
    global _active
    arguments = launch_arguments(
        os.environ if env is None else env,
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        gpus_per_process=gpus_per_process,
    )
    if _active is not None and arguments != _active:
        raise RuntimeError(
            f"this process has already joined a launch as {_active}; it cannot join as {arguments}"
        )
    if arguments is None:
        return False
    if _active is None:
        jax.distributed.initialize(**arguments)
        _active = arguments
    return True


def _place_from_flags(
    env: Mapping[str, str], flags: _Flags, gpus_per_process: int | None
) -> launchers.Place | None:
    missing = [name for name, value in flags._asdict().items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        raise ValueError(
            f"an explicit launch needs {', '.join(flags._fields)} together; "
            f"missing: {', '.join(missing)}. Pass all, or none under torchrun, mpirun or srun."
        )
    address, size, rank = flags
    assert address is not None
    assert size is not None
    assert rank is not None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"coordinator_address: expected host:port such as 10.0.0.1:1234, got {address!r}"
        )
    if size < 1:
        raise ValueError(f"num_processes: expected at least 1, got {size}")
    local_rank, local_size = 0, 1
    if gpus_per_process is not None and size > 1:
        # Several processes on a host, whose ranks there no launcher tells: on one machine they are
        # the ranks themselves, elsewhere hosts are taken to be filled one after the other.
        if host in ("localhost", "127.0.0.1", "[::1]"):
            local_rank, local_size = rank, size
        else:
            visible = _visible_gpus(env)
            if visible is None:
                raise ValueError(
                    "gpus_per_process: with an explicit launch over several hosts, set "
                    "CUDA_VISIBLE_DEVICES to all GPUs of the host, or JAX_LOCAL_DEVICE_IDS to "
                    "those of this process, so that its share can be told"
                )
            local_size = max(visible // gpus_per_process, 1)
            local_rank = rank % local_size
    return launchers.Place("the flags", address, size, rank, local_rank, local_size)


def _visible_gpus(env: Mapping[str, str]) -> int | None:
    """Number of devices in CUDA_VISIBLE_DEVICES; None where it is not set."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    count = 0
    for entry in listed.split(","):
        # CUDA reads up to the first entry that names no device; Slurm writes NoDevFiles for none.
        if entry.strip() in ("", "-1", "NoDevFiles"):
            break
        count += 1
    return count


def _local_device_ids(
    env: Mapping[str, str], place: launchers.Place, gpus_per_process: int | None
) -> list[int] | None:
    """Indices, among the GPUs that CUDA shows this process, of those it drives; None is all."""
    visible = _visible_gpus(env)
    if visible == 0:
        return None
    shown = place.host_gpus if visible is None else visible
    # Whether what this process sees is its own: it sees as many as it needs, and the host has so
    # many for each of its processes.
    own = (
        place.local_size == 1
        or place.bound
        or (
            visible is not None
            and visible in (gpus_per_process, place.gpus_per_task, 1)
            and (place.host_gpus is None or place.host_gpus >= visible * (place.local_size or 1))
        )
    )
    if own and gpus_per_process in (None, visible):
        return None
    share = gpus_per_process or place.gpus_per_task or _even_share(place, shown)
    first = 0 if own else place.local_rank * share
    if shown is not None and first + share > shown:
        raise ValueError(
            f"gpus_per_process: local process {place.local_rank} would take GPUs {first} to "
            f"{first + share - 1}, but {shown} are visible ({place.source}). Pass a smaller number "
            "or start fewer processes on this host."
        )
    return list(range(first, first + share))


def _even_share(place: launchers.Place, shown: int | None) -> int:
    if place.local_size is None:
        raise ValueError(
            "LOCAL_RANK is set without LOCAL_WORLD_SIZE, so the GPUs per process cannot be told. "
            "Set LOCAL_WORLD_SIZE to the processes on this host, or pass gpus_per_process."
        )
    if shown is None:
        return 1
    share, rest = divmod(shown, place.local_size)
    if rest or not share:
        raise ValueError(
            f"{place.local_size} processes on this host cannot share its {shown} GPUs evenly "
            f"({place.source}). Start one process per host or per GPU, or pass gpus_per_process."
        )
    return share
