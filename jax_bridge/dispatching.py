"""Programs of native calls that JAX dispatches as fast as any other program.

A native call has an effect in JAX's sense, so that no trace drops it or merges it with another. But a program with an
effect is dispatched in Python, with a token for ``jax.effects_barrier``: about 0.2 ms more than the C++ takes that
dispatches every other program. ``fast_dispatch`` encloses a whole program, whose effects then do not show outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .ffi import TransformationError

Function = TypeVar("Function", bound=Callable[..., Any])


def fast_dispatch(function: Function) -> Function:
    """``function``, for ``jax.jit`` to compile and nothing else to transform, without the effects of the native calls
    in it: ``jax.jit(fast_dispatch(step), donate_argnums=0)``.

    The program is the same, and every call in it runs. What differs is that ``jax.effects_barrier`` does not wait for
    it: wait for its results (``jax.block_until_ready``), also before the process ends.

    Args:
        function: of trees of arrays, positional, with an array in every leaf of its result.
    """

    @functools.wraps(function)
    def enclosed(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        program, result = jax.make_jaxpr(lambda *x: function(*jax.tree.unflatten(tree, x)), return_shape=True)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(result), _program_p.bind(*leaves, program=program))

    return enclosed  # type: ignore[return-value]


def _refuse(*_: Any, **__: Any) -> Any:
    raise TransformationError(
        "async_emb fast_dispatch: the function must go to jax.jit as it is: neither run without it, nor "
        "differentiated, nor mapped. Call fast_dispatch on the outermost function, jax.jit(fast_dispatch(step))"
    )


_program_p = Primitive("async_emb_program")
_program_p.multiple_results = True
_program_p.def_impl(_refuse)
_program_p.def_abstract_eval(lambda *_, program: list(program.out_avals))
ad.primitive_jvps[_program_p] = _refuse
batching.primitive_batchers[_program_p] = _refuse
mlir.register_lowering(_program_p, mlir.lower_fun(lambda *x, program: jaxpr_as_fun(program)(*x), multiple_results=True))
