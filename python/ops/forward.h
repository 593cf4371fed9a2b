#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace uniep::ops {

/// The op uniep::forward: plan and forward pass of this rank's tokens.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Tensor key, Tensor overflow, Tensor x, Tensor topk_ids, Tensor topk_probs,
    std::vector<Tensor> w1, std::vector<Tensor> w2, std::int64_t rows, std::int64_t rows_of_x,
    std::int64_t rows_of_h, std::int64_t plan_bytes, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> shared_probs, std::int64_t layout,
    std::optional<Tensor> waves);

/// The op uniep::forward_exact: the same in memory of the rows that came, for which it waits.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_exact(
    Tensor key, Tensor overflow, Tensor x, Tensor topk_ids, Tensor topk_probs,
    std::vector<Tensor> w1, std::vector<Tensor> w2, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> shared_probs, std::int64_t layout);

/// The op uniep::forward_pages, of a layer with a row pool: out, and the address of what the pass
/// saved there, a uniep_saved that Python destroys.
std::tuple<Tensor, std::int64_t> forward_pages(
    Tensor key, Tensor overflow, Tensor x, Tensor topk_ids, Tensor topk_probs,
    std::vector<Tensor> w1, std::vector<Tensor> w2, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> shared_probs, std::int64_t layout,
    std::optional<Tensor> waves);

}  // namespace uniep::ops
