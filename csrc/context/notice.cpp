#include "context/notice.h"

#include <cstdio>

namespace async_emb::context {
namespace {

std::string text_of(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(std::int64_t value) { return std::to_string(value); }
std::string text_of(std::int32_t value) { return std::to_string(value); }
std::string text_of(std::uint32_t value) { return std::to_string(value); }

// The first difference between what is said in two places.
struct Comparison {
  const std::string& one;
  const std::string& other;
  std::optional<std::string> found = std::nullopt;

  template <typename T>
  void equal(const char* what, T first, T second) {
    // By their text, in which a NaN is like another.
    if (found || text_of(first) == text_of(second)) return;
    found = std::string(what) + " is " + text_of(first) + " on " + one + " and " + text_of(second) + " on " + other;
  }

  void equal(const UpdateRule& a, const UpdateRule& b) {
    equal("whether the rule is lazy", a.lazy, b.lazy);
    equal("learning_rate", a.learning_rate, b.learning_rate);
    equal("eps", a.eps, b.eps);
    equal(a.lazy ? "accum_decay_rate" : "decay_factor", a.decay, b.decay);
    equal(a.lazy ? "weight_decay_rate" : "weight_decay_factor", a.weight_decay, b.weight_decay);
    equal("step", a.step, b.step);
    equal("whether max_grad_norm is given", a.clips, b.clips);
    equal("max_grad_norm", a.max_grad_norm, b.max_grad_norm);
    equal("whether rounding is stochastic", a.stochastic_rounding, b.stochastic_rounding);
    equal("seed", a.seed, b.seed);
    equal("rounding_step", a.rounding_step, b.rounding_step);
  }
};

}  // namespace

std::optional<std::string> difference(const UpdateRule& a, const std::string& where_a, const UpdateRule& b,
                                      const std::string& where_b) {
  Comparison compare{where_a, where_b};
  compare.equal(a, b);
  return compare.found;
}

std::optional<std::string> disagreement(const std::vector<Notice>& notices, const std::vector<int>& names) {
  const Notice& first = notices.front();
  const std::string here = "process " + std::to_string(names[0]);
  for (std::size_t process = 1; process < notices.size(); ++process) {
    const Notice& other = notices[process];
    const std::string there = "process " + std::to_string(names[process]);
    Comparison compare{here, there};
    compare.equal("the number of starts", first.start, other.start);
    if (!first.refused && !other.refused) {
      compare.equal("the number of rows", first.rows, other.rows);
      if (first.staged && other.staged) compare.equal("whether segment_ids are given", first.own_ids, other.own_ids);
      compare.equal(first.rule, other.rule);
    }
    if (compare.found) return compare.found;
  }
  return std::nullopt;
}

std::string in_words(const cuda::RuleDifference& difference, bool lazy, const ProcessMap& map) {
  // In the order of cuda::RuleNumbers, of which the first five are floats.
  const char* const numbers[] = {"learning_rate",
                                 "eps",
                                 lazy ? "accum_decay_rate" : "decay_factor",
                                 lazy ? "weight_decay_rate" : "weight_decay_factor",
                                 "max_grad_norm",
                                 "step",
                                 "seed",
                                 "rounding_step"};
  static_assert(sizeof(cuda::RuleNumbers) == 4 * std::size(numbers));
  const auto text = [&](std::uint32_t bits) {
    if (difference.number < 5) return text_of(core::float_of(bits));
    return difference.number == 5 ? text_of(static_cast<std::int32_t>(bits)) : text_of(bits);
  };
  const auto on = [&](int process) {
    return " on process " + std::to_string(map.names[static_cast<std::size_t>(process)]);
  };
  std::string mine = text(difference.mine) + on(map.self);
  std::string theirs = text(difference.theirs) + on(difference.process);
  if (difference.process < map.self) std::swap(mine, theirs);
  return std::string(numbers[difference.number]) + " is " + mine + " and " + theirs;
}

}  // namespace async_emb::context
