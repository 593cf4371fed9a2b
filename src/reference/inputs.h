#pragma once

#include <cstdint>
#include <vector>

#include "base/layer_data.h"

namespace uniep::reference {

/// LayerData with its numbers widened to T, which is exact for T = float and double. The oracle
/// computes from this, so that a test may also hand it numbers that no bf16 can hold.
template <class T>
struct Inputs {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;        // H
  std::int64_t intermediate = 0;  // I
  int num_experts = 0;            // E
  int topk = 0;                   // K
  Activation activation = Activation::kSwiglu;
  Probs probs = Probs::kBefore;
  int combine_groups = 1;
  CombinePartials combine_partials = CombinePartials::kFp32;
  int shared_experts = 0;  // S

  std::vector<T> x;                    // [tokens, H]
  std::vector<std::int32_t> topk_ids;  // [tokens, K]; -1: dropped slot
  std::vector<T> topk_probs;           // [tokens, K]
  std::vector<T> w1;                   // [E, 2I, H]: gate rows, then up rows; without a gate I
  std::vector<T> w2;                   // [E, H, I]
  std::vector<T> dy;                   // [tokens, H]; empty: forward pass only
  std::vector<T> b1{};                 // [E, 2I], as w1's rows; empty: no biases
  std::vector<T> b2{};                 // [E, H]; empty like b1
  std::vector<T> shared_w1{};          // [S, 2I, H], as w1
  std::vector<T> shared_w2{};          // [S, H, I]
  std::vector<T> shared_probs{};       // [tokens, S]

  std::int64_t w1_rows() const { return (is_gated(activation) ? 2 : 1) * intermediate; }

  /// Whether gradients are wanted. With no tokens at all they are, and the weights' are zero.
  bool backward() const { return !dy.empty() || tokens == 0; }
};

/// Throws Error(kInvalidArgument) where a size or an expert id does not fit.
template <class T>
Inputs<T> widen(const LayerData& layer);

/// The results of a layer, as T; a forward pass fills out alone.
template <class T>
struct Outputs {
  std::vector<T> out;            // [tokens, H]
  std::vector<T> dx;             // [tokens, H]
  std::vector<T> dprobs;         // [tokens, K]; 0 at dropped slots
  std::vector<T> dw1;            // as w1
  std::vector<T> dw2;            // [E, H, I]
  std::vector<T> db1;            // as b1
  std::vector<T> db2;            // as b2
  std::vector<T> dshared_probs;  // [tokens, S]
  std::vector<T> dshared_w1;     // as shared_w1
  std::vector<T> dshared_w2;     // [S, H, I]
};

}  // namespace uniep::reference
