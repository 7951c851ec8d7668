// A transport over a process group of torch.distributed: Gloo, between CPUs.
//
// Each exchange is sends and receives between pairs of processes, so that a failure has a name: that of the peer whose
// send or receive it was. Gloo keeps the buffers of an operation exactly as long as its Work lives, so dropping the
// Works of a failed exchange is what makes its buffers free again, whatever the peers do later.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/c10d/announcements.h"
#include "comm/transport.h"

namespace async_emb::comm {

class ProcessGroupTransport final : public Transport {
 public:
  // `store` is for announcements alone: what an operation of it waits for must not be another process.
  ProcessGroupTransport(c10::intrusive_ptr<::c10d::Backend> backend, c10::intrusive_ptr<::c10d::Store> store);
  // No exchange may be running: end() and join its thread before.
  ~ProcessGroupTransport() override;

  int size() const override { return size_; }
  int self() const override { return self_; }

  // After one has failed, every later exchange throws the same: the processes no longer agree about what comes next.
  // Announce it and end() soon, for what peers still send has nowhere to go, and Gloo's thread keeps looking for it.
  void exchange(std::span<const Block> sent, std::span<const Inbox> received,
                std::chrono::nanoseconds timeout) override;

  // Also closes the connections, so that peers which still wait for this process learn of it at once. Announce first.
  void end() noexcept override;

  void announce(const std::string& failure) noexcept override { announcements_.announce(failure); }
  std::optional<std::string> announced() noexcept override { return announcements_.first(); }

 private:
  struct Operation {
    int peer;
    c10::intrusive_ptr<::c10d::Work> work;
  };
  enum class Outcome { kDone, kNotYet, kBroken };

  std::vector<Operation> post(::c10d::Backend& backend, std::span<const Block> sent, std::span<const Inbox> received);
  void wait_for_all(std::vector<Operation>& pending, std::chrono::nanoseconds timeout);
  Outcome wait_for(const Operation& operation, bool only_look);
  void wake_regularly();
  void set_tick(std::chrono::milliseconds tick);
  std::string exchange_name() const;

  const int size_;
  const int self_;
  Announcements announcements_;

  // Of the thread that exchanges.
  std::int64_t exchanges_ = 0;
  std::optional<TransportError> failed_;
  std::string broken_because_;

  std::mutex mutex_;
  std::condition_variable changed_;
  c10::intrusive_ptr<::c10d::Backend> backend_;
  ::c10d::Work* waiting_ = nullptr;
  bool ended_ = false;
  std::chrono::milliseconds wake_every_;
  std::thread waker_;
};

}  // namespace async_emb::comm
