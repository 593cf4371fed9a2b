#include "bench/bench_sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "base/cpu_info.h"
#include "reference/exact_activation.h"
#include "tune/model/parallel.h"

namespace uniep::tool {
namespace {

using workload::Tensor;
using Row = std::vector<double>;

double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(Row& to, double factor, const Row& row) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += factor * row[i];
}

/// Calls body(0) to body(count - 1), on this rank's share of the cores.
void in_parallel(std::size_t count, int ranks, const std::function<void(std::size_t)>& body) {
  const auto share = static_cast<std::size_t>(usable_cpus() / ranks);
  tune::for_each_in_parallel(count, share, body);
}

/// Any element of the layer's inputs.
class Inputs {
 public:
  explicit Inputs(const BenchCase& bench) : bench_(bench) {}

  Row values(Tensor tensor, std::int64_t first, std::int64_t count) const {
    Row wide;
    wide.reserve(static_cast<std::size_t>(count));
    for (const bf16 v : stored(tensor, first, count)) wide.push_back(to_float(v));
    return wide;
  }
  Row token(Tensor tensor, std::int64_t index) const {
    return values(tensor, index * bench_.spec.hidden, bench_.spec.hidden);
  }
  Row w1_row(std::int64_t expert, std::int64_t row) const {
    const auto& s = bench_.spec;
    return values(Tensor::kW1, (expert * 2 * s.intermediate + row) * s.hidden, s.hidden);
  }
  Row w2_row(std::int64_t expert, std::int64_t row) const {
    const auto& s = bench_.spec;
    return values(Tensor::kW2, (expert * s.hidden + row) * s.intermediate, s.intermediate);
  }
  std::int64_t expert_of(std::int64_t slot) const {
    return bench_.routing.topk_ids[static_cast<std::size_t>(slot)];
  }
  double prob_of(std::int64_t slot) const {
    return bench_.routing.topk_probs[static_cast<std::size_t>(slot)];
  }

 private:
  std::vector<bf16> stored(Tensor tensor, std::int64_t first, std::int64_t count) const {
    if (bench_.layer) {
      const auto begin = tensor_of(*bench_.layer, tensor).begin() + first;
      return {begin, begin + count};
    }
    const workload::Numbers numbers = workload::numbers_of(tensor, bench_.spec, bench_.seed);
    std::vector<bf16> made(static_cast<std::size_t>(count));
    numbers.stream.fill(static_cast<std::uint64_t>(first), made, numbers.scale);
    return made;
  }

  const BenchCase& bench_;
};

/// SwiGLU of one row and column, and what its gradient makes of `da`.
struct Activation {
  double a, dprob, dgate, dup;

  Activation(double gate, double up, double prob, double da)
      : Activation(reference::exact_activations::silu(gate), up, prob, da) {}

 private:
  Activation(reference::ExactValueSlope silu, double up, double prob, double da)
      : a(prob * silu.value * up),
        dprob(da * silu.value * up),
        dgate(prob * da * up * silu.slope),
        dup(prob * da * silu.value) {}
};

/// What one (token, k) contributes to its token.
struct SlotResult {
  Row y{}, dx{};
  double dprob = 0;
  double dprob_squares = 0;  ///< of the terms that it is the sum of
};

SlotResult dropped_slot(const workload::ShapeSpec& s, bool backward) {
  const auto hidden = static_cast<std::size_t>(s.hidden);
  return {.y = Row(hidden), .dx = Row(backward ? hidden : 0)};
}

SlotResult exact_slot(const Inputs& in, const workload::ShapeSpec& s, std::int64_t slot,
                      bool backward) {
  const std::int64_t expert = in.expert_of(slot);
  if (expert < 0) return dropped_slot(s, backward);
  const double prob = in.prob_of(slot);
  const Row x = in.token(Tensor::kX, slot / s.topk);
  const Row dy = backward ? in.token(Tensor::kDy, slot / s.topk) : Row();
  const auto inter = static_cast<std::size_t>(s.intermediate);
  Row h(2 * inter), a(inter), da(inter);
  for (std::size_t j = 0; j < h.size(); ++j) {
    h[j] = dot(in.w1_row(expert, static_cast<std::int64_t>(j)), x);
  }
  for (std::size_t i = 0; i < inter; ++i) a[i] = Activation(h[i], h[inter + i], prob, 0).a;

  SlotResult result{.y = Row(x.size()), .dx = Row(backward ? x.size() : 0)};
  for (std::size_t r = 0; r < result.y.size(); ++r) {
    const Row w2 = in.w2_row(expert, static_cast<std::int64_t>(r));
    result.y[r] = dot(w2, a);
    if (backward) add_scaled(da, dy[r], w2);
  }
  if (!backward) return result;
  for (std::size_t i = 0; i < inter; ++i) {
    const Activation d(h[i], h[inter + i], prob, da[i]);
    result.dprob += d.dprob;
    result.dprob_squares += d.dprob * d.dprob;
    add_scaled(result.dx, d.dgate, in.w1_row(expert, static_cast<std::int64_t>(i)));
    add_scaled(result.dx, d.dup, in.w1_row(expert, static_cast<std::int64_t>(inter + i)));
  }
  return result;
}

/// Tokens spread evenly over a rank's.
std::vector<std::int64_t> sampled_tokens(std::int64_t tokens) {
  const std::int64_t count = std::min(tokens, kSampledTokens);
  std::vector<std::int64_t> sampled;
  for (std::int64_t i = 0; i < count; ++i) sampled.push_back((2 * i + 1) * tokens / (2 * count));
  return sampled;
}

void add_run(Sample& sample, std::int64_t first, const Row& exact) {
  sample.runs.push_back({first, static_cast<std::int64_t>(exact.size())});
  sample.exact.insert(sample.exact.end(), exact.begin(), exact.end());
}

std::vector<Sample> token_samples(const BenchCase& bench, int rank, bool backward) {
  const Inputs in(bench);
  const workload::ShapeSpec& s = bench.spec;
  const std::vector<std::int64_t> tokens = sampled_tokens(bench.tokens(rank));
  const auto topk = static_cast<std::size_t>(s.topk);
  std::vector<SlotResult> slots(tokens.size() * topk);
  in_parallel(slots.size(), bench.ranks, [&](std::size_t i) {
    const std::int64_t token = bench.first_token(rank) + tokens[i / topk];
    const auto slot = token * s.topk + static_cast<std::int64_t>(i % topk);
    slots[i] = exact_slot(in, s, slot, backward);
  });

  Sample out{.tensor = ResultTensor::kOut};
  Sample dx{.tensor = ResultTensor::kDx};
  Sample dprobs{.tensor = ResultTensor::kDprobs};
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    SlotResult sum{.y = Row(static_cast<std::size_t>(s.hidden)),
                   .dx = Row(static_cast<std::size_t>(s.hidden))};
    Row token_dprobs;
    for (std::size_t k = 0; k < topk; ++k) {
      const SlotResult& slot = slots[t * topk + k];
      add_scaled(sum.y, 1, slot.y);
      token_dprobs.push_back(slot.dprob);
      dprobs.terms.push_back(std::sqrt(slot.dprob_squares));
      if (backward) add_scaled(sum.dx, 1, slot.dx);
    }
    add_run(out, tokens[t] * s.hidden, sum.y);
    add_run(dx, tokens[t] * s.hidden, sum.dx);
    add_run(dprobs, tokens[t] * s.topk, token_dprobs);
  }
  return backward ? std::vector{out, dx, dprobs} : std::vector{out};
}

/// Which elements of an expert's weight gradients are sampled: columns [column, + kSampledColumns)
/// of the intermediate dimension, [hidden, + hidden_count) of the other.
struct WeightBlock {
  std::int64_t expert, column, hidden, hidden_count;
};

/// What one row of the expert adds to a weight gradient: products of these.
struct RowFactors {
  Row x, dy;          // [hidden_count]
  Row a, dgate, dup;  // [kSampledColumns]
};

/// The weights that the sampled columns depend on, each of the width of a token.
struct BlockWeights {
  std::vector<Row> gate, up, down;

  BlockWeights(const Inputs& in, const workload::ShapeSpec& s, const WeightBlock& block) {
    down.assign(kSampledColumns, Row(static_cast<std::size_t>(s.hidden)));
    for (std::int64_t c = 0; c < kSampledColumns; ++c) {
      gate.push_back(in.w1_row(block.expert, block.column + c));
      up.push_back(in.w1_row(block.expert, s.intermediate + block.column + c));
    }
    for (std::int64_t r = 0; r < s.hidden; ++r) {
      const std::int64_t first = (block.expert * s.hidden + r) * s.intermediate + block.column;
      const Row columns = in.values(Tensor::kW2, first, kSampledColumns);
      for (std::size_t c = 0; c < down.size(); ++c) {
        down[c][static_cast<std::size_t>(r)] = columns[c];
      }
    }
  }
};

RowFactors row_factors(const Inputs& in, const workload::ShapeSpec& s, const WeightBlock& block,
                       const BlockWeights& weights, std::int64_t slot) {
  const Row x = in.token(Tensor::kX, slot / s.topk);
  const Row dy = in.token(Tensor::kDy, slot / s.topk);
  RowFactors f;
  f.x.assign(x.begin() + block.hidden, x.begin() + block.hidden + block.hidden_count);
  f.dy.assign(dy.begin() + block.hidden, dy.begin() + block.hidden + block.hidden_count);
  for (std::size_t c = 0; c < kSampledColumns; ++c) {
    const Activation d(dot(weights.gate[c], x), dot(weights.up[c], x), in.prob_of(slot),
                       dot(weights.down[c], dy));
    f.a.push_back(d.a);
    f.dgate.push_back(d.dgate);
    f.dup.push_back(d.dup);
  }
  return f;
}

/// In the middle of the first expert of a rank that has rows; nothing where none has.
std::optional<WeightBlock> sampled_block(const BenchCase& bench, int rank) {
  const workload::ShapeSpec& s = bench.spec;
  const auto first = bench.rows_per_expert.begin() + rank * bench.local_experts();
  const auto last = first + bench.local_experts();
  const auto expert = std::find_if(first, last, [](std::int64_t rows) { return rows > 0; });
  if (expert == last) return std::nullopt;
  const std::int64_t hidden_count = std::min(kSampledHidden, s.hidden);
  return WeightBlock{.expert = expert - bench.rows_per_expert.begin(),
                     .column = s.intermediate / (2 * kSampledColumns) * kSampledColumns,
                     .hidden = (s.hidden - hidden_count) / 2,
                     .hidden_count = hidden_count};
}

/// The factors of every row of the block's expert.
std::vector<RowFactors> all_row_factors(const BenchCase& bench, const WeightBlock& block) {
  const Inputs in(bench);
  std::vector<std::int64_t> slots;
  for (std::size_t i = 0; i < bench.routing.topk_ids.size(); ++i) {
    const auto slot = static_cast<std::int64_t>(i);
    if (in.expert_of(slot) == block.expert) slots.push_back(slot);
  }
  const BlockWeights weights(in, bench.spec, block);
  std::vector<RowFactors> rows(slots.size());
  in_parallel(rows.size(), bench.ranks, [&](std::size_t r) {
    rows[r] = row_factors(in, bench.spec, block, weights, slots[r]);
  });
  return rows;
}

std::vector<Sample> weight_samples(const BenchCase& bench, int rank) {
  const auto block = sampled_block(bench, rank);
  if (!block) return {};
  const workload::ShapeSpec& s = bench.spec;
  const std::vector<RowFactors> rows = all_row_factors(bench, *block);
  const std::int64_t local = block->expert - rank * bench.local_experts();
  Sample dw1{.tensor = ResultTensor::kDw1};
  Sample dw2{.tensor = ResultTensor::kDw2};
  for (std::int64_t c = 0; c < kSampledColumns; ++c) {
    Row gate(static_cast<std::size_t>(block->hidden_count)), up = gate;
    for (const RowFactors& f : rows) {
      add_scaled(gate, f.dgate[static_cast<std::size_t>(c)], f.x);
      add_scaled(up, f.dup[static_cast<std::size_t>(c)], f.x);
    }
    const std::int64_t row = local * 2 * s.intermediate + block->column + c;
    add_run(dw1, row * s.hidden + block->hidden, gate);
    add_run(dw1, (row + s.intermediate) * s.hidden + block->hidden, up);
  }
  for (std::int64_t i = 0; i < block->hidden_count; ++i) {
    Row down(kSampledColumns);
    for (const RowFactors& f : rows) add_scaled(down, f.dy[static_cast<std::size_t>(i)], f.a);
    const std::int64_t row = local * s.hidden + block->hidden + i;
    add_run(dw2, row * s.intermediate + block->column, down);
  }
  return {dw1, dw2};
}

}  // namespace

std::vector<Sample> exact_samples(const BenchCase& bench, int rank, bool backward) {
  std::vector<Sample> samples = token_samples(bench, rank, backward);
  if (!backward) return samples;
  for (Sample& sample : weight_samples(bench, rank)) samples.push_back(std::move(sample));
  return samples;
}

std::int64_t count_inexact(const std::vector<double>& got, const Sample& sample) {
  const std::vector<double>& exact = sample.exact;
  double squares = 0;
  for (const double v : exact) squares += v * v;
  const double rms = exact.empty() ? 0 : std::sqrt(squares / static_cast<double>(exact.size()));
  std::int64_t inexact = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double terms = sample.terms.empty() ? 0 : sample.terms[i];
    const double allowed = kMaxSampleError * std::max({rms, std::abs(exact[i]), terms});
    inexact += std::abs(got[i] - exact[i]) <= allowed ? 0 : 1;  // a NaN compares false
  }
  return inexact;
}

}  // namespace uniep::tool
