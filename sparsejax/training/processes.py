"""Values that all processes of a run agree on, for decisions that depend on one process's disk.

Each function is called by every process. In a run of one process they cost nothing.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

_MESSAGE_BYTES = 1000


def from_process_0(compute: Callable[[], Any]) -> Any:
    """`compute()` of process 0, a JSON value, on every process.

    Raises:
        RuntimeError: `compute` raised on process 0 (there, the exception itself is raised).
    """
    if jax.process_count() == 1:
        return compute()
    failure: Exception | None = None
    answer = b""
    if jax.process_index() == 0:
        try:
            answer = json.dumps({"value": compute()}).encode()
        except Exception as error:  # the other processes wait for an answer: tell them, then raise
            failure = error
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
    size = int(_collective(multihost_utils.broadcast_one_to_all, np.int32(len(answer))))
    padded = np.frombuffer(answer.ljust(size), np.uint8)
    content = json.loads(bytes(_collective(multihost_utils.broadcast_one_to_all, padded)))
    if failure is not None:
        raise failure
    if "error" in content:
        raise RuntimeError(f"process 0 failed: {content['error']}")
    return content["value"]


def from_all_processes(message: str) -> list[str]:
    """Everybody's `message`, cut to 1,000 bytes, in the order of the processes."""
    if jax.process_count() == 1:
        return [message]
    padded = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    rows = _collective(multihost_utils.process_allgather, np.frombuffer(padded, np.uint8))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in np.asarray(rows)]


def _collective(function: Callable[[Any], Any], value: Any) -> Any:
    # The caller may have set a mesh of its own, which these host collectives cannot run under.
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("device",))):
        return function(value)
