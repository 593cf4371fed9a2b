#include "forward.h"

#include "call.h"

namespace uniep::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Tensor key, Tensor overflow, Tensor x, Tensor topk_ids, Tensor topk_probs, Tensor w1, Tensor w2,
    std::int64_t rows, std::int64_t rows_of_x, std::int64_t rows_of_h, std::int64_t plan_bytes,
    bool flag, std::optional<std::string> schedule) {
  const Call call(key);
  const LayerShape& shape = call.shape();
  if (rows != shape.rows || rows_of_x != shape.rows_of_x || rows_of_h != shape.rows_of_h ||
      plan_bytes != shape.plan_bytes) {
    refuse("the workspace has grown since its figures were read; read rows and plan_bytes again");
  }
  const std::int64_t tokens = x.dim() == 2 ? x.size(0) : -1;
  require(x, "x", ScalarType::BFloat16, {tokens, shape.hidden}, key);
  if (tokens > shape.max_tokens) {
    refuse("x has " + std::to_string(tokens) +
           " tokens; the workspace has room for max_tokens=" + std::to_string(shape.max_tokens));
  }
  require(topk_ids, "topk_ids", ScalarType::Int, {tokens, shape.topk}, key);
  require(topk_probs, "topk_probs", ScalarType::Float, {tokens, shape.topk}, key);
  require(w1, "w1", ScalarType::BFloat16,
          {shape.local_experts, 2 * shape.intermediate, shape.hidden}, key);
  require(w2, "w2", ScalarType::BFloat16, {shape.local_experts, shape.hidden, shape.intermediate},
          key);
  require(overflow, "overflow", ScalarType::Long, {2}, key);

  Tensor out = empty(x, ScalarType::BFloat16, {tokens, shape.hidden});
  Tensor plan = empty(x, ScalarType::Byte, {plan_bytes});
  Tensor x_rows = empty(x, ScalarType::BFloat16, {rows_of_x, shape.hidden});
  Tensor h = empty(x, ScalarType::BFloat16, {rows_of_h, 2 * shape.intermediate});
  Tensor row_probs = empty(x, ScalarType::Float, {rows});
  std::optional<Tensor> status;
  if (flag) status = empty(x, ScalarType::Long, {2});

  uniep_forward_call arguments{};
  arguments.tokens = tokens;
  arguments.topk_ids = static_cast<const std::int32_t*>(topk_ids.const_data_ptr());
  arguments.topk_probs = static_cast<const float*>(topk_probs.const_data_ptr());
  arguments.x = x.const_data_ptr();
  arguments.w1 = w1.const_data_ptr();
  arguments.w2 = w2.const_data_ptr();
  arguments.out = out.mutable_data_ptr();
  arguments.plan = plan.mutable_data_ptr();
  if (rows_of_x > 0) arguments.x_rows = x_rows.mutable_data_ptr();
  if (rows_of_h > 0) arguments.h = h.mutable_data_ptr();
  arguments.row_probs = static_cast<float*>(row_probs.mutable_data_ptr());
  if (status) arguments.overflow = static_cast<std::int64_t*>(status->mutable_data_ptr());
  arguments.schedule = text_of(schedule);
  arguments.stream = current_stream(x);
  Call::check(uniep_forward(call.layer(), &arguments));
  if (status) raise_to(overflow, *status);
  return {out, plan, x_rows, h, row_probs};
}

}  // namespace uniep::ops
