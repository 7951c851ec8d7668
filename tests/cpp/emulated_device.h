// A GPU on threads: every stream is a thread that does one thing after another, events order streams, kernels run on
// emulated warps. Nothing else orders the streams, so that a wait which is missing in a pipeline is a data race that
// the thread sanitizer sees, and wrong bits where streams stall.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "emulated_launches.h"

namespace async_emb::cuda {

using async_emb::testing::emulated_launches;

class EmulatedEvent {
 public:
  // The record that is made now; reached when the stream gets there.
  std::int64_t next_record() {
    std::lock_guard lock(mutex_);
    return ++recorded_;
  }
  std::int64_t last_record() {
    std::lock_guard lock(mutex_);
    return recorded_;
  }
  bool reached() {
    std::lock_guard lock(mutex_);
    return reached_ >= recorded_;
  }
  void reach(std::int64_t record) {
    std::lock_guard lock(mutex_);
    reached_ = std::max(reached_, record);
    changed_.notify_all();
  }
  void await(std::int64_t record) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= record; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t recorded_ = 0;
  std::int64_t reached_ = 0;
};

class EmulatedStream {
 public:
  explicit EmulatedStream(unsigned seed) : random_(seed), thread_([this] { run(); }) {}
  ~EmulatedStream() {
    put({});
    thread_.join();
  }

  void put(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    ++put_;
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, until = put_] { return done_ >= until; });
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!work) return;
      // A device that is behind the host, now and then.
      if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 150));
      work();
      std::lock_guard lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }

  std::mt19937 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::int64_t put_ = 0;
  std::int64_t done_ = 0;
  std::thread thread_;
};

// The emulated launches, put on a stream.
template <auto Launches::* kLaunch, typename Job>
void on_stream(const Job& job, Stream stream) {
  static_cast<EmulatedStream*>(stream)->put([job] { (emulated_launches().*kLaunch)(job, nullptr); });
}

inline const Launches& streamed_launches() {
  static const Launches table = [] {
    Launches launches = emulated_launches();
    launches.name = "emulated";
    launches.clean_ids = on_stream<&Launches::clean_ids, CleanIds>;
    launches.ids_of_segments = on_stream<&Launches::ids_of_segments, IdsOfSegments>;
    launches.check_lookup = on_stream<&Launches::check_lookup, CheckLookup>;
    launches.open_round = on_stream<&Launches::open_round, OpenRound>;
    launches.speak_to_peers = on_stream<&Launches::speak_to_peers, SpeakToPeers>;
    launches.hear_peers = on_stream<&Launches::hear_peers, HearPeers>;
    launches.gather_rows = on_stream<&Launches::gather_rows, GatherRows>;
    launches.deliver_rows = on_stream<&Launches::deliver_rows, DeliverRows>;
    launches.unique_ids = on_stream<&Launches::unique_ids, UniqueIds>;
    launches.take_pending = on_stream<&Launches::take_pending, TakePending>;
    launches.take_numbers = on_stream<&Launches::take_numbers, TakeNumbers>;
    launches.segment_sum = on_stream<&Launches::segment_sum, SegmentSum>;
    launches.row_statistic = on_stream<&Launches::row_statistic, RowStatistic>;
    launches.decide = on_stream<&Launches::decide, Decide>;
    launches.deliver_outcome = on_stream<&Launches::deliver_outcome, DeliverOutcome>;
    // The job of the sums is read while launching, and this launch is later.
    launches.rowwise_adagrad = [](const RowwiseAdagrad& job, Stream stream) {
      static_cast<EmulatedStream*>(stream)->put([job, sums = job.sum_job ? *job.sum_job : SegmentSum()] {
        RowwiseAdagrad later = job;
        if (job.sum_job != nullptr) later.sum_job = &sums;
        emulated_launches().rowwise_adagrad(later, nullptr);
      });
    };
    launches.write_pin = [](float value, float* pin, Stream stream) {
      static_cast<EmulatedStream*>(stream)->put([value, pin] { emulated_launches().write_pin(value, pin, nullptr); });
    };
    launches.write_positions = [](std::int32_t* out, std::int64_t count, Stream stream) {
      static_cast<EmulatedStream*>(stream)->put(
          [out, count] { emulated_launches().write_positions(out, count, nullptr); });
    };
    return launches;
  }();
  return table;
}

class EmulatedDevice : public Device {
 public:
  // Devices of different clusters do not read each other's memory.
  explicit EmulatedDevice(int cluster = 0) : cluster_(cluster) {}
  ~EmulatedDevice() override { EXPECT_EQ(objects_, 0) << "memory, streams or events outlive their pipeline"; }

  // Allocations, streams and events that live.
  int objects() const { return objects_; }

  const Launches& launches() const override { return streamed_launches(); }
  std::unique_ptr<Guard> activate() override { return std::make_unique<Guard>(); }

  void* allocate(std::int64_t bytes) override {
    ++objects_;
    void* memory = std::aligned_alloc(256, static_cast<std::size_t>((bytes + 255) / 256 * 256));
    std::memset(memory, 0, static_cast<std::size_t>(bytes));
    return memory;
  }
  void free(void* memory) noexcept override {
    --objects_;
    std::free(memory);
  }
  void* allocate_mapped(std::int64_t bytes) override { return allocate(bytes); }
  void free_mapped(void* memory) noexcept override { free(memory); }

  Stream create_stream() override {
    ++objects_;
    return new EmulatedStream(static_cast<unsigned>(seed_++));
  }
  void destroy(Stream stream) noexcept override {
    --objects_;
    delete static_cast<EmulatedStream*>(stream);
  }
  Event create_event() override {
    ++objects_;
    return new EmulatedEvent;
  }
  void destroy_event(Event event) noexcept override {
    --objects_;
    delete static_cast<EmulatedEvent*>(event);
  }

  void record(Event event, Stream stream) override {
    auto* const e = static_cast<EmulatedEvent*>(event);
    static_cast<EmulatedStream*>(stream)->put([e, record = e->next_record()] { e->reach(record); });
  }
  void wait(Stream stream, Event event) override {
    auto* const e = static_cast<EmulatedEvent*>(event);
    static_cast<EmulatedStream*>(stream)->put([e, record = e->last_record()] { e->await(record); });
  }
  bool reached(Event event) override { return static_cast<EmulatedEvent*>(event)->reached(); }
  void synchronize(Stream stream) override { static_cast<EmulatedStream*>(stream)->synchronize(); }

  void copy(void* to, const void* from, std::int64_t bytes, Stream stream) override {
    if (bytes == 0) return;  // nothing may lie at no address, which memcpy does not take
    static_cast<EmulatedStream*>(stream)->put([=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  }
  void copy_from(const Device&, void* to, const void* from, std::int64_t bytes, Stream stream) override {
    copy(to, from, bytes, stream);
  }
  void read(void* host, const void* from, std::int64_t bytes) override {
    std::memcpy(host, from, static_cast<std::size_t>(bytes));
  }
  void write(void* to, const void* host, std::int64_t bytes) override {
    std::memcpy(to, host, static_cast<std::size_t>(bytes));
  }

  bool reads(const Device& peer) const override {
    return static_cast<const EmulatedDevice&>(peer).cluster_ == cluster_;
  }

 private:
  const int cluster_;
  std::atomic<int> objects_ = 0;
  std::atomic<int> seed_ = 1;
};

}  // namespace async_emb::cuda
