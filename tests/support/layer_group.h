#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reference/contract.h"
#include "support/expect_same.h"
#include "support/random_case.h"
#include "uniep/layer.h"
#include "workload/split.h"

namespace uniep::testing {

/// A layer in which every rank has tokens, every expert has rows, and all ranks send to all.
inline LayerData plain_layer(int ranks, std::int64_t tokens_per_rank = 12) {
  Rng rng(static_cast<unsigned>(ranks));
  LayerData d;
  d.tokens = ranks * tokens_per_rank;
  d.hidden = 72;
  d.intermediate = 40;
  d.num_experts = 2 * ranks;
  d.topk = 2;
  d.x = random_bf16(rng, d.tokens * d.hidden, 1);
  d.dy = random_bf16(rng, d.tokens * d.hidden, 1);
  d.w1 = random_bf16(rng, d.num_experts * 2 * d.intermediate * d.hidden, 0.3f);
  d.w2 = random_bf16(rng, d.num_experts * d.hidden * d.intermediate, 0.3f);
  for (std::int64_t i = 0; i < d.tokens * d.topk; ++i) {
    d.topk_ids.push_back(static_cast<std::int32_t>(i % d.num_experts));
    d.topk_probs.push_back(0.1f + 0.01f * static_cast<float>(i % 50));
  }
  return d;
}

/// How a rank's call ended.
struct Outcome {
  std::optional<Error> error;
  double seconds = 0;
  std::string what() const { return error ? error->what() : "no error"; }
};

/// The ranks of a group with a layer, plan and saved each, which live from call to call, and one
/// global result full of NaNs that all ranks write to.
class LayerGroup {
 public:
  explicit LayerGroup(LayerData data, int ranks, bool main_grad = false)
      : data_(std::move(data)),
        split_(data_, ranks),
        group_(Communicator::cpu_group(ranks)),
        layers_(static_cast<std::size_t>(ranks)),
        plans_(static_cast<std::size_t>(ranks)),
        saved_(static_cast<std::size_t>(ranks)),
        main_grad_(main_grad) {
    clear_result();
  }

  int ranks() const { return split_.ranks(); }
  const LayerData& data() const { return data_; }
  const workload::Split& split() const { return split_; }
  const std::vector<Communicator>& group() const { return group_; }
  Layer& layer(int rank) { return *layers_[static_cast<std::size_t>(rank)]; }
  const RoutingPlan& plan(int rank) const { return *plans_[static_cast<std::size_t>(rank)]; }
  Saved& saved(int rank) { return saved_[static_cast<std::size_t>(rank)]; }
  LayerResult& result() { return result_; }
  ForwardArgs forward_args(int rank) { return split_.forward_args(rank, result_); }
  BackwardArgs backward_args(int rank) { return split_.backward_args(rank, result_); }

  void clear_result() {
    result_ = workload::make_result(data_, {.backward = true, .main_grad = main_grad_});
  }

  /// Runs body(rank) on every rank, each in a thread; nothing may throw.
  void each(const std::function<void(int)>& body) {
    run_ranks(group_, [&](Communicator& c) { body(c.rank()); });
  }

  /// The same where errors are expected.
  std::vector<Outcome> attempt(const std::function<void(int)>& body) {
    std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks()));
    each([&](int rank) {
      const auto start = std::chrono::steady_clock::now();
      Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      try {
        body(rank);
      } catch (const Error& e) {
        outcome.error = e;
      }
      outcome.seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
    return outcomes;
  }

  /// `options(rank)` may differ by rank.
  void make_layers(const std::function<LayerOptions(int)>& options = [](int) {
    return LayerOptions{};
  }) {
    each([&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      layers_[r].emplace(split_.problem(), group_[r], options(rank));
    });
  }
  void make_plans() {
    each([&](int rank) {
      plans_[static_cast<std::size_t>(rank)] = layer(rank).plan(split_.topk_ids(rank));
    });
  }
  void forward(int rank, const Schedule& schedule = {}) {
    saved(rank) = layer(rank).forward(plan(rank), forward_args(rank), schedule);
  }
  void backward(int rank, const Schedule& schedule = {}) {
    layer(rank).backward(saved(rank), backward_args(rank), schedule);
  }

  /// A whole step gives the bits of the contract.
  void expect_step_works(const std::string& what) {
    clear_result();
    each([&](int rank) {
      plans_[static_cast<std::size_t>(rank)] = layer(rank).plan(split_.topk_ids(rank));
      forward(rank);
      backward(rank);
    });
    expect_contract(what);
  }

  void expect_contract(const std::string& what) {
    expect_same_bits(
        result_,
        main_grad_ ? reference::contract_into_main_grad(data_, std::vector<float>(data_.w1.size()),
                                                        std::vector<float>(data_.w2.size()))
                   : reference::contract(data_),
        what);
  }

  /// Nothing was written since clear_result().
  void expect_untouched(const std::string& what) {
    expect_same_bits(
        result_, workload::make_result(data_, {.backward = true, .main_grad = main_grad_}), what);
  }

  void drop_layers() {
    for (auto& layer : layers_) layer.reset();
  }

 private:
  const LayerData data_;
  const workload::Split split_;
  std::vector<Communicator> group_;
  std::vector<std::optional<Layer>> layers_;
  std::vector<std::optional<RoutingPlan>> plans_;
  std::vector<Saved> saved_;
  LayerResult result_;
  const bool main_grad_;
};

}  // namespace uniep::testing
