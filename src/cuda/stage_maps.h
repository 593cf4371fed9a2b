#pragma once

#include <cuda.h>

#include "base/math.h"
#include "graph/layer_graph.h"

namespace uniep::cuda {

/// The maps of an operand or output that experts have, where their matrices lie apart.
struct ExpertMapTable {
  const CUtensorMap* maps = nullptr;  // [experts, parts]; null: one map has all matrices
  int parts = 1;
  int rows = 0;      // of a matrix
  int box_rows = 0;  // of boxes that run over the rows of several parts: a divisor of both
};

/// Tensor maps of one GEMM stage; those that it has no use for are unspecified.
struct StageMaps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap tokens;  // of shared experts in place of x_rows or dy_rows (tokens_in_place.h)
  CUtensorMap aux;     // what the epilogue reads
  CUtensorMap out0;
  CUtensorMap out1;
  ExpertMapTable experts;  // in place of b, or of a weight gradient's out0
};

/// Which of the products of its pass the stage is, in the order of the graph.
constexpr int product_number(Stage stage) {
  int number = 0;
  for (int i = 0; i < kLayerGraph.num_stages; ++i) {
    const StageRow& row = kLayerGraph.stages[i];
    if (row.pass != row_of(stage).pass || row.kind != StageKind::kProduct) continue;
    if (row.stage == stage) break;
    ++number;
  }
  return number;
}

constexpr int num_products(Pass pass) {
  int count = 0;
  kLayerGraph.for_each_stage(pass, [&](const StageRow& row) {
    if (row.kind == StageKind::kProduct) ++count;
  });
  return count;
}

/// The maps of all products of a pass, in the order of the graph.
struct PassMaps {
  static constexpr int kMax = max_of(num_products(Pass::kForward), num_products(Pass::kBackward));
  StageMaps stages[kMax];
};

}  // namespace uniep::cuda
