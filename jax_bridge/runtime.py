"""The process's side of a context: opening, closing, errors that are waiting, counters, and the recorded timeline.

Contexts live in the native module, found there by ``context_id`` and device. The per-shard operations open theirs while
they are traced, so most programs never call ``open_context``.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

from torch_ext.common.ids import id_error

from .context import AsyncEmbContextHandle
from .errors import ContextError, FailedContextError, IdError, PipelineError
from .placing import spans_processes
from .processes.timeouts import timeout_seconds as timeout_seconds  # meetings ask here
from .processes.topology import processes_of

AFTER_A_FAILURE = (
    "Every call of this context fails until it is closed and opened again (close_context and open_context; of the "
    "objects close, init and restore). A step that failed has lost what it was given: go on from a snapshot"
)


@functools.cache
def native() -> Any:
    """The native module, with its FFI handlers registered. Imported on first use, so that importing jax_bridge is
    cheap."""
    import torch_ext

    # jaxlib's own version of the FFI, from the header it ships: a newer handler would end the process at backend start.
    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (int(re.search(rf"XLA_FFI_API_{part} (\d+)", header)[1]) for part in ("MAJOR", "MINOR"))  # type: ignore[index]
    torch_ext.require_ffi_api(torch_ext.build_info()["ffi_api"], (major, minor))

    module: Any = torch_ext.native()
    platforms = ["cpu", "CUDA"] if torch_ext.build_info().get("cuda") else ["cpu"]
    for platform in platforms:
        for name, handler in module.ffi_targets(platform).items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    return module


def open_context(handle: AsyncEmbContextHandle) -> None:
    """Opens the native context of a handle in this process; does nothing where it is open already.

    Raises:
        ContextError: the native module has no kernels for a device of the mesh, or the name is taken by another
            context; over several processes also what `meeting.meet` raises.
    """
    module = native()
    if module.is_open(handle.context_id):
        return
    _require_own_device(handle)
    gpus = _local_gpus(handle)
    processes = {device.id: device.process_index for device in handle.mesh.devices.flat}
    spans = spans_processes(handle.mesh)
    # What leads to the other processes, for each group of the mesh.
    links = _meet(handle, gpus) if spans else []
    try:
        module.open_context(
            {
                "context_id": handle.context_id,
                "key": handle.key(),
                "name": handle.name,
                "group_size": handle.group_size,
                "devices": list(handle.flatten_replicas),
                "gpus": [gpus.get(device, -1) for device in handle.flatten_replicas] if gpus else [],
                "processes": [processes[device] for device in handle.flatten_replicas] if spans else [],
                "process": jax.process_index(),
                "token_blocks": list(handle.token_blocks),
                "tokens_per_rank": handle.tokens_per_rank,
                "emb_width": handle.emb_width,
                "logical_width": handle.logical_width,
                "num_unique": handle.num_unique,
                "dtype": handle.dtype.name,
                "id_policy": handle.id_policy,
                "padding_id": handle.padding_id,
                "lookup_only": handle.purpose == "lookup",
                "timeout_seconds": timeout_seconds(),
                "transports": [] if gpus else links,
                "device_links": links if gpus else [],
            }
        )
    except (RuntimeError, MemoryError) as error:
        raise ContextError(f"async_emb context {handle.name!r} cannot be opened: {error}") from error


def require_devices(handle: AsyncEmbContextHandle) -> None:
    """Raises ContextError where a context of this handle could not be opened on its devices. Opens nothing."""
    _require_own_device(handle)
    _local_gpus(handle)


def is_open(handle: AsyncEmbContextHandle) -> bool:
    """Whether the handle's context is open in this process."""
    return bool(native().is_open(handle.context_id))


def close_context(handle: AsyncEmbContextHandle) -> None:
    """Lets running work end, answers calls that still wait with an error, and forgets the context. Closing twice is
    fine."""
    native().close_context(handle.context_id)


def abort_context(handle: AsyncEmbContextHandle, reason: str) -> None:
    """Ends every wait of the context with an error that says ``reason``. Every later call fails until it is closed
    and opened."""
    _call(native().abort_context, handle.context_id, reason)


def drain(handle: AsyncEmbContextHandle) -> None:
    """Waits until no work of the context runs. Work that has yet to begin (a rank is missing) is not awaited."""
    _call(native().drain, handle.context_id)


def check(handle: AsyncEmbContextHandle) -> None:
    """Raises what the context has to say: a call that came at the wrong time, or ids that the policy "error" met.

    Call it when the steps that were dispatched have finished (``jax.block_until_ready``). Raising clears the error;
    tables and state are valid.

    Raises:
        PipelineError: a call was refused; nothing was applied from there on.
        IdError: ids outside of the table, or more unique ids than ``num_unique``; they were dropped.
        FailedContextError: the context has failed, was aborted, or timed out. This is not cleared.
    """
    require_working(handle)
    refusal = _call(native().take_refusal, handle.context_id)
    problem = _call(native().take_id_problem, handle.context_id)
    if refusal is not None:
        refused = PipelineError(refusal)
        if problem is not None:
            refused.add_note(f"Also: {_id_error(handle, problem)}")
        raise refused
    if problem is not None:
        raise _id_error(handle, problem)


def require_working(handle: AsyncEmbContextHandle) -> None:
    """Raises FailedContextError where the context has failed, was aborted, or timed out; may be called while steps
    run."""
    failure = _call(native().failure, handle.context_id)
    if failure is None:
        return
    error = FailedContextError(failure)
    error.add_note(AFTER_A_FAILURE)
    raise error


def check_ids(handle: AsyncEmbContextHandle) -> None:
    """As ``check``, for ids alone; may be called while steps run, and then perhaps raises not a step's first id."""
    problem = _call(native().take_id_problem, handle.context_id)
    if problem is not None:
        raise _id_error(handle, problem)


def stats(handle: AsyncEmbContextHandle) -> dict[str, float]:
    """Counters since the context was opened, over the ranks of this process.

    Counts: ``lookups``, ``tokens``, ``updates`` (applied), ``skipped_updates``, ``trained_tokens``, ``unique_tokens``,
    ``bad_ids``, ``padding_ids``, ``saturated`` (fp16 stores), ``refused_calls``, and the native calls of each kind
    (``lookup_begin_calls``, ...). In bytes: ``bytes_moved`` between ranks, ``bytes_sent`` to other processes,
    ``arena_bytes``. ``unique_share`` is unique over trained tokens; ``exposed_wait_seconds`` is the time that done
    calls waited for their result, mean over the ranks of this process; 0 on GPUs, where a stream waits and the host
    does not see it.
    """
    counts: dict[str, float] = dict(_call(native().stats, handle.context_id))
    counts["unique_share"] = counts["unique_tokens"] / max(counts["trained_tokens"], 1)
    ranks = sum(device.process_index == jax.process_index() for device in handle.mesh.devices.flat)
    counts["exposed_wait_seconds"] = counts.pop("exposed_wait_ns") * 1e-9 / ranks
    return counts


class TimelineEvent(NamedTuple):
    """One event. Times are nanoseconds of a steady clock; events are listed in the order in which they happened."""

    name: str
    table: str
    device: int
    step: int
    nanoseconds: int


def start_timeline() -> None:
    """Records what every context and every ``mark`` does from now on, process-wide."""
    native().start_timeline()


def stop_timeline() -> list[TimelineEvent]:
    """Ends the recording and returns it."""
    return [TimelineEvent(*event) for event in native().stop_timeline()]


def _call(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except RuntimeError as error:
        raise PipelineError(str(error)) from None


def _id_error(handle: AsyncEmbContextHandle, problem: dict[str, int]) -> IdError:
    return id_error(
        handle.name,
        problem,
        num_unique=handle.num_unique,
        tokens_per_batch=handle.tokens_per_batch,
        padding_id=handle.padding_id,
    )


def _require_own_device(handle: AsyncEmbContextHandle) -> None:
    owners = processes_of(handle.mesh)
    if jax.process_index() not in owners:
        raise ContextError(
            f"async_emb context {handle.name!r}: no device of the mesh belongs to this process, {jax.process_index()}: "
            f"the mesh is over the devices of {'process' if len(owners) == 1 else 'processes'} "
            f"{', '.join(map(str, owners))}. Only these may use it; or make the mesh of jax.devices(), which are those "
            "of all processes"
        )


def _local_gpus(handle: AsyncEmbContextHandle) -> dict[int, int]:
    """The numbers that this process gives to its GPUs of the mesh, by device id; empty where the mesh is of CPU
    devices. Raises where the native module has no kernels for a device, or cannot reach another process's."""
    numbers = {}
    for device in handle.mesh.devices.flat:
        where = f"async_emb context {handle.name!r}: device {device} of the mesh"
        if device.platform not in ("cpu", "gpu"):
            raise ContextError(
                f"{where} is a {device.platform} device, but the native module has kernels for cpu and gpu (CUDA) only"
            )
        if device.platform == "gpu" and device.process_index == jax.process_index():
            numbers[device.id] = device.local_hardware_id
    if any(device.platform == "gpu" for device in handle.mesh.devices.flat):
        import torch_ext

        try:
            torch_ext.require_cuda()
        except ImportError as error:
            refusal = ContextError(f"async_emb context {handle.name!r}: the mesh is of GPUs, but {error}")
            for note in getattr(error, "__notes__", ()):
                refusal.add_note(note)
            raise refusal from None
        if spans_processes(handle.mesh):
            from torch_ext import nccl

            if (reason := nccl.missing()) is not None:
                raise ContextError(
                    f"async_emb context {handle.name!r}: the mesh is of GPUs of several processes, but {reason}"
                )
    return numbers


def _meet(handle: AsyncEmbContextHandle, gpus: dict[int, int]) -> list[Any]:
    """Agrees with the other processes of the mesh about the handle. What leads to them, for each of its groups."""
    from .processes.meeting import meet

    return meet(handle, timeout_seconds(), gpus)
