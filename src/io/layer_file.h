#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/layer_data.h"

namespace uniep::io {

// A layer file is a safetensors file with
//   x           BF16  [T, H]       topk_ids    I32 or I64  [T, K]   -1: dropped slot
//   topk_probs  F32   [T, K]       w1          BF16        [E, 2I, H]
//   w2          BF16  [E, H, I]    dy          BF16        [T, H], may be left out
//   b1          BF16  [E, 2I]      b2          BF16        [E, H], both or neither
//   shared_w1   BF16  [S, 2I, H]   shared_w2   BF16        [S, H, I], both or neither, no biases
//   shared_probs  F32 [T, S]       with these, may be left out: each is 1
// Without a gate w1 is [E, I, H], shared_w1 [S, I, H] and b1 [E, I]: a file does not say what its
// experts compute. K from 1 to kMaxTopk, K + S too, H and I multiples of 8, all dimensions such as
// one rank can have (base/problem_limits.h), every number finite. Other tensors are ignored.

/// What a layer file holds, in figures.
struct LayerSummary {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  int num_experts = 0;
  int topk = 0;
  bool has_dy = false;
  bool has_bias = false;
  int shared_experts = 0;
  bool has_shared_probs = false;
  std::int64_t rows = 0;           ///< (token, k) copies that go to an expert
  std::int64_t dropped_slots = 0;  ///< slots with id -1
  std::int64_t min_rows = 0;       ///< of the expert with the fewest
  double median_rows = 0;
  std::int64_t max_rows = 0;               ///< of the expert with the most
  std::vector<std::string> other_tensors;  ///< names that a layer does not use
};

/// Three lines for people: dimensions, routing, what is ignored.
std::string to_string(const LayerSummary& summary);

struct LayerCheck {
  /// One sentence each; empty for a file that load_layer accepts. Many bad values of one tensor are
  /// named one by one up to a limit and counted after it.
  std::vector<std::string> findings;
  /// The summary, if the shapes are right. Ids that are out of range are in none of its counts.
  std::optional<LayerSummary> summary;
};

/// Reads a layer of that activation; throws Error(kIo) with the first finding.
LayerData load_layer(const std::filesystem::path& path,
                     Activation activation = Activation::kSwiglu);
LayerData parse_layer(std::span<const std::byte> file, std::string_view name,
                      Activation activation = Activation::kSwiglu);

/// Looks for everything that is wrong, for `uniep validate`. Never throws for what the file holds.
LayerCheck check_layer(const std::filesystem::path& path,
                       Activation activation = Activation::kSwiglu);
LayerCheck check_layer(std::span<const std::byte> file, std::string_view name,
                       Activation activation = Activation::kSwiglu);

/// Writes the layout above; `dy`, b1 and b2, and tensors of shared experts are left out where they
/// are empty.
void save_layer(const std::filesystem::path& path, const LayerData& layer);

/// Writes out, and after a backward pass dx, dprobs, dw1, dw2 and where there are biases db1 and
/// db2, where there are shared experts dshared_w1 [ranks, S, 2I, H], dshared_w2 and dshared_probs,
/// the gradients of weights as F32 where `result` has them as main_grad. `dims` gives the shapes;
/// its tensors are not looked at.
void save_result(const std::filesystem::path& path, const LayerResult& result,
                 const LayerData& dims);

}  // namespace uniep::io
