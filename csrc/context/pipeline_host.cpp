// What the host reads and restores.
#include "context/pipeline.h"

#include <cstring>
#include <utility>

namespace async_emb::context {

void Pipeline::note_bad_id(std::int64_t step, std::int64_t position, std::int64_t id, std::int64_t rows) {
  const bool earlier = !id_problem_ || step < id_problem_->step ||
                       (step == id_problem_->step && !id_problem_->too_many_unique && position < id_problem_->position);
  if (earlier) id_problem_ = IdProblem{.step = step, .position = position, .id = id, .rows = rows};
}

std::optional<IdProblem> Pipeline::take_id_problem() {
  Lock lock(mutex_);
  return std::exchange(id_problem_, std::nullopt);
}

void Pipeline::return_to_first_step() {
  Lock lock(mutex_);
  for (Rank& rank : ranks_) rank.machine.return_to_first_step();
}

std::optional<StagedGradients> Pipeline::staged() const {
  Lock lock(mutex_);
  const Rank& first = ranks_.front();
  if (!first.machine.staged()) return std::nullopt;
  StagedGradients result;
  const auto* ids = batches_[first.staged_batch]->ids.as<std::int32_t>();
  const char* grads = work_.arena().grads.as<char>();
  result.ids.assign(ids, ids + spec_.tokens());
  result.grads.assign(grads, grads + work_.arena().grads.bytes());
  for (const Rank& rank : ranks_) result.pending = result.pending && rank.staged_pending;
  return result;
}

void Pipeline::restore_staged(const StagedGradients& staged) {
  Lock lock(mutex_);
  require_working();
  check_.staged(static_cast<std::int64_t>(staged.ids.size()), static_cast<std::int64_t>(staged.grads.size()));
  for (const Rank& rank : ranks_) {
    if (rank.machine.staged() || rank.machine.update().pending() || rank.machine.lookup().pending()) {
      check_.not_idle();
    }
  }
  const int batch = take_batch();
  std::memcpy(batches_[batch]->ids.as<char>(), staged.ids.data(), staged.ids.size() * sizeof(std::int32_t));
  batches_[batch]->rows = 1 + std::int64_t{*std::max_element(staged.ids.begin(), staged.ids.end())};
  std::memcpy(work_.arena().grads.as<char>(), staged.grads.data(), staged.grads.size());
  for (Rank& rank : ranks_) {
    rank.last_table = nullptr;  // the next lookup brings it
    release(rank.staged_batch);
    rank.staged_batch = batch;
    rank.staged_pending = staged.pending;
    hold(batch);
    rank.machine.adopt_staged();
  }
}

Stats Pipeline::stats() const {
  Lock lock(mutex_);
  return stats_;
}

std::int64_t Pipeline::arena_bytes() const {
  Lock lock(mutex_);
  std::int64_t total = work_.arena().bytes();
  for (const auto& batch : batches_) total += batch->bytes();
  return total;
}

}  // namespace async_emb::context
