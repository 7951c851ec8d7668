"""JAX's coordination service, as far as this package uses it: a key-value store that all processes of a job share.

The client has no public interface in the supported versions of jax; nothing else here touches it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed, xla_bridge

from ..errors import ContextError
from .timeouts import timeout_seconds

_MOMENT_SECONDS = 0.5


class ServiceError(ContextError):
    """The coordination service does not answer: process 0 is stopped, cut off, or dead."""


def is_running() -> bool:
    """Whether this process has joined a job of several processes, or of one."""
    return distributed.global_state.client is not None


def numbers() -> tuple[str | None, int, int]:
    """(address of the coordinator, number of processes, number of this process)."""
    state = distributed.global_state
    return state.coordinator_address, state.num_processes, state.process_id


def backend_has_started() -> bool:
    """Whether JAX has made its devices, after which it is too late to join a job."""
    return bool(xla_bridge.backends_are_initialized())


def let_survivors_live() -> None:
    """Without it JAX ends everybody when one process dies."""
    jax.config.update("jax_enable_recoverability", True)


def use_gloo_between_cpus() -> None:
    """Computations over CPU devices of several processes need it; where the user has chosen, that stays."""
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def let_sigterm_end_this_process() -> None:
    """JAX takes it as a notice of preemption, which only programs that ask for notices ever look at. Where the user has
    chosen (``JAX_ENABLE_PREEMPTION_SERVICE``), that stays."""
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)


def detect(address: Any, num_processes: Any, process_id: Any, timeout_seconds: int) -> tuple[Any, Any, Any, Any]:
    """What JAX finds out about the job itself (SLURM, Open MPI, Cloud TPU, Kubernetes), None where it finds nothing."""
    from jax._src import clusters

    find: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
    return find(address, num_processes, process_id, None, None, timeout_seconds)


def put(key: str, value: str, *, within: float | None = None) -> None:
    """Sets or replaces the value of ``key``.

    Here and below, ``within`` is how many seconds the service has for its answer, at least a moment;
    ``ASYNC_EMB_TIMEOUT_SECONDS`` unless given. It may be stopped, and JAX's own calls would wait for ever.

    Raises:
        ServiceError: it did not answer.
    """
    _call(within, lambda client: client.key_value_set(key, value, allow_overwrite=True))


def below(directory: str, *, within: float | None = None) -> dict[str, str]:
    """Everything whose key begins with ``directory`` and a slash, by the rest of the key."""
    found = _call(within, lambda client: client.key_value_dir_get(directory))
    return {key.removeprefix(f"{directory}/"): value for key, value in found}


def delete(key: str, *, within: float | None = None) -> None:
    """Deletes ``key``; a slash at its end deletes everything below it. Does nothing where there is nothing."""
    _call(within, lambda client: client.key_value_delete(key))


def forget_devices() -> None:
    """Ends JAX's backends, and with them the connections of XLA's collectives. Every array and mesh is gone."""
    from jax._src.dispatch import runtime_tokens
    from jax.extend.backend import clear_backends

    runtime_tokens.clear()  # those of steps that have failed raise for ever
    clear_backends()


def forget_addresses() -> None:
    """What processes have told each other about their devices, the dead one's part too. Nobody may have any then."""
    for directory in ("cpu:gloo/", "cpu:global_topology/", "cpu:local_topology/"):
        delete(directory)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ContextError(
            "the devices of the mesh belong to several processes, but this process has not joined a job of "
            "jax.distributed: call jax_bridge.initialize() first"
        )
    return client


def _call(within: float | None, function: Callable[[Any], Any]) -> Any:
    client = _client()
    seconds = max(timeout_seconds() if within is None else within, _MOMENT_SECONDS)
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((function(client), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise _no_answer(f"within {seconds:g} s") from None
    if isinstance(error, jax.errors.JaxRuntimeError):
        raise _no_answer(str(error).splitlines()[0])
    if error is not None:
        raise error
    return answer


def _no_answer(why: str) -> ServiceError:
    return ServiceError(
        f"JAX's coordination service at {numbers()[0]}, which runs in process 0, does not answer: {why}. Without it no "
        "process can meet another one"
    )
