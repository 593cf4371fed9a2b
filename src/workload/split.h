#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/layer_data.h"
#include "uniep/layer.h"
#include "uniep/problem.h"

namespace uniep::workload {

/// Indices [begin, end) of a rank.
struct Part {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// The token at which each of N ranks begins, and T: rank r gets [r T / N, (r + 1) T / N). Throws
/// Error(kInvalidArgument) for less than one rank.
std::vector<std::int64_t> even_parts(std::int64_t tokens, int ranks);

/// How a global layer is dealt out: contiguous parts of the tokens, by default even_parts, and the
/// r-th of N equal parts of the experts. Parts are contiguous, so a rank's tensors are views of the
/// global ones, and its results are written straight to their place in global order.
class Split {
 public:
  /// Throws Error(kInvalidArgument) where the experts do not divide. Keeps a reference to `layer`.
  Split(const LayerData& layer, int ranks);
  /// Deals out parts of the tokens of any sizes: rank r gets [token_begin[r], token_begin[r + 1]).
  Split(const LayerData& layer, std::vector<std::int64_t> token_begin);

  int ranks() const { return ranks_; }
  const Problem& problem() const { return problem_; }
  Part tokens(int rank) const;
  Part experts(int rank) const;

  std::span<const std::int32_t> topk_ids(int rank) const;
  ForwardArgs forward_args(int rank, LayerResult& result) const;
  /// Weight gradients go to main_dw1 and so on where `result` has them, else to dw1 and so on.
  BackwardArgs backward_args(int rank, LayerResult& result) const;

 private:
  /// A rank's part of w1, w2, b1 and b2, or of their gradients.
  template <class T>
  struct Parts {
    std::span<T> w1, w2, b1, b2;
  };
  using Weights = Parts<const bf16>;
  template <class Vector>
  auto weights(Vector& w1, Vector& w2, Vector& b1, Vector& b2, int rank) const;

  /// A rank's rows of shared_probs, or of their gradients.
  template <class Vector>
  auto shared_rows(Vector& tensor, int rank) const;
  /// Each rank has gradients of its own for shared experts, one behind another in the tensor.
  template <class Vector>
  auto part_of_rank(Vector& grads, std::size_t size, int rank) const;

  const LayerData& layer_;
  int ranks_;
  std::vector<std::int64_t> token_begin_;  // [ranks + 1]
  Problem problem_;
};

/// Which tensors a result has room for.
struct ResultTensors {
  bool backward = true;
  bool main_grad = false;
  int ranks = 1;  ///< each has a part of its own of the weight gradients of shared experts
};

/// A result of the right sizes, filled with NaNs: what a pass forgets to write shows. Main
/// gradients are zeros, which a pass adds to.
LayerResult make_result(const LayerData& layer, const ResultTensors& tensors);

/// Zeros in the part of the main gradients, if there are any, that belongs to `rank`.
void clear_main_grad(const Split& split, int rank, LayerResult& result);

}  // namespace uniep::workload
