#include "workload/random.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <system_error>
#include <thread>
#include <vector>

#include "base/cpu_info.h"

namespace uniep::workload {
namespace {

static_assert(FLT_EVAL_METHOD == 0, "results must not depend on extra precision of registers");

constexpr std::size_t kBlock = 4096;         // values drawn at once, even
constexpr std::size_t kPerThread = 1 << 20;  // fewer values are not worth a thread
constexpr std::size_t kMaxThreads = 16;      // more are limited by memory

std::uint64_t key_of(std::uint64_t seed, std::uint64_t stream) {
  return mixed_bits(mixed_bits(seed + kGolden) + (stream + 1) * kGolden);
}

}  // namespace

double portable_exp(double x) {
  if (x < -700) return 0;  // and nothing below needs subnormal numbers
  const int power = static_cast<int>(x / kLn2 - 0.5);
  const double r = x - power * kLn2;  // -0.35 to 0.35
  double series = 1;
  for (int n = 13; n >= 1; --n) series = 1 + r / n * series;
  const auto scale = static_cast<std::uint64_t>(1023 + power) << kMantissaBits;
  return series * std::bit_cast<double>(scale);
}

NormalStream::NormalStream(std::uint64_t seed, std::uint64_t stream) : key_(key_of(seed, stream)) {}

void NormalStream::fill(std::uint64_t first, std::span<double> out) const {
  for (std::size_t i = 0; i < out.size(); i += 2) {
    const NormalPair pair = normal_pair(key_, (first + i) / 2);
    out[i] = pair.even;
    if (i + 1 < out.size()) out[i + 1] = pair.odd;
  }
}

void NormalStream::fill(std::uint64_t first, std::span<bf16> out, double scale) const {
  const auto fill_range = [&](std::size_t begin, std::size_t end) {
    std::array<double, kBlock> block;
    for (std::size_t i = begin; i < end; i += kBlock) {
      const std::size_t n = std::min(kBlock, end - i);
      fill(first + i, std::span(block).first(n));
      for (std::size_t j = 0; j < n; ++j) {
        out[i + j] = to_bf16(static_cast<float>(scale * block[j]));
      }
    }
  };
  const auto cores = static_cast<std::size_t>(std::max(1, usable_cpus()));
  const std::size_t threads =
      std::clamp<std::size_t>(out.size() / kPerThread, 1, std::min(cores, kMaxThreads));
  // Ranges start at even indices, as a pair of values comes from one hash.
  const std::size_t step = (out.size() / threads / 2 + 1) * 2;
  std::vector<std::jthread> others;
  std::size_t started = 1;
  try {
    for (; started < threads; ++started) {
      others.emplace_back(fill_range, started * step, std::min(out.size(), (started + 1) * step));
    }
  } catch (const std::system_error&) {
    // No more threads for this process: the rest is done here.
  }
  for (std::size_t t = started; t < threads; ++t) {
    fill_range(t * step, std::min(out.size(), (t + 1) * step));
  }
  fill_range(0, std::min(out.size(), step));
}

UniformStream::UniformStream(std::uint64_t seed, std::uint64_t stream)
    : key_(key_of(seed, stream)) {}

double UniformStream::operator[](std::uint64_t index) const {
  return static_cast<double>(mixed_bits(key_ + (index + 1) * kGolden) >> 11) * 0x1p-53;
}

}  // namespace uniep::workload
