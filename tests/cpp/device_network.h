// Exchanges between the GPUs of processes that are threads: on emulated streams, which wait for each other without a
// limit, as NCCL's do, until somebody aborts them.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "comm/device_transport.h"
#include "emulated_device.h"

namespace async_emb::comm {

class DeviceNetwork : public std::enable_shared_from_this<DeviceNetwork> {
 public:
  explicit DeviceNetwork(int size) : exchanges_(static_cast<std::size_t>(size), 0) {}

  std::shared_ptr<DeviceTransport> transport(int process);

  // Its GPU sends nothing any more, and whoever waits for it does so for ever.
  void silence(int process) {
    std::lock_guard lock(mutex_);
    silent_.insert(process);
  }

 private:
  class End;
  struct Message {
    int from;
    int to;
    std::int64_t number;
    auto operator<=>(const Message&) const = default;
  };

  void run(int self, std::int64_t number, const std::vector<Block>& sent, const std::vector<Inbox>& received) {
    std::unique_lock lock(mutex_);
    const int size = static_cast<int>(sent.size());
    const auto of = [](int process) { return static_cast<std::size_t>(process); };
    for (int to = 0; to < size; ++to) {
      if (to == self || sent[of(to)].bytes == 0 || silent_.contains(self)) continue;
      const char* data = static_cast<const char*>(sent[of(to)].data);
      mail_[{self, to, number}].assign(data, data + sent[of(to)].bytes);
    }
    changed_.notify_all();
    changed_.wait(lock, [&] {
      if (aborted_.contains(self)) return true;
      for (int from = 0; from < size; ++from) {
        if (from != self && received[of(from)].bytes > 0 && !mail_.contains({from, self, number})) return false;
      }
      return true;
    });
    for (int from = 0; from < size; ++from) {
      const Inbox& inbox = received[of(from)];
      if (from == self || inbox.bytes == 0) continue;
      if (aborted_.contains(self)) {
        std::memset(inbox.data, 0x11, static_cast<std::size_t>(inbox.bytes));
        continue;
      }
      const auto found = mail_.find({from, self, number});
      EXPECT_EQ(static_cast<std::int64_t>(found->second.size()), inbox.bytes) << "of exchange " << number;
      std::copy(found->second.begin(), found->second.end(), static_cast<char*>(inbox.data));
      mail_.erase(found);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::int64_t> exchanges_;  // by process
  std::map<Message, std::vector<char>> mail_;
  std::set<int> silent_;
  std::set<int> aborted_;
};

class DeviceNetwork::End final : public DeviceTransport {
 public:
  End(std::shared_ptr<DeviceNetwork> network, int self) : network_(std::move(network)), self_(self) {}

  int size() const override { return static_cast<int>(network_->exchanges_.size()); }
  int self() const override { return self_; }

  void exchange(std::span<const Block> sent, std::span<const Inbox> received, void* stream) override {
    std::int64_t number = 0;
    {
      std::lock_guard lock(network_->mutex_);
      if (network_->aborted_.contains(self_)) throw std::runtime_error("the communicator was aborted");
      number = ++network_->exchanges_[static_cast<std::size_t>(self_)];
    }
    static_cast<cuda::EmulatedStream*>(stream)->put([network = network_, self = self_, number,
                                                     sent = std::vector<Block>(sent.begin(), sent.end()),
                                                     received = std::vector<Inbox>(received.begin(), received.end())] {
      network->run(self, number, sent, received);
    });
  }

  void abort() noexcept override {
    std::lock_guard lock(network_->mutex_);
    network_->aborted_.insert(self_);
    network_->changed_.notify_all();
  }

 private:
  const std::shared_ptr<DeviceNetwork> network_;
  const int self_;
};

inline std::shared_ptr<DeviceTransport> DeviceNetwork::transport(int process) {
  return std::make_shared<End>(shared_from_this(), process);
}

}  // namespace async_emb::comm
