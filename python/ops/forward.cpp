#include "forward.h"

#include <exception>

#include "biases.h"
#include "call.h"
#include "shared_experts.h"
#include "waves.h"
#include "weights.h"

namespace uniep::ops {
namespace {

/// What forward returns, and where it is written. A plan of no bytes is not the caller's.
struct Results {
  Tensor out;
  Tensor plan;
  std::optional<Tensor> status;

  Results(const LayerShape& shape, const Tensor& x, bool flag)
      : Results(shape, x, flag, shape.plan_bytes) {}
  Results(const LayerShape& shape, const Tensor& x, bool flag, std::int64_t plan_bytes)
      : out(empty_results(shape, x, x.size(0))), plan(empty(x, ScalarType::Byte, {plan_bytes})) {
    if (flag) status = empty(x, ScalarType::Long, {2});
  }
};

/// What is kept for backward, and what the pass works in.
struct Rows {
  Tensor x_rows;
  Tensor h;
  Tensor row_probs;
  Tensor scratch;

  Rows(const LayerShape& shape, const Tensor& beside, std::int64_t rows, std::int64_t rows_of_x,
       std::int64_t scratch_bytes)
      : x_rows(empty(beside, ScalarType::BFloat16, {rows_of_x, shape.hidden})),
        h(empty(beside, ScalarType::BFloat16, {shape.rows_of_h > 0 ? rows : 0, shape.h_width})),
        row_probs(empty(beside, ScalarType::Float, {rows})),
        scratch(empty(beside, ScalarType::Byte, {scratch_bytes})) {}

  uniep_row_memory memory() {
    uniep_row_memory memory{};
    if (x_rows.size(0) > 0) memory.x_rows = x_rows.mutable_data_ptr();
    if (h.size(0) > 0) memory.h = h.mutable_data_ptr();
    memory.row_probs = static_cast<float*>(row_probs.mutable_data_ptr());
    memory.forward_memory = scratch.mutable_data_ptr();
    return memory;
  }
};

/// The inputs, checked, and the results of a call.
uniep_forward_call call_of(const LayerShape& shape, const Tensor& key, const Tensor& overflow,
                           const Tensor& x, const Tensor& topk_ids, const Tensor& topk_probs,
                           const Weights& weights, const std::optional<std::string>& schedule,
                           const Biases& biases, const SharedExperts& shared,
                           const std::optional<Tensor>& shared_probs) {
  const std::int64_t tokens = x.dim() == 2 ? x.size(0) : -1;
  require(x, "x", ScalarType::BFloat16, {tokens, shape.hidden}, key);
  require(topk_ids, "topk_ids", ScalarType::Int, {tokens, shape.topk}, key);
  require(topk_probs, "topk_probs", ScalarType::Float, {tokens, shape.topk}, key);
  require(overflow, "overflow", ScalarType::Long, {2}, key);
  biases.check(shape, key);
  shared.check(shape, key);
  if (shared_probs) {
    require(*shared_probs, "shared_probs", ScalarType::Float, {tokens, shape.shared_experts}, key);
  }

  uniep_forward_call arguments{};
  arguments.tokens = tokens;
  arguments.topk_ids = static_cast<const std::int32_t*>(topk_ids.const_data_ptr());
  arguments.topk_probs = static_cast<const float*>(topk_probs.const_data_ptr());
  arguments.x = x.const_data_ptr();
  weights.set(arguments);
  biases.set(arguments);
  shared.set(arguments);
  if (shared_probs) {
    arguments.shared_probs = static_cast<const float*>(shared_probs->const_data_ptr());
  }
  arguments.schedule = text_of(schedule);
  arguments.stream = current_stream(x);
  return arguments;
}

/// Runs the call, whose memory is set.
void run(const Call& call, uniep_forward_call& arguments, Results& results, Tensor& overflow) {
  arguments.out = results.out.mutable_data_ptr();
  if (results.plan.size(0) > 0) arguments.plan = results.plan.mutable_data_ptr();
  std::optional<Tensor>& status = results.status;
  if (status) arguments.overflow = static_cast<std::int64_t*>(status->mutable_data_ptr());
  Call::check(uniep_forward(call.layer(), &arguments));
  if (status) raise_to(overflow, *status);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Tensor key, Tensor overflow, Tensor x, Tensor topk_ids, Tensor topk_probs,
    std::vector<Tensor> w1, std::vector<Tensor> w2, std::int64_t rows, std::int64_t rows_of_x,
    std::int64_t rows_of_h, std::int64_t plan_bytes, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> shared_probs, std::int64_t layout,
    std::optional<Tensor> waves) {
  align(x);
  const Call call(key);
  const LayerShape& shape = call.shape();
  if (rows != shape.rows || rows_of_x != shape.rows_of_x || rows_of_h != shape.rows_of_h ||
      plan_bytes != shape.plan_bytes) {
    refuse("the workspace has grown since its figures were read; read rows and plan_bytes again");
  }
  const Weights weights(w1, w2, shape, layout_of(layout), key);
  auto arguments = call_of(shape, key, overflow, x, topk_ids, topk_probs, weights, schedule,
                           {b1, b2}, {shared_w1, shared_w2}, shared_probs);
  Results results(shape, x, flag);
  Rows kept(shape, x, rows, rows_of_x, shape.forward_bytes);
  arguments.memory = kept.memory();
  const Waves events(waves);
  events.set(arguments);
  run(call, arguments, results, overflow);
  return {results.out, results.plan, kept.x_rows, kept.h, kept.row_probs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_exact(
    Tensor key, Tensor overflow, Tensor x, Tensor topk_ids, Tensor topk_probs,
    std::vector<Tensor> w1, std::vector<Tensor> w2, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> shared_probs, std::int64_t layout) {
  align(x);
  const Call call(key);
  const Weights weights(w1, w2, call.shape(), layout_of(layout), key);
  auto arguments = call_of(call.shape(), key, overflow, x, topk_ids, topk_probs, weights, schedule,
                           {b1, b2}, {shared_w1, shared_w2}, shared_probs);
  Results results(call.shape(), x, flag);

  // No exception crosses the C API. Where memory is short, all ranks hear of it.
  struct Allocation {
    const Call& call;
    const Tensor& x;
    std::optional<Rows> rows;
    std::exception_ptr failure;
  } allocation{call, x, std::nullopt, nullptr};
  arguments.allocate_context = &allocation;
  arguments.allocate = [](void* context, const uniep_memory_needs* needs,
                          uniep_row_memory* memory) {
    auto& a = *static_cast<Allocation*>(context);
    try {
      a.rows.emplace(a.call.shape(), a.x, needs->rows, needs->rows_of_x, needs->forward_memory);
      *memory = a.rows->memory();
      return 0;
    } catch (...) {
      a.failure = std::current_exception();
      return 1;
    }
  };
  try {
    run(call, arguments, results, overflow);
  } catch (...) {
    if (allocation.failure) std::rethrow_exception(allocation.failure);
    throw;
  }
  const Rows& kept = *allocation.rows;
  return {results.out, results.plan, kept.x_rows, kept.h, kept.row_probs};
}

std::tuple<Tensor, std::int64_t> forward_pages(
    Tensor key, Tensor overflow, Tensor x, Tensor topk_ids, Tensor topk_probs,
    std::vector<Tensor> w1, std::vector<Tensor> w2, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> shared_probs, std::int64_t layout,
    std::optional<Tensor> waves) {
  align(x);
  const Call call(key);
  const LayerShape& shape = call.shape();
  const Weights weights(w1, w2, shape, layout_of(layout), key);
  auto arguments = call_of(shape, key, overflow, x, topk_ids, topk_probs, weights, schedule,
                           {b1, b2}, {shared_w1, shared_w2}, shared_probs);
  Results results(shape, x, flag, 0);
  Tensor scratch = empty(x, ScalarType::Byte, {shape.forward_bytes});
  arguments.memory.forward_memory = scratch.mutable_data_ptr();
  uniep_saved* saved = nullptr;
  arguments.saved = &saved;
  const Waves events(waves);
  events.set(arguments);
  run(call, arguments, results, overflow);
  return {results.out, reinterpret_cast<std::intptr_t>(saved)};
}

}  // namespace uniep::ops
