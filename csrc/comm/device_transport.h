// Moving bytes between the GPUs of several processes, one GPU each, on a stream. What an exchange is for, and that all
// processes are about to make it, they agree on by a Transport between their hosts: nothing here has a timeout.
#pragma once

#include <span>

#include "comm/transport.h"

namespace async_emb::comm {

class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;

  virtual int size() const = 0;
  virtual int self() const = 0;

  // Puts on `stream` (a cudaStream_t of this transport's GPU) that sent[p] goes to every other process p and
  // received[p] is filled from it, all of it in one operation; what comes later on the stream comes after. Blocks are
  // in the GPU's memory and stay until then. The entries of self are not looked at, an empty block is not sent, and the
  // two ends of a block agree about its size. All processes make the same exchanges in the same order, each from one
  // thread at a time, which may have to wait for the library, never for a GPU.
  //
  // Throws std::runtime_error where the exchange cannot be put on the stream.
  virtual void exchange(std::span<const Block> sent, std::span<const Inbox> received, void* stream) = 0;

  // From any thread, any number of times: what is on streams ends soon, whatever the peers do, and leaves anything in
  // what it was to fill. Every later exchange throws.
  virtual void abort() noexcept = 0;
};

}  // namespace async_emb::comm
