#pragma once

#include <cstdint>
#include <vector>

#include "uniep/bf16.h"
#include "uniep/problem.h"

namespace uniep {

/// One MoE layer's inputs in global order: all tokens of the batch, all experts. What a trace file
/// holds, what the oracle computes from, and what a run splits over its ranks.
struct LayerData {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;        // H
  std::int64_t intermediate = 0;  // I
  int num_experts = 0;            // E
  int topk = 0;                   // K
  Activation activation = Activation::kSwiglu;
  Probs probs = Probs::kBefore;
  int combine_groups = 1;
  CombinePartials combine_partials = CombinePartials::kFp32;

  std::vector<bf16> x;                 // [tokens, H]
  std::vector<std::int32_t> topk_ids;  // [tokens, K]; -1: dropped slot
  std::vector<float> topk_probs;       // [tokens, K]
  std::vector<bf16> w1;                // [E, 2I, H]: gate rows, then up rows; without a gate I
  std::vector<bf16> w2;                // [E, H, I]
  std::vector<bf16> dy;                // [tokens, H]; empty where only the forward pass is wanted
  std::vector<bf16> b1{};              // [E, 2I], as w1's rows; empty: no biases
  std::vector<bf16> b2{};              // [E, H]; empty like b1
  int shared_experts = 0;              // S
  std::vector<bf16> shared_w1{};       // [S, 2I, H], as w1
  std::vector<bf16> shared_w2{};       // [S, H, I]
  std::vector<float> shared_probs{};   // [tokens, S]; empty: each is 1

  /// Rows of an expert's w1.
  std::int64_t w1_rows() const { return (is_gated(activation) ? 2 : 1) * intermediate; }
  bool has_bias() const { return !b1.empty(); }
};

/// What a training step computes from LayerData, in global order. Weight gradients are either bf16
/// (dw1, dw2) or fp32 sums added into what main_grad held (main_dw1, main_dw2); the other pair is
/// empty. So it is with those of biases, where there are any. Those of shared experts are a part
/// for each rank, summed over its tokens.
struct LayerResult {
  std::vector<bf16> out;               // [tokens, H]
  std::vector<bf16> dx;                // [tokens, H]
  std::vector<float> dprobs;           // [tokens, K]; 0 at dropped slots
  std::vector<bf16> dw1;               // as w1
  std::vector<bf16> dw2;               // [E, H, I]
  std::vector<float> main_dw1;         // as w1
  std::vector<float> main_dw2;         // [E, H, I]
  std::vector<bf16> db1;               // as b1
  std::vector<bf16> db2;               // as b2
  std::vector<float> main_db1;         // as b1
  std::vector<float> main_db2;         // as b2
  std::vector<float> dshared_probs;    // [tokens, S]
  std::vector<bf16> dshared_w1;        // [ranks, S, 2I, H]
  std::vector<bf16> dshared_w2;        // [ranks, S, H, I]
  std::vector<float> main_dshared_w1;  // as dshared_w1
  std::vector<float> main_dshared_w2;
};

}  // namespace uniep
