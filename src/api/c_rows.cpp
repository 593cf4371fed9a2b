#include "api/c_support.h"
#include "base/problem_limits.h"
#include "base/row_sums.h"
#include "cpu/add_rows.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/add_rows.h"
#endif

using namespace uniep::c_api;

namespace {

void require_number(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  require(value >= low && value <= high, ErrorCode::kInvalidArgument, "call.", name, " is ", value,
          "; ", low, " to ", high, " is accepted");
}

/// Checks the figures and what is given, as far as that is known without looking at it.
uniep::RowSums sums_of(const uniep_rows_call& c) {
  require_number("tokens", c.tokens, 0, std::numeric_limits<std::int32_t>::max());
  require_number("hidden", c.hidden, uniep::kWidthMultiple, uniep::kMaxWidth);
  require(c.hidden % uniep::kWidthMultiple == 0, ErrorCode::kInvalidArgument, "call.hidden is ",
          c.hidden, "; a multiple of ", uniep::kWidthMultiple, " is accepted");
  require_number("topk", c.topk, 1, uniep::kMaxTopk);
  require_number("num_experts", c.num_experts, 1, std::numeric_limits<std::int32_t>::max());
  require(c.combine_groups >= 1 && c.num_experts % c.combine_groups == 0,
          ErrorCode::kInvalidArgument, "call.combine_groups is ", c.combine_groups,
          "; a divisor of num_experts=", c.num_experts, " from 1 on is accepted");
  constexpr std::int64_t kMostRows = std::int64_t{1} << 40;
  require_number("num_rows", c.num_rows, 0, kMostRows);
  require_number("num_more", c.num_more, 0, kMostRows);
  const std::int64_t slots = c.tokens * c.topk;
  const auto group_experts = static_cast<int>(c.num_experts / c.combine_groups);
  return {.tokens = c.tokens,
          .hidden = c.hidden,
          .topk = static_cast<int>(c.topk),
          .group_experts = c.combine_groups > 1 ? group_experts : 0,
          .rounds = truth(c.combine_partials, "call.combine_partials"),
          .ids = read_only<const std::int32_t>(c.ids, slots, "call.ids").data(),
          .factors = c.factors,
          .row = read_only<const std::int64_t>(c.row, slots, "call.row").data(),
          .rows = read_only<const bf16>(c.rows, c.num_rows * c.hidden, "call.rows").data(),
          .more = read_only<const bf16>(c.more, c.num_more * c.hidden, "call.more").data(),
          .num_rows = c.num_rows,
          .num_more = c.num_more,
          .out = elements<bf16>(c.out, c.tokens * c.hidden, "call.out").data()};
}

void require_experts(const uniep::RowSums& sums, std::int64_t num_experts) {
  const std::int64_t slots = sums.tokens * sums.topk;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    require(sums.ids[slot] < num_experts, ErrorCode::kInvalidArgument, "call.ids has ",
            sums.ids[slot], " at slot ", slot, "; less than num_experts=", num_experts,
            " is accepted");
  }
}

}  // namespace

int uniep_add_rows(const uniep_rows_call* call) {
  return guarded([&] {
    require_given(call, "call");
    const uniep::Backend backend = backend_of(call->backend);
    const uniep::RowSums sums = sums_of(*call);
    if (backend == uniep::Backend::kCpu) {
      require_experts(sums, call->num_experts);
      return uniep::cpu::add_rows(sums);
    }
#ifdef UNIEP_HAS_CUDA
    uniep::cuda::add_rows(sums, call->device, static_cast<cudaStream_t>(call->stream));
#else
    throw Error(ErrorCode::kUnsupported, uniep::kNoCuda);
#endif
  });
}
