"""The exceptions of the package; see ``torch_ext.common.errors``, where they are for both frameworks."""

from torch_ext.common.errors import (
    AsyncEmbError,
    CheckpointError,
    ContextError,
    ContextTypeError,
    ContextWarning,
    FailedContextError,
    IdError,
    PipelineError,
    Problem,
    raise_problems,
    show,
)

__all__ = [
    "AsyncEmbError",
    "CheckpointError",
    "ContextError",
    "ContextTypeError",
    "ContextWarning",
    "FailedContextError",
    "IdError",
    "PipelineError",
    "Problem",
    "raise_problems",
    "show",
]
