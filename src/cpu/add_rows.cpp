#include "cpu/add_rows.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/contract.h"
#include "cpu/kernels/kernels.h"

namespace uniep::cpu {
namespace {

constexpr ExpertRange kAllExperts{0, std::numeric_limits<std::int32_t>::max()};

class Adder {
 public:
  explicit Adder(const RowSums& sums)
      : s_(sums),
        kernels_(kernels()),
        part_(static_cast<std::size_t>(sums.hidden)),
        total_(part_.size()),
        rounded_(part_.size()) {}

  void add(std::int64_t token) {
    const std::int64_t first = token * s_.topk;
    const std::int32_t* ids = s_.ids + first;
    std::ranges::fill(total_, 0.0f);
    if (s_.group_experts == 0) {
      add_group(first, kAllExperts);
      kernels_.add_f32_row(s_.hidden, total_.data(), part_.data());
    } else {
      const auto next = [&](std::int32_t from) {
        return next_combine_group(ids, s_.topk, s_.group_experts, from);
      };
      for (ExpertRange group = next(0); !group.is_empty(); group = next(group.end)) {
        add_group(first, group);
        add_part();
      }
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
      } else if (s_.factors == nullptr) {
        kernels_.add_row(s_.hidden, part_.data(), row);
      } else {
        kernels_.add_scaled_row(s_.hidden, part_.data(), row, s_.factors[first + k]);
      }
    }
  }

  void add_part() {
    if (s_.rounds) {
      kernels_.round_row(s_.hidden, part_.data(), rounded_.data());
      kernels_.add_row(s_.hidden, total_.data(), rounded_.data());
    } else {
      kernels_.add_f32_row(s_.hidden, total_.data(), part_.data());
    }
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
