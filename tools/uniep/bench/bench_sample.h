#pragma once

#include <cstdint>
#include <vector>

#include "bench/bench_case.h"
#include "uniep/stage.h"

namespace uniep::tool {

/// The tensors that a step computes.
enum class ResultTensor {
  kOut,
  kDx,
  kDprobs,
  kDw1,
  kDw2,
  kDb1,
  kDb2,
  kDsharedProbs,
  kDsharedW1,
  kDsharedW2
};

// What is sampled on each rank: all elements of these tokens' out, dx, dprobs and dshared_probs,
// and of the first expert that has rows a block of dw1 and dw2 and, with biases, of db1 and db2; of
// the first shared expert a block, too.
inline constexpr std::int64_t kSampledTokens = 4;
inline constexpr std::int64_t kSampledColumns = 8;  ///< of the intermediate dimension
inline constexpr std::int64_t kSampledHidden = 64;

/// A sampled element may lie this far from its float64 value, relative to the largest of that, the
/// root mean square of its tensor's samples, and the root of the sum of squares of what it is the
/// sum of, where that is known. The roundings of the numerics contract alone are 3e-3 (one standard
/// deviation); a missing or misplaced term shows as about 1.
inline constexpr double kMaxSampleError = 0.05;

/// Elements of one of a rank's tensors: runs of consecutive ones, and the float64 values of all.
struct Sample {
  struct Run {
    std::int64_t first;
    std::int64_t count;
  };
  ResultTensor tensor;
  std::vector<Run> runs{};
  std::vector<double> exact{};
  /// The root of the sum of squares of each value's terms, which may cancel; empty: there are
  /// enough values for some to be of the usual size.
  std::vector<double> terms{};
};

/// Computed from the inputs, or the streams that these are made of, by loops that share nothing
/// with a backend.
std::vector<Sample> exact_samples(const BenchCase& bench, int rank, bool backward);

/// How many of `got` are off by more than kMaxSampleError allows, NaNs and infinities included.
std::int64_t count_inexact(const std::vector<double>& got, const Sample& sample);

}  // namespace uniep::tool
