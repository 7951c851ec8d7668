// Which call may follow which: every refusal by its message, and every short sequence of calls against the rules
// restated.
#include "context/state_machine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

namespace async_emb::context {
namespace {

StateMachine::Refusal no() { return std::nullopt; }

// A machine whose lookup of step 1 is consumed.
StateMachine with_rows() {
  StateMachine machine;
  machine.lookup_start();
  machine.lookup_done();
  return machine;
}

TEST(StateMachine, StartsWithALookupOrAnEmptyUpdate) {
  const StateMachine machine;
  EXPECT_EQ(machine.check_lookup_start(), no());
  EXPECT_EQ(machine.check_update_start(), no());
  EXPECT_NE(machine.check_lookup_done(pin_of(0)), no());
  EXPECT_NE(machine.check_update_done(), no());
  EXPECT_NE(machine.check_stage(), no());
}

TEST(StateMachine, RefusesALookupStartBeforeThePendingDone) {
  StateMachine machine = with_rows();
  machine.lookup_start();
  EXPECT_EQ(machine.check_lookup_start(),
            "lookup_start of step 3 came before lookup_done of step 2: consume each lookup before the next start");
}

TEST(StateMachine, RefusesALookupStartBesideNoUpdate) {
  StateMachine machine = with_rows();
  const std::string refusal =
      "lookup_start_beside_update of step 2 came with no update under way on a table that was looked up before: call "
      "it "
      "between an update start and its update_done, or call lookup_start";
  EXPECT_EQ(machine.check_lookup_start_beside_update(true), refusal);
  machine.update_start();
  EXPECT_EQ(machine.check_lookup_start_beside_update(true), no());
  EXPECT_EQ(machine.check_lookup_start_beside_update(false), refusal);
}

TEST(StateMachine, RefusesALookupDoneWithNothingArmed) {
  EXPECT_EQ(with_rows().check_lookup_done(pin_of(1)),
            "lookup_done with nothing armed: step 1 was the last started and is consumed; call lookup_start first");
}

TEST(StateMachine, RefusesAStalePin) {
  StateMachine machine = with_rows();
  machine.lookup_start();
  EXPECT_EQ(machine.check_lookup_done(pin_of(2)), no());
  EXPECT_EQ(
      machine.check_lookup_done(pin_of(1)),
      "lookup_done got a stale pin of step 1, but step 2 is armed: pass the pin that the last lookup_start returned (a "
      "state that was rewound or used twice brings an old one)");
}

TEST(StateMachine, RefusesPinsThatAreNoNumbers) {
  StateMachine machine;
  machine.lookup_start();
  for (const float pin : {std::nanf(""), std::numeric_limits<float>::infinity(), -1e30f, 0.5f, -1.0f}) {
    const StateMachine::Refusal refusal = machine.check_lookup_done(pin);
    ASSERT_TRUE(refusal);
    EXPECT_NE(refusal->find("stale pin"), std::string::npos) << *refusal;
  }
}

TEST(StateMachine, RefusesStagingTwice) {
  StateMachine machine = with_rows();
  machine.stage();
  EXPECT_EQ(
      machine.check_stage(),
      "stage_update number 2 came before an update start took number 1: staged gradients are taken once per step");
}

TEST(StateMachine, RefusesStagingWhileAnUpdateRuns) {
  StateMachine machine = with_rows();
  machine.stage();
  machine.update_start();
  EXPECT_EQ(machine.check_stage(),
            "stage_update number 2 came before update_done of step 1: finish the update that is running first");
}

TEST(StateMachine, RefusesStagingBeforeAnyLookup) {
  StateMachine machine;
  machine.lookup_start();
  EXPECT_EQ(machine.check_stage(),
            "stage_update number 1 has no batch to belong to: no lookup was consumed yet; call lookup_done first");
}

TEST(StateMachine, StagesForTheConsumedLookupWhileTheNextIsArmed) {
  StateMachine machine = with_rows();
  machine.lookup_start();
  EXPECT_EQ(machine.check_stage(), no());
}

TEST(StateMachine, RefusesAnUpdateStartBeforeThePendingDone) {
  StateMachine machine;
  EXPECT_FALSE(machine.update_start());
  EXPECT_EQ(machine.check_update_start(), "update start of step 2 came before update_done of step 1");
}

TEST(StateMachine, RefusesAnUpdateStartWhileALookupIsPending) {
  StateMachine machine = with_rows();
  machine.lookup_start();
  EXPECT_EQ(
      machine.check_update_start(),
      "update start of step 1 came before lookup_done of step 2: the update would change rows that are still being "
      "looked up");
}

TEST(StateMachine, RefusesAnUpdateStartWithNothingStagedAfterTheFirst) {
  StateMachine machine;
  machine.update_start();
  machine.update_done();
  EXPECT_EQ(machine.check_update_start(),
            "update start of step 2 has nothing staged: only the first one may; call stage_update before it");
  machine.return_to_first_step();
  EXPECT_EQ(machine.check_update_start(), no());
}

TEST(StateMachine, RefusesAnUpdateDoneWithNothingArmed) {
  EXPECT_EQ(
      StateMachine().check_update_done(),
      "update_done with nothing armed: update step 0 was the last started and is consumed; call an update start first");
}

TEST(StateMachine, SaysWhetherAnUpdateStartFoundGradients) {
  StateMachine machine = with_rows();
  machine.stage();
  EXPECT_TRUE(machine.staged());
  EXPECT_TRUE(machine.update_start());
  EXPECT_FALSE(machine.staged());
}

TEST(StateMachine, TakesOverStagedGradientsButNoRows) {
  StateMachine machine;
  machine.adopt_staged();
  EXPECT_TRUE(machine.staged());
  EXPECT_TRUE(machine.update_start());
  machine.update_done();
  EXPECT_NE(machine.check_stage(), no());
  EXPECT_NE(machine.check_update_start(), no());
}

TEST(StateMachine, GoesOnCountingAfterAReset) {
  StateMachine ahead = with_rows();
  ahead.stage();
  ahead.lookup_start();
  StateMachine behind;
  behind.reset(2, 0, 1);
  ahead.reset(2, 0, 1);
  EXPECT_EQ(ahead, behind) << "ranks that stood at different calls are alike after a reset";
  EXPECT_EQ(ahead.lookup_start(), 3);
  EXPECT_EQ(ahead.check_stage()->substr(0, 21), "stage_update number 2");
  EXPECT_EQ(ahead.check_update_start()->substr(0, 22), "update start of step 1");
}

TEST(StateMachine, NumbersPinsWithoutLossAcrossTheirWrap) {
  for (std::int64_t step = kPinModulus - 3; step < kPinModulus + 3; ++step) {
    EXPECT_NE(pin_of(step), pin_of(step + 1));
    EXPECT_EQ(static_cast<std::int64_t>(pin_of(step)), step % kPinModulus);
  }
}

// The rules of the pipeline once more, as plain booleans.
struct Rules {
  bool looking_up = false, updating = false, has_rows = false, staged = false, first_update = true;
};

enum Action { kLookupStart, kLookupBeside, kLookupDone, kStalePin, kStage, kUpdateStart, kUpdateDone, kActions };

bool allowed(const Rules& rules, Action action) {
  switch (action) {
    case kLookupStart:
      return !rules.looking_up;
    case kLookupBeside:
      return !rules.looking_up && rules.updating;
    case kLookupDone:
      return rules.looking_up;
    case kStage:
      return rules.has_rows && !rules.staged && !rules.updating;
    case kUpdateStart:
      return !rules.updating && !rules.looking_up && (rules.staged || rules.first_update);
    case kUpdateDone:
      return rules.updating;
    default:
      return false;
  }
}

void follow(Rules& rules, Action action) {
  if (action == kLookupStart || action == kLookupBeside) rules.looking_up = true;
  if (action == kLookupDone) rules.looking_up = false, rules.has_rows = true;
  if (action == kStage) rules.staged = true;
  if (action == kUpdateStart) rules.updating = true, rules.staged = false, rules.first_update = false;
  if (action == kUpdateDone) rules.updating = false;
}

StateMachine::Refusal check(const StateMachine& machine, Action action) {
  switch (action) {
    case kLookupStart:
      return machine.check_lookup_start();
    case kLookupBeside:
      return machine.check_lookup_start_beside_update(true);
    case kLookupDone:
      return machine.check_lookup_done(pin_of(machine.lookup().armed));
    case kStalePin:
      return machine.check_lookup_done(pin_of(machine.lookup().armed + 1));
    case kStage:
      return machine.check_stage();
    case kUpdateStart:
      return machine.check_update_start();
    default:
      return machine.check_update_done();
  }
}

void act(StateMachine& machine, Action action) {
  if (action == kLookupStart || action == kLookupBeside) machine.lookup_start();
  if (action == kLookupDone) machine.lookup_done();
  if (action == kStage) machine.stage();
  if (action == kUpdateStart) machine.update_start();
  if (action == kUpdateDone) machine.update_done();
}

// Every sequence of up to `depth` further calls.
void explore(const StateMachine& machine, const Rules& rules, int depth, long& sequences) {
  ++sequences;
  for (const StepCounts& counts : {machine.lookup(), machine.update()}) {
    ASSERT_GE(counts.armed - counts.consumed, 0);
    ASSERT_LE(counts.armed - counts.consumed, 1);
  }
  ASSERT_EQ(machine.lookup().pending(), rules.looking_up);
  ASSERT_EQ(machine.update().pending(), rules.updating);
  ASSERT_EQ(machine.staged(), rules.staged);
  ASSERT_FALSE(rules.staged && rules.updating) << "gradients were staged while an update runs";
  if (depth == 0) return;
  for (int i = 0; i < kActions; ++i) {
    const auto action = static_cast<Action>(i);
    StateMachine next = machine;
    Rules next_rules = rules;
    ASSERT_EQ(!check(machine, action).has_value(), allowed(rules, action)) << "action " << action;
    ASSERT_EQ(machine, next) << "a check changed the machine";
    if (allowed(rules, action)) {
      act(next, action);
      follow(next_rules, action);
    }
    explore(next, next_rules, depth - 1, sequences);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(StateMachine, FollowsTheRulesInEverySequenceOfSevenCalls) {
  long sequences = 0;
  explore(StateMachine(), Rules(), 7, sequences);
  EXPECT_EQ(sequences, (1 - 823543 * 7L) / (1 - 7));  // 1 + 7 + .. + 7^7
}

}  // namespace
}  // namespace async_emb::context
