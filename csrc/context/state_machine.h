// Which calls of one rank may follow which. Pure bookkeeping: no locks, no buffers.
//
// Each channel counts steps that were armed by a start and consumed by a done. Every check answers with what is wrong,
// or nothing; a refusal changes no count.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace async_emb::context {

struct StepCounts {
  std::int64_t armed = 0;
  std::int64_t consumed = 0;
  bool pending() const { return armed != consumed; }
  bool operator==(const StepCounts&) const = default;
};

// Pins are float32 and carry a step number exactly up to here; beyond it numbers wrap around.
inline constexpr std::int64_t kPinModulus = std::int64_t{1} << 24;
inline float pin_of(std::int64_t step) { return static_cast<float>(step % kPinModulus); }

// A done that still waits owns its step; a second one would take its place, and nobody would answer the first.
std::string called_twice(const char* call, std::int64_t step);

// What is wrong with a lookup_done whose pin or ids are of another step: the CPU pipeline finds it at the call, a GPU
// tells it later. Ids are cleaned, `position` is in the global token array.
std::string stale_pin(float pin, std::int64_t step);
std::string other_batch(std::int64_t step, std::int64_t position, std::int32_t armed, std::int32_t given);

class StateMachine {
 public:
  using Refusal = std::optional<std::string>;

  const StepCounts& lookup() const { return lookup_; }
  const StepCounts& update() const { return update_; }
  bool staged() const { return staged_; }
  std::int64_t stages() const { return stages_; }

  Refusal check_lookup_start() const;
  // `has_table`: a lookup has lent one, which the update under way has taken over.
  Refusal check_lookup_start_beside_update(bool has_table) const;
  Refusal check_lookup_done(float pin) const;
  Refusal check_stage() const;
  Refusal check_update_start() const;
  Refusal check_update_done() const;

  std::int64_t lookup_start() { return ++lookup_.armed; }
  void lookup_done() {
    ++lookup_.consumed;
    has_rows_ = true;
  }
  std::int64_t stage() {
    staged_ = true;
    return ++stages_;
  }
  // True where gradients were staged; false for the first start of all, which has none.
  bool update_start();
  void update_done() { ++update_.consumed; }

  // The next update start may find nothing staged, as the very first may.
  void return_to_first_step() { first_update_ = true; }
  // Drops whatever is armed or staged, and goes on counting from the numbers given.
  void reset(std::int64_t lookup_step, std::int64_t update_step, std::int64_t stages);
  // Takes over staged gradients that a snapshot has kept. They bring no rows: staging more needs a lookup.
  void adopt_staged();

  bool operator==(const StateMachine&) const = default;

 private:
  StepCounts lookup_;
  StepCounts update_;
  std::int64_t stages_ = 0;
  bool has_rows_ = false;  // a lookup has been consumed since the start or reset: its batch can be staged
  bool staged_ = false;
  bool first_update_ = true;
};

}  // namespace async_emb::context
