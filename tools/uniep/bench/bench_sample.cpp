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

/// Any element of the layer's inputs. A token's slots are its K, then one for each shared expert;
/// shared experts are numbered behind the others.
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
  std::int64_t w1_rows() const { return bench_.w1_rows(); }
  Row w1_row(std::int64_t expert, std::int64_t row) const {
    const std::int64_t hidden = bench_.spec.hidden;
    const auto [tensor, own] = weight_of(Tensor::kW1, Tensor::kSharedW1, expert);
    return values(tensor, (own * w1_rows() + row) * hidden, hidden);
  }
  Row w2_row(std::int64_t expert, std::int64_t row) const {
    const auto& s = bench_.spec;
    return w2_columns(expert, row, 0, s.intermediate);
  }
  Row w2_columns(std::int64_t expert, std::int64_t row, std::int64_t first,
                 std::int64_t count) const {
    const auto& s = bench_.spec;
    const auto [tensor, own] = weight_of(Tensor::kW2, Tensor::kSharedW2, expert);
    return values(tensor, (own * s.hidden + row) * s.intermediate + first, count);
  }
  /// Empty where experts have no biases.
  Row b1(std::int64_t expert) const { return bias(Tensor::kB1, expert, w1_rows()); }
  Row b2(std::int64_t expert) const { return bias(Tensor::kB2, expert, bench_.spec.hidden); }
  std::int64_t slots() const { return bench_.spec.topk + bench_.spec.shared_experts; }
  std::int64_t token_of(std::int64_t slot) const { return slot / slots(); }
  std::int64_t expert_of(std::int64_t slot) const {
    const std::int64_t shared = slot % slots() - bench_.spec.topk;
    if (shared >= 0) return bench_.spec.num_experts + shared;
    return bench_.routing.topk_ids[routed(slot)];
  }
  double prob_of(std::int64_t slot) const {
    const std::int64_t shared = slot % slots() - bench_.spec.topk;
    if (shared < 0) return bench_.routing.topk_probs[routed(slot)];
    if (bench_.shared_probs.empty()) return 1;
    const std::int64_t row = token_of(slot) * bench_.spec.shared_experts;
    return bench_.shared_probs[static_cast<std::size_t>(row + shared)];
  }

 private:
  struct Weight {
    Tensor tensor;
    std::int64_t expert;  ///< in it
  };
  Weight weight_of(Tensor routed, Tensor shared, std::int64_t expert) const {
    const int experts = bench_.spec.num_experts;
    return expert < experts ? Weight{routed, expert} : Weight{shared, expert - experts};
  }
  /// The place in the routing of a slot that is one of its token's K.
  std::size_t routed(std::int64_t slot) const {
    return static_cast<std::size_t>(token_of(slot) * bench_.spec.topk + slot % slots());
  }
  Row bias(Tensor tensor, std::int64_t expert, std::int64_t width) const {
    return bench_.spec.bias ? values(tensor, expert * width, width) : Row();
  }
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

/// One row and column of what lies between the products, and what its gradient makes of `da`. Where
/// the probability is multiplied changes roundings alone.
struct Activated {
  double a, dprob, dgate;
  double dup = 0;  ///< without a gate there is no such half, and `up` counts for nothing

  Activated(Activation activation, double gate, double up, double prob, double da)
      : Activated(reference::exact_gate(activation, gate), upper(activation, up), prob, da) {}

 private:
  using ValueSlope = reference::ExactValueSlope;

  static ValueSlope upper(Activation activation, double up) {
    return is_gated(activation) ? reference::exact_up(activation, up) : ValueSlope{1, 0};
  }
  Activated(ValueSlope gate, ValueSlope up, double prob, double da)
      : a(prob * gate.value * up.value),
        dprob(da * gate.value * up.value),
        dgate(prob * da * up.value * gate.slope),
        dup(prob * da * gate.value * up.slope) {}
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

Row exact_h(const Inputs& in, std::int64_t expert, const Row& x) {
  Row h(static_cast<std::size_t>(in.w1_rows()));
  for (std::size_t j = 0; j < h.size(); ++j) {
    h[j] = dot(in.w1_row(expert, static_cast<std::int64_t>(j)), x);
  }
  const Row b1 = in.b1(expert);
  if (!b1.empty()) add_scaled(h, 1, b1);
  return h;
}

/// The part of dprob that b2 has.
void add_dprob_of_bias(SlotResult& result, const Row& dy, const Row& b2) {
  for (std::size_t r = 0; r < b2.size(); ++r) {
    result.dprob += dy[r] * b2[r];
    result.dprob_squares += dy[r] * b2[r] * dy[r] * b2[r];
  }
}

SlotResult exact_slot(const Inputs& in, const workload::ShapeSpec& s, std::int64_t slot,
                      bool backward) {
  const std::int64_t expert = in.expert_of(slot);
  if (expert < 0) return dropped_slot(s, backward);
  const double prob = in.prob_of(slot);
  const Row x = in.token(Tensor::kX, in.token_of(slot));
  const Row dy = backward ? in.token(Tensor::kDy, in.token_of(slot)) : Row();
  const Row h = exact_h(in, expert, x);
  const Row b2 = in.b2(expert);
  const auto inter = static_cast<std::size_t>(s.intermediate);
  const auto activated = [&](std::size_t i, double da) {
    return Activated(s.activation, h[i], h[h.size() - inter + i], prob, da);
  };
  Row a(inter), da(inter);
  for (std::size_t i = 0; i < inter; ++i) a[i] = activated(i, 0).a;

  SlotResult result{.y = Row(x.size()), .dx = Row(backward ? x.size() : 0)};
  for (std::size_t r = 0; r < result.y.size(); ++r) {
    const Row w2 = in.w2_row(expert, static_cast<std::int64_t>(r));
    result.y[r] = dot(w2, a);
    if (backward) add_scaled(da, dy[r], w2);
  }
  if (!b2.empty()) add_scaled(result.y, prob, b2);
  if (!backward) return result;
  add_dprob_of_bias(result, dy, b2);
  for (std::size_t i = 0; i < inter; ++i) {
    const Activated d = activated(i, da[i]);
    result.dprob += d.dprob;
    result.dprob_squares += d.dprob * d.dprob;
    add_scaled(result.dx, d.dgate, in.w1_row(expert, static_cast<std::int64_t>(i)));
    if (!is_gated(s.activation)) continue;
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
  const auto of_token = static_cast<std::size_t>(in.slots());
  std::vector<SlotResult> slots(tokens.size() * of_token);
  in_parallel(slots.size(), bench.ranks, [&](std::size_t i) {
    const std::int64_t token = bench.first_token(rank) + tokens[i / of_token];
    const auto slot = token * in.slots() + static_cast<std::int64_t>(i % of_token);
    slots[i] = exact_slot(in, s, slot, backward);
  });

  Sample out{.tensor = ResultTensor::kOut};
  Sample dx{.tensor = ResultTensor::kDx};
  Sample dprobs{.tensor = ResultTensor::kDprobs};
  Sample dshared_probs{.tensor = ResultTensor::kDsharedProbs};
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    SlotResult sum{.y = Row(static_cast<std::size_t>(s.hidden)),
                   .dx = Row(static_cast<std::size_t>(s.hidden))};
    Row token_dprobs, token_dshared;
    for (std::size_t k = 0; k < of_token; ++k) {
      const SlotResult& slot = slots[t * of_token + k];
      add_scaled(sum.y, 1, slot.y);
      (k < topk ? token_dprobs : token_dshared).push_back(slot.dprob);
      (k < topk ? dprobs : dshared_probs).terms.push_back(std::sqrt(slot.dprob_squares));
      if (backward) add_scaled(sum.dx, 1, slot.dx);
    }
    add_run(out, tokens[t] * s.hidden, sum.y);
    add_run(dx, tokens[t] * s.hidden, sum.dx);
    add_run(dprobs, tokens[t] * s.topk, token_dprobs);
    add_run(dshared_probs, tokens[t] * s.shared_experts, token_dshared);
  }
  if (!backward) return {out};
  if (s.shared_experts == 0) return {out, dx, dprobs};
  return {out, dx, dprobs, dshared_probs};
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
  double prob = 0;
};

/// The weights that the sampled columns depend on, each of the width of a token, and their biases.
struct BlockWeights {
  std::vector<Row> gate, up, down;
  Row gate_bias, up_bias;

  BlockWeights(const Inputs& in, const workload::ShapeSpec& s, const WeightBlock& block)
      : gate_bias(kSampledColumns), up_bias(kSampledColumns) {
    // Without a gate both are the same rows.
    const std::int64_t to_up = in.w1_rows() - s.intermediate;
    const Row b1 = in.b1(block.expert);
    down.assign(kSampledColumns, Row(static_cast<std::size_t>(s.hidden)));
    for (std::int64_t c = 0; c < kSampledColumns; ++c) {
      gate.push_back(in.w1_row(block.expert, block.column + c));
      up.push_back(in.w1_row(block.expert, to_up + block.column + c));
      if (b1.empty()) continue;
      gate_bias[static_cast<std::size_t>(c)] = b1[static_cast<std::size_t>(block.column + c)];
      up_bias[static_cast<std::size_t>(c)] = b1[static_cast<std::size_t>(to_up + block.column + c)];
    }
    for (std::int64_t r = 0; r < s.hidden; ++r) {
      const Row columns = in.w2_columns(block.expert, r, block.column, kSampledColumns);
      for (std::size_t c = 0; c < down.size(); ++c) {
        down[c][static_cast<std::size_t>(r)] = columns[c];
      }
    }
  }
};

RowFactors row_factors(const Inputs& in, const workload::ShapeSpec& s, const WeightBlock& block,
                       const BlockWeights& weights, std::int64_t slot) {
  const Row x = in.token(Tensor::kX, in.token_of(slot));
  const Row dy = in.token(Tensor::kDy, in.token_of(slot));
  RowFactors f;
  f.prob = in.prob_of(slot);
  f.x.assign(x.begin() + block.hidden, x.begin() + block.hidden + block.hidden_count);
  f.dy.assign(dy.begin() + block.hidden, dy.begin() + block.hidden + block.hidden_count);
  for (std::size_t c = 0; c < kSampledColumns; ++c) {
    const Activated d(s.activation, dot(weights.gate[c], x) + weights.gate_bias[c],
                      dot(weights.up[c], x) + weights.up_bias[c], f.prob, dot(weights.down[c], dy));
    f.a.push_back(d.a);
    f.dgate.push_back(d.dgate);
    f.dup.push_back(d.dup);
  }
  return f;
}

/// The block in the middle of an expert.
WeightBlock block_of(const workload::ShapeSpec& s, std::int64_t expert) {
  const std::int64_t hidden_count = std::min(kSampledHidden, s.hidden);
  return {.expert = expert,
          .column = s.intermediate / (2 * kSampledColumns) * kSampledColumns,
          .hidden = (s.hidden - hidden_count) / 2,
          .hidden_count = hidden_count};
}

/// The block of the first expert of a rank that has rows; nothing if none has.
std::optional<WeightBlock> sampled_block(const BenchCase& bench, int rank) {
  const auto first = bench.rows_per_expert.begin() + rank * bench.local_experts();
  const auto last = first + bench.local_experts();
  const auto expert = std::find_if(first, last, [](std::int64_t rows) { return rows > 0; });
  if (expert == last) return std::nullopt;
  return block_of(bench.spec, expert - bench.rows_per_expert.begin());
}

/// The factors of every row of the block's expert, of tokens [first, last).
std::vector<RowFactors> all_row_factors(const BenchCase& bench, const WeightBlock& block,
                                        std::int64_t first, std::int64_t last) {
  const Inputs in(bench);
  std::vector<std::int64_t> slots;
  for (std::int64_t slot = first * in.slots(); slot < last * in.slots(); ++slot) {
    if (in.expert_of(slot) == block.expert) slots.push_back(slot);
  }
  const BlockWeights weights(in, bench.spec, block);
  std::vector<RowFactors> rows(slots.size());
  in_parallel(rows.size(), bench.ranks, [&](std::size_t r) {
    rows[r] = row_factors(in, bench.spec, block, weights, slots[r]);
  });
  return rows;
}

/// The sum of what an expert's rows add, in float64.
Row summed(const std::vector<RowFactors>& rows, std::size_t width,
           const std::function<void(Row&, const RowFactors&)>& add_row) {
  Row sum(width);
  for (const RowFactors& f : rows) add_row(sum, f);
  return sum;
}

/// The halves of w1's rows: the number of its first row, and what a row of the expert gives.
struct Half {
  std::int64_t first;
  Row RowFactors::*gradient;
};
std::vector<Half> halves_of(const workload::ShapeSpec& s) {
  std::vector<Half> halves{{0, &RowFactors::dgate}};
  if (is_gated(s.activation)) halves.push_back({s.intermediate, &RowFactors::dup});
  return halves;
}

Sample dw1_sample(ResultTensor tensor, const BenchCase& bench, const WeightBlock& block,
                  std::int64_t local, const std::vector<RowFactors>& rows) {
  Sample dw1{.tensor = tensor};
  for (std::size_t c = 0; c < kSampledColumns; ++c) {
    for (const Half& half : halves_of(bench.spec)) {
      const std::int64_t row =
          local * bench.w1_rows() + half.first + block.column + static_cast<std::int64_t>(c);
      add_run(dw1, row * bench.spec.hidden + block.hidden,
              summed(rows, rows.front().x.size(), [&](Row& sum, const RowFactors& f) {
                add_scaled(sum, (f.*half.gradient)[c], f.x);
              }));
    }
  }
  return dw1;
}

Sample dw2_sample(ResultTensor tensor, const BenchCase& bench, const WeightBlock& block,
                  std::int64_t local, const std::vector<RowFactors>& rows) {
  const workload::ShapeSpec& s = bench.spec;
  Sample dw2{.tensor = tensor};
  for (std::int64_t i = 0; i < block.hidden_count; ++i) {
    const std::int64_t row = local * s.hidden + block.hidden + i;
    add_run(dw2, row * s.intermediate + block.column,
            summed(rows, kSampledColumns, [&](Row& sum, const RowFactors& f) {
              add_scaled(sum, f.dy[static_cast<std::size_t>(i)], f.a);
            }));
  }
  return dw2;
}

Sample db1_sample(const BenchCase& bench, const WeightBlock& block, std::int64_t local,
                  const std::vector<RowFactors>& rows) {
  Sample db1{.tensor = ResultTensor::kDb1};
  for (const Half& half : halves_of(bench.spec)) {
    add_run(db1, local * bench.w1_rows() + half.first + block.column,
            summed(rows, kSampledColumns,
                   [&](Row& sum, const RowFactors& f) { add_scaled(sum, 1, f.*half.gradient); }));
  }
  return db1;
}

Sample db2_sample(const BenchCase& bench, const WeightBlock& block, std::int64_t local,
                  const std::vector<RowFactors>& rows) {
  Sample db2{.tensor = ResultTensor::kDb2};
  add_run(db2, local * bench.spec.hidden + block.hidden,
          summed(rows, rows.front().dy.size(),
                 [](Row& sum, const RowFactors& f) { add_scaled(sum, f.prob, f.dy); }));
  return db2;
}

std::vector<Sample> weight_samples(const BenchCase& bench, int rank) {
  const auto block = sampled_block(bench, rank);
  if (!block) return {};
  const std::vector<RowFactors> rows = all_row_factors(bench, *block, 0, bench.token_begin.back());
  const std::int64_t local = block->expert - rank * bench.local_experts();
  std::vector<Sample> samples{dw1_sample(ResultTensor::kDw1, bench, *block, local, rows),
                              dw2_sample(ResultTensor::kDw2, bench, *block, local, rows)};
  if (!bench.spec.bias) return samples;
  samples.push_back(db1_sample(bench, *block, local, rows));
  samples.push_back(db2_sample(bench, *block, local, rows));
  return samples;
}

/// A shared expert's gradients are sums over the rank's tokens.
std::vector<Sample> shared_weight_samples(const BenchCase& bench, int rank) {
  if (bench.spec.shared_experts == 0 || bench.tokens(rank) == 0) return {};
  const WeightBlock block = block_of(bench.spec, bench.spec.num_experts);
  const std::vector<RowFactors> rows =
      all_row_factors(bench, block, bench.first_token(rank), bench.first_token(rank + 1));
  return {dw1_sample(ResultTensor::kDsharedW1, bench, block, 0, rows),
          dw2_sample(ResultTensor::kDsharedW2, bench, block, 0, rows)};
}

}  // namespace

std::vector<Sample> exact_samples(const BenchCase& bench, int rank, bool backward) {
  std::vector<Sample> samples = token_samples(bench, rank, backward);
  if (!backward) return samples;
  for (Sample& sample : weight_samples(bench, rank)) samples.push_back(std::move(sample));
  for (Sample& sample : shared_weight_samples(bench, rank)) samples.push_back(std::move(sample));
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
    // What is allowed may be infinite, too.
    const bool is_exact = std::isfinite(got[i]) && std::abs(got[i] - exact[i]) <= allowed;
    inexact += is_exact ? 0 : 1;
  }
  return inexact;
}

}  // namespace uniep::tool
