#include "workload/split.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/math.h"

namespace uniep::workload {
namespace {

/// Rows `part` of a tensor whose rows have `width` elements.
template <class Vector>
auto rows_of(Vector& tensor, const Part& part, std::int64_t width) {
  return std::span(tensor).subspan(static_cast<std::size_t>(part.begin * width),
                                   static_cast<std::size_t>(part.size() * width));
}

std::size_t count(std::int64_t a, std::int64_t b, std::int64_t c = 1) {
  return static_cast<std::size_t>(a * b * c);
}

}  // namespace

std::vector<std::int64_t> even_parts(std::int64_t tokens, int ranks) {
  require(ranks >= 1, ErrorCode::kInvalidArgument, "number of ranks is ", ranks,
          "; at least 1 is accepted");
  std::vector<std::int64_t> begin;
  for (int r = 0; r <= ranks; ++r) begin.push_back(r * tokens / ranks);
  return begin;
}

Split::Split(const LayerData& layer, int ranks) : Split(layer, even_parts(layer.tokens, ranks)) {}

Split::Split(const LayerData& layer, std::vector<std::int64_t> token_begin)
    : layer_(layer),
      ranks_(static_cast<int>(token_begin.size()) - 1),
      token_begin_(std::move(token_begin)) {
  require(layer.num_experts % ranks_ == 0, ErrorCode::kInvalidArgument, layer.num_experts,
          " experts cannot be split over ", ranks_,
          " ranks; a number of ranks that divides the experts is accepted");
  problem_.hidden = layer.hidden;
  problem_.intermediate = layer.intermediate;
  problem_.num_experts = layer.num_experts;
  problem_.topk = layer.topk;
  for (int r = 0; r < ranks_; ++r) {
    problem_.max_tokens = max_of(problem_.max_tokens, tokens(r).size());
  }
}

Part Split::tokens(int rank) const {
  return {token_begin_[static_cast<std::size_t>(rank)],
          token_begin_[static_cast<std::size_t>(rank) + 1]};
}

Part Split::experts(int rank) const {
  const std::int64_t each = layer_.num_experts / ranks_;
  return {rank * each, (rank + 1) * each};
}

std::span<const std::int32_t> Split::topk_ids(int rank) const {
  return rows_of(layer_.topk_ids, tokens(rank), layer_.topk);
}

ForwardArgs Split::forward_args(int rank, LayerResult& result) const {
  const std::int64_t w_size = layer_.intermediate * layer_.hidden;
  return {.x = rows_of(layer_.x, tokens(rank), layer_.hidden),
          .topk_probs = rows_of(layer_.topk_probs, tokens(rank), layer_.topk),
          .w1 = rows_of(layer_.w1, experts(rank), 2 * w_size),
          .w2 = rows_of(layer_.w2, experts(rank), w_size),
          .out = rows_of(result.out, tokens(rank), layer_.hidden)};
}

BackwardArgs Split::backward_args(int rank, LayerResult& result) const {
  const std::int64_t w_size = layer_.intermediate * layer_.hidden;
  BackwardArgs args;
  args.x = rows_of(layer_.x, tokens(rank), layer_.hidden);
  args.dy = rows_of(layer_.dy, tokens(rank), layer_.hidden);
  args.w1 = rows_of(layer_.w1, experts(rank), 2 * w_size);
  args.w2 = rows_of(layer_.w2, experts(rank), w_size);
  args.dx = rows_of(result.dx, tokens(rank), layer_.hidden);
  args.dprobs = rows_of(result.dprobs, tokens(rank), layer_.topk);
  if (result.main_dw1.empty()) {
    args.dw1 = rows_of(result.dw1, experts(rank), 2 * w_size);
    args.dw2 = rows_of(result.dw2, experts(rank), w_size);
  } else {
    args.dw1 = rows_of(result.main_dw1, experts(rank), 2 * w_size);
    args.dw2 = rows_of(result.main_dw2, experts(rank), w_size);
  }
  return args;
}

LayerResult make_result(const LayerData& layer, const ResultTensors& tensors) {
  constexpr bf16 kNan{0x7fff};
  constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();
  const std::size_t activations = count(layer.tokens, layer.hidden);
  const std::size_t w2 = count(layer.num_experts, layer.hidden, layer.intermediate);
  LayerResult result;
  result.out.assign(activations, kNan);
  if (!tensors.backward) return result;
  result.dx.assign(activations, kNan);
  result.dprobs.assign(count(layer.tokens, layer.topk), kFloatNan);
  if (tensors.main_grad) {
    result.main_dw1.assign(2 * w2, 0);
    result.main_dw2.assign(w2, 0);
  } else {
    result.dw1.assign(2 * w2, kNan);
    result.dw2.assign(w2, kNan);
  }
  return result;
}

void clear_main_grad(const Split& split, int rank, LayerResult& result) {
  if (result.main_dw1.empty()) return;
  const std::int64_t w_size = split.problem().intermediate * split.problem().hidden;
  std::ranges::fill(rows_of(result.main_dw1, split.experts(rank), 2 * w_size), 0.0f);
  std::ranges::fill(rows_of(result.main_dw2, split.experts(rank), w_size), 0.0f);
}

}  // namespace uniep::workload
