// Why a group has given up, kept in a store that all its processes reach: the first announcement of all stands.
//
// An operation of a store waits for the process that serves it, without limit where that one is stopped. Failures are
// told exactly then, so operations run on a thread of their own, and callers wait for it with patience, not forever.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace async_emb::comm {

class Announcements {
 public:
  explicit Announcements(c10::intrusive_ptr<::c10d::Store> store);
  ~Announcements();
  Announcements(const Announcements&) = delete;
  Announcements& operator=(const Announcements&) = delete;

  // Does nothing where the store cannot be reached.
  void announce(const std::string& failure) noexcept;
  std::optional<std::string> first() noexcept;

 private:
  struct State;
  // Shared with the thread, which is left behind where an operation does not return.
  std::shared_ptr<State> state_;
};

}  // namespace async_emb::comm
