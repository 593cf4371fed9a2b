#include "cpu/add_rows.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/token_sums.h"

namespace uniep::cpu {
namespace {

class Adder {
 public:
  explicit Adder(const RowSums& sums)
      : s_(sums),
        kernels_(kernels()),
        part_(static_cast<std::size_t>(sums.hidden)),
        total_(part_.size()) {}

  void add(std::int64_t token) {
    const std::int64_t first = token * s_.topk;
    std::ranges::fill(total_, 0.0f);
    const auto take = [&](ExpertRange group) { add_group(first, group); };
    if (s_.group_experts == 0) {
      take(kAllExperts);
    } else {
      for_each_group(s_.ids + first, s_.topk, s_.group_experts, take);
    }
    kernels_.round_row(s_.hidden, total_.data(), s_.out + token * s_.hidden);
  }

 private:
  void add_group(std::int64_t first, ExpertRange experts) {
    std::ranges::fill(part_, 0.0f);
    for (int k = 0; k < s_.topk; ++k) {
      if (!experts.has(s_.ids[first + k])) continue;
      const bf16* row = s_.row_of(first + k);
      if (row == nullptr) {
        std::ranges::fill(part_, std::numeric_limits<float>::quiet_NaN());
        continue;
      }
      const float* factor = s_.factors == nullptr ? nullptr : s_.factors + first + k;
      add_slot(kernels_, s_.hidden, row, factor, part_.data());
    }
    const bool rounds = s_.group_experts > 0 && s_.rounds;
    add_partial(kernels_, s_.hidden, part_.data(), rounds, rounded_, total_.data());
  }

  const RowSums& s_;
  const Kernels& kernels_;
  std::vector<float> part_, total_;
  std::vector<bf16> rounded_;
};

}  // namespace

void add_rows(const RowSums& sums) {
  Adder adder(sums);
  for (std::int64_t token = 0; token < sums.tokens; ++token) adder.add(token);
}

}  // namespace uniep::cpu
