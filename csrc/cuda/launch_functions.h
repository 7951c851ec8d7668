// The functions of the table, each defined in the .cu file of its kernels.
#pragma once

#include "cuda/launches.h"

namespace async_emb::cuda::gpu {

void clean_ids(const CleanIds& job, Stream stream);
void ids_of_segments(const IdsOfSegments& job, Stream stream);
void check_lookup(const CheckLookup& job, Stream stream);
void open_round(const OpenRound& job, Stream stream);
void speak_to_peers(const SpeakToPeers& job, Stream stream);
void hear_peers(const HearPeers& job, Stream stream);
void gather_rows(const GatherRows& job, Stream stream);
void deliver_rows(const DeliverRows& job, Stream stream);
void unique_ids(const UniqueIds& job, Stream stream);
void take_pending(const TakePending& job, Stream stream);
void take_numbers(const TakeNumbers& job, Stream stream);
void segment_sum(const SegmentSum& job, Stream stream);
void row_statistic(const RowStatistic& job, Stream stream);
void decide(const Decide& job, Stream stream);
void rowwise_adagrad(const RowwiseAdagrad& job, Stream stream);
void deliver_outcome(const DeliverOutcome& job, Stream stream);
void write_pin(float value, float* pin, Stream stream);
void write_positions(std::int32_t* out, std::int64_t count, Stream stream);
std::int64_t unique_ids_workspace(std::int64_t count);
std::int64_t segment_sum_workspace(std::int64_t max_tokens, std::int64_t width);
std::int64_t decide_workspace(std::int64_t max_segments);

// Loads the kernels of the sort and the selection, which are not this project's, by a small run.
void warm_up_sort();

}  // namespace async_emb::cuda::gpu
