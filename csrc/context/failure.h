// What can go wrong in a context, as a kind and a message that says what happened, the values, and what to do.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace async_emb::context {

enum class FailureKind {
  kInvalidArgument,   // a shape, dtype or attribute that does not fit the context
  kUnmatchedBuffers,  // XLA put a copy between lookup and update
  kUnknownContext,    // no such context, or one that was closed
  kAborted,           // abort() or close() while a call waited
  kTimeout,           // a peer did not come in time
  kPeer,              // another process has ended or given up
  kInternal,          // a defect of ours, or out of memory
};

struct Failure {
  FailureKind kind = FailureKind::kInternal;
  std::string message;
};

class Error : public std::runtime_error {
 public:
  explicit Error(Failure failure) : std::runtime_error(failure.message), kind_(failure.kind) {}
  Error(FailureKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}

  FailureKind kind() const { return kind_; }

 private:
  FailureKind kind_;
};

}  // namespace async_emb::context
