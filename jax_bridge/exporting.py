"""``jax.export`` of programs that hold our calls."""

from __future__ import annotations

from jax import export

from .runtime import native


def export_checks() -> list[export.DisabledSafetyCheck]:
    """What to give ``jax.export.export`` as ``disabled_checks``: one entry for each native call of this package.

    JAX exports a custom call only where somebody vouches that its target stays compatible. We vouch for it within one
    version of this package. A program may be lowered for a platform that this machine does not have::

        exported = jax.export.export(jitted, platforms=["cpu", "cuda"], disabled_checks=export_checks())(*arguments)

    The program names its contexts by ``context_id``, which stands for the devices of the handle's mesh as well: it runs
    where a context with that id is open, so in a process that has the same devices.
    """
    return [export.DisabledSafetyCheck.custom_call(name) for name in sorted(native().ffi_targets("cpu"))]
