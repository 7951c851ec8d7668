// The small jobs on NVIDIA GPUs, and the table of all launches.
#include "cuda/launch_control.h"

#include "cuda/launch_functions.h"
#include "cuda/run.cuh"

namespace async_emb::cuda {
namespace gpu {

void open_round(const OpenRound& job, Stream stream) { cuda::open_round<GpuRunner>(job, stream); }
void speak_to_peers(const SpeakToPeers& job, Stream stream) { cuda::speak_to_peers<GpuRunner>(job, stream); }
void hear_peers(const HearPeers& job, Stream stream) { cuda::hear_peers<GpuRunner>(job, stream); }
void take_pending(const TakePending& job, Stream stream) { cuda::take_pending<GpuRunner>(job, stream); }
void take_numbers(const TakeNumbers& job, Stream stream) { cuda::take_numbers<GpuRunner>(job, stream); }
void deliver_outcome(const DeliverOutcome& job, Stream stream) { cuda::deliver_outcome<GpuRunner>(job, stream); }
void write_pin(float value, float* pin, Stream stream) { cuda::write_pin<GpuRunner>(value, pin, stream); }
void write_positions(std::int32_t* out, std::int64_t count, Stream stream) {
  cuda::write_positions<GpuRunner>(out, count, stream);
}

}  // namespace gpu

const Launches& launches() {
  static constexpr Launches kLaunches = {
      .name = "cuda",
      .clean_ids = gpu::clean_ids,
      .ids_of_segments = gpu::ids_of_segments,
      .check_lookup = gpu::check_lookup,
      .open_round = gpu::open_round,
      .speak_to_peers = gpu::speak_to_peers,
      .hear_peers = gpu::hear_peers,
      .gather_rows = gpu::gather_rows,
      .deliver_rows = gpu::deliver_rows,
      .unique_ids = gpu::unique_ids,
      .take_pending = gpu::take_pending,
      .take_numbers = gpu::take_numbers,
      .segment_sum = gpu::segment_sum,
      .row_statistic = gpu::row_statistic,
      .decide = gpu::decide,
      .rowwise_adagrad = gpu::rowwise_adagrad,
      .deliver_outcome = gpu::deliver_outcome,
      .write_pin = gpu::write_pin,
      .write_positions = gpu::write_positions,
      .warm_up =
          [] {
            load_listed_kernels();
            gpu::warm_up_sort();
          },
      .unique_ids_workspace = gpu::unique_ids_workspace,
      .segment_sum_workspace = gpu::segment_sum_workspace,
      .decide_workspace = gpu::decide_workspace,
  };
  return kLaunches;
}

}  // namespace async_emb::cuda
