#include "rows.h"

#include "call.h"

namespace uniep::ops {

Tensor add_rows(Tensor rows, Tensor more, Tensor row, Tensor ids, std::optional<Tensor> factors,
                std::int64_t num_experts, std::int64_t combine_groups, bool bf16_partials) {
  if (rows.dim() != 2 || ids.dim() != 2) refuse("rows and ids must have two dimensions each");
  const std::int64_t tokens = ids.size(0), topk = ids.size(1), hidden = rows.size(1);
  require(rows, "rows", ScalarType::BFloat16, {-1, hidden}, ids);
  require(more, "more", ScalarType::BFloat16, {-1, hidden}, ids);
  require(row, "row", ScalarType::Long, {tokens, topk}, ids);
  require(ids, "ids", ScalarType::Int, {tokens, topk}, ids);
  Tensor out = empty(ids, ScalarType::BFloat16, {tokens, hidden});
  uniep_rows_call call{};
  call.backend = ids.is_cuda() ? 1 : 0;
  call.device = ids.is_cuda() ? ids.get_device_index() : 0;
  call.tokens = tokens;
  call.hidden = hidden;
  call.topk = topk;
  call.num_experts = num_experts;
  call.combine_groups = combine_groups;
  call.combine_partials = bf16_partials ? 1 : 0;
  call.ids = static_cast<const std::int32_t*>(ids.const_data_ptr());
  if (factors) {
    require(*factors, "factors", ScalarType::Float, {tokens, topk}, ids);
    call.factors = static_cast<const float*>(factors->const_data_ptr());
  }
  call.row = static_cast<const std::int64_t*>(row.const_data_ptr());
  call.rows = rows.const_data_ptr();
  call.more = more.const_data_ptr();
  call.num_rows = rows.size(0);
  call.num_more = more.size(0);
  call.out = out.mutable_data_ptr();
  call.stream = current_stream(ids);
  Call::check(uniep_add_rows(&call));
  return out;
}

}  // namespace uniep::ops
