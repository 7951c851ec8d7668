// Processes that are threads: transports between them that copy, break and fall silent on demand.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/transport.h"

namespace async_emb::comm {

class ThreadNetwork : public std::enable_shared_from_this<ThreadNetwork> {
 public:
  explicit ThreadNetwork(int size) : exchanges_(static_cast<std::size_t>(size), 0) {}

  std::shared_ptr<Transport> transport(int process);

  // Its connections break, as where the process has died.
  void kill(int process) {
    std::lock_guard lock(mutex_);
    dead_.insert(process);
    changed_.notify_all();
  }

 private:
  class End;
  struct Message {
    int from;
    int to;
    std::int64_t number;
    auto operator<=>(const Message&) const = default;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::int64_t> exchanges_;  // by process
  std::map<Message, std::vector<char>> mail_;
  std::set<int> dead_;
  std::set<int> ended_;
  std::optional<std::string> announced_;
};

class ThreadNetwork::End final : public Transport {
 public:
  End(std::shared_ptr<ThreadNetwork> network, int self) : network_(std::move(network)), self_(self) {}
  ~End() override {
    std::lock_guard lock(network_->mutex_);
    network_->dead_.insert(self_);  // a transport that goes closes its connections
    network_->changed_.notify_all();
  }

  int size() const override { return static_cast<int>(network_->exchanges_.size()); }
  int self() const override { return self_; }

  void exchange(std::span<const Block> sent, std::span<const Inbox> received,
                std::chrono::nanoseconds timeout) override {
    ThreadNetwork& net = *network_;
    std::unique_lock lock(net.mutex_);
    const std::int64_t number = ++net.exchanges_[static_cast<std::size_t>(self_)];
    for (int to = 0; to < size(); ++to) {
      const Block& block = sent[static_cast<std::size_t>(to)];
      if (to == self_ || block.bytes == 0) continue;
      const char* data = static_cast<const char*>(block.data);
      net.mail_[{self_, to, number}].assign(data, data + block.bytes);
    }
    net.changed_.notify_all();

    std::vector<int> late, lost;
    const auto look = [&] {
      late.clear();
      lost.clear();
      for (int from = 0; from < size(); ++from) {
        if (from == self_ || received[static_cast<std::size_t>(from)].bytes == 0) continue;
        if (net.mail_.contains({from, self_, number})) continue;
        (net.dead_.contains(from) ? lost : late).push_back(from);
      }
      return net.ended_.contains(self_) || net.dead_.contains(self_) || !lost.empty() || late.empty();
    };
    const bool in_time = net.changed_.wait_for(lock, timeout, look);
    if (net.ended_.contains(self_)) throw TransportError(TransportError::Kind::kEnded, {}, "ended");
    if (!lost.empty() || net.dead_.contains(self_)) {
      throw TransportError(TransportError::Kind::kLost, lost, "connection closed");
    }
    if (!in_time) throw TransportError(TransportError::Kind::kTimeout, late, "no answer");
    for (int from = 0; from < size(); ++from) {
      const Inbox& inbox = received[static_cast<std::size_t>(from)];
      if (from == self_ || inbox.bytes == 0) continue;
      const auto found = net.mail_.find({from, self_, number});
      if (static_cast<std::int64_t>(found->second.size()) != inbox.bytes) {
        throw TransportError(
            TransportError::Kind::kLost, {from},
            "sent " + std::to_string(found->second.size()) + " bytes for an inbox of " + std::to_string(inbox.bytes));
      }
      std::copy(found->second.begin(), found->second.end(), static_cast<char*>(inbox.data));
      net.mail_.erase(found);
    }
  }

  void end() noexcept override {
    std::lock_guard lock(network_->mutex_);
    network_->ended_.insert(self_);
    network_->changed_.notify_all();
  }
  void announce(const std::string& failure) noexcept override {
    std::lock_guard lock(network_->mutex_);
    if (network_->dead_.contains(self_)) return;  // a process that was killed says nothing any more
    if (!network_->announced_) network_->announced_ = failure;
  }
  std::optional<std::string> announced() noexcept override {
    std::lock_guard lock(network_->mutex_);
    return network_->announced_;
  }

 private:
  const std::shared_ptr<ThreadNetwork> network_;
  const int self_;
};

inline std::shared_ptr<Transport> ThreadNetwork::transport(int process) {
  return std::make_shared<End>(shared_from_this(), process);
}

}  // namespace async_emb::comm
