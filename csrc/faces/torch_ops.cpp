// The torch face of the kernels: schemas, checks, and the translation of tensors into what the kernels take.
//
// The only file that includes ATen: everything else compiles without torch.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "core/adagrad.h"
#include "core/dyadic.h"
#include "cpu/float_mode.h"
#include "cpu/huge_pages.h"
#include "cpu/kernels.h"
#include "faces/torch_checks.h"

namespace async_emb::faces {
namespace {

constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

// Rows that one thread takes at least: enough bytes to be worth waking it.
std::int64_t grain(std::int64_t row_bytes) {
  constexpr std::int64_t kBytesPerTask = 64 * 1024;
  return std::max<std::int64_t>(1, kBytesPerTask / std::max<std::int64_t>(1, row_bytes));
}

at::Tensor gather_rows(const at::Tensor& table, const at::Tensor& ids) {
  constexpr const char* kOp = "async_emb::gather_rows";
  check({kOp, "table", table}, {at::kFloat, at::kBFloat16, at::kHalf}, 2, "[rows, width]");
  check_int32_range(kOp, "the number of rows of table", table.size(0));
  const at::Tensor rows = checked_ids({kOp, "ids", ids}, table.size(0));

  std::vector<std::int64_t> shape = ids.sizes().vec();
  shape.push_back(table.size(1));
  at::Tensor out = at::empty(shape, table.options());
  const std::int64_t row_bytes = table.size(1) * table.element_size();
  const cpu::ColumnShard shard{table.const_data_ptr(), row_bytes, row_bytes};
  const std::int32_t* const row_of = rows.const_data_ptr<std::int32_t>();
  char* const first = static_cast<char*>(out.mutable_data_ptr());
  cpu::prefer_huge_pages(first, rows.numel() * row_bytes);
  at::parallel_for(0, rows.numel(), grain(row_bytes), [&](std::int64_t begin, std::int64_t end) {
    cpu::GatherRows job;
    job.ids = row_of + begin;
    job.count = end - begin;
    job.shards = &shard;
    job.num_shards = 1;
    job.out = first + begin * row_bytes;
    job.out_row_stride_bytes = row_bytes;
    cpu::kernels().gather_rows(job);
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> unique_ids(const at::Tensor& ids) {
  const at::Tensor cleaned = checked_ids({"async_emb::unique_ids", "ids", ids}, kMaxRows);
  const std::int64_t count = cleaned.numel();
  const at::TensorOptions int32 = cleaned.options();
  at::Tensor unique = at::empty({count}, int32);
  at::Tensor offsets = at::empty({count + 1}, int32);
  at::Tensor positions = at::empty({count}, int32);
  at::Tensor scratch = at::empty({cpu::unique_ids_scratch(count)}, int32.dtype(at::kLong));

  cpu::UniqueIds job;
  job.ids = cleaned.const_data_ptr<std::int32_t>();
  job.count = count;
  job.unique = unique.mutable_data_ptr<std::int32_t>();
  job.offsets = offsets.mutable_data_ptr<std::int32_t>();
  job.positions = positions.mutable_data_ptr<std::int32_t>();
  job.scratch = reinterpret_cast<std::uint64_t*>(scratch.mutable_data_ptr<std::int64_t>());
  const std::int64_t distinct = cpu::kernels().unique_ids(job);
  const std::int64_t kept = job.offsets[distinct];
  // Shrinks the tensors, not their memory: copying would cost more than it saves.
  unique.resize_({distinct});
  offsets.resize_({distinct + 1});
  positions.resize_({kept});
  return {unique, offsets, positions};
}

// offsets and positions as unique_ids gives them, for gradient rows of `tokens` tokens: every segment has at least one
// token.
void check_segments(const char* op, const at::Tensor& offsets, const at::Tensor& positions, std::int64_t tokens) {
  check({op, "offsets", offsets}, {at::kInt}, 1, "[unique ids + 1]");
  check({op, "positions", positions}, {at::kInt}, 1, "[tokens with a row]");
  TORCH_CHECK_VALUE(offsets.numel() >= 1, op, ": offsets is empty; for no unique ids it is [0]");
  const std::int32_t* const offset = offsets.const_data_ptr<std::int32_t>();
  TORCH_CHECK_VALUE(offset[0] == 0, op, ": offsets[0] is ", offset[0], ", it must be 0");
  for (std::int64_t u = 1; u < offsets.numel(); ++u) {
    TORCH_CHECK_VALUE(offset[u - 1] < offset[u], op, ": offsets must ascend, but offsets[", u - 1,
                      "] = ", offset[u - 1], " and offsets[", u, "] = ", offset[u], "; pass what unique_ids returned");
  }
  TORCH_CHECK_VALUE(offset[offsets.numel() - 1] == positions.numel(), op, ": offsets ends with ",
                    offset[offsets.numel() - 1], ", but there are ", positions.numel(),
                    " positions; pass what unique_ids returned");
  const std::int32_t* const position = positions.const_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < positions.numel(); ++i) {
    TORCH_CHECK_INDEX(position[i] >= 0 && position[i] < tokens, op, ": positions[", i, "] is ", position[i],
                      ", but grads has ", tokens, " rows");
  }
}

std::tuple<at::Tensor, at::Tensor> segment_sum(const at::Tensor& grads, const at::Tensor& offsets,
                                               const at::Tensor& positions) {
  constexpr const char* kOp = "async_emb::segment_sum";
  check({kOp, "grads", grads}, {at::kFloat, at::kBFloat16, at::kHalf}, 2, "[tokens, width]");
  check_segments(kOp, offsets, positions, grads.size(0));

  const std::int64_t unique = offsets.numel() - 1;
  const std::int64_t width = grads.size(1);
  const at::TensorOptions float32 = grads.options().dtype(at::kFloat);
  std::array<std::int8_t, core::kMaxSubtrees> levels;
  const std::int64_t subtrees = core::subtree_levels(0, width, levels.data());
  at::Tensor sums = at::empty({unique, width}, float32);
  at::Tensor subtree_sums = at::empty({unique, subtrees}, float32);
  at::Tensor statistics = at::empty({unique}, float32);

  cpu::SegmentSum sum;
  sum.grad_dtype = kernel_dtype(grads);
  sum.grads = grads.const_data_ptr();
  sum.grad_row_stride = width;
  sum.width = width;
  sum.offsets = offsets.const_data_ptr<std::int32_t>();
  sum.positions = positions.const_data_ptr<std::int32_t>();
  sum.sums = sums.mutable_data_ptr<float>();
  sum.subtree_sums = subtree_sums.mutable_data_ptr<float>();
  cpu::prefer_huge_pages(sum.sums, static_cast<std::int64_t>(sums.nbytes()));
  sum.subtree_stride = subtrees;
  cpu::RowStatistic statistic;
  statistic.subtree_sums = sum.subtree_sums;
  statistic.count = subtrees;
  statistic.levels = levels.data();
  statistic.statistics = statistics.mutable_data_ptr<float>();
  at::parallel_for(0, unique, grain(width * grads.element_size()), [&](std::int64_t begin, std::int64_t end) {
    cpu::SegmentSum my_sum = sum;
    cpu::RowStatistic my_statistic = statistic;
    my_sum.begin = my_statistic.begin = begin;
    my_sum.end = my_statistic.end = end;
    cpu::kernels().segment_sum(my_sum);
    cpu::kernels().row_statistic(my_statistic);
  });
  return {sums, statistics};
}

float norm_of(const at::Tensor& statistics) {
  const float sum = cpu::kernels().dyadic_sum(statistics.const_data_ptr<float>(), statistics.numel());
  const cpu::ScopedFloatMode mode;
  return core::gradient_norm(sum);
}

at::Tensor gradient_norm(const at::Tensor& statistics) {
  check({"async_emb::gradient_norm", "statistics", statistics}, {at::kFloat}, 1, "[unique ids]");
  at::Tensor norm = at::empty({}, statistics.options());
  *norm.mutable_data_ptr<float>() = norm_of(statistics);
  return norm;
}

// Rows to update: ascending, so that no row occurs twice and threads never meet in one.
void check_unique(const char* op, const at::Tensor& unique, std::int64_t rows) {
  const std::int32_t* const row = unique.const_data_ptr<std::int32_t>();
  for (std::int64_t u = 0; u < unique.numel(); ++u) {
    TORCH_CHECK_INDEX(row[u] >= 0 && row[u] < rows, op, ": unique[", u, "] is ", row[u], ", outside of [0, ", rows,
                      "), the rows of table");
    TORCH_CHECK_VALUE(u == 0 || row[u - 1] < row[u], op, ": unique must ascend, but unique[", u - 1, "] = ", row[u - 1],
                      " and unique[", u, "] = ", row[u], "; pass what unique_ids returned");
  }
}

// What both forms of the rule take.
struct Update {
  const char* op;
  at::Tensor& table;
  at::Tensor& row_state;
  at::Tensor* last_step;  // null: the plain form
  const at::Tensor& unique;
  const at::Tensor& sums;
  const at::Tensor& statistics;
  std::optional<double> max_grad_norm;
  std::string_view rounding;
  std::optional<std::int64_t> seed;
  std::optional<std::int64_t> rounding_step;
};

void check_update(const Update& update) {
  check({update.op, "table", update.table}, {at::kFloat, at::kBFloat16, at::kHalf}, 2, "[rows, width]");
  const std::int64_t rows = update.table.size(0);
  check_int32_range(update.op, "the number of rows of table", rows);
  const Argument row_state{update.op, "row_state", update.row_state};
  check(row_state, {at::kFloat}, 1, "[rows]");
  check_size(row_state, 0, rows, "the rows of table");
  if (update.last_step != nullptr) {
    const Argument last_step{update.op, "last_step", *update.last_step};
    check(last_step, {at::kInt}, 1, "[rows]");
    check_size(last_step, 0, rows, "the rows of table");
  }
  check({update.op, "unique", update.unique}, {at::kInt}, 1, "[unique ids]");
  check_unique(update.op, update.unique, rows);
  const Argument sums{update.op, "sums", update.sums};
  check(sums, {at::kFloat}, 2, "[unique ids, width]");
  check_size(sums, 0, update.unique.numel(), "the number of unique ids");
  check_size(sums, 1, update.table.size(1), "the width of table");
  const Argument statistics{update.op, "statistics", update.statistics};
  check(statistics, {at::kFloat}, 1, "[unique ids]");
  check_size(statistics, 0, update.unique.numel(), "the number of unique ids");
}

void set_rounding(const Update& update, cpu::RowwiseAdagrad& job) {
  TORCH_CHECK_VALUE(update.rounding == "nearest" || update.rounding == "stochastic", update.op, ": rounding = '",
                    update.rounding, "' must be 'nearest' or 'stochastic'");
  job.stochastic_rounding = update.rounding == "stochastic";
  if (!job.stochastic_rounding) return;
  TORCH_CHECK_VALUE(update.seed.has_value() && update.rounding_step.has_value(), update.op,
                    ": rounding = 'stochastic' draws from (seed, rounding_step, row, column); pass ",
                    update.seed.has_value() ? "" : "seed",
                    update.seed.has_value() || update.rounding_step.has_value() ? "" : " and ",
                    update.rounding_step.has_value() ? "" : "rounding_step");
  job.seed = checked_uint32(update.op, "seed", *update.seed);
  job.rounding_step = checked_uint32(update.op, "rounding_step", *update.rounding_step);
}

// Fills in the rest of `job`, which holds the numbers of the rule, and runs it; a norm that is not finite changes
// nothing.
void apply(const Update& update, cpu::RowwiseAdagrad job) {
  check_update(update);
  set_rounding(update, job);
  const float norm = norm_of(update.statistics);
  if (update.max_grad_norm.has_value()) {
    const float limit = checked_float(update.op, "max_grad_norm", *update.max_grad_norm);
    TORCH_CHECK_VALUE(limit >= 0, update.op, ": max_grad_norm = ", limit,
                      " must not be negative; None switches clipping off");
    const cpu::ScopedFloatMode mode;
    job.clip = core::clip_factor(limit, norm);
  }
  // Tells autograd that saved copies of these tensors are stale, and refuses inference tensors.
  update.table.unsafeGetTensorImpl()->bump_version();
  update.row_state.unsafeGetTensorImpl()->bump_version();
  if (update.last_step != nullptr) update.last_step->unsafeGetTensorImpl()->bump_version();
  if (!std::isfinite(norm)) return;

  job.table_dtype = kernel_dtype(update.table);
  job.table = update.table.mutable_data_ptr();
  job.table_row_stride = update.table.size(1);
  job.width = update.table.size(1);
  job.logical_width = update.table.size(1);
  job.row_state = update.row_state.mutable_data_ptr<float>();
  job.last_step = update.last_step != nullptr ? update.last_step->mutable_data_ptr<std::int32_t>() : nullptr;
  job.unique = update.unique.const_data_ptr<std::int32_t>();
  job.sums = update.sums.const_data_ptr<float>();
  job.statistics = update.statistics.const_data_ptr<float>();
  const std::int64_t row_bytes = job.width * update.table.element_size();
  at::parallel_for(0, update.unique.numel(), grain(row_bytes), [&](std::int64_t begin, std::int64_t end) {
    cpu::RowwiseAdagrad mine = job;
    mine.begin = begin;
    mine.end = end;
    cpu::kernels().rowwise_adagrad(mine);
  });
}

void rowwise_adagrad_(at::Tensor& table, at::Tensor& row_state, const at::Tensor& unique, const at::Tensor& sums,
                      const at::Tensor& statistics, double learning_rate, double eps, double decay_factor,
                      double weight_decay_factor, std::optional<double> max_grad_norm, std::string_view rounding,
                      std::optional<std::int64_t> seed, std::optional<std::int64_t> rounding_step) {
  constexpr const char* kOp = "async_emb::rowwise_adagrad_";
  cpu::RowwiseAdagrad job;
  job.learning_rate = checked_not_negative(kOp, "learning_rate", learning_rate);
  job.eps = checked_not_negative(kOp, "eps", eps);
  job.decay = checked_not_negative(kOp, "decay_factor", decay_factor);
  job.weight_decay = checked_float(kOp, "weight_decay_factor", weight_decay_factor);
  apply({kOp, table, row_state, nullptr, unique, sums, statistics, max_grad_norm, rounding, seed, rounding_step}, job);
}

void rowwise_adagrad_lazy_(at::Tensor& table, at::Tensor& row_state, at::Tensor& last_step, const at::Tensor& unique,
                           const at::Tensor& sums, const at::Tensor& statistics, std::int64_t step,
                           double learning_rate, double eps, double accum_decay_rate, double weight_decay_rate,
                           std::optional<double> max_grad_norm, std::string_view rounding,
                           std::optional<std::int64_t> seed, std::optional<std::int64_t> rounding_step) {
  constexpr const char* kOp = "async_emb::rowwise_adagrad_lazy_";
  cpu::RowwiseAdagrad job;
  check_int32_range(kOp, "step", step);
  TORCH_CHECK_VALUE(step >= 0, kOp, ": step = ", step, " must not be negative");
  job.step = static_cast<std::int32_t>(step);
  job.learning_rate = checked_not_negative(kOp, "learning_rate", learning_rate);
  job.eps = checked_not_negative(kOp, "eps", eps);
  job.decay = checked_not_negative(kOp, "accum_decay_rate", accum_decay_rate);
  job.weight_decay = checked_not_negative(kOp, "weight_decay_rate", weight_decay_rate);
  apply({kOp, table, row_state, &last_step, unique, sums, statistics, max_grad_norm, rounding, seed, rounding_step},
        job);
}

TORCH_LIBRARY(async_emb, library) {
  library.set_python_module("torch_ext.ops");  // has the fake kernels
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  library.def("gather_rows(Tensor table, Tensor ids) -> Tensor", tags);
  library.def("unique_ids(Tensor ids) -> (Tensor unique, Tensor offsets, Tensor positions)", tags);
  library.def("segment_sum(Tensor grads, Tensor offsets, Tensor positions) -> (Tensor sums, Tensor statistics)", tags);
  library.def("gradient_norm(Tensor statistics) -> Tensor", tags);
  library.def(
      "rowwise_adagrad_(Tensor(a!) table, Tensor(b!) row_state, Tensor unique, Tensor sums, Tensor statistics, *, "
      "float learning_rate, float eps, float decay_factor=1.0, float weight_decay_factor=1.0, "
      "float? max_grad_norm=None, str rounding='nearest', int? seed=None, int? rounding_step=None) -> ()",
      tags);
  library.def(
      "rowwise_adagrad_lazy_(Tensor(a!) table, Tensor(b!) row_state, Tensor(c!) last_step, Tensor unique, Tensor sums, "
      "Tensor statistics, *, int step, float learning_rate, float eps, float accum_decay_rate, float "
      "weight_decay_rate, "
      "float? max_grad_norm=None, str rounding='nearest', int? seed=None, int? rounding_step=None) -> ()",
      tags);
}

TORCH_LIBRARY_IMPL(async_emb, CPU, library) {
  library.impl("gather_rows", gather_rows);
  library.impl("unique_ids", unique_ids);
  library.impl("segment_sum", segment_sum);
  library.impl("gradient_norm", gradient_norm);
  library.impl("rowwise_adagrad_", rowwise_adagrad_);
  library.impl("rowwise_adagrad_lazy_", rowwise_adagrad_lazy_);
}

}  // namespace
}  // namespace async_emb::faces
