#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "graph/graph.h"
#include "layer/expert_places.h"

namespace uniep::cuda {

// Weights, and gradients of weights, whose matrices one tensor map cannot describe have a map each,
// in device memory. The host encodes that of a first matrix; the GPU writes the others, ahead of
// each pass (kernels/expert_maps.cu): so nothing is encoded again when tensors move, and a captured
// pass brings its own.

/// Matrices of a weight, or of its gradient, of which each has a map.
struct MatricesApart {
  std::vector<void*> begins;  // [experts, parts]
  ExpertShape shape;
  bool in_out = false;
  std::int64_t line_stride = 0;  // elements from a row to the next, of [in, out] from a column
  bool is_cleared = false;       // by a plan that has a fault: what `enter` does not fill

  /// A line's elements, and how many lines there are.
  std::int64_t line() const { return in_out ? shape.rows : shape.cols; }
  std::int64_t lines() const { return in_out ? shape.cols : shape.rows; }
};

/// Whether one map has them all: they are one tensor, row after row.
template <class T>
bool are_one_tensor(const ExpertMatrices<T>& matrices) {
  return matrices.form() == ExpertForm::kOneTensor && !matrices.is_in_out();
}

template <class T>
MatricesApart matrices_apart(const ExpertMatrices<T>& matrices, const ExpertShape& shape) {
  const ExpertPlaces<T> places(matrices, shape);
  const bool in_out = matrices.is_in_out();
  MatricesApart apart{.begins = {},
                      .shape = shape,
                      .in_out = in_out,
                      .line_stride = in_out ? places.col_stride() : places.row_stride()};
  for (std::int64_t expert = 0; expert < shape.experts; ++expert) {
    for (std::int64_t part = 0; part < shape.parts; ++part) {
      apart.begins.push_back(const_cast<std::remove_const_t<T>*>(places.matrix(expert, part)));
    }
  }
  return apart;
}

/// The maps of one operand or output of a stage.
struct ExpertMaps {
  CUtensorMap first;  // that of the first matrix
  CUtensorMap* to;    // [experts, parts]
  MatricesApart matrices;
};

}  // namespace uniep::cuda
