#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "uniep/bf16.h"
#include "workload/normal.h"

namespace uniep::workload {

/// exp(x) for x <= 0 from IEEE additions, multiplications and divisions alone: the same bits with
/// every C library, unlike std::exp. Relative error below 1e-13.
double portable_exp(double x);

/// A stream of independent N(0, 1) values, each a pure function of (seed, stream, index), so that
/// neither the order nor the number of threads that draw them matters.
class NormalStream {
 public:
  NormalStream(std::uint64_t seed, std::uint64_t stream);

  /// Values first, first + 1, ... `first` must be even.
  void fill(std::uint64_t first, std::span<double> out) const;

  /// `out[i] = bf16(scale * value first + i)`, on several threads where that pays.
  void fill(std::uint64_t first, std::span<bf16> out, double scale) const;

  /// What `normal_pair` takes.
  std::uint64_t key() const { return key_; }

 private:
  std::uint64_t key_;
};

/// A stream of independent values that are even in [0, 1), each a pure function of (seed, stream,
/// index).
class UniformStream {
 public:
  UniformStream(std::uint64_t seed, std::uint64_t stream);
  double operator[](std::uint64_t index) const;

 private:
  std::uint64_t key_;
};

}  // namespace uniep::workload
