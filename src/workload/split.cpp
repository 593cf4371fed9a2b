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
  problem_.activation = layer.activation;
  problem_.probs = layer.probs;
  problem_.combine_groups = layer.combine_groups;
  problem_.combine_partials = layer.combine_partials;
  problem_.bias = layer.has_bias();
  problem_.shared_experts = layer.shared_experts;
  problem_.shared_gate = layer.shared_experts == 0 || !layer.shared_probs.empty();
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

template <class Vector>
auto Split::shared_rows(Vector& tensor, int rank) const {
  const Part none{};
  return rows_of(tensor, tensor.empty() ? none : tokens(rank), layer_.shared_experts);
}

template <class Vector>
auto Split::weights(Vector& w1, Vector& w2, Vector& b1, Vector& b2, int rank) const {
  const auto of_rank = [&](Vector& tensor, std::int64_t width) {
    const Part none{};
    return rows_of(tensor, tensor.empty() ? none : experts(rank), width);
  };
  using T = typename decltype(of_rank(w1, 0))::element_type;
  return Parts<T>{of_rank(w1, layer_.w1_rows() * layer_.hidden),
                  of_rank(w2, layer_.hidden * layer_.intermediate), of_rank(b1, layer_.w1_rows()),
                  of_rank(b2, layer_.hidden)};
}

ForwardArgs Split::forward_args(int rank, LayerResult& result) const {
  const Weights w = weights(layer_.w1, layer_.w2, layer_.b1, layer_.b2, rank);
  return {.x = rows_of(layer_.x, tokens(rank), layer_.hidden),
          .topk_probs = rows_of(layer_.topk_probs, tokens(rank), layer_.topk),
          .w1 = w.w1,
          .w2 = w.w2,
          .out = rows_of(result.out, tokens(rank), layer_.hidden),
          .b1 = w.b1,
          .b2 = w.b2,
          .shared_w1 = layer_.shared_w1,
          .shared_w2 = layer_.shared_w2,
          .shared_probs = shared_rows(layer_.shared_probs, rank)};
}

template <class Vector>
auto Split::part_of_rank(Vector& grads, std::size_t size, int rank) const {
  const std::size_t first = static_cast<std::size_t>(rank) * size;
  ensure(first + size <= grads.size(), "a result has no part of rank ", rank);
  return std::span(grads).subspan(first, size);
}

BackwardArgs Split::backward_args(int rank, LayerResult& result) const {
  const Weights w = weights(layer_.w1, layer_.w2, layer_.b1, layer_.b2, rank);
  BackwardArgs args{.dy = rows_of(layer_.dy, tokens(rank), layer_.hidden),
                    .w1 = w.w1,
                    .w2 = w.w2,
                    .dx = rows_of(result.dx, tokens(rank), layer_.hidden),
                    .dprobs = rows_of(result.dprobs, tokens(rank), layer_.topk),
                    .dw1 = {},
                    .dw2 = {},
                    .x = rows_of(layer_.x, tokens(rank), layer_.hidden),
                    .b1 = w.b1,
                    .b2 = w.b2,
                    .shared_w1 = layer_.shared_w1,
                    .shared_w2 = layer_.shared_w2,
                    .dshared_probs = shared_rows(result.dshared_probs, rank)};
  const auto set_grads = [&](const auto& of_rank) {
    args.dw1 = of_rank.w1;
    args.dw2 = of_rank.w2;
    args.db1 = of_rank.b1;
    args.db2 = of_rank.b2;
  };
  const auto set_shared = [&](auto& dw1, auto& dw2) {
    args.dshared_w1 = part_of_rank(dw1, layer_.shared_w1.size(), rank);
    args.dshared_w2 = part_of_rank(dw2, layer_.shared_w2.size(), rank);
  };
  if (result.main_dw1.empty()) {
    set_grads(weights(result.dw1, result.dw2, result.db1, result.db2, rank));
    set_shared(result.dshared_w1, result.dshared_w2);
  } else {
    set_grads(weights(result.main_dw1, result.main_dw2, result.main_db1, result.main_db2, rank));
    set_shared(result.main_dshared_w1, result.main_dshared_w2);
  }
  return args;
}

LayerResult make_result(const LayerData& layer, const ResultTensors& tensors) {
  constexpr bf16 kNan{0x7fff};
  constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();
  const std::size_t activations = count(layer.tokens, layer.hidden);
  LayerResult result;
  result.out.assign(activations, kNan);
  if (!tensors.backward) return result;
  result.dx.assign(activations, kNan);
  result.dprobs.assign(count(layer.tokens, layer.topk), kFloatNan);
  result.dshared_probs.assign(count(layer.tokens, layer.shared_experts), kFloatNan);
  const auto parts = static_cast<std::size_t>(tensors.ranks);
  if (tensors.main_grad) {
    result.main_dw1.assign(layer.w1.size(), 0);
    result.main_dw2.assign(layer.w2.size(), 0);
    result.main_db1.assign(layer.b1.size(), 0);
    result.main_db2.assign(layer.b2.size(), 0);
    result.main_dshared_w1.assign(parts * layer.shared_w1.size(), 0);
    result.main_dshared_w2.assign(parts * layer.shared_w2.size(), 0);
  } else {
    result.dw1.assign(layer.w1.size(), kNan);
    result.dw2.assign(layer.w2.size(), kNan);
    result.db1.assign(layer.b1.size(), kNan);
    result.db2.assign(layer.b2.size(), kNan);
    result.dshared_w1.assign(parts * layer.shared_w1.size(), kNan);
    result.dshared_w2.assign(parts * layer.shared_w2.size(), kNan);
  }
  return result;
}

void clear_main_grad(const Split& split, int rank, LayerResult& result) {
  if (result.main_dw1.empty()) return;
  const BackwardArgs args = split.backward_args(rank, result);
  for (const WeightGrad& grad :
       {args.dw1, args.dw2, args.db1, args.db2, args.dshared_w1, args.dshared_w2}) {
    std::ranges::fill(std::get<ExpertMatrices<float>>(grad).tensor(), 0.0f);
  }
}

}  // namespace uniep::workload
