#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "tensors.h"

namespace uniep::ops {

// The ops of backward. `plan`, `x_rows`, `h` and `row_probs` are what uniep::forward returned.

/// uniep::backward: dx, dprobs, dw1, dw2, db1, db2; without biases the latter are empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy, Tensor w1,
    Tensor w2, std::optional<Tensor> x, std::int64_t topk, bool flag,
    std::optional<std::string> schedule, std::optional<Tensor> b1, std::optional<Tensor> b2);

/// uniep::backward_main_grad: dx, dprobs; adds to `dw1` and so on, all fp32 or all bf16.
std::tuple<Tensor, Tensor> backward_main_grad(Tensor key, Tensor plan, Tensor x_rows, Tensor h,
                                              Tensor row_probs, Tensor dy, Tensor w1, Tensor w2,
                                              std::optional<Tensor> x, Tensor dw1, Tensor dw2,
                                              std::int64_t topk, bool flag,
                                              std::optional<std::string> schedule,
                                              std::optional<Tensor> b1, std::optional<Tensor> b2,
                                              std::optional<Tensor> db1, std::optional<Tensor> db2);

/// uniep::backward_data: dx, dprobs, and what the weight gradients take.
std::tuple<Tensor, Tensor, Tensor> backward_data(
    Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy, Tensor w1,
    Tensor w2, std::optional<Tensor> x, std::int64_t topk, std::int64_t backward_bytes, bool flag,
    std::optional<std::string> schedule, std::optional<Tensor> b1, std::optional<Tensor> b2);

/// uniep::backward_weights: dw1, dw2, db1, db2.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_weights(
    Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor backward_rows,
    std::int64_t tokens, std::int64_t local_experts, std::int64_t intermediate, bool bias,
    bool flag, std::optional<std::string> schedule);

/// uniep::backward_weights_main_grad: adds to `dw1` and so on.
void backward_weights_main_grad(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs,
                                Tensor backward_rows, Tensor dw1, Tensor dw2, std::int64_t tokens,
                                bool flag, std::optional<std::string> schedule,
                                std::optional<Tensor> db1, std::optional<Tensor> db2);

}  // namespace uniep::ops
