// Core as a GPU sees it, compiled for the CPU: in an instruction-set namespace of its own, with packs that are arrays.
#define ASYNC_EMB_ISA isa_emulated
#define ASYNC_EMB_ARRAY_PACKS

#include "emulated_launches.h"

#include "cuda/launch_control.h"
#include "cuda/launch_ids.h"
#include "cuda/launch_lookup.h"
#include "emulated_runner.h"

namespace async_emb::testing {

// In emulated_sums.cc and emulated_update.cc.
void segment_sum(const cuda::SegmentSum& job, cuda::Stream stream);
void row_statistic(const cuda::RowStatistic& job, cuda::Stream stream);
void decide(const cuda::Decide& job, cuda::Stream stream);
std::int64_t segment_sum_workspace(std::int64_t max_tokens, std::int64_t width);
std::int64_t decide_workspace(std::int64_t max_segments);
void rowwise_adagrad(const cuda::RowwiseAdagrad& job, cuda::Stream stream);

namespace {

constexpr cuda::Launches kEmulated = {
    .name = "emulated",
    .clean_ids = cuda::clean_ids<EmulatedRunner>,
    .ids_of_segments = cuda::ids_of_segments<EmulatedRunner>,
    .check_lookup = cuda::check_lookup<EmulatedRunner>,
    .open_round = cuda::open_round<EmulatedRunner>,
    .speak_to_peers = cuda::speak_to_peers<EmulatedRunner>,
    .hear_peers = cuda::hear_peers<EmulatedRunner>,
    .gather_rows = cuda::gather_rows<EmulatedRunner>,
    .deliver_rows = cuda::deliver_rows<EmulatedRunner>,
    .unique_ids = cuda::unique_ids<EmulatedRunner>,
    .take_pending = cuda::take_pending<EmulatedRunner>,
    .take_numbers = cuda::take_numbers<EmulatedRunner>,
    .segment_sum = segment_sum,
    .row_statistic = row_statistic,
    .decide = decide,
    .rowwise_adagrad = rowwise_adagrad,
    .deliver_outcome = cuda::deliver_outcome<EmulatedRunner>,
    .write_pin = cuda::write_pin<EmulatedRunner>,
    .write_positions = cuda::write_positions<EmulatedRunner>,
    .warm_up = [] {},
    .unique_ids_workspace = cuda::unique_ids_workspace<EmulatedRunner>,
    .segment_sum_workspace = segment_sum_workspace,
    .decide_workspace = decide_workspace,
};

}  // namespace

const cuda::Launches& emulated_launches() { return kEmulated; }

}  // namespace async_emb::testing
