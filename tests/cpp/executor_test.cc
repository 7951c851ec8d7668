// The pool: work is limited, continuations never wait for each other, and threads end.
#include "context/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/float_mode.h"

namespace async_emb::context {
namespace {

using std::chrono::milliseconds;

TEST(Executor, NeverWorksOnMoreThanItsLimit) {
  for (const int limit : {1, 2, 3}) {
    std::atomic<int> working{0}, most{0}, ran{0};
    {
      Executor executor(limit);
      for (int i = 0; i < 200; ++i) {
        executor.submit([&] {
          const int now = ++working;
          for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
          }
          if (ran % 16 == 0) std::this_thread::sleep_for(milliseconds(1));
          --working;
          ++ran;
        });
      }
    }
    EXPECT_EQ(ran, 200);
    EXPECT_LE(most, limit);
  }
}

TEST(Executor, UsesItsWholeLimit) {
  Executor executor(3);
  std::latch together(3);
  std::latch ended(3);
  for (int i = 0; i < 3; ++i) {
    executor.submit([&] {
      together.arrive_and_wait();  // hangs unless all three work at once
      ended.count_down();
    });
  }
  ended.wait();
}

TEST(Executor, GivesALimitOfAtLeastOne) {
  Executor executor(-4);
  EXPECT_EQ(executor.limit(), 1);
  std::promise<void> ran;
  executor.submit([&] { ran.set_value(); });
  ran.get_future().wait();
}

TEST(Executor, LetsContinuationsWaitForEachOther) {
  Executor executor(1);
  std::barrier together(64);
  std::latch ended(64);
  for (int i = 0; i < 64; ++i) {
    executor.resume([&] {
      together.arrive_and_wait();
      ended.count_down();
    });
  }
  ended.wait();
}

TEST(Executor, LetsContinuationsOfOneTaskWaitForEachOtherAndForWork) {
  Executor executor(1);
  std::barrier together(16);
  std::latch ended(16), worked(1);
  executor.submit([&] {
    for (int i = 0; i < 16; ++i) {
      executor.resume([&] {
        together.arrive_and_wait();
        worked.wait();
        ended.count_down();
      });
    }
    executor.submit([&] { worked.count_down(); });
  });
  ended.wait();
}

TEST(Executor, WorksWhileContinuationsBlock) {
  Executor executor(1);
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  for (int i = 0; i < 8; ++i) executor.resume([=] { released.wait(); });
  std::latch worked(100);
  for (int i = 0; i < 100; ++i) executor.submit([&] { worked.count_down(); });
  worked.wait();
  release.set_value();
}

TEST(Executor, RunsContinuationsOfATaskAfterIt) {
  Executor executor(4);
  std::atomic<int> wrong{0};
  std::latch ended(200);
  for (int i = 0; i < 200; ++i) {
    executor.submit([&] {
      auto inside = std::make_shared<std::atomic<bool>>(true);
      executor.resume([&, inside] {
        if (*inside) ++wrong;
        ended.count_down();
      });
      std::this_thread::yield();
      *inside = false;
    });
  }
  ended.wait();
  EXPECT_EQ(wrong, 0);
}

TEST(Executor, RunsAContinuationOutsideOfTheLimit) {
  Executor executor(1);
  std::latch worked(1);
  std::promise<void> ended;
  executor.resume([&] {
    executor.submit([&] { worked.count_down(); });
    worked.wait();
    executor.resume([&] { ended.set_value(); });
  });
  ended.get_future().wait();
}

TEST(Executor, DoesNotStartAThreadForEveryTask) {
  Executor executor(2);
  std::latch worked(2000);
  int most = 0;
  for (int i = 0; i < 2000; ++i) {
    executor.submit([&] { worked.count_down(); });
    most = std::max(most, executor.threads());
  }
  worked.wait();
  EXPECT_LE(most, 3);
}

TEST(Executor, EndsThreadsThatStayIdle) {
  Executor executor(1);
  std::barrier together(20);
  std::latch ended(20);
  for (int i = 0; i < 20; ++i) {
    executor.resume([&] {
      together.arrive_and_wait();
      ended.count_down();
    });
  }
  ended.wait();
  EXPECT_GE(executor.threads(), 20);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (executor.threads() > 1 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(50));
  }
  EXPECT_EQ(executor.threads(), 1);
  std::promise<void> ran;
  executor.submit([&] { ran.set_value(); });
  ran.get_future().wait();
}

TEST(Executor, FinishesEverythingBeforeItIsDestroyed) {
  for (int repetition = 0; repetition < 50; ++repetition) {
    std::atomic<int> ran{0};
    {
      Executor executor(2);
      for (int i = 0; i < 20; ++i) {
        executor.submit([&] {
          ++ran;
          executor.resume([&] { ++ran; });
        });
        executor.resume([&] { ++ran; });
      }
    }
    ASSERT_EQ(ran, 60);
  }
}

TEST(Executor, ForgetsATaskBeforeItIsDestroyed) {
  auto held = std::make_shared<int>(1);
  {
    Executor executor(1);
    executor.submit([held] {});
    executor.submit([held, &executor] { executor.resume([held] {}); });
  }
  EXPECT_EQ(held.use_count(), 1);
}

TEST(Executor, WorksInTheFloatingPointModeOfTheKernels) {
  cpu::FloatMode of_tasks = 0, of_continuations = 0;
  const cpu::FloatMode callers = cpu::float_mode();
#if defined(__x86_64__)
  cpu::set_float_mode(callers | 0x8040u);  // denormals flushed, as XLA has it; new threads inherit it
#endif
  {
    Executor executor(1);
    executor.submit([&] {
      of_tasks = cpu::float_mode();
      executor.resume([&] { of_continuations = cpu::float_mode(); });
    });
  }
  const cpu::FloatMode flushed = cpu::float_mode();
  cpu::set_float_mode(callers);
  EXPECT_EQ(of_tasks, cpu::kKernelMode);
  EXPECT_EQ(of_continuations, flushed);
}

TEST(Executor, SurvivesCallsFromManyThreads) {
  std::atomic<int> ran{0};
  {
    Executor executor(2);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 8; ++caller) {
      callers.emplace_back([&] {
        for (int i = 0; i < 200; ++i) {
          executor.submit([&] {
            executor.resume([&] { ++ran; });
            ++ran;
          });
          executor.resume([&] { ++ran; });
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  EXPECT_EQ(ran, 8 * 200 * 3);
}

TEST(Executor, SharesOnePoolInTheProcess) {
  EXPECT_EQ(&Executor::shared(), &Executor::shared());
  EXPECT_GE(Executor::shared().limit(), 1);
}

}  // namespace
}  // namespace async_emb::context
