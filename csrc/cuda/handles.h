// Streams, events and memory of a device as objects that go when their owner goes.
#pragma once

#include <cstdint>
#include <new>
#include <utility>

#include "cuda/device.h"

namespace async_emb::cuda {

class OwnedStream {
 public:
  explicit OwnedStream(Device& device) : device_(&device), stream_(device.create_stream()) {}
  OwnedStream(OwnedStream&& other) noexcept : device_(other.device_), stream_(std::exchange(other.stream_, nullptr)) {}
  OwnedStream& operator=(OwnedStream&&) = delete;
  ~OwnedStream() {
    if (stream_ != nullptr) device_->destroy(stream_);
  }

  Stream get() const { return stream_; }

 private:
  Device* device_;
  Stream stream_;
};

class OwnedEvent {
 public:
  explicit OwnedEvent(Device& device) : device_(&device), event_(device.create_event()) {}
  OwnedEvent(OwnedEvent&& other) noexcept : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  OwnedEvent& operator=(OwnedEvent&&) = delete;
  ~OwnedEvent() {
    if (event_ != nullptr) device_->destroy_event(event_);
  }

  Event get() const { return event_; }

 private:
  Device* device_;
  Event event_;
};

// An array of `count` values on one device; null where it has none.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(Device& device, std::int64_t count)
      : device_(&device), bytes_(count * static_cast<std::int64_t>(sizeof(T))) {
    if (bytes_ > 0) data_ = static_cast<T*>(device.allocate(bytes_));
  }
  DeviceArray(DeviceArray&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceArray() {
    if (data_ != nullptr) device_->free(data_);
  }

  T* get() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  T* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// One value in host memory that every device maps.
template <typename T>
class Mapped {
 public:
  explicit Mapped(Device& device)
      : device_(&device), value_(new (device.allocate_mapped(static_cast<std::int64_t>(sizeof(T)))) T()) {}
  Mapped(Mapped&& other) noexcept : device_(other.device_), value_(std::exchange(other.value_, nullptr)) {}
  Mapped& operator=(Mapped&&) = delete;
  ~Mapped() {
    if (value_ != nullptr) device_->free_mapped(value_);
  }

  T* get() const { return value_; }
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  Device* device_;
  T* value_;
};

}  // namespace async_emb::cuda
