// What the host reads and restores.
#include "context/pipeline.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace async_emb::context {
namespace {

// A host that never asks must not make us grow.
constexpr std::size_t kProblemsKept = 8;

}  // namespace

void Pipeline::note(const IdProblem& problem) {
  for (IdProblem& known : id_problems_) {
    if (known.step != problem.step || known.too_many_unique != problem.too_many_unique) continue;
    if (problem.position < known.position) known = problem;
    return;
  }
  if (id_problems_.size() < kProblemsKept) id_problems_.push_back(problem);
}

std::optional<IdProblem> Pipeline::take_id_problem() {
  Lock lock(mutex_);
  // All processes say the same, as far as the step is over on every rank of this one: then all know of it.
  const auto is_over = [&](const IdProblem& problem) {
    return peers_ == nullptr || std::all_of(local_.begin(), local_.end(), [&](int rank) {
             const StateMachine& machine = ranks_[rank].machine;
             return problem.step <= (problem.too_many_unique ? machine.update() : machine.lookup()).consumed;
           });
  };
  std::optional<IdProblem> first;
  for (const IdProblem& problem : id_problems_) {
    if (!is_over(problem)) continue;
    const bool earlier = !first || problem.step < first->step ||
                         (problem.step == first->step && first->too_many_unique && !problem.too_many_unique);
    if (earlier) first = problem;
  }
  std::erase_if(id_problems_, is_over);
  return first;
}

void Pipeline::return_to_first_step() {
  Lock lock(mutex_);
  for (const int rank : local_) ranks_[rank].machine.return_to_first_step();
}

std::vector<int> Pipeline::local_in_token_order() const {
  std::vector<int> ranks = local_;
  std::sort(ranks.begin(), ranks.end(), [&](int a, int b) { return spec_.token_blocks[a] < spec_.token_blocks[b]; });
  return ranks;
}

std::optional<StagedGradients> Pipeline::staged() const {
  Lock lock(mutex_);
  const Rank& first = ranks_[local_.front()];
  if (!first.machine.staged()) return std::nullopt;
  StagedGradients result;
  const auto* ids = batches_[first.staged_batch]->ids.as<std::int32_t>();
  const std::int64_t block = spec_.tokens_per_rank;
  result.grads.resize(static_cast<std::size_t>(work_.lookup_bytes()) * local_.size());
  char* grads = result.grads.data();
  for (const int rank : local_in_token_order()) {
    result.ids.insert(result.ids.end(), ids + spec_.token_blocks[rank] * block,
                      ids + (spec_.token_blocks[rank] + 1) * block);
    work_.unstage(rank, grads);
    if (peers_ != nullptr) peers_->unstage(rank, grads);
    grads += work_.lookup_bytes();
    result.pending = result.pending && ranks_[rank].staged_pending;
  }
  return result;
}

void Pipeline::restore_staged(const StagedGradients& staged) {
  Lock lock(mutex_);
  require_working();
  check_.staged(static_cast<std::int64_t>(staged.ids.size()), static_cast<std::int64_t>(staged.grads.size()));
  for (const int local : local_) {
    const Rank& rank = ranks_[local];
    if (rank.machine.staged() || rank.machine.update().pending() || rank.machine.lookup().pending()) {
      check_.not_idle();
    }
  }
  const int batch = take_batch();
  std::memcpy(batches_[batch]->ids.as<char>(), staged.ids.data(), staged.ids.size() * sizeof(std::int32_t));
  batches_[batch]->rows = 1 + std::int64_t{*std::max_element(staged.ids.begin(), staged.ids.end())};
  for (const int local : local_) {
    Rank& rank = ranks_[local];
    const char* grads = staged.grads.data() + spec_.token_blocks[local] * work_.lookup_bytes();
    work_.stage(local, grads);
    if (peers_ != nullptr) peers_->stage(local, grads);
    rank.last_table = nullptr;  // the next lookup brings it
    release(rank.staged_batch);
    rank.staged_batch = batch;
    rank.staged_pending = staged.pending;
    rank.staged_own_ids = false;  // every process has all of them
    hold(batch);
    rank.machine.adopt_staged();
  }
}

Stats Pipeline::stats() const {
  Lock lock(mutex_);
  Stats stats = stats_;
  if (peers_ != nullptr) stats.bytes_sent = peers_->bytes_sent();
  return stats;
}

std::int64_t Pipeline::moved_bytes() const {
  const auto local = static_cast<std::int64_t>(local_.size());
  return work_.lookup_bytes() * local / spec_.group_size * (spec_.group_size - 1);
}

std::int64_t Pipeline::arena_bytes() const {
  Lock lock(mutex_);
  std::int64_t total = work_.arena().bytes();
  for (const auto& batch : batches_) total += batch->bytes();
  if (peers_ != nullptr) total += peers_->bytes();
  return total;
}

}  // namespace async_emb::context
