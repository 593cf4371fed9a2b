#include "uniep/problem.h"

#include <limits>

#include "base/check.h"
#include "base/math.h"
#include "base/problem_limits.h"
#include "uniep/bf16.h"

namespace uniep {
namespace {

/// Row numbers are 32 bits wide.
constexpr std::int64_t kMaxCapacityRows = std::numeric_limits<std::int32_t>::max();

void require_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
  require(value >= low && value <= high, ErrorCode::kInvalidArgument, "problem.", field, " is ",
          value, "; ", low, " to ", high, " is accepted");
}

std::int64_t most_padding(const Problem& p, int num_ranks) {
  return p.num_experts / num_ranks * (p.row_align - std::int64_t{1});
}

void require_dimension(const char* field, std::int64_t value) {
  require(value >= kWidthMultiple && value <= kMaxWidth && value % kWidthMultiple == 0,
          ErrorCode::kInvalidArgument, "problem.", field, " is ", value, "; a multiple of ",
          kWidthMultiple, " from ", kWidthMultiple, " to ", kMaxWidth, " is accepted");
}

}  // namespace

void validate(const Problem& p, int num_ranks) {
  require(num_ranks >= 1, ErrorCode::kInvalidArgument, "number of ranks is ", num_ranks,
          "; at least 1 is accepted");
  require_dimension("hidden", p.hidden);
  require_dimension("intermediate", p.intermediate);
  require_range("num_experts", p.num_experts, 1, kMaxNumExperts);
  require(p.num_experts % num_ranks == 0, ErrorCode::kInvalidArgument, "problem.num_experts is ",
          p.num_experts, ", which ", num_ranks,
          " ranks do not divide; a multiple of the number of ranks is accepted");
  require_range("topk", p.topk, 1, kMaxTopk);
  require_range("max_tokens", p.max_tokens, 0, kMaxRankTokens);
  require_range("capacity_rows", p.capacity_rows, 0, kMaxCapacityRows);
  require(p.row_align >= 16 && p.row_align <= 256 && (p.row_align & (p.row_align - 1)) == 0,
          ErrorCode::kInvalidArgument, "problem.row_align is ", p.row_align,
          "; 16, 32, 64, 128 or 256 is accepted");
}

std::int64_t rows_of_any_routing(const Problem& p, int num_ranks) {
  // The same expert may be named twice by a token, so K bounds a token's copies, not min(K, El).
  return num_ranks * p.max_tokens * p.topk + most_padding(p, num_ranks);
}

std::int64_t capacity_rows(const Problem& p, int num_ranks) {
  if (p.capacity_rows > 0) return p.capacity_rows;
  const std::int64_t any_routing = rows_of_any_routing(p, num_ranks);
  const std::int64_t row_bytes =
      static_cast<std::int64_t>(sizeof(bf16)) * (2 * p.hidden + 5 * p.intermediate);
  const bool small = any_routing * row_bytes <= kSmallLayerBytes;
  const std::int64_t usual = kDefaultLoad * p.max_tokens * p.topk + most_padding(p, num_ranks);
  const std::int64_t rows = small ? any_routing : min_of(any_routing, usual);
  return min_of(rows, kMaxCapacityRows);
}

std::string to_string(const Problem& p) {
  return cat("hidden=", p.hidden, ",intermediate=", p.intermediate, ",num_experts=", p.num_experts,
             ",topk=", p.topk, ",max_tokens=", p.max_tokens, ",capacity_rows=", p.capacity_rows,
             ",row_align=", p.row_align);
}

}  // namespace uniep
