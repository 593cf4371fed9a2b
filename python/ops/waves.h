#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tensors.h"

namespace uniep::ops {

/// Events of the waves of a pass, as Python gives them: int64 [2, waves] on the CPU, cudaEvent_t or
/// 0 that waves wait for, then those that are recorded behind them. Lives as long as the call.
class Waves {
 public:
  explicit Waves(const std::optional<Tensor>& given) {
    if (!given) return;
    if (given->dim() != 2 || given->size(0) != 2 || given->scalar_type() != ScalarType::Long ||
        !given->is_contiguous() || !given->is_cpu()) {
      refuse("waves is no int64 tensor of two contiguous rows on the CPU");
    }
    count_ = given->size(1);
    const auto* numbers = static_cast<const std::int64_t*>(given->const_data_ptr());
    for (std::int64_t i = 0; i < 2 * count_; ++i) {
      events_.push_back(reinterpret_cast<void*>(static_cast<std::intptr_t>(numbers[i])));
    }
  }

  /// Call: uniep_forward_call or uniep_backward_call.
  template <class Call>
  void set(Call& call) const {
    if (count_ == 0) return;
    call.waves = {.before = events_.data(),
                  .after = events_.data() + count_,
                  .count = static_cast<std::int32_t>(count_)};
  }

 private:
  std::int64_t count_ = 0;
  std::vector<void*> events_;
};

}  // namespace uniep::ops
