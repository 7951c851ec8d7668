"""One memory, two frameworks: arrays that torch borrows, tensors that JAX shares.

``view`` lends a torch tensor of a JAX array, for the length of a ``with`` block. ``adopt`` takes a torch tensor into
JAX. Both share or raise; a copy is made where ``copy=True`` asks for it, and nowhere else. ``docs/torch.md`` says who
may write when, and how long what lives.

Importing this module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils.dlpack

import torch_ext

from . import loans
from .errors import ContextError, ContextTypeError, PipelineError, Problem, raise_problems, show
from .ffi import TransformationError
from .loans import require_donatable
from .spreading import parts_of, spread_problem

__all__ = ["ShardView", "adopt", "give", "require_donatable", "shares_memory", "view", "view_shards"]

# Of both frameworks, under one name.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
# What JAX narrows in silence without x64, and what to take instead.
NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
ALIGNMENT = 64  # bytes; XLA copies a host buffer that is aligned to less


# ---- JAX to torch ----


@dataclasses.dataclass(frozen=True)
class ShardView:
    """A view of one shard.

    Attributes:
        tensor: the shard's elements.
        index: where they are in the whole array, a slice for each dimension.
        device: of JAX.
        replica: 0 for one copy of each part of the array, 1 and up for the others, each with memory of its own.
    """

    tensor: torch.Tensor
    index: tuple[slice, ...]
    device: jax.Device
    replica: int


@contextlib.contextmanager
def view(array: jax.Array) -> Iterator[torch.Tensor]:
    """Lends a torch tensor of an array that lies on one device: the same memory, no copy.

    The array is waited for. Inside of the block both frameworks see what torch writes; no step that would donate the
    array starts. When the block ends, the tensor and all that share its storage (slices, tensors that autograd has
    saved) raise RuntimeError from whatever reads or writes them, and the memory is JAX's alone. What torch cannot take
    back: an address from ``data_ptr()``, a NumPy array, or another library's tensor made of the view. Let those go
    inside of the block.

    On CUDA torch's stream waits for JAX, and the end of the block for all that torch has put on the device.

    Args:
        array: on one device, of a dtype that both frameworks have. For one on several devices there is ``view_shards``.

    Raises:
        ContextError: the array lies on several devices, or torch has no such dtype.
        PipelineError: the array was deleted, or given to a step.
        TransformationError: the call is inside of jax.jit, jax.grad, jax.vmap or the like.
    """
    with lent_as_one(array, "view") as tensor:
        yield tensor


@contextlib.contextmanager
def lent_as_one(array: jax.Array, call: str) -> Iterator[torch.Tensor]:
    """``view``, for a function whose name, ``call``, is to be in the messages."""
    _require_array(array, call)
    _require_one_device(array, call)
    jax.block_until_ready(array)
    with _lent(array, call) as tensor:
        yield tensor


@contextlib.contextmanager
def view_shards(array: jax.Array) -> Iterator[list[ShardView]]:
    """As ``view``, for every shard of an array that is in this process, in the order of ``array.addressable_shards``.

    A part of the array that several devices hold (a replicated array) comes once for each of them. Who writes to one
    replica must write the same to the others.
    """
    _require_array(array, "view_shards")
    jax.block_until_ready(array)
    with contextlib.ExitStack() as loan:
        yield [
            ShardView(loan.enter_context(_lent(shard.data, "view_shards")), shard.index, shard.device, shard.replica_id)
            for shard in array.addressable_shards
        ]


def give(array: jax.Array) -> torch.Tensor:
    """Gives an array's memory to torch for good: the same memory, no copy. The array is deleted, as a donated one is.

    Args:
        array: as for ``view``; nobody else's (see ``require_donatable``).
    """
    return given_by(array, "give")


def given_by(array: jax.Array, call: str) -> torch.Tensor:
    """``give``, for a function whose name, ``call``, is to be in the messages."""
    _require_array(array, call)
    _require_one_device(array, call)
    require_donatable(array)
    jax.block_until_ready(array)
    tensor = _exported(array, call)
    array.delete()
    return tensor


@contextlib.contextmanager
def _lent(shard: jax.Array, call: str) -> Iterator[torch.Tensor]:
    what, tensor = _describe(shard), _exported(shard, call)
    device, storage = tensor.device, tensor.untyped_storage()  # of now: the block may give the tensor another storage
    claim = loans.claim("view", tensor.data_ptr(), shard.nbytes, what)
    try:
        yield tensor
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        why = f"async_emb {call}: the view of {what} has ended, and its memory is JAX's again"
        torch_ext.native().end_loan(storage._cdata, f"{why}. Clone inside of the block what is needed after it.")
        loans.release(claim)


def _exported(array: jax.Array, call: str) -> torch.Tensor:
    tensor = torch.utils.dlpack.from_dlpack(array)
    if array.nbytes and tensor.data_ptr() != array.unsafe_buffer_pointer():
        raise PipelineError(f"async_emb {call}: JAX has exported a copy of {_describe(array)} instead of its memory")
    return tensor


def _require_one_device(array: jax.Array, call: str) -> None:
    devices = len(array.sharding.device_set)
    if devices > 1:
        error = ContextError(
            f"async_emb {call}: {_describe(array)} lies on {devices} devices, and a tensor has one memory"
        )
        error.add_note("view_shards(array) lends each shard; view(array.addressable_shards[i].data) one of them.")
        raise error


def _require_array(array: Any, call: str) -> None:
    if isinstance(array, jax.core.Tracer):
        error = TransformationError(
            f"async_emb {call} was called inside of jax.jit, jax.grad, jax.vmap or another transformation, where an "
            "array has no memory yet"
        )
        error.add_note("Call it outside, on the arrays that the transformed function takes or returns.")
        raise error
    if not isinstance(array, jax.Array):
        raise ContextTypeError(f"async_emb {call}: expected a jax.Array, not {type(array).__name__}: {show(array)}")
    if array.is_deleted():
        raise PipelineError(
            f"async_emb {call}: {_describe(array)} was deleted, or given to a step, which has taken its memory. Take "
            "the array of the state that the last call returned"
        )
    if array.dtype.name not in DTYPES:
        raise ContextError(
            f"async_emb {call}: torch cannot share {_describe(array)}; dtypes that both have: {', '.join(DTYPES)}"
        )


# ---- torch to JAX ----


def adopt(tensor: torch.Tensor, *, copy: bool = False, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Takes a torch tensor into JAX: the same memory, or an error that says what to change.

    The memory lives as long as the array or the tensor. What torch writes, the array shows: write only where no
    computation of JAX's that reads it can run. A step does not take a shared array as a table or parameter (see
    ``require_donatable``); as a batch it does.

    On CUDA JAX's stream waits for torch's current one.

    Args:
        tensor: contiguous, without gradient, of a dtype that both frameworks have, on the CPU at an address that 64
            divides (what torch allocates is; a slice may not be).
        copy: make a copy instead, which is XLA's own and may be donated. ``shares_memory(array, tensor)`` is False
            for it, and True for whatever else this function returns. Strides and alignment do not matter then.
        sharding: of the array; the device that the tensor is on unless given. Over several CPU devices each takes its
            part of the tensor where it lies; every part must be contiguous and aligned.

    Raises:
        ContextError: the tensor cannot be shared; every problem is listed.
        TransformationError: the call is inside of jax.jit, where the array would become a constant of the program.
    """
    problems = _problems(tensor, copy)
    if problems:
        raise_problems(problems)
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        error = TransformationError(
            "async_emb adopt was called inside of jax.jit, or of another transformation that traces: the tensor's "
            "values of now would become a constant of the program"
        )
        error.add_note("Adopt outside, and give the array to the transformed function as an argument.")
        raise error
    if sharding is not None and (problem := spread_problem(_describe(tensor), tuple(tensor.shape), sharding)):
        raise_problems([problem])
    if copy:
        return _copied(tensor, sharding)
    if sharding is None:
        return _shared(tensor, _home_of(tensor))
    parts = parts_of(tensor, sharding)
    if problems := list(_unshareable_parts(tensor, parts, sharding)):
        raise_problems(problems)
    shared = [_shared(part, device) for device, part in parts]
    return jax.make_array_from_single_device_arrays(tuple(tensor.shape), sharding, shared)


def shares_memory(array: jax.Array, tensor: torch.Tensor) -> bool:
    """Whether every element of the array lies in the memory of the tensor."""
    first = tensor.data_ptr()
    last = first + _bytes_spanned(tensor)
    return all(first <= start and start + size <= last for start, size in loans.blocks_of(array))


def _shared(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    # Its own tensor object: it lives as long as JAX has the memory, and its end says so.
    alias = tensor.detach()
    if device == _home_of(tensor):
        array = jax.dlpack.from_dlpack(alias, copy=False)
    else:
        # DLPack knows one CPU; that several devices of XLA's are the same memory is known to device_put alone.
        array = jax.device_put(as_numpy(alias), device)
    if array.nbytes:
        if array.unsafe_buffer_pointer() != alias.data_ptr():
            raise ContextError(f"async_emb adopt: JAX has made a copy of {_describe(tensor)} instead of sharing it")
        claim = loans.claim("adopted", alias.data_ptr(), array.nbytes, _describe(tensor))
        shared = torch_ext.native().Shared(alias.untyped_storage()._cdata)
        weakref.finalize(alias, _let_go, claim, shared).atexit = False
    return array


def _let_go(claim: int, shared: object) -> None:
    """JAX has the memory no more: ``shared`` ends with its last reference, this one."""
    loans.release(claim)


def _copied(tensor: torch.Tensor, sharding: jax.sharding.Sharding | None) -> jax.Array:
    unfit = any(_unshareable_memory(tensor))
    whole = tensor.clone(memory_format=torch.contiguous_format) if unfit else tensor
    copied = jnp.copy(jax.dlpack.from_dlpack(whole, copy=False))
    return jax.block_until_ready(copied if sharding is None else jax.device_put(copied, sharding))


def _home_of(tensor: torch.Tensor) -> jax.Device:
    if tensor.is_cuda:
        return jax.local_devices(backend="cuda")[tensor.device.index]
    return jax.local_devices(backend="cpu")[0]


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's memory as a NumPy array, of the dtypes that torch's own ``numpy()`` does not know too."""
    name = _name_of(tensor.dtype)
    if name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"):
        bits = tensor.view(torch.int16 if name == "bfloat16" else torch.uint8)
        return bits.numpy().view(jnp.dtype(name))
    return tensor.numpy()


def _problems(tensor: Any, copy: bool) -> list[Problem]:
    """Why a tensor cannot be adopted, in the order in which one would mend it."""
    if not isinstance(tensor, torch.Tensor):
        message = f"async_emb adopt: expected a torch.Tensor, not {type(tensor).__name__}: {show(tensor)}"
        return [Problem(message, wrong_type=True)]
    return list(_without_memory(tensor)) or [*_unfit_elements(tensor), *([] if copy else _unshareable_memory(tensor))]


def _without_memory(tensor: torch.Tensor) -> Iterator[Problem]:
    what = f"async_emb adopt: {_describe(tensor)}"
    if tensor.device.type not in ("cpu", "cuda"):
        advice = "Tensors on cpu and cuda can be shared: tensor.to('cpu') copies it there."
        yield Problem(f"{what} is on the device {tensor.device}", (advice,))
    elif tensor.layout != torch.strided:
        yield Problem(f"{what} has the layout {tensor.layout}", ("tensor.to_dense() has one memory.",))
    elif (reason := _why_no_address(tensor)) is not None:
        advice = "Adopt the real tensor, outside of torch.compile, torch.func and FakeTensorMode."
        yield Problem(f"{what} has no memory of its own", (f"torch says: {reason}.", advice))


def _why_no_address(tensor: torch.Tensor) -> str | None:
    try:
        if tensor.untyped_storage().device.type == "meta":
            return f"it is a {type(tensor).__name__} with storage on the device meta"
        tensor.data_ptr()
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(".")
    return None


def _unfit_elements(tensor: torch.Tensor) -> Iterator[Problem]:
    what, name = f"async_emb adopt: {_describe(tensor)}", _name_of(tensor.dtype)
    if name not in DTYPES:
        yield Problem(f"{what}: JAX has no such dtype", (f"Dtypes that both have: {', '.join(DTYPES)}.",))
    elif name in NARROWED and not jax.config.read("jax_enable_x64"):
        advice = f"Adopt tensor.to(torch.{NARROWED[name]}), or first jax.config.update('jax_enable_x64', True)."
        yield Problem(f"{what}: JAX without x64 would narrow {name} to {NARROWED[name]}", (advice,))
    if tensor.requires_grad:
        yield Problem(f"{what} requires grad, which JAX would not see", ("Adopt tensor.detach().",))
    if tensor.is_conj() or tensor.is_neg():
        kind = "conj" if tensor.is_conj() else "neg"
        yield Problem(f"{what} is a lazy {kind} view", (f"Adopt tensor.resolve_{kind}().",))
    if tensor.device.type == "cpu" and tensor.is_pinned():
        yield Problem(f"{what} is in pinned memory, which JAX takes for a GPU's", ("Adopt tensor.clone().",))


def _unshareable_memory(tensor: torch.Tensor) -> Iterator[Problem]:
    what, or_copy = f"async_emb adopt: {_describe(tensor)}", "or adopt(tensor, copy=True)"
    if not tensor.is_contiguous():
        advice = f"Make it contiguous: tensor.contiguous() copies it once; {or_copy}."
        yield Problem(f"{what} has the strides {tuple(tensor.stride())}: it is not contiguous", (advice,))
    elif tensor.device.type == "cpu" and tensor.numel() and (over := tensor.data_ptr() % ALIGNMENT):
        advice = f"What torch allocates is aligned, a slice of it may not be: tensor.clone() copies it once; {or_copy}."
        yield Problem(
            f"{what} begins {over} bytes after a multiple of {ALIGNMENT}: sharing needs {ALIGNMENT}-byte alignment",
            (advice,),
        )
    yield from _lent_by_jax(tensor)


def _unshareable_parts(
    tensor: torch.Tensor, parts: list[tuple[jax.Device, torch.Tensor]], sharding: jax.sharding.Sharding
) -> Iterator[Problem]:
    if tensor.is_cuda and sharding.device_set != {_home_of(tensor)}:
        message = f"async_emb adopt: a tensor on {tensor.device} cannot be shared with {len(parts)} devices"
        yield Problem(message, ("Adopt it on its own device, and let jax.device_put spread it.",))
        return
    for device, part in parts:
        what, where = f"async_emb adopt: {_describe(part)}", f"(the part for {device} of {_describe(tensor)})"
        advice = (
            "Each device takes its part where it lies: split the first dimension only, into parts of a multiple of "
            f"{ALIGNMENT} bytes, of a tensor that is aligned itself; or adopt(tensor, copy=True, sharding=...).",
        )
        if not part.is_contiguous():
            yield Problem(f"{what} has the strides {tuple(part.stride())}: it is not contiguous {where}", advice)
        elif part.device.type == "cpu" and part.numel() and (over := part.data_ptr() % ALIGNMENT):
            yield Problem(f"{what} begins {over} bytes after a multiple of {ALIGNMENT} {where}", advice)
    yield from _lent_by_jax(tensor)


def _lent_by_jax(tensor: torch.Tensor) -> Iterator[Problem]:
    what, or_copy = f"async_emb adopt: {_describe(tensor)}", "or adopt(tensor, copy=True)"
    for claim in loans.claims_on(tensor.data_ptr(), _bytes_spanned(tensor)):
        if claim.kind == "view":
            advice = f"Use that array, {or_copy}."
            yield Problem(f"{what} is a view of a JAX array ({claim.what}), which ends with its block", (advice,))


def _bytes_spanned(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(x: Any) -> str:
    kind, name = ("tensor", _name_of(x.dtype)) if isinstance(x, torch.Tensor) else ("array", x.dtype.name)
    return f"the {kind} {name}{list(x.shape)}"
