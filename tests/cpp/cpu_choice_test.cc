// Which kernel table a process gets. The choice is made once, so each case runs in a process of its own.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "cpu_naive.h"

namespace async_emb::cpu {
namespace {

[[noreturn]] void print_choice_and_exit(const char* wanted) {
  if (wanted == nullptr) {
    unsetenv("ASYNC_EMB_CPU");
  } else {
    setenv("ASYNC_EMB_CPU", wanted, 1);
  }
  try {
    std::fprintf(stderr, "chosen: %s\n", kernels().name);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::exit(2);
  }
  std::exit(0);
}

class Choice : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

using Exited = ::testing::ExitedWithCode;

TEST_F(Choice, IsTheBestOfTheMachineByDefault) {
  const std::string best = all_kernels().back()->name;
  EXPECT_EXIT(print_choice_and_exit(nullptr), Exited(0), "chosen: " + best);
  EXPECT_EXIT(print_choice_and_exit(""), Exited(0), "chosen: " + best);
}

TEST_F(Choice, FollowsTheVariable) {
  for (const Kernels* each : all_kernels()) {
    EXPECT_EXIT(print_choice_and_exit(each->name), Exited(0), "chosen: " + std::string(each->name));
  }
}

TEST_F(Choice, RefusesWhatTheMachineCannotRun) {
  EXPECT_EXIT(print_choice_and_exit("avx1024"), Exited(2), "ASYNC_EMB_CPU=avx1024.*it can run: baseline");
}

TEST_F(Choice, BaselineComesFirst) { EXPECT_STREQ(all_kernels().front()->name, "baseline"); }

}  // namespace
}  // namespace async_emb::cpu
