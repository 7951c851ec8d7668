"""The oracle: lookup, sums and row-wise Adagrad in NumPy, bit for bit what the kernels promise.

It needs numpy and ml_dtypes only and shares no code with the kernels, so that the two can disagree. Every float32
operation here is one NumPy operation on float32 arrays, hence rounded once to nearest even; sums are written out in
their canonical order. All functions work on whole (unsharded) tables and on the tokens of the whole communicator group,
in the order of the global array. Inputs are never modified.

Call it from ordinary Python threads: inside an XLA host callback denormals may be flushed to zero, and the bits differ.
"""

from .adagrad import AdagradUpdate, LazyAdagradUpdate, rowwise_adagrad_lazy_update, rowwise_adagrad_update
from .exponential import exp32
from .formats import round_to, to_fp32
from .philox import philox4x32
from .simulation import Simulation, StepResult, UpdateRecord
from .sums import dyadic_sum, global_norm, row_statistics, segment_sum
from .tokens import IdReport, UniqueIds, clean_ids, lookup, unique_from_segments, unique_ids

__all__ = [
    "AdagradUpdate",
    "IdReport",
    "LazyAdagradUpdate",
    "Simulation",
    "StepResult",
    "UniqueIds",
    "UpdateRecord",
    "clean_ids",
    "dyadic_sum",
    "exp32",
    "global_norm",
    "lookup",
    "philox4x32",
    "round_to",
    "row_statistics",
    "rowwise_adagrad_lazy_update",
    "rowwise_adagrad_update",
    "segment_sum",
    "to_fp32",
    "unique_from_segments",
    "unique_ids",
]
