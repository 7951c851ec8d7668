// One GPU as a pipeline sees it: memory, streams, events, and the launches. No CUDA here, so that a test can put an
// emulated device in its place.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/launches.h"

namespace async_emb::cuda {

using Event = void*;  // a cudaEvent_t

class Device {
 public:
  virtual ~Device() = default;

  virtual const Launches& launches() const = 0;

  // Makes this device current for the calling thread as long as the result lives.
  class Guard {
   public:
    virtual ~Guard() = default;
  };
  virtual std::unique_ptr<Guard> activate() = 0;

  // Memory of this device, at a multiple of 256 bytes, zeroed. Throws std::runtime_error that says how much was asked.
  virtual void* allocate(std::int64_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
  // Host memory that every device and the host read and write at the same address, zeroed.
  virtual void* allocate_mapped(std::int64_t bytes) = 0;
  virtual void free_mapped(void* memory) noexcept = 0;

  virtual Stream create_stream() = 0;
  virtual void destroy(Stream stream) noexcept = 0;
  virtual Event create_event() = 0;
  virtual void destroy_event(Event event) noexcept = 0;

  // What is put on `stream` so far is what a later wait for `event` waits for. `stream` is of this device.
  virtual void record(Event event, Stream stream) = 0;
  // What is put on `stream` from now on runs after the event's last record, on whichever device that was.
  virtual void wait(Stream stream, Event event) = 0;
  // Whether everything before the event's last record is done. Never blocks.
  virtual bool reached(Event event) = 0;
  // Blocks the host; only for opening, closing, and what the host reads.
  virtual void synchronize(Stream stream) = 0;

  virtual void copy(void* to, const void* from, std::int64_t bytes, Stream stream) = 0;
  // From another device's memory, through the host where the two have no direct way.
  virtual void copy_from(const Device& peer, void* to, const void* from, std::int64_t bytes, Stream stream) = 0;
  // Between the host and this device; blocks the host.
  virtual void read(void* host, const void* from, std::int64_t bytes) = 0;
  virtual void write(void* to, const void* host, std::int64_t bytes) = 0;

  // Whether kernels of this device may read the memory of `peer` where it lies.
  virtual bool reads(const Device& peer) const = 0;
};

// The GPU with this ordinal; lives as long as the process. Throws std::runtime_error where there is none. Defined where
// the module is built with CUDA.
Device& device(int ordinal);
int device_count();

}  // namespace async_emb::cuda
