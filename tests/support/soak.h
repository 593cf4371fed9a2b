#pragma once

#include <unistd.h>

#include <cmath>
#include <fstream>
#include <vector>

#include "base/layer_data.h"
#include "support/random_case.h"
#include "uniep/problem.h"

namespace uniep::testing {

/// What is asked of the same layer in one step after another: other tokens, numbers of tokens and
/// routing each time, evenly or not; weights stay. The same on every rank.
class SoakSteps {
 public:
  struct Step {
    LayerData data;
    std::vector<std::int64_t> token_begin;  // [ranks + 1]
    bool defer_weights = false;
    Rng rng;  // for what else the step is to have at random
  };

  SoakSteps(int ranks, std::int64_t hidden, std::int64_t intermediate) : ranks_(ranks) {
    Rng rng(static_cast<unsigned>(ranks));
    const std::int64_t tokens = ranks * kMaxTokens;
    base_.hidden = hidden;
    base_.intermediate = intermediate;
    base_.num_experts = 8;
    base_.topk = 4;
    base_.x = random_bf16(rng, tokens * base_.hidden, 1);
    base_.dy = random_bf16(rng, tokens * base_.hidden, 1);
    base_.w1 = random_bf16(rng, base_.num_experts * 2 * base_.intermediate * base_.hidden, 0.06f);
    base_.w2 = random_bf16(rng, base_.num_experts * base_.hidden * base_.intermediate, 0.09f);
  }

  Problem problem() const {
    return {.hidden = base_.hidden,
            .intermediate = base_.intermediate,
            .num_experts = base_.num_experts,
            .topk = base_.topk,
            .max_tokens = kMaxTokens};
  }

  Step step(int number) const {
    Step s{.data = base_,
           .token_begin = {0},
           .rng = Rng(static_cast<unsigned>(1000 * ranks_ + number))};
    for (int r = 0; r < ranks_; ++r) {
      const std::int64_t tokens = chance(s.rng, 10) ? 0 : pick(s.rng, 1, kMaxTokens);
      s.token_begin.push_back(s.token_begin.back() + tokens);
    }
    s.data.tokens = s.token_begin.back();
    cut(s.data.x, s);
    cut(s.data.dy, s);
    route(s);
    s.defer_weights = chance(s.rng, 30);
    return s;
  }

 private:
  static constexpr std::int64_t kMaxTokens = 96;

  /// As many tokens as the step has, from anywhere among all.
  void cut(std::vector<bf16>& tensor, Step& s) const {
    const auto first = pick(s.rng, 0, ranks_ * kMaxTokens - s.data.tokens) * base_.hidden;
    tensor.erase(tensor.begin(), tensor.begin() + first);
    tensor.resize(static_cast<std::size_t>(s.data.tokens * base_.hidden));
  }

  void route(Step& s) const {
    std::uniform_real_distribution<double> uniform(0, 1);
    const double skew = static_cast<double>(pick(s.rng, 1, 4));  // 1: even
    const int dropped_percent = chance(s.rng, 30) ? 25 : 0;
    for (std::int64_t i = 0; i < s.data.tokens * base_.topk; ++i) {
      const double place = std::pow(uniform(s.rng), skew);
      const auto expert =
          std::min(static_cast<int>(place * base_.num_experts), base_.num_experts - 1);
      s.data.topk_ids.push_back(chance(s.rng, dropped_percent) ? -1 : expert);
      s.data.topk_probs.push_back(static_cast<float>(uniform(s.rng)));
    }
  }

  int ranks_;
  LayerData base_;
};

/// Memory of this process that lies in RAM.
inline std::int64_t resident_bytes() {
  std::int64_t pages = 0;
  std::ifstream statm("/proc/self/statm");
  statm >> pages >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

}  // namespace uniep::testing
