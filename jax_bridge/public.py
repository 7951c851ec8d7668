"""The public names of ``jax_bridge``, which has them from here."""

from .context import AsyncEmbContextHandle, make_context_handle
from .dispatching import fast_dispatch
from .embedding import AsyncEmbedding, TableState
from .errors import (
    AsyncEmbError,
    CheckpointError,
    ContextError,
    ContextTypeError,
    ContextWarning,
    FailedContextError,
    IdError,
    PipelineError,
)
from .exporting import export_checks
from .ffi import TransformationError
from .mesh import pad_width, replica_groups
from .ops import (
    lookup_done,
    lookup_start,
    lookup_start_beside_update,
    rowwise_adagrad_lazy_update_start,
    rowwise_adagrad_update_done,
    rowwise_adagrad_update_start,
    settle,
    stage_update,
)
from .optimizers import RowOptimizer, RowwiseAdagrad
from .order import depend, mark
from .processes.starting import initialize
from .runtime import (
    TimelineEvent,
    abort_context,
    check,
    close_context,
    open_context,
    start_timeline,
    stats,
    stop_timeline,
)
from .saving.checkpoints import Checkpoints
from .steps.batches import with_next
from .steps.snapshots import Snapshot
from .steps.step_program import StepProgram, StepState
from .steps.train import TrainStep, train_step

__all__ = [
    "AsyncEmbContextHandle",
    "AsyncEmbError",
    "AsyncEmbedding",
    "CheckpointError",
    "Checkpoints",
    "ContextError",
    "ContextTypeError",
    "ContextWarning",
    "FailedContextError",
    "IdError",
    "PipelineError",
    "RowOptimizer",
    "RowwiseAdagrad",
    "Snapshot",
    "StepProgram",
    "StepState",
    "TableState",
    "TimelineEvent",
    "TrainStep",
    "TransformationError",
    "abort_context",
    "check",
    "close_context",
    "depend",
    "export_checks",
    "fast_dispatch",
    "initialize",
    "lookup_done",
    "lookup_start",
    "lookup_start_beside_update",
    "make_context_handle",
    "mark",
    "open_context",
    "pad_width",
    "replica_groups",
    "rowwise_adagrad_lazy_update_start",
    "rowwise_adagrad_update_done",
    "rowwise_adagrad_update_start",
    "settle",
    "stage_update",
    "start_timeline",
    "stats",
    "stop_timeline",
    "train_step",
    "with_next",
]
