// Ranks as threads that put their calls on a stream each, as XLA does for the GPUs of a mesh.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "context/device_pipeline.h"
#include "emulated_device.h"
#include "lent_buffers.h"
#include "ranks.h"

namespace async_emb::context {

// The calls of one rank on XLA's stream. Inputs are overwritten on the stream right after the call that took them, as
// XLA reuses buffers; results are read when the stream is done.
class DeviceRankCalls {
 public:
  DeviceRankCalls(DevicePipeline& pipeline, cuda::EmulatedDevice& device, int rank, Shard& shard)
      : pipeline_(pipeline),
        device_(device),
        rank_(rank),
        shard_(shard),
        pin_(kFloat32, {1}),
        lookup_pin_(kFloat32, {1}),
        stream_(device) {
    *lookup_pin_.as<float>() = 0;
  }

  cuda::Stream stream() const { return stream_.get(); }

  template <typename Id>
  float lookup_start(const std::vector<Id>& ids) {
    Tensor& tensor =
        keep(Tensor(sizeof(Id) == 8 ? kInt64 : kInt32, {static_cast<std::int64_t>(ids.size())}, ids.data()));
    shard_.lend();
    pipeline_.lookup_begin(rank_, tensor.view(), shard_.table.view(), lookup_pin_.as<float>(), stream());
    overwrite(tensor);
    return 0;
  }

  template <typename Id>
  float lookup_start_beside_update(const std::vector<Id>& ids) {
    Tensor& tensor =
        keep(Tensor(sizeof(Id) == 8 ? kInt64 : kInt32, {static_cast<std::int64_t>(ids.size())}, ids.data()));
    Tensor& issued = keep(Tensor(kFloat32, {1}));
    pipeline_.lookup_begin_beside_update(rank_, tensor.view(), issued.as<float>(), lookup_pin_.as<float>(), stream());
    overwrite(tensor);
    pipeline_.lookup_show(rank_, shard_.table.view());
    return 0;
  }

  // Rows on the stream; wait with `settle`.
  Tensor& lookup_done_later(const std::vector<std::int32_t>* ids = nullptr, const float* pin = nullptr) {
    const ContextSpec& spec = pipeline_.spec();
    Tensor& rows = keep(Tensor(dlpack_type(spec.dtype), {spec.tokens_per_rank, spec.emb_width}));
    if (pin == nullptr) pin = lookup_pin_.as<float>();
    if (ids == nullptr) {
      pipeline_.lookup_done(rank_, pin, nullptr, rows.view(), stream());
    } else {
      Tensor& tensor = keep(Tensor(kInt32, {static_cast<std::int64_t>(ids->size())}, ids->data()));
      const DLTensor view = tensor.view();
      pipeline_.lookup_done(rank_, pin, &view, rows.view(), stream());
      overwrite(tensor);
    }
    return rows;
  }
  std::vector<char> lookup_done(float, const std::vector<std::int32_t>* ids = nullptr) {
    Tensor& rows = lookup_done_later(ids);
    device_.synchronize(stream());
    return rows.content();
  }

  float stage(const void* grads, bool pending = true) {
    const ContextSpec& spec = pipeline_.spec();
    Tensor& tensor = keep(Tensor(dlpack_type(spec.dtype), {spec.tokens_per_rank, spec.emb_width}, grads));
    Tensor& flag = keep(Tensor(DLDataType{kDLBool, 8, 1}, {}, &pending));
    pipeline_.stage_update(rank_, tensor.view(), nullptr, nullptr, flag.view(), pin_.as<float>(), stream());
    overwrite(tensor);
    overwrite(flag);
    return 0;
  }

  float stage_segments(const void* grads, const std::vector<std::int32_t>& segments,
                       const std::vector<std::int32_t>& unique) {
    const ContextSpec& spec = pipeline_.spec();
    const std::int32_t pending = 1;
    Tensor& tensor = keep(Tensor(dlpack_type(spec.dtype), {spec.tokens_per_rank, spec.emb_width}, grads));
    Tensor& of_tokens = keep(Tensor(kInt32, {static_cast<std::int64_t>(segments.size())}, segments.data()));
    Tensor& distinct = keep(Tensor(kInt32, {static_cast<std::int64_t>(unique.size())}, unique.data()));
    Tensor& flag = keep(Tensor(kInt32, {1}, &pending));
    const DLTensor segment_view = of_tokens.view();
    const DLTensor unique_view = distinct.view();
    pipeline_.stage_update(rank_, tensor.view(), &segment_view, &unique_view, flag.view(), pin_.as<float>(), stream());
    for (Tensor* used : {&tensor, &of_tokens, &distinct, &flag}) overwrite(*used);
    return 0;
  }

  float update_start(const UpdateRule& rule) {
    Tensor& floats = keep(Tensor(kFloat32, {5}));
    Tensor& words = keep(Tensor(kInt32, {3}));
    float* const f = floats.as<float>();
    std::int32_t* const w = words.as<std::int32_t>();
    f[0] = rule.learning_rate;
    f[1] = rule.eps;
    f[2] = rule.decay;
    f[3] = rule.weight_decay;
    f[4] = rule.max_grad_norm;
    w[0] = rule.step;
    w[1] = static_cast<std::int32_t>(rule.seed);
    w[2] = static_cast<std::int32_t>(rule.rounding_step);
    const auto* u = words.as<std::uint32_t>();
    const DLTensor last_step = shard_.last_step.view();
    shard_.lend();
    pipeline_.update_begin(rank_, {rule.lazy, rule.clips, rule.stochastic_rounding},
                           {f, f + 1, f + 2, f + 3, f + 4, w, u + 1, u + 2, nullptr}, shard_.table.view(),
                           shard_.row_state.view(), rule.lazy ? &last_step : nullptr, pin_.as<float>(), stream());
    overwrite(floats);
    overwrite(words);
    return 0;
  }

  Tensor& update_done_later() {
    Tensor& out = keep(Tensor(kInt32, {3}));
    pipeline_.update_done(rank_, {out.as<float>(), out.as<std::int32_t>() + 1, out.as<std::int32_t>() + 2},
                          pin_.as<float>(), stream());
    return out;
  }
  static UpdateOutcome outcome_of(Tensor& out) {
    return {*out.as<float>(), out.as<std::int32_t>()[1], out.as<std::int32_t>()[2]};
  }
  UpdateOutcome update_done() {
    Tensor& out = update_done_later();
    device_.synchronize(stream());
    return outcome_of(out);
  }

  float pin() const { return *pin_.as<float>(); }

  // The table is at rest and all results are there.
  void settle() {
    pipeline_.settle(rank_, stream());
    device_.synchronize(stream());
    shard_.rest();
  }

 private:
  Tensor& keep(Tensor tensor) {
    tensors_.push_back(std::make_unique<Tensor>(std::move(tensor)));
    return *tensors_.back();
  }
  void overwrite(Tensor& tensor) {
    static_cast<cuda::EmulatedStream*>(stream())->put(
        [&tensor] { std::memset(tensor.as<char>(), 0x7b, tensor.bytes()); });
  }

  DevicePipeline& pipeline_;
  cuda::EmulatedDevice& device_;
  const int rank_;
  Shard& shard_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  Tensor pin_;
  Tensor lookup_pin_;
  cuda::OwnedStream stream_;  // goes first
};

// One pipeline with the shards of all its ranks, on emulated GPUs: one for each rank, or one for all.
struct DeviceGroup {
  std::vector<std::unique_ptr<cuda::EmulatedDevice>> gpus;
  std::vector<std::unique_ptr<Shard>> shards;
  std::unique_ptr<DevicePipeline> pipeline;
  std::vector<std::unique_ptr<DeviceRankCalls>> ranks;

  // `clusters[rank]`: which devices read each other's memory. Ranks of one GPU have the same number and `one_gpu`.
  DeviceGroup(const ContextSpec& spec, std::int64_t rows, const std::vector<int>& clusters, bool one_gpu) {
    std::vector<cuda::Device*> of_rank;
    for (int rank = 0; rank < spec.group_size; ++rank) {
      if (rank == 0 || !one_gpu) {
        gpus.push_back(std::make_unique<cuda::EmulatedDevice>(clusters[static_cast<std::size_t>(rank)]));
      }
      of_rank.push_back(gpus.back().get());
      shards.push_back(std::make_unique<Shard>(spec, rows));
    }
    pipeline = std::make_unique<DevicePipeline>(spec, spec.devices, of_rank);
    for (int rank = 0; rank < spec.group_size; ++rank) {
      const std::size_t gpu = one_gpu ? 0 : static_cast<std::size_t>(rank);
      ranks.push_back(
          std::make_unique<DeviceRankCalls>(*pipeline, *gpus[gpu], rank, *shards[static_cast<std::size_t>(rank)]));
    }
  }
  ~DeviceGroup() {
    for (auto& rank : ranks) rank.reset();
  }
};

}  // namespace async_emb::context
