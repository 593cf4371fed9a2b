#include "uniep/problem.h"

#include "base/activation_names.h"
#include "base/check.h"
#include "base/problem_limits.h"

namespace uniep {
namespace {

void require_range(const char* field, std::int64_t value, std::int64_t low, std::int64_t high) {
  require(value >= low && value <= high, ErrorCode::kInvalidArgument, "problem.", field, " is ",
          value, "; ", low, " to ", high, " is accepted");
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
  require(p.backward_rows >= 0 && p.backward_rows <= kMaxCapacityRows &&
              p.backward_rows % p.row_align == 0,
          ErrorCode::kInvalidArgument, "problem.backward_rows is ", p.backward_rows,
          "; 0 (all), or a multiple of row_align=", p.row_align, " up to ", kMaxCapacityRows,
          " is accepted");
  require(p.save >= Save::kRows && p.save <= Save::kNone, ErrorCode::kInvalidArgument,
          "problem.save is ", static_cast<int>(p.save),
          "; 0 (rows), 1 (tokens) and 2 (none) are accepted");
  require(p.activation >= Activation::kSwiglu && p.activation <= Activation::kSilu,
          ErrorCode::kInvalidArgument, "problem.activation is ", static_cast<int>(p.activation),
          "; 0 to ", kNumActivations - 1, " (", activation_names(), ") are accepted");
  require(p.probs == Probs::kBefore || p.probs == Probs::kAfter, ErrorCode::kInvalidArgument,
          "problem.probs is ", static_cast<int>(p.probs),
          "; 0 (before) and 1 (after) are accepted");
  require(p.combine_groups >= 1 && p.num_experts % p.combine_groups == 0,
          ErrorCode::kInvalidArgument, "problem.combine_groups is ", p.combine_groups,
          "; a divisor of num_experts=", p.num_experts, " from 1 on is accepted");
  require(p.shared_experts >= 0 && p.shared_experts <= kMaxTopk - p.topk,
          ErrorCode::kInvalidArgument, "problem.shared_experts is ", p.shared_experts,
          "; with topk=", p.topk, ", 0 to ", kMaxTopk - p.topk, " is accepted");
  require(p.shared_experts == 0 || (!p.bias && p.combine_groups == 1), ErrorCode::kInvalidArgument,
          "problem.shared_experts is ", p.shared_experts,
          p.bias ? ", and experts have biases; " : ", and there are combine groups; ",
          "shared experts are accepted without biases and with combine_groups=1");
  require(!p.slot_rows || (p.combine_groups == 1 && p.shared_experts == 0),
          ErrorCode::kInvalidArgument,
          "problem.slot_rows is true, with combine_groups=", p.combine_groups,
          " and shared_experts=", p.shared_experts, "; 1 and 0 are accepted with it");
  require_range("gathered_hosts", p.gathered_hosts, 1, kMaxGatheredHosts);
  require(p.max_tokens % p.gathered_hosts == 0, ErrorCode::kInvalidArgument,
          "problem.gathered_hosts is ", p.gathered_hosts, ", and max_tokens ", p.max_tokens,
          "; a divisor of max_tokens is accepted");
  require_range("first_host", p.first_host, -1, p.gathered_hosts - 1);
  require(p.first_host < 0 || p.gathered_hosts <= kMaxHostsInWaves, ErrorCode::kInvalidArgument,
          "problem.first_host is ", p.first_host, ", and gathered_hosts ", p.gathered_hosts,
          "; tokens of at most ", kMaxHostsInWaves,
          " hosts come in waves, and with more -1 is "
          "accepted");
  require(
      p.combine_partials == CombinePartials::kFp32 || p.combine_partials == CombinePartials::kBf16,
      ErrorCode::kInvalidArgument, "problem.combine_partials is ",
      static_cast<int>(p.combine_partials), "; 0 (fp32) and 1 (bf16) are accepted");
}

std::string to_string(const Problem& p) {
  return cat("hidden=", p.hidden, ",intermediate=", p.intermediate, ",num_experts=", p.num_experts,
             ",topk=", p.topk, ",max_tokens=", p.max_tokens, ",capacity_rows=", p.capacity_rows,
             ",row_align=", p.row_align, ",save=", name(p.save),
             ",recompute_h=", p.recompute_h ? "yes" : "no", ",backward_rows=", p.backward_rows,
             ",activation=", name(p.activation), ",probs=", name(p.probs),
             ",bias=", p.bias ? "yes" : "no", ",combine_groups=", p.combine_groups,
             ",combine_partials=", name(p.combine_partials), ",shared_experts=", p.shared_experts,
             p.shared_gate ? "" : ",shared_gate=no", p.slot_rows ? ",slot_rows=yes" : "",
             p.gathered_hosts == 1 && p.first_host == -1
                 ? ""
                 : cat(",gathered_hosts=", p.gathered_hosts, ",first_host=", p.first_host));
}

}  // namespace uniep
