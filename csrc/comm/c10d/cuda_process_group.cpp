#include "comm/c10d/cuda_process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace async_emb::comm {
namespace {

// A pair's first exchange connects it.
constexpr std::int64_t kFirstBytes = 256;

at::TensorOptions bytes_on(int ordinal) {
  return at::TensorOptions().dtype(at::kByte).device(at::kCUDA, static_cast<c10::DeviceIndex>(ordinal));
}

// The first line of an exception of torch's.
std::string what_happened(const std::exception& error) {
  const std::string what = error.what();
  return what.substr(0, what.find('\n'));
}

}  // namespace

CudaProcessGroupTransport::CudaProcessGroupTransport(c10::intrusive_ptr<::c10d::Backend> backend, int ordinal)
    : size_(backend->getSize()), self_(backend->getRank()), ordinal_(ordinal), backend_(std::move(backend)) {}

CudaProcessGroupTransport::~CudaProcessGroupTransport() { abort(); }

void CudaProcessGroupTransport::exchange(std::span<const Block> sent, std::span<const Inbox> received, void* stream) {
  if (static_cast<int>(sent.size()) != size_ || static_cast<int>(received.size()) != size_) {
    throw std::invalid_argument("an exchange between " + std::to_string(size_) +
                                " processes needs as many blocks, got " + std::to_string(sent.size()) +
                                " to send and " + std::to_string(received.size()) + " to receive");
  }
  c10::intrusive_ptr<::c10d::Backend> backend;
  {
    std::lock_guard lock(mutex_);
    backend = backend_;
  }
  if (!backend) throw std::runtime_error("the transport between GPUs was ended");
  bool any = false;
  for (int peer = 0; peer < size_; ++peer) {
    any = any || (peer != self_ && (sent[peer].bytes > 0 || received[peer].bytes > 0));
  }
  if (!any) return;

  const auto index = static_cast<c10::DeviceIndex>(ordinal_);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), index));
  // Borrowed: neither torch's allocator nor a destructor of a tensor's has to do with this memory.
  const auto tensors_at = [&](void* data, std::int64_t bytes) {
    return std::vector<at::Tensor>{at::for_blob(data, {bytes})
                                       .options(bytes_on(ordinal_))
                                       .target_device(c10::Device(at::kCUDA, index))
                                       .make_tensor()};
  };
  try {
    backend->startCoalescing();
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == self_) continue;
      if (sent[peer].bytes > 0) {
        auto tensors = tensors_at(const_cast<void*>(sent[peer].data), sent[peer].bytes);
        backend->send(tensors, peer, 0);
      }
      if (received[peer].bytes > 0) {
        auto tensors = tensors_at(received[peer].data, received[peer].bytes);
        backend->recv(tensors, peer, 0);
      }
    }
    const auto work = backend->endCoalescing();
    if (work) work->synchronize();  // on the stream: the host goes on
  } catch (const std::exception& error) {
    throw std::runtime_error("NCCL: " + what_happened(error));
  }
}

bool CudaProcessGroupTransport::connect(std::chrono::nanoseconds timeout) {
  // On a thread of its own, which abort() ends: the library's wait for peers has no limit that we could set.
  struct Shared {
    std::promise<void> promise;
  };
  auto shared = std::make_shared<Shared>();
  auto done = shared->promise.get_future();
  std::thread thread([this, shared] {
    try {
      connect_here();
      shared->promise.set_value();
    } catch (const std::exception&) {
      shared->promise.set_exception(std::current_exception());
    }
  });
  const bool in_time = done.wait_for(timeout) == std::future_status::ready;
  if (!in_time) abort();
  thread.join();
  if (!in_time) return false;
  done.get();
  return true;
}

void CudaProcessGroupTransport::connect_here() {
  const auto index = static_cast<c10::DeviceIndex>(ordinal_);
  const c10::cuda::CUDAGuard device(index);
  {
    c10::intrusive_ptr<::c10d::Backend> backend;
    {
      std::lock_guard lock(mutex_);
      backend = backend_;
    }
    if (backend) backend->eagerConnectSingleDevice(c10::Device(at::kCUDA, index));
  }
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(true, index);
  const c10::cuda::CUDAStreamGuard guard(stream);
  at::Tensor out = at::empty({size_ * kFirstBytes}, bytes_on(ordinal_));
  at::Tensor in = at::empty({size_ * kFirstBytes}, bytes_on(ordinal_));
  std::vector<Block> sent;
  std::vector<Inbox> received;
  for (int peer = 0; peer < size_; ++peer) {
    sent.push_back({static_cast<char*>(out.data_ptr()) + peer * kFirstBytes, kFirstBytes});
    received.push_back({static_cast<char*>(in.data_ptr()) + peer * kFirstBytes, kFirstBytes});
  }
  exchange(sent, received, stream.stream());
  stream.synchronize();
}

void CudaProcessGroupTransport::abort() noexcept try {
  c10::intrusive_ptr<::c10d::Backend> backend;
  {
    std::lock_guard lock(mutex_);
    backend = std::move(backend_);
  }
  if (backend) backend->abort();
} catch (const std::exception&) {
  // The communicator has failed already.
}

}  // namespace async_emb::comm
