#pragma once

#include "tensors.h"

namespace uniep::ops {

/// uniep_add_rows: bf16 [T, H] of ids and row [T, K].
Tensor add_rows(Tensor rows, Tensor more, Tensor row, Tensor ids, std::optional<Tensor> factors,
                std::int64_t num_experts, std::int64_t combine_groups, bool bf16_partials);

}  // namespace uniep::ops
