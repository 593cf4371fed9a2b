#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "base/check.h"
#include "reference/contract.h"
#include "support/expect_same.h"
#include "support/guarded_memory.h"
#include "support/layer_group.h"
#include "support/states.h"
#include "uniep/c_api.h"

// Layers and steps through the C API, whose memory is the test's.

namespace uniep::testing {

inline uniep_problem c_problem(const Problem& p) {
  return {.hidden = p.hidden,
          .intermediate = p.intermediate,
          .num_experts = p.num_experts,
          .topk = p.topk,
          .max_tokens = p.max_tokens,
          .capacity_rows = p.capacity_rows,
          .row_align = p.row_align,
          .save = static_cast<int>(p.save),
          .recompute_h = p.recompute_h ? 1 : 0,
          .activation = static_cast<std::int64_t>(p.activation),
          .probs = p.probs == Probs::kBefore ? 0 : 1,
          .bias = p.bias ? 1 : 0,
          .backward_rows = p.backward_rows,
          .combine_groups = p.combine_groups,
          .combine_partials = p.combine_partials == CombinePartials::kFp32 ? 0 : 1,
          .shared_experts = p.shared_experts,
          .no_shared_gate = p.shared_gate ? 0 : 1,
          .slot_rows = p.slot_rows ? 1 : 0,
          .gathered_hosts = p.gathered_hosts,
          .first_host = p.first_host};
}

/// What a layer does not keep is given as NULL.
inline void* data_or_null(const GuardedMemory& memory) {
  return memory.bytes().empty() ? nullptr : memory.data();
}

inline void* data_or_null(std::vector<bf16>& tensor) {
  return tensor.empty() ? nullptr : tensor.data();
}

inline float* data_or_null(std::vector<float>& numbers) {
  return numbers.empty() ? nullptr : numbers.data();
}

inline uniep_group* group_of_one() {
  uniep_group_config config{};
  config.size = 1;
  uniep_group* group = nullptr;
  EXPECT_EQ(uniep_group_create(&config, &group), 0) << uniep_last_error();
  return group;
}

inline void expect_refused(int code, const std::string& sentence,
                           ErrorCode kind = ErrorCode::kInvalidArgument) {
  EXPECT_EQ(code, 1 + static_cast<int>(kind)) << sentence;
  EXPECT_STATES(uniep_last_error(), sentence);
}

inline void expect_ok(int code) { ASSERT_EQ(code, 0) << uniep_last_error(); }

/// A layer of this process alone, all of whose memory is the test's.
class CLayer {
 public:
  explicit CLayer(const Problem& problem, bool callers_memory = true) : problem_(problem) {
    const uniep_problem p = c_problem(problem);
    expect_ok(uniep_needs(&p, 0, 1, &needs_));
    workspace_ = GuardedMemory(needs_.workspace);
    symmetric_ = GuardedMemory(needs_.symmetric);
    uniep_layer_config config{};
    config.schedule = "single,tile_m=16";
    if (callers_memory) {
      config.workspace = workspace_.data();
      config.symmetric = symmetric_.data();
    }
    uniep_group* group = group_of_one();
    expect_ok(uniep_layer_create(group, &p, &config, &layer_));
    uniep_group_destroy(group);  // the layer keeps what it needs
  }
  ~CLayer() { uniep_layer_destroy(layer_); }
  CLayer(const CLayer&) = delete;
  CLayer& operator=(const CLayer&) = delete;

  uniep_layer* get() const { return layer_; }
  const Problem& problem() const { return problem_; }
  const uniep_memory_needs& needs() const { return needs_; }
  MemoryNeeds cpp_needs() const { return Layer::memory_needs(problem_, Backend::kCpu, 1); }

 private:
  Problem problem_;
  uniep_memory_needs needs_{};
  GuardedMemory workspace_, symmetric_;
  uniep_layer* layer_ = nullptr;
};

/// One step of a layer through C structures.
class CStep {
 public:
  CStep(const CLayer& layer, LayerData data)
      : layer_(layer),
        data_(std::move(data)),
        memory_(layer.cpp_needs(), layer.problem()),
        result_(workload::make_result(data_, {})) {}

  uniep_forward_call forward_call() {
    uniep_forward_call c{};
    c.tokens = data_.tokens;
    c.topk_ids = data_.topk_ids.data();
    c.topk_probs = data_.topk_probs.data();
    c.x = data_.x.data();
    c.w1 = data_.w1.data();
    c.w2 = data_.w2.data();
    c.b1 = data_or_null(data_.b1);
    c.b2 = data_or_null(data_.b2);
    c.shared_w1 = data_or_null(data_.shared_w1);
    c.shared_w2 = data_or_null(data_.shared_w2);
    c.shared_probs = data_or_null(data_.shared_probs);
    c.out = result_.out.data();
    c.plan = memory_.plan.data();
    c.memory = {data_or_null(memory_.x_rows), data_or_null(memory_.h),
                memory_.row_probs.as<float>().data(), memory_.forward_memory.data()};
    return c;
  }
  uniep_backward_call backward_call(int part = 0) {
    uniep_backward_call c{};
    c.part = part;
    c.tokens = data_.tokens;
    c.plan = memory_.plan.data();
    c.x_rows = data_or_null(memory_.x_rows);
    c.h = data_or_null(memory_.h);
    c.row_probs = memory_.row_probs.as<float>().data();
    c.backward_memory = memory_.backward_memory.data();
    const Problem& p = layer_.problem();
    const bool in_place = p.shared_experts > 0;
    if (part != 2 || in_place) c.dy = data_.dy.data();
    if ((part != 2 && p.save == Save::kNone) || in_place) c.x = data_.x.data();
    if (part != 2) {
      c.w1 = data_.w1.data();
      c.w2 = data_.w2.data();
      c.b1 = data_or_null(data_.b1);
      c.b2 = data_or_null(data_.b2);
      c.shared_w1 = data_or_null(data_.shared_w1);
      c.shared_w2 = data_or_null(data_.shared_w2);
      c.dshared_probs = data_or_null(result_.dshared_probs);
      c.dx = result_.dx.data();
      c.dprobs = result_.dprobs.data();
    }
    if (part != 1) {
      c.dw1 = result_.dw1.data();
      c.dw2 = result_.dw2.data();
      c.db1 = data_or_null(result_.db1);
      c.db2 = data_or_null(result_.db2);
      c.dshared_w1 = data_or_null(result_.dshared_w1);
      c.dshared_w2 = data_or_null(result_.dshared_w2);
    }
    return c;
  }

  void forward() {
    const uniep_forward_call c = forward_call();
    expect_ok(uniep_forward(layer_.get(), &c));
  }
  void backward(int part = 0) {
    const uniep_backward_call c = backward_call(part);
    expect_ok(uniep_backward(layer_.get(), &c));
  }

  void expect_contract(const std::string& what) const {
    expect_same_bits(result_, reference::contract(data_), what);
  }

  GuardedStep& memory() { return memory_; }
  LayerData& data() { return data_; }
  LayerResult& result() { return result_; }

 private:
  const CLayer& layer_;
  LayerData data_;
  GuardedStep memory_;
  LayerResult result_;
};

/// A number of batches of one shape.
inline LayerData batch(int number) {
  LayerData d = plain_layer(1);
  Rng rng(static_cast<unsigned>(number));
  d.tokens -= number;  // fewer than there is room for
  d.x = random_bf16(rng, d.tokens * d.hidden, 1);
  d.dy = random_bf16(rng, d.tokens * d.hidden, 1);
  d.topk_ids.resize(static_cast<std::size_t>(d.tokens * d.topk));
  d.topk_probs.resize(d.topk_ids.size());
  for (auto& id : d.topk_ids) id = static_cast<std::int32_t>(pick(rng, -1, d.num_experts - 1));
  return d;
}

/// A batch with two shared experts, whose probabilities are given or 1.
inline LayerData batch_with_shared(bool with_probs) {
  LayerData d = batch(1);
  Rng rng(11);
  d.shared_experts = 2;
  d.shared_w1 = random_bf16(rng, d.shared_experts * d.w1_rows() * d.hidden, 0.3f);
  d.shared_w2 = random_bf16(rng, d.shared_experts * d.hidden * d.intermediate, 0.3f);
  if (with_probs) {
    d.shared_probs.assign(static_cast<std::size_t>(d.tokens * d.shared_experts), 0.375f);
  }
  return d;
}

inline Problem problem_of_batches(Save save = Save::kRows, bool recompute_h = false) {
  Problem problem = workload::Split(plain_layer(1), 1).problem();
  problem.save = save;
  problem.recompute_h = recompute_h;
  return problem;
}

/// Ends with its rounds, however slow the machine is.
inline uniep_tune_config short_search() {
  uniep_tune_config config{};
  config.budget_s = 3600;
  config.candidates = 2;
  config.max_rounds = 12;
  return config;
}

}  // namespace uniep::testing
