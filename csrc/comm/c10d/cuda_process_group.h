// A transport between GPUs over a process group of torch.distributed: NCCL.
//
// Only what c10d::Backend declares is used, so that one build serves all versions of the group. The group's own stream
// does the work; events, which torch makes, order it between what is on the caller's stream before and after.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/device_transport.h"

namespace async_emb::comm {

class CudaProcessGroupTransport final : public DeviceTransport {
 public:
  // `ordinal`: of the GPU, as this process numbers them.
  CudaProcessGroupTransport(c10::intrusive_ptr<::c10d::Backend> backend, int ordinal);
  ~CudaProcessGroupTransport() override;

  int size() const override { return size_; }
  int self() const override { return self_; }

  // Connects the processes, all of which must call it, and every pair of them by a first exchange: NCCL allocates and
  // waits for peers there, which must not happen in a step. Returns false where that is not over in time; then abort.
  //
  // Throws std::runtime_error with NCCL's reason.
  bool connect(std::chrono::nanoseconds timeout);

  void exchange(std::span<const Block> sent, std::span<const Inbox> received, void* stream) override;
  void abort() noexcept override;

 private:
  void connect_here();

  const int size_;
  const int self_;
  const int ordinal_;

  std::mutex mutex_;
  c10::intrusive_ptr<::c10d::Backend> backend_;  // null after abort
};

}  // namespace async_emb::comm
