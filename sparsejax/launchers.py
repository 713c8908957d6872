"""What torchrun, Open MPI and Slurm say in the environment of a process: its place in a launch."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """One process among those of a launch.

    Attributes:
      source: the launcher, for messages.
      coordinator: `host:port` at which process 0 listens.
      size: processes in the launch; `rank` is this one's number.
      local_size: processes on this host, None where not said; `local_rank` is this one's number.
      host_gpus: GPUs of the launch on this host, where the launcher says so.
      gpus_per_task: GPUs asked for per process, where the launcher says so.
      bound: the launcher shows each process its own GPUs only.
    """

    source: str
    coordinator: str
    size: int
    rank: int
    local_rank: int
    local_size: int | None
    host_gpus: int | None = None
    gpus_per_task: int | None = None
    bound: bool = False


def find(env: Mapping[str, str]) -> Place | None:
    """The place that the innermost launcher gives; None where `env` shows no launcher."""
    return _torchrun(env) or _open_mpi(env) or _slurm(env)


def _torchrun(env: Mapping[str, str]) -> Place | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    source = "RANK, WORLD_SIZE"
    size = _number(env, "WORLD_SIZE")
    if size == 1:
        return Place(source, "", 1, 0, 0, 1)
    if "JAX_COORDINATOR_ADDRESS" not in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ValueError(
                f"RANK and WORLD_SIZE={size} are set but not {' and '.join(missing)}. Set them to "
                "the host and a free port of process 0, or unset RANK and WORLD_SIZE."
            )
        port = _number(env, "MASTER_PORT")
        # torchrun's own store already listens on MASTER_PORT.
        if env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
            port = port + 1 if port < 65535 else port - 1
        address = _coordinator(env, env["MASTER_ADDR"], port)
    else:
        address = env["JAX_COORDINATOR_ADDRESS"]
    local_rank = _number(env, "LOCAL_RANK", 0)
    if "LOCAL_WORLD_SIZE" in env:
        local_size = _number(env, "LOCAL_WORLD_SIZE")
    else:
        local_size = None if "LOCAL_RANK" in env else 1
    return Place(source, address, size, _number(env, "RANK"), local_rank, local_size)


def _open_mpi(env: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    size = _number(env, "OMPI_COMM_WORLD_SIZE")
    if size == 1:
        return Place("Open MPI", "", 1, 0, 0, 1)
    address = env.get("JAX_COORDINATOR_ADDRESS")
    if address is None:
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or 1314521088.0;tcp6://[fe80::b9b,2620::2]:43370
        uri = env.get("OMPI_MCA_orte_hnp_uri", "")
        found = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
        if found is None:
            raise ValueError(
                "Open MPI does not say where its first process runs (OMPI_MCA_orte_hnp_uri is "
                f"{uri!r}). Set JAX_COORDINATOR_ADDRESS to host:port of rank 0 "
                "(mpirun -x JAX_COORDINATOR_ADDRESS=...), or pass the three flags."
            )
        job, ip4, ip6 = found.groups()
        # Job ids are multiples of 2**12.
        address = _coordinator(env, ip4 or f"[{ip6}]", _port_of_job(int(job) // 4096))
    return Place(
        "Open MPI",
        address,
        size,
        _number(env, "OMPI_COMM_WORLD_RANK"),
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _slurm(env: Mapping[str, str]) -> Place | None:
    # A batch script or an interactive shell in an allocation is not a step: it runs alone.
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= env.keys():
        return None
    # SLURM_NTASKS may be the allocation's, where a step has fewer tasks.
    size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if size == 1:
        return Place("Slurm", "", 1, 0, 0, 1)
    first_host, hosts = _hosts(env["SLURM_STEP_NODELIST"])
    port = _port_of_job(_number(env, "SLURM_JOB_ID"))
    bound = "SLURM_NTASKS_PER_GPU" in env or env.get("SLURM_GPU_BIND", "none") != "none"
    return Place(
        "Slurm",
        env.get("JAX_COORDINATOR_ADDRESS") or _coordinator(env, first_host, port),
        size,
        _number(env, "SLURM_PROCID"),
        _number(env, "SLURM_LOCALID"),
        _tasks_on_this_host(env, size, hosts),
        host_gpus=_gpu_count(env.get("SLURM_GPUS_ON_NODE")),
        gpus_per_task=_gpu_count(env.get("SLURM_GPUS_PER_TASK")),
        bound=bound,
    )


def _tasks_on_this_host(env: Mapping[str, str], size: int, hosts: int) -> int:
    """Tasks of the step on this host, from a list such as `4(x2),1` (one count per host)."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in env:
            counts = []
            for entry in env[name].split(","):
                found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
                if found is None:
                    raise ValueError(
                        f"{name}: expected counts such as '4(x2),1', got {env[name]!r}"
                    )
                counts += [int(found[1])] * int(found[2] or 1)
            host = _number(env, "SLURM_NODEID", 0)
            if sum(counts) == size and host < len(counts):
                return counts[host]
    if size % hosts == 0:
        return size // hosts
    raise ValueError(
        f"Slurm: cannot tell how many of {size} tasks run on each of {hosts} hosts. "
        "Set SLURM_STEP_TASKS_PER_NODE, start equally many on each host, or pass the three flags."
    )


def _hosts(nodelist: str) -> tuple[str, int]:
    """First host and number of hosts of a list such as `gpu[003-005,9]-ib,login1`."""
    entries = re.split(r",(?![^\[]*\])", nodelist)
    count = 0
    for entry in entries:
        groups = re.findall(r"\[([^\]]*)\]", entry)
        count += math.prod(sum(_span(part) for part in group.split(",")) for group in groups)
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", entries[0])
    return first, count


def _span(part: str) -> int:
    low, _, high = part.partition("-")
    return int(high) - int(low) + 1 if high else 1


def _gpu_count(text: str | None) -> int | None:
    """4 of `4`, `a100:4` or `gpu:a100:4`; None where nothing was said."""
    if not text:
        return None
    number = text.rsplit(":", 1)[-1]
    if not number.isdigit():
        raise ValueError(f"Slurm: expected a number of GPUs such as 4 or a100:4, got {text!r}")
    return int(number)


def _port_of_job(job: int) -> int:
    """A port in 61440 to 65535 that all processes of a job agree on, the one that jax takes too."""
    return 61440 + job % 4096


def _coordinator(env: Mapping[str, str], host: str, port: int) -> str:
    return f"{host}:{_number(env, 'JAX_COORDINATOR_PORT', port)}"


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env:
        if default is None:
            raise ValueError(
                f"the launcher's environment lacks {name}; pass the three launch flags"
            )
        return default
    if not env[name].strip().isdigit():
        raise ValueError(f"{name}: expected a whole number, got {env[name]!r}")
    return int(env[name])
