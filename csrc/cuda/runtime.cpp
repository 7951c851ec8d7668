// Devices on the CUDA runtime.
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device.h"

namespace async_emb::cuda {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a later launch check must not find this one
  throw std::runtime_error(std::string("async_emb: ") + what + ": " + cudaGetErrorString(status));
}

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes / (1024 * 1024)) + " MiB"; }

class CurrentDevice : public Device::Guard {
 public:
  explicit CurrentDevice(int ordinal) {
    check(cudaGetDevice(&before_), "the current device is unknown");
    if (before_ != ordinal) check(cudaSetDevice(ordinal), "the device cannot be made current");
    changed_ = before_ != ordinal;
  }
  ~CurrentDevice() override {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

class RuntimeDevice : public Device {
 public:
  explicit RuntimeDevice(int ordinal) : ordinal_(ordinal) {}

  const Launches& launches() const override { return cuda::launches(); }
  std::unique_ptr<Guard> activate() override { return std::make_unique<CurrentDevice>(ordinal_); }

  void* allocate(std::int64_t bytes) override {
    const CurrentDevice current(ordinal_);
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, static_cast<std::size_t>(bytes));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      std::size_t unused = 0;
      std::size_t all = 0;
      cudaMemGetInfo(&unused, &all);
      throw std::runtime_error(
          "async_emb: GPU " + std::to_string(ordinal_) + " has no room for " +
          mebibytes(static_cast<std::size_t>(bytes)) + " of a context's arena: " + mebibytes(unused) + " of " +
          mebibytes(all) +
          " are not taken. JAX takes most of a GPU when it starts: leave room with "
          "XLA_PYTHON_CLIENT_MEM_FRACTION, or let it grow with XLA_PYTHON_CLIENT_PREALLOCATE=false");
    }
    check(status, "memory of the GPU cannot be allocated");
    check(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), own_stream()),
          "memory of the GPU cannot be zeroed");
    check(cudaStreamSynchronize(own_stream()), "memory of the GPU cannot be zeroed");
    return memory;
  }
  void free(void* memory) noexcept override { cudaFree(memory); }

  void* allocate_mapped(std::int64_t bytes) override {
    const CurrentDevice current(ordinal_);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, static_cast<std::size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped),
          "host memory cannot be mapped");
    return memory;
  }
  void free_mapped(void* memory) noexcept override { cudaFreeHost(memory); }

  Stream create_stream() override {
    const CurrentDevice current(ordinal_);
    int least = 0;
    int greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities are unknown");
    cudaStream_t stream = nullptr;
    // Above the dense compute: a lookup's blocks should not wait behind a long matrix product's.
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "a stream cannot be made");
    return stream;
  }
  void destroy(Stream stream) noexcept override { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }
  Event create_event() override {
    const CurrentDevice current(ordinal_);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event cannot be made");
    return event;
  }
  void destroy_event(Event event) noexcept override { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

  void record(Event event, Stream stream) override {
    check(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)),
          "an event cannot be recorded");
  }
  void wait(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0),
          "a stream cannot wait for an event");
  }
  bool reached(Event event) override {
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (status == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(status, "work on the side stream has failed");
    return true;
  }
  void synchronize(Stream stream) override {
    check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "work on the side stream has failed");
  }

  void copy(void* to, const void* from, std::int64_t bytes, Stream stream) override {
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(stream)),
          "a copy cannot be started");
  }
  void copy_from(const Device& peer, void* to, const void* from, std::int64_t bytes, Stream stream) override {
    const int other = static_cast<const RuntimeDevice&>(peer).ordinal_;
    if (other == ordinal_) return copy(to, from, bytes, stream);
    check(cudaMemcpyPeerAsync(to, ordinal_, from, other, static_cast<std::size_t>(bytes),
                              static_cast<cudaStream_t>(stream)),
          "a copy between GPUs cannot be started");
  }
  void read(void* host, const void* from, std::int64_t bytes) override {
    move(host, from, bytes, cudaMemcpyDeviceToHost);
  }
  void write(void* to, const void* host, std::int64_t bytes) override { move(to, host, bytes, cudaMemcpyHostToDevice); }

  bool reads(const Device& peer) const override {
    const int other = static_cast<const RuntimeDevice&>(peer).ordinal_;
    if (other == ordinal_) return true;
    std::lock_guard lock(mutex_);
    const auto known = peers_.find(other);
    if (known != peers_.end()) return known->second;
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, ordinal_, other), "peer access is unknown");
    if (can != 0) {
      const CurrentDevice current(ordinal_);
      const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
      if (status != cudaErrorPeerAccessAlreadyEnabled) check(status, "peer access cannot be enabled");
      cudaGetLastError();
    }
    return peers_[other] = can != 0;
  }

 private:
  // For what the host moves: waiting for it waits for nobody else's work, as the default stream or the device would.
  cudaStream_t own_stream() {
    std::lock_guard lock(mutex_);
    if (own_stream_ == nullptr) own_stream_ = static_cast<cudaStream_t>(create_stream());
    return own_stream_;
  }

  void move(void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind) {
    const CurrentDevice current(ordinal_);
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, own_stream()),
          "a copy between host and GPU cannot be started");
    check(cudaStreamSynchronize(own_stream()), "a copy between host and GPU has failed");
  }

  const int ordinal_;
  mutable std::mutex mutex_;
  mutable std::map<int, bool> peers_;  // by ordinal: whether this device reads its memory
  cudaStream_t own_stream_ = nullptr;
};

}  // namespace

int device_count() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return count;
  cudaGetLastError();
  return 0;  // no driver, or no device
}

Device& device(int ordinal) {
  static std::mutex mutex;
  static auto* const devices = new std::vector<std::unique_ptr<RuntimeDevice>>;  // contexts may outlive statics
  std::lock_guard lock(mutex);
  const int count = device_count();
  if (ordinal < 0 || ordinal >= count) {
    throw std::runtime_error("async_emb: there is no GPU " + std::to_string(ordinal) + ": this process sees " +
                             std::to_string(count) + " (CUDA_VISIBLE_DEVICES chooses which)");
  }
  while (static_cast<int>(devices->size()) < count) {
    devices->push_back(std::make_unique<RuntimeDevice>(static_cast<int>(devices->size())));
  }
  return *(*devices)[static_cast<std::size_t>(ordinal)];
}

}  // namespace async_emb::cuda
