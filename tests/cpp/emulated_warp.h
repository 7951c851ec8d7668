// A warp without a GPU: its lanes are fibers of one thread that take turns at every operation between lanes.
//
// Lane k runs until it meets the others in such an operation, then lane k + 1 runs; once the last has come, the first
// goes on. So lanes keep step where a warp must, and are as far apart as may be everywhere else: what one lane writes
// for another without a meeting in between shows as wrong numbers. Lanes that disagree about an operation stop the
// program.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace async_emb::testing {

// One execution with a stack of its own, and the thread's own execution, which has no stack here.
class Fiber {
 public:
  Fiber() = default;  // the thread's own
  explicit Fiber(void (*entry)()) {
    stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack_ == MAP_FAILED || getcontext(&context_) != 0) std::abort();
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    makecontext(&context_, entry, 0);
#if defined(__SANITIZE_THREAD__)
    tsan_ = __tsan_create_fiber(0);
#endif
  }
  ~Fiber() {
    if (stack_ == nullptr) return;
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(tsan_);
#endif
    munmap(stack_, kStackBytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs `next` until something switches back to this one, which must be what runs now.
  void switch_to(Fiber& next) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, next.bottom(), next.bytes());
#endif
#if defined(__SANITIZE_THREAD__)
    if (stack_ == nullptr) tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(next.tsan_, 0);
#endif
    // swapcontext saves the signal mask, by two calls of the kernel: only the first entry into a fiber needs it.
    if (__builtin_setjmp(registers_) == 0) next.enter();
#if defined(__SANITIZE_ADDRESS__)
    arrived(fake_stack);
#endif
  }

  // The first thing a fiber does; `came_from` is the thread's own execution or another fiber.
  static void arrived([[maybe_unused]] void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
    if (thread_bottom() == nullptr) {  // the first switch of a thread leaves its own stack
      thread_bottom() = bottom;
      thread_bytes() = bytes;
    }
#endif
  }

 private:
  static constexpr std::size_t kStackBytes = 256 * 1024;

  // Never returns, which the thread sanitizer must not take for a call that goes on.
  [[noreturn]] __attribute__((noinline, no_sanitize("thread"))) void enter() {
    if (stack_ != nullptr && !entered_) {
      entered_ = true;
      setcontext(&context_);
    }
    __builtin_longjmp(registers_, 1);
  }

#if defined(__SANITIZE_ADDRESS__)
  static const void*& thread_bottom() {
    thread_local const void* bottom = nullptr;
    return bottom;
  }
  static std::size_t& thread_bytes() {
    thread_local std::size_t bytes = 0;
    return bytes;
  }
  const void* bottom() const { return stack_ != nullptr ? stack_ : thread_bottom(); }
  std::size_t bytes() const { return stack_ != nullptr ? kStackBytes : thread_bytes(); }
#endif

  ucontext_t context_{};
  void* registers_[5] = {};
  bool entered_ = false;
  void* stack_ = nullptr;
#if defined(__SANITIZE_THREAD__)
  void* tsan_ = nullptr;
#endif
};

// The lanes of one warp, or of a part of it. One team for each thread; its fibers serve one run after the other.
class Team {
 public:
  static constexpr int kMostLanes = 32;

  static Team& of_this_thread() {
    thread_local Team team;
    return team;
  }

  // Calls body(lane) on every lane.
  template <class Body>
  void run(int lanes, const Body& body) {
    lanes_ = lanes;
    body_ = &body;
    call_ = [](const void* function, int lane) { (*static_cast<const Body*>(function))(lane); };
    meetings_.fill(0);
    finished_ = 0;
    lane_ = 0;
    thread_.switch_to(fiber(0));
  }

  // Gives every lane's value, once all have come. They stay until this lane comes again.
  const std::array<std::uint32_t, kMostLanes>& meet(char operation, std::uint32_t value) {
    const int lane = lane_;
    if (finished_ > 0) disagree(lane, "still works when another has finished");
    const std::uint64_t meeting = ++meetings_[lane];
    auto& values = values_[meeting % 2];  // the first lane may be at its next meeting when the last reads this one's
    values[lane] = value;
    operations_[lane] = operation;
    const int next = (lane + 1) % lanes_;
    lane_ = next;
    if (next != lane) fiber(lane).switch_to(fiber(next));
    lane_ = lane;
    if (lane == 0) {
      for (int other = 0; other < lanes_; ++other) {
        if (meetings_[other] != meeting) disagree(other, "has met the others fewer times");
        if (operations_[other] != operation) disagree(other, "is in another operation");
      }
    }
    return values;
  }

 private:
  static void work() {
    Fiber::arrived(nullptr);
    Team& team = of_this_thread();
    const int lane = team.lane_;
    for (;;) {
      team.call_(team.body_, lane);
      ++team.finished_;
      team.lane_ = lane + 1;
      team.fiber(lane).switch_to(lane + 1 < team.lanes_ ? team.fiber(lane + 1) : team.thread_);
    }
  }

  Fiber& fiber(int lane) {
    if (!fibers_[lane]) fibers_[lane] = std::make_unique<Fiber>(&Team::work);
    return *fibers_[lane];
  }

  [[noreturn]] void disagree(int lane, const char* what) const {
    std::fprintf(stderr, "emulated warp of %d lanes: lane %d %s\n", lanes_, lane, what);
    std::abort();
  }

  Fiber thread_;
  std::array<std::unique_ptr<Fiber>, kMostLanes> fibers_;
  int lanes_ = 0;
  int lane_ = 0;  // that runs, or is switched to
  int finished_ = 0;
  const void* body_ = nullptr;
  void (*call_)(const void*, int) = nullptr;
  std::array<std::uint64_t, kMostLanes> meetings_{};
  std::array<char, kMostLanes> operations_{};
  std::array<std::uint32_t, kMostLanes> values_[2];
};

// The lanes type of core/lanes.h, on a team.
template <int kLanes>
struct EmulatedLanes {
  static constexpr int kCount = kLanes;
  Team* team;
  int lane;

  int index() const { return lane; }
  float exchange(float value, int mask) const { return float_of(team->meet('x', bits_of(value))[lane ^ mask]); }
  float broadcast(float value, int from) const {
    return float_of(team->meet('b', bits_of(value))[static_cast<std::size_t>(from)]);
  }
  std::uint32_t ballot(bool value) const {
    const auto& values = team->meet('v', value ? 1 : 0);
    std::uint32_t bits = 0;
    for (int k = 0; k < kLanes; ++k) bits |= values[static_cast<std::size_t>(k)] << k;
    return bits;
  }
  std::uint32_t sum(std::uint32_t value) const {
    const auto& values = team->meet('s', value);
    std::uint32_t total = 0;
    for (int k = 0; k < kLanes; ++k) total += values[static_cast<std::size_t>(k)];
    return total;
  }
  void synchronize() const { team->meet('y', 0); }

 private:
  static std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
  static float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
};

// Lanes that never meet: each runs to its end, without a fiber.
template <int kLanes>
struct LonelyLanes {
  static constexpr int kCount = kLanes;
  int lane;

  int index() const { return lane; }
};

}  // namespace async_emb::testing
