#include "context/pipeline.h"

#include <atomic>
#include <utility>

#include "context/timeline.h"

namespace async_emb::context {
namespace {

// Rows of about this size are gathered, cold ones too, in the time in which a thread wakes up.
constexpr std::int64_t kBytesWorthAThread = 64 * 1024;

}  // namespace

Pipeline::Pipeline(ContextSpec spec, std::vector<std::int64_t> devices, Executor& executor, ProcessMap map,
                   std::shared_ptr<comm::Transport> transport)
    : spec_(std::move(spec)),
      devices_(std::move(devices)),
      check_(spec_, devices_),
      executor_(executor),
      arrivals_(map.local()),
      local_(arrivals_.ranks()),
      work_(spec_, local_),
      peers_(map.size() == 1 ? nullptr
                             : std::make_unique<Peers>(spec_, work_.layout(), std::move(map), std::move(transport))),
      at_once_(spec_.group_size == 1 && work_.lookup_bytes() < kBytesWorthAThread),
      ranks_(spec_.group_size) {
  for (LookupRound& round : lookups_) {
    round.ranks.resize(spec_.group_size);
    round.tables.resize(spec_.group_size);
  }
  for (UpdateRound& round : updates_) round.ranks.resize(spec_.group_size);
}

void Pipeline::record(const char* name, int rank, std::int64_t step) const {
  Timeline::shared().record(name, spec_.name, devices_[rank], step);
}

// ---- batches of ids ----

int Pipeline::take_batch() {
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    if (batches_[i]->holders == 0) {
      batches_[i]->indexed = false;
      return static_cast<int>(i);
    }
  }
  batches_.push_back(std::make_unique<BatchIds>(spec_.tokens()));
  return static_cast<int>(batches_.size()) - 1;
}

void Pipeline::hold(int batch) { ++batches_[batch]->holders; }

void Pipeline::release(int& batch) {
  if (batch >= 0) --batches_[batch]->holders;
  batch = -1;
}

// ---- what lookup and update share ----

void Pipeline::arrive(comm::Channel channel, std::int64_t number, int rank) {
  const bool looks_up = channel == comm::Channel::kLookup;
  // The completions are the round's from here on, so an exception may only reach a caller through them.
  guarded(looks_up ? "lookup_start" : "update start", [&] {
    arrivals_.arrive(channel, number, rank, [self = shared_from_this(), looks_up, number] {
      if (self->peers_ == nullptr) {
        looks_up ? self->run_lookup(number) : self->run_update(number);
        return;
      }
      self->peers_->threads().post_start(
          [self, looks_up, number] { looks_up ? self->lookup_with_peers(number) : self->update_with_peers(number); });
    });
  });
}

void Pipeline::parallel(int count, std::function<void(int)> body, std::function<void()> then) {
  if (count == 1) {
    body(0);
    then();
    return;
  }
  struct Shared {
    std::atomic<int> left;
    std::function<void(int)> body;
    std::function<void()> then;
  };
  auto shared = std::make_shared<Shared>(count, std::move(body), std::move(then));
  for (int job = 0; job < count; ++job) {
    executor_.submit([self = shared_from_this(), shared, job] {
      self->guarded("update", [&] {
        shared->body(job);
        if (shared->left.fetch_sub(1, std::memory_order_acq_rel) == 1) shared->then();
      });
    });
  }
}

void Pipeline::later(Completion& completion) {
  if (!completion) return;
  // A buffer may only go back without an error when all is well; the failure is copied, since it outlives this call.
  executor_.resume([completion = std::exchange(completion, nullptr), failure = failure_] {
    completion(failure ? &*failure : nullptr);
  });
}

}  // namespace async_emb::context
