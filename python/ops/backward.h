#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace uniep::ops {

// The ops of backward. `plan`, `x_rows`, `h` and `row_probs` are what uniep::forward returned.

/// uniep::backward: dx, dprobs, dw1, dw2, db1, db2, dshared_probs, dshared_w1, dshared_w2; of what
/// a layer has not, the gradients have no elements.
std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor,
           Tensor>
backward(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy,
         std::vector<Tensor> w1, std::vector<Tensor> w2, std::optional<Tensor> x, std::int64_t topk,
         bool flag, std::optional<std::string> schedule, std::optional<Tensor> b1,
         std::optional<Tensor> b2, std::optional<Tensor> shared_w1, std::optional<Tensor> shared_w2,
         std::int64_t layout);

/// uniep::backward_main_grad: dx, dprobs, dshared_probs; adds to `dw1` and so on, all fp32 or all
/// bf16.
std::tuple<Tensor, Tensor, Tensor> backward_main_grad(
    Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy,
    std::vector<Tensor> w1, std::vector<Tensor> w2, std::optional<Tensor> x,
    std::vector<Tensor> dw1, std::vector<Tensor> dw2, std::int64_t topk, bool flag,
    std::optional<std::string> schedule, std::optional<Tensor> b1, std::optional<Tensor> b2,
    std::optional<Tensor> db1, std::optional<Tensor> db2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> dshared_w1,
    std::optional<Tensor> dshared_w2, std::int64_t layout);

/// uniep::backward_data: dx, dprobs, dshared_probs, and what the weight gradients take.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_data(
    Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy,
    std::vector<Tensor> w1, std::vector<Tensor> w2, std::optional<Tensor> x, std::int64_t topk,
    std::int64_t backward_bytes, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::int64_t layout, std::optional<Tensor> waves);

/// uniep::backward_weights: dw1, dw2, db1, db2, dshared_w1, dshared_w2. With shared experts it is
/// given dy and x once more, like the two below.
std::tuple<std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor>
backward_weights(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs,
                 Tensor backward_memory, std::int64_t tokens, std::int64_t local_experts,
                 std::int64_t intermediate, bool bias, bool flag,
                 std::optional<std::string> schedule, std::int64_t shared_experts,
                 std::int64_t w1_form, std::int64_t w2_form, std::int64_t layout,
                 std::optional<Tensor> dy, std::optional<Tensor> x);

/// uniep::backward_weights_main_grad: adds to `dw1` and so on.
void backward_weights_main_grad(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs,
                                Tensor backward_memory, std::vector<Tensor> dw1,
                                std::vector<Tensor> dw2, std::int64_t tokens, bool flag,
                                std::optional<std::string> schedule, std::optional<Tensor> db1,
                                std::optional<Tensor> db2, std::optional<Tensor> dshared_w1,
                                std::optional<Tensor> dshared_w2, std::int64_t layout,
                                std::optional<Tensor> dy, std::optional<Tensor> x);

// Ops of a layer with a row pool. `saved` is what uniep::forward_pages returned.

/// uniep::backward_pages: dx, dprobs, dshared_probs, dw1, dw2, db1, db2, dshared_w1 and dshared_w2,
/// and what the weight gradients take. Weight gradients are empty tensors with `data_only`, and if
/// they are given to be added to; the last one is empty without `data_only`.
std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor,
           Tensor, Tensor>
backward_pages(Tensor key, std::int64_t saved, Tensor dy, std::vector<Tensor> w1,
               std::vector<Tensor> w2, std::optional<Tensor> x, std::vector<Tensor> dw1,
               std::vector<Tensor> dw2, std::int64_t topk, bool data_only, bool keep,
               std::optional<std::string> schedule, std::optional<Tensor> b1,
               std::optional<Tensor> b2, std::optional<Tensor> db1, std::optional<Tensor> db2,
               std::optional<Tensor> shared_w1, std::optional<Tensor> shared_w2,
               std::optional<Tensor> dshared_w1, std::optional<Tensor> dshared_w2,
               std::int64_t layout, std::optional<Tensor> waves);

/// uniep::backward_weights_pages: dw1, dw2, db1, db2, dshared_w1, dshared_w2; empty ones, if they
/// are given to be added to.
std::tuple<std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor>
backward_weights_pages(Tensor key, std::int64_t saved, Tensor backward_memory,
                       std::vector<Tensor> dw1, std::vector<Tensor> dw2, std::int64_t tokens,
                       bool keep, std::optional<std::string> schedule, std::optional<Tensor> db1,
                       std::optional<Tensor> db2, std::optional<Tensor> dshared_w1,
                       std::optional<Tensor> dshared_w2, std::int64_t w1_form, std::int64_t w2_form,
                       std::int64_t layout, std::optional<Tensor> dy, std::optional<Tensor> x);

}  // namespace uniep::ops
