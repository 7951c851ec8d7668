// What a step does with the other processes of its group: on the communication thread, which may wait for them.
#include <cstring>
#include <utility>

#include "context/peer_faults.h"
#include "context/pipeline.h"

namespace async_emb::context {
namespace {

template <typename Rounds>
auto* round_of_start(Rounds& rounds, std::int64_t start) {
  auto* found = &rounds[0];
  for (auto& round : rounds) {
    if (round.step != 0 && round.start == start) found = &round;
  }
  return found->step != 0 && found->start == start && !found->is_void ? found : nullptr;
}

}  // namespace

void Pipeline::begin_running(Progress& round) {
  round.running = true;
  ++running_;
}

void Pipeline::stop_running(Progress& round) {
  round.running = false;
  --running_;
  if (failure_) fail_waiting();
  if (running_ == 0) settled_.notify_all();
}

template <typename Body>
void Pipeline::with_peers(const char* call, std::int64_t step, Progress* round, Body body) {
  std::optional<Failure> failure;
  try {
    body();
    return;
  } catch (const comm::TransportError& error) {
    failure = failure_of(error, call, step, check_, peers_->map(), peers_->threads());
  } catch (const Error& error) {
    failure = Failure{error.kind(), error.what()};
  } catch (const std::exception& error) {
    failure = Failure{FailureKind::kInternal, check_.of_step(call, step) + " failed: " + error.what()};
  }
  fail(std::move(*failure));
  Lock lock(mutex_);
  if (round != nullptr) stop_running(*round);
}

template <typename Round>
bool Pipeline::take_notices(const std::vector<Notice>& notices, const char* call, Round* round) {
  if (const auto what = disagreement(notices, peers_->map().names)) {
    const std::int64_t step = round != nullptr ? round->step : notices.front().step;
    throw Error(FailureKind::kInvalidArgument, check_.of_step(call, step) + ": " + *what +
                                                   ". All processes must run one program with one configuration");
  }
  Lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  if (round == nullptr) return false;
  for (const Notice& notice : notices) {
    if (!notice.refused) continue;
    if (!refusal_) {
      refusal_ = std::string(notice.why);
      refused_call_ = round->begin_call;
    }
    stop_running(*round);
    finish_void(*round);
    void_rounds();
    return false;
  }
  for (const Notice& notice : notices) {
    if (!notice.has_id_problem) continue;
    IdProblem problem = notice.id_problem;
    problem.step = round->step;
    note(problem);
  }
  return true;
}

void Pipeline::lookup_with_peers(std::int64_t start) {
  Notice mine{.start = start};
  LookupRound* round = nullptr;
  BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    if (failure_) return;
    round = round_of_start(lookups_, start);
    if (round != nullptr) {
      begin_running(*round);
      mine.step = round->step;
      mine.rows = round->rows;
      batch = batches_[round->batch].get();
      for (const int rank : local_) round->tables[rank] = round->ranks[rank].table;
      for (const IdProblem& problem : id_problems_) {
        if (problem.step != round->step || problem.too_many_unique) continue;
        mine.has_id_problem = true;
        mine.id_problem = problem;
      }
    } else {
      mine.refused = true;
      why_refused(mine);
    }
  }
  with_peers("lookup_start", mine.step, round, [&] {
    if (!take_notices(peers_->begin_lookup(mine, batch != nullptr ? batch->ids.as<std::int32_t>() : nullptr),
                      "lookup_start", round)) {
      return;
    }
    peers_->exchange_rows(work_, *batch, round->tables);
    {
      Lock lock(mutex_);
      if (failure_) throw Error(*failure_);
    }
    gather(mine.step);
  });
}

void Pipeline::update_with_peers(std::int64_t start) {
  Notice mine{.start = start};
  UpdateRound* round = nullptr;
  BatchIds* batch = nullptr;
  {
    Lock lock(mutex_);
    if (failure_) return;
    round = round_of_start(updates_, start);
    if (round != nullptr) {
      begin_running(*round);
      mine.step = round->step;
      mine.rows = round->rows;
      mine.staged = round->batch >= 0;
      mine.pending = round->pending;
      mine.own_ids = round->own_ids;
      mine.rule = round->rule;
      if (round->batch >= 0) batch = batches_[round->batch].get();
    } else {
      mine.refused = true;
      why_refused(mine);
    }
  }
  with_peers("update start", mine.step, round, [&] {
    peers_->threads().hold();
    const std::vector<Notice>& notices = peers_->begin_update(mine, work_.arena().grads.as<void>());
    if (!take_notices(notices, "update start", round)) return peers_->threads().release();
    {
      Lock lock(mutex_);
      for (const Notice& notice : notices) {
        round->pending = round->pending && notice.pending;
        round->applies_nothing = round->applies_nothing || !notice.staged;
      }
    }
    if (round->applies_nothing) {
      peers_->threads().release();
    } else if (round->own_ids) {
      peers_->exchange_ids(batch->ids.as<std::int32_t>());
    }
    work_on_update(mine.step);
  });
}

void Pipeline::share_sums(std::int64_t step) {
  UpdateRound& round = update_round(step);  // stays this step's while its work runs
  const std::int64_t unique = unique_of(round);
  with_peers("update start", step, &round, [&] {
    const Peers::Slice mine = peers_->exchange_subtree_sums(work_.arena().subtree_sums.as<float>(), unique);
    executor_.submit([self = shared_from_this(), step, mine, unique] {
      self->guarded("update", [&] {
        self->work_.statistics(mine.begin, mine.end);
        if (!self->peers_->slices()) {
          self->decide(step);
        } else {
          self->peers_->threads().post([self, step] { self->share_statistics(step); });
        }
      });
    });
  });
}

void Pipeline::share_statistics(std::int64_t step) {
  UpdateRound& round = update_round(step);
  with_peers("update start", step, &round, [&] {
    peers_->exchange_statistics(work_.arena().statistics.as<float>(), unique_of(round));
    executor_.submit([self = shared_from_this(), step] { self->guarded("update", [&] { self->decide(step); }); });
  });
}

std::int64_t Pipeline::unique_of(const UpdateRound& round) const {
  Lock lock(mutex_);
  return batches_[round.batch]->unique_count;
}

void Pipeline::why_refused(Notice& notice) const {
  const std::string why = refusal_.value_or("a call of this step was refused");
  std::strncpy(notice.why, why.c_str(), sizeof(notice.why) - 1);
}

}  // namespace async_emb::context
