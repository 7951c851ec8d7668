// How the small jobs are launched.
#pragma once

#include "cuda/control_bodies.h"
#include "cuda/launch_shape.h"
#include "cuda/launches.h"

namespace async_emb::cuda {
inline namespace ASYNC_EMB_ISA {

template <class Runner>
void open_round(const OpenRound& job, Stream stream) {
  Runner::run(LookForRefusals{{}, job}, 1, stream);
}

template <class Runner>
void speak_to_peers(const SpeakToPeers& job, Stream stream) {
  Runner::run(WriteWord{{}, job}, 1, stream);
}

template <class Runner>
void hear_peers(const HearPeers& job, Stream stream) {
  Runner::run(ReadWords{{}, job}, 1, stream);
}

template <class Runner>
void take_pending(const TakePending& job, Stream stream) {
  Runner::run(ReadPending{{}, job}, 1, stream);
}

template <class Runner>
void take_numbers(const TakeNumbers& job, Stream stream) {
  Runner::run(ReadNumbers{{}, job}, 1, stream);
}

template <class Runner>
void deliver_outcome(const DeliverOutcome& job, Stream stream) {
  Runner::run(WriteOutcome{{}, job}, 1, stream);
}

template <class Runner>
void write_pin(float value, float* pin, Stream stream) {
  Runner::run(WritePin{{}, value, pin}, 1, stream);
}

template <class Runner>
void write_positions(std::int32_t* out, std::int64_t count, Stream stream) {
  if (count > 0) Runner::run(WritePositions{out, count}, ceil_divide(count, 32), stream);
}

}  // namespace ASYNC_EMB_ISA
}  // namespace async_emb::cuda
