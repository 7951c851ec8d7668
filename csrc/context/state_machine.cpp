#include "context/state_machine.h"

#include <cstdio>

namespace async_emb::context {
namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

// A pin that went through arithmetic may hold anything.
std::string number(float pin) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(pin));
  return text;
}

}  // namespace

std::string called_twice(const char* call, std::int64_t step) {
  return std::string(call) + " of step " + number(step) +
         " was called again while the first call waits: call it once for each start";
}

std::string stale_pin(float pin, std::int64_t step) {
  return "lookup_done got a stale pin of step " + number(pin) + ", but step " + number(step) +
         " is armed: pass the pin that the last lookup_start returned (a state that was rewound "
         "or used twice brings an old one)";
}

std::string other_batch(std::int64_t step, std::int64_t position, std::int32_t armed, std::int32_t given) {
  return "lookup_done was given token_ids of another batch: step " + number(step) + " was armed with row " +
         number(std::int64_t{armed}) + " at position " + number(position) + ", but token_ids have " +
         number(std::int64_t{given}) +
         " there (-1 stands for an id that reads zeros); pass the batch whose ids went to lookup_start";
}

StateMachine::Refusal StateMachine::check_lookup_start() const {
  if (!lookup_.pending()) return std::nullopt;
  return "lookup_start of step " + number(lookup_.armed + 1) + " came before lookup_done of step " +
         number(lookup_.armed) + ": consume each lookup before the next start";
}

StateMachine::Refusal StateMachine::check_lookup_start_beside_update(bool has_table) const {
  if (auto refusal = check_lookup_start(); refusal || (update_.pending() && has_table)) return refusal;
  return "lookup_start_beside_update of step " + number(lookup_.armed + 1) +
         " came with no update under way on a table that was looked up before: call it between an update start and its "
         "update_done, or call lookup_start";
}

StateMachine::Refusal StateMachine::check_lookup_done(float pin) const {
  if (!lookup_.pending()) {
    return "lookup_done with nothing armed: step " + number(lookup_.consumed) +
           " was the last started and is consumed; call lookup_start first";
  }
  if (pin != pin_of(lookup_.armed)) {
    return stale_pin(pin, lookup_.armed);
  }
  return std::nullopt;
}

StateMachine::Refusal StateMachine::check_stage() const {
  if (staged_) {
    return "stage_update number " + number(stages_ + 1) + " came before an update start took number " +
           number(stages_) + ": staged gradients are taken once per step";
  }
  if (update_.pending()) {
    return "stage_update number " + number(stages_ + 1) + " came before update_done of step " + number(update_.armed) +
           ": finish the update that is running first";
  }
  if (!has_rows_) {
    return "stage_update number " + number(stages_ + 1) +
           " has no batch to belong to: no lookup was consumed yet; call lookup_done first";
  }
  return std::nullopt;
}

StateMachine::Refusal StateMachine::check_update_start() const {
  if (update_.pending()) {
    return "update start of step " + number(update_.armed + 1) + " came before update_done of step " +
           number(update_.armed);
  }
  if (lookup_.pending()) {
    return "update start of step " + number(update_.armed + 1) + " came before lookup_done of step " +
           number(lookup_.armed) + ": the update would change rows that are still being looked up";
  }
  if (!staged_ && !first_update_) {
    return "update start of step " + number(update_.armed + 1) +
           " has nothing staged: only the first one may; call stage_update before it";
  }
  return std::nullopt;
}

StateMachine::Refusal StateMachine::check_update_done() const {
  if (update_.pending()) return std::nullopt;
  return "update_done with nothing armed: update step " + number(update_.consumed) +
         " was the last started and is consumed; call an update start first";
}

bool StateMachine::update_start() {
  ++update_.armed;
  first_update_ = false;
  const bool had = staged_;
  staged_ = false;
  return had;
}

void StateMachine::reset(std::int64_t lookup_step, std::int64_t update_step, std::int64_t stages) {
  lookup_ = {lookup_step, lookup_step};
  update_ = {update_step, update_step};
  stages_ = stages;
  staged_ = false;
  has_rows_ = false;
  first_update_ = true;
}

void StateMachine::adopt_staged() {
  staged_ = true;
  ++stages_;
  first_update_ = false;
}

}  // namespace async_emb::context
