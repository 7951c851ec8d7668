// Moving bytes between the processes that share a group of ranks. It knows nothing of what the bytes mean: sums are
// made elsewhere, in the canonical order.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace async_emb::comm {

struct Block {
  const void* data = nullptr;
  std::int64_t bytes = 0;
};

struct Inbox {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// An exchange that came to nothing. No buffer of it is in use any more.
class TransportError : public std::runtime_error {
 public:
  enum class Kind {
    kTimeout,  // `peers` did not come in time
    kLost,     // the connections to `peers` broke
    kEnded,    // end() was called here
  };

  TransportError(Kind kind, std::vector<int> peers, const std::string& what)
      : std::runtime_error(what), kind_(kind), peers_(std::move(peers)) {}

  Kind kind() const { return kind_; }
  const std::vector<int>& peers() const { return peers_; }

 private:
  Kind kind_;
  std::vector<int> peers_;
};

// The processes of one group are numbered [0, size), in the order of their first ranks.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int size() const = 0;
  virtual int self() const = 0;

  // Sends sent[p] to every other process p, fills received[p] from it, and returns when both are done everywhere they
  // concern this process; the entries of self are not looked at. With one block for all it is an all-gather, with one
  // for each an all-to-all, of equal or of unequal blocks. The two ends of a block agree about its size; an empty one
  // is not sent. All processes make the same exchanges in the same order, each from one thread at a time.
  //
  // Throws TransportError, which names all peers that are at fault.
  virtual void exchange(std::span<const Block> sent, std::span<const Inbox> received,
                        std::chrono::nanoseconds timeout) = 0;

  // From any thread, any number of times: an exchange that waits throws kEnded, and so does every later one.
  virtual void end() noexcept = 0;

  // Tells every process why this one has given up; the first announcement of all stands. Does nothing where nobody can
  // be reached any more. Both may be called at any time, also after end().
  virtual void announce(const std::string& failure) noexcept = 0;
  virtual std::optional<std::string> announced() noexcept = 0;
};

}  // namespace async_emb::comm
