#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/layer_data.h"
#include "schedule/axes.h"
#include "uniep/schedule.h"

namespace uniep::testing {

using Rng = std::mt19937;

inline std::int64_t pick(Rng& rng, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(high - low + 1));
}

inline bool chance(Rng& rng, int percent) { return pick(rng, 1, 100) <= percent; }

inline std::vector<bf16> random_bf16(Rng& rng, std::int64_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<bf16> values(static_cast<std::size_t>(count));
  for (bf16& v : values) v = to_bf16(normal(rng));
  return values;
}

/// Bounds of `random_layer`.
struct LayerBounds {
  std::int64_t max_tokens = 48;
  std::int64_t max_hidden = 96;
  std::int64_t max_intermediate = 96;
  int max_experts_per_rank = 4;
  /// Any activation, place of probabilities, combine groups, and biases.
  bool any_arithmetic = false;
  /// Now and then some in place of biases and combine groups.
  bool shared_experts = false;
};

/// The shared experts' tensors, with probabilities or without.
inline void draw_shared(Rng& rng, LayerData& d) {
  d.shared_w1 = random_bf16(rng, d.shared_experts * d.w1_rows() * d.hidden, 0.3f);
  d.shared_w2 = random_bf16(rng, d.shared_experts * d.hidden * d.intermediate, 0.3f);
  if (chance(rng, 50)) return;
  std::uniform_real_distribution<float> probability(0.01f, 1.0f);
  for (std::int64_t i = 0; i < d.tokens * d.shared_experts; ++i) {
    d.shared_probs.push_back(chance(rng, 5) ? 0 : probability(rng));
  }
}

/// Activations of wide range reach what they do beyond a limit, or near 0.
inline void draw_arithmetic(Rng& rng, LayerData& d) {
  d.activation = static_cast<Activation>(pick(rng, 0, kNumActivations - 1));
  d.probs = chance(rng, 50) ? Probs::kBefore : Probs::kAfter;
  while (chance(rng, 50) || d.num_experts % d.combine_groups != 0) {
    d.combine_groups = static_cast<int>(pick(rng, 1, d.num_experts));
  }
  d.combine_partials = chance(rng, 50) ? CombinePartials::kFp32 : CombinePartials::kBf16;
  const float scale = chance(rng, 30) ? 2.0f : 0.3f;
  d.w1 = random_bf16(rng, d.num_experts * d.w1_rows() * d.hidden, scale);
  if (d.shared_experts > 0) {
    d.combine_groups = 1;
    return draw_shared(rng, d);
  }
  if (chance(rng, 50)) return;
  d.b1 = random_bf16(rng, d.num_experts * d.w1_rows(), 1);
  d.b2 = random_bf16(rng, d.num_experts * d.hidden, 1);
}

/// NaN where nobody may read: probabilities of dropped slots, and tokens that have no others and no
/// shared experts.
inline void poison_dropped_slots(LayerData& d) {
  const auto width = static_cast<std::ptrdiff_t>(d.hidden);
  const bf16 nan = to_bf16(std::numeric_limits<float>::quiet_NaN());
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    bool alone = d.shared_experts == 0;
    for (std::int64_t slot = t * d.topk; slot < (t + 1) * d.topk; ++slot) {
      const bool null = d.topk_ids[static_cast<std::size_t>(slot)] < 0;
      if (null) d.topk_probs[static_cast<std::size_t>(slot)] = to_float(nan);
      alone = alone && null;
    }
    if (!alone) continue;
    std::fill_n(d.x.begin() + t * width, width, nan);
    std::fill_n(d.dy.begin() + t * width, width, nan);
  }
}

/// A layer with odd sizes and, now and then, what goes wrong first: no tokens, dropped slots with
/// NaN in them, a token that names one expert several times, experts without rows, one expert that
/// takes everything.
inline LayerData random_layer(Rng& rng, int ranks, const LayerBounds& bounds = {}) {
  LayerData d;
  d.tokens = chance(rng, 5) ? 0 : pick(rng, 1, bounds.max_tokens);
  d.hidden = 8 * pick(rng, 1, bounds.max_hidden / 8);
  d.intermediate = 8 * pick(rng, 1, bounds.max_intermediate / 8);
  d.num_experts = ranks * static_cast<int>(pick(rng, 1, bounds.max_experts_per_rank));
  d.topk = static_cast<int>(chance(rng, 70) ? pick(rng, 1, 4) : pick(rng, 1, kMaxTopk));
  if (bounds.shared_experts && chance(rng, 30)) {
    d.shared_experts = static_cast<int>(pick(rng, 1, 3));
    d.topk = std::min(d.topk, kMaxTopk - d.shared_experts);
  }
  d.x = random_bf16(rng, d.tokens * d.hidden, 1);
  d.dy = random_bf16(rng, d.tokens * d.hidden, 1);
  d.w1 = random_bf16(rng, d.num_experts * 2 * d.intermediate * d.hidden, 0.3f);
  d.w2 = random_bf16(rng, d.num_experts * d.hidden * d.intermediate, 0.3f);
  const int dropped_percent = chance(rng, 40) ? static_cast<int>(pick(rng, 1, 60)) : 0;
  const bool one_takes_all = chance(rng, 10);
  const int used_experts =
      one_takes_all
          ? 1
          : static_cast<int>(chance(rng, 30) ? pick(rng, 1, d.num_experts) : d.num_experts);
  const int first_expert = static_cast<int>(pick(rng, 0, d.num_experts - used_experts));
  std::uniform_real_distribution<float> probability(0.01f, 1.0f);
  const bool wide = chance(rng, 15);  // magnitudes whose order of addition shows
  for (std::int64_t i = 0; i < d.tokens * d.topk; ++i) {
    const bool dropped = chance(rng, dropped_percent);
    d.topk_ids.push_back(
        dropped ? -1 : static_cast<std::int32_t>(first_expert + pick(rng, 0, used_experts - 1)));
    d.topk_probs.push_back(
        wide ? std::ldexp(chance(rng, 50) ? 1.0f : -1.0f, static_cast<int>(pick(rng, -24, 24)))
             : probability(rng));
  }
  if (bounds.any_arithmetic) {
    draw_arithmetic(rng, d);
    for (float& p : d.topk_probs) {
      if (chance(rng, 5)) p = 0;  // which Probs::kAfter must not divide by
    }
  }
  poison_dropped_slots(d);
  return d;
}

/// Cuts `tokens` into a part per rank, at random places: parts may be empty.
inline std::vector<std::int64_t> random_parts(Rng& rng, std::int64_t tokens, int ranks) {
  std::vector<std::int64_t> begin{0};
  for (int r = 1; r < ranks; ++r) begin.push_back(pick(rng, 0, tokens));
  begin.push_back(tokens);
  std::sort(begin.begin(), begin.end());
  return begin;
}

/// Any value in range, not only those that are tried.
inline int random_value(Rng& rng, const AxisInfo& axis) {
  if (!axis.power_of_two) return static_cast<int>(pick(rng, axis.min, axis.max));
  if (axis.min == 0 && chance(rng, 20)) return 0;
  int value = std::max(axis.min, 1);
  while (value < axis.max && chance(rng, 70)) value *= 2;
  return value;
}

/// Any valid point of the parameter space, with at most `max_workers` workers: on each axis a value
/// that is tried on the backend or, as often, any other.
inline Schedule random_schedule(Rng& rng, const Problem& problem, int max_workers,
                                Backend backend = Backend::kCpu) {
  for (;;) {
    Schedule s;
    for (std::size_t i = 0; i < axes().size(); ++i) {
      const auto& tried = axes()[i].candidates(backend);
      const auto one_of_tried = pick(rng, 0, static_cast<std::int64_t>(tried.size()) - 1);
      set_axis(s, i,
               chance(rng, 50) ? tried[static_cast<std::size_t>(one_of_tried)]
                               : random_value(rng, axes()[i].info));
    }
    s.workers = static_cast<int>(pick(rng, 1, max_workers));
    s.dispatch_workers = static_cast<int>(pick(rng, 0, max_workers + 3));
    if (chance(rng, 50)) s.pull_tokens = static_cast<int>(pick(rng, 0, 20));
    if (!invalid_reason(s, problem)) return s;
  }
}

}  // namespace uniep::testing
