// The C API on the CPU: the bits of the contract with the caller's memory everywhere, saved tensors
// that were moved, several steps at a time, overflow as values, and a sentence for each mistake.
#include "uniep/c_api.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "base/check.h"
#include "layout/page_pool.h"
#include "reference/contract.h"
#include "support/expect_same.h"
#include "support/guarded_memory.h"
#include "support/layer_group.h"
#include "support/states.h"
#include "support/tuned_cache.h"

namespace uniep::testing {
namespace {

uniep_problem c_problem(const Problem& p) {
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
          .combine_partials = p.combine_partials == CombinePartials::kFp32 ? 0 : 1};
}

/// What a layer does not keep is given as NULL.
void* data_or_null(const GuardedMemory& memory) {
  return memory.bytes().empty() ? nullptr : memory.data();
}

void* data_or_null(std::vector<bf16>& tensor) { return tensor.empty() ? nullptr : tensor.data(); }

uniep_group* group_of_one() {
  uniep_group_config config{};
  config.size = 1;
  uniep_group* group = nullptr;
  EXPECT_EQ(uniep_group_create(&config, &group), 0) << uniep_last_error();
  return group;
}

void expect_refused(int code, const std::string& sentence,
                    ErrorCode kind = ErrorCode::kInvalidArgument) {
  EXPECT_EQ(code, 1 + static_cast<int>(kind)) << sentence;
  EXPECT_STATES(uniep_last_error(), sentence);
}

void expect_ok(int code) { ASSERT_EQ(code, 0) << uniep_last_error(); }

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
    c.out = result_.out.data();
    c.plan = memory_.plan.data();
    c.memory = {data_or_null(memory_.x_rows), data_or_null(memory_.h),
                memory_.row_probs.as<float>().data(), memory_.forward_rows.data()};
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
    c.backward_rows = memory_.backward_rows.data();
    if (part != 2) {
      c.dy = data_.dy.data();
      c.w1 = data_.w1.data();
      c.w2 = data_.w2.data();
      c.b1 = data_or_null(data_.b1);
      c.b2 = data_or_null(data_.b2);
      c.dx = result_.dx.data();
      c.dprobs = result_.dprobs.data();
      if (layer_.problem().save == Save::kNone) c.x = data_.x.data();
    }
    if (part != 1) {
      c.dw1 = result_.dw1.data();
      c.dw2 = result_.dw2.data();
      c.db1 = data_or_null(result_.db1);
      c.db2 = data_or_null(result_.db2);
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
LayerData batch(int number) {
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

Problem problem_of_batches(Save save = Save::kRows, bool recompute_h = false) {
  Problem problem = workload::Split(plain_layer(1), 1).problem();
  problem.save = save;
  problem.recompute_h = recompute_h;
  return problem;
}

TEST(CApi, AStepHasTheContractsBitsInAnybodysMemory) {
  for (const bool callers : {true, false}) {
    const CLayer layer(problem_of_batches(), callers);
    CStep step(layer, batch(0));
    step.forward();
    step.backward();
    step.expect_contract(callers ? "caller's memory" : "uniep's memory");
  }
}

TEST(CApi, SeveralForwardsAreOutstandingAndTheirSavedTensorsAreMoved) {
  const CLayer layer(problem_of_batches());
  CStep steps[] = {{layer, batch(1)}, {layer, batch(2)}, {layer, batch(3)}};
  for (CStep& s : steps) s.forward();
  for (CStep& s : steps) s.memory().move();
  for (const int i : {1, 0, 2}) steps[i].backward();
  for (const CStep& s : steps) s.expect_contract("one of three");
}

TEST(CApi, WhatIsNotKeptIsMadeAgainAndGivenAsNull) {
  for (const Save save : kSaves) {
    for (const bool recompute_h : {false, true}) {
      const CLayer layer(problem_of_batches(save, recompute_h));
      CStep whole(layer, batch(1)), parts(layer, batch(2));
      whole.forward();
      parts.forward();
      parts.backward(1);
      parts.memory().move();
      whole.memory().move();
      whole.backward();
      parts.backward(2);
      const std::string what = cat("save ", name(save), ", recompute_h ", recompute_h);
      whole.expect_contract(what);
      parts.expect_contract(what + ", in parts");
    }
  }
}

/// Memory that is asked for when the rows are known.
struct ExactMemory {
  const CLayer& layer;
  std::int64_t rows = 0;  // 0: not asked
  std::int64_t rows_of_x = 0;
  int result = 0;
  std::optional<GuardedStep> memory{};

  static int allocate(void* context, const uniep_memory_needs* wanted, uniep_row_memory* memory) {
    auto& self = *static_cast<ExactMemory*>(context);
    self.rows = wanted->rows;
    self.rows_of_x = wanted->rows_of_x;
    if (self.result != 0) return self.result;
    const Problem& p = self.layer.problem();
    MemoryNeeds needs = Layer::memory_needs(p, Backend::kCpu, 1, self.rows);
    needs.rows_of_x = self.rows_of_x;
    self.memory.emplace(needs, p);
    *memory = {data_or_null(self.memory->x_rows), data_or_null(self.memory->h),
               self.memory->row_probs.as<float>().data(), self.memory->forward_rows.data()};
    return 0;
  }
};

TEST(CApi, MemoryOfTheRowsThatComeIsAskedForAndBackwardTakesItsNumber) {
  for (const Save save : kSaves) {
    for (const int part : {0, 1}) {
      const CLayer layer(problem_of_batches(save, save == Save::kNone));
      CStep step(layer, batch(1));
      ExactMemory exact{layer};
      uniep_forward_call forward = step.forward_call();
      forward.memory = {};
      forward.allocate = ExactMemory::allocate;
      forward.allocate_context = &exact;
      expect_ok(uniep_forward(layer.get(), &forward));
      const RoutingPlan plan = RoutingPlan::build(
          layer.problem(), 0, std::array{step.data().tokens}, step.data().topk_ids);
      EXPECT_EQ(exact.rows, plan.padded_rows());
      EXPECT_LT(exact.rows, layer.needs().rows);
      EXPECT_EQ(exact.rows_of_x, save == Save::kRows     ? plan.padded_rows()
                                 : save == Save::kTokens ? plan.received_tokens()
                                                         : 0);
      uniep_memory_needs needs{};
      expect_ok(uniep_layer_needs(layer.get(), exact.rows, &needs));
      EXPECT_EQ(needs.rows, exact.rows);
      EXPECT_LT(needs.backward_rows, layer.needs().backward_rows);
      exact.memory->move();
      for (int p = part; p <= 2 * part; ++p) {
        uniep_backward_call backward = step.backward_call(p);
        backward.rows = exact.rows;
        backward.x_rows = data_or_null(exact.memory->x_rows);
        backward.h = data_or_null(exact.memory->h);
        backward.row_probs = exact.memory->row_probs.as<float>().data();
        backward.backward_rows = exact.memory->backward_rows.data();
        expect_ok(uniep_backward(layer.get(), &backward));
      }
      step.expect_contract(cat("exact rows, save ", name(save), ", part ", part));
    }
  }
}

/// A routing of no rows at all has memory for one tile; one that cannot be planned asks for none.
TEST(CApi, MemoryIsAskedForOfAnyRoutingThatHasAPlan) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  ExactMemory exact{layer};
  uniep_forward_call forward = step.forward_call();
  forward.memory = {};
  forward.allocate = ExactMemory::allocate;
  forward.allocate_context = &exact;
  auto& ids = step.data().topk_ids;
  const std::vector<std::int32_t> good = ids;
  std::ranges::fill(ids, -1);
  expect_ok(uniep_forward(layer.get(), &forward));
  EXPECT_EQ(exact.rows, layer.problem().row_align);
  ids = good;
  ids[0] = 1000;
  exact.rows = 0;
  EXPECT_EQ(uniep_forward(layer.get(), &forward), 1);
  EXPECT_EQ(exact.rows, 0);
  ids = good;
  exact.result = 7;
  expect_refused(
      uniep_forward(layer.get(), &forward),
      cat("rank 0: allocate returned 7 for ",
          RoutingPlan::build(layer.problem(), 0, std::array{step.data().tokens}, ids).padded_rows(),
          " rows; 0 means that it worked"));
  step.forward();
  step.backward();
  step.expect_contract("after refusals");
}

TEST(CApi, WhatIsNotKeptIsRefusedAndXAskedFor) {
  const CLayer layer(problem_of_batches(Save::kNone, true));
  CStep step(layer, batch(1));
  std::vector<bf16> some(1 << 20);
  uniep_forward_call forward = step.forward_call();
  forward.memory.x_rows = some.data();
  expect_refused(uniep_forward(layer.get(), &forward),
                 "rank 0: x_rows is given, and this layer does not keep it; NULL is accepted");
  forward.memory.x_rows = nullptr;
  forward.memory.h = some.data();
  expect_refused(uniep_forward(layer.get(), &forward),
                 "rank 0: h is given, and this layer does not keep it; NULL is accepted");
  step.forward();
  uniep_backward_call backward = step.backward_call();
  backward.x = nullptr;
  expect_refused(uniep_backward(layer.get(), &backward),
                 "rank 0: x is NULL; an address is accepted");
  step.backward();
  step.expect_contract("after refusals");
  uniep_problem p = c_problem(problem_of_batches());
  p.save = 3;
  uniep_memory_needs needs{};
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.save is 3; 0 (rows), 1 (tokens) and 2 (none) are accepted");
  p.save = 0;
  p.recompute_h = -1;
  expect_refused(uniep_needs(&p, 0, 1, &needs), "problem.recompute_h is -1; 0 and 1 are accepted");
}

/// A batch with another activation, biases, probabilities behind fc2, and combine groups.
LayerData batch_of(Activation activation, Probs probs) {
  LayerData d = batch(1);
  Rng rng(7);
  d.activation = activation;
  d.probs = probs;
  d.combine_groups = d.num_experts / 2;
  d.combine_partials = probs == Probs::kAfter ? CombinePartials::kBf16 : CombinePartials::kFp32;
  d.w1 = random_bf16(rng, d.num_experts * d.w1_rows() * d.hidden, 0.3f);
  d.b1 = random_bf16(rng, d.num_experts * d.w1_rows(), 1);
  d.b2 = random_bf16(rng, d.num_experts * d.hidden, 1);
  return d;
}

Problem problem_of(const LayerData& d) {
  Problem problem = problem_of_batches();
  problem.activation = d.activation;
  problem.probs = d.probs;
  problem.bias = d.has_bias();
  problem.combine_groups = d.combine_groups;
  problem.combine_partials = d.combine_partials;
  return problem;
}

TEST(CApi, EveryArithmeticHasTheContractsBits) {
  for (int activation = 0; activation < kNumActivations; ++activation) {
    for (const Probs probs : {Probs::kBefore, Probs::kAfter}) {
      const LayerData data = batch_of(static_cast<Activation>(activation), probs);
      const CLayer layer(problem_of(data));
      CStep whole(layer, data), parts(layer, data);
      const std::string what = cat(name(data.activation), ", probs ", name(probs));
      whole.forward();
      whole.backward();
      whole.expect_contract(what);
      parts.forward();
      parts.backward(1);
      parts.backward(2);
      parts.expect_contract(what + ", in parts");
    }
  }
}

TEST(CApi, BiasGradientsAreAddedTo) {
  const LayerData d = batch_of(Activation::kGptOss, Probs::kAfter);
  const CLayer layer(problem_of(d));
  CStep step(layer, d);
  step.forward();
  const auto starts = [](const auto& like) { return std::vector<float>(like.size(), 0.75f); };
  auto dw1 = starts(d.w1), dw2 = starts(d.w2), db1 = starts(d.b1), db2 = starts(d.b2);
  const LayerResult want = reference::contract_into_main_grad(d, dw1, dw2, db1, db2);
  uniep_backward_call call = step.backward_call();
  call.weight_grad = 1;
  call.dw1 = dw1.data();
  call.dw2 = dw2.data();
  call.db1 = db1.data();
  call.db2 = db2.data();
  expect_ok(uniep_backward(layer.get(), &call));
  expect_same_bits(db1, want.main_db1, "db1", "fp32");
  expect_same_bits(db2, want.main_db2, "db2", "fp32");
}

TEST(CApi, BiasesAreAskedForOrRefused) {
  const LayerData biased = batch_of(Activation::kReglu, Probs::kBefore);
  const CLayer with(problem_of(biased)), without(problem_of_batches());
  CStep step(with, biased), other(without, batch(1));
  uniep_forward_call forward = step.forward_call();
  forward.b2 = nullptr;
  expect_refused(uniep_forward(with.get(), &forward), "rank 0: b2 is NULL; an address is accepted");
  forward = other.forward_call();
  forward.b1 = biased.b1.data();
  expect_refused(uniep_forward(without.get(), &forward),
                 "rank 0: b1 is given, and this layer has no biases; NULL is accepted, or "
                 "problem.bias=1");
  step.forward();
  uniep_backward_call backward = step.backward_call();
  backward.db1 = nullptr;
  expect_refused(uniep_backward(with.get(), &backward),
                 "rank 0: db1 is NULL; an address is accepted");
  uniep_problem p = c_problem(problem_of_batches());
  uniep_memory_needs needs{};
  p.activation = 8;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.activation is 8; 0 to 7 (swiglu, geglu, geglu_tanh, reglu, gpt_oss, "
                 "relu2, gelu, silu) are accepted");
  p.activation = 0;
  p.probs = 2;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.probs is 2; 0 (before) and 1 (after) are accepted");
  p.probs = 0;
  p.combine_groups = 3;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.combine_groups is 3; a divisor of num_experts=" +
                     std::to_string(p.num_experts) + " from 1 on is accepted");
  p.combine_groups = 0;
  p.combine_partials = 2;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.combine_partials is 2; 0 (fp32) and 1 (bf16) are accepted");
  p.combine_partials = 0;
  p.bias = 2;
  expect_refused(uniep_needs(&p, 0, 1, &needs), "problem.bias is 2; 0 and 1 are accepted");
  p.bias = 0;
  p.backward_rows = -128;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 cat("problem.backward_rows is -128; 0 (all), or a multiple of row_align=",
                     p.row_align, " up to 2147483647 is accepted"));
}

TEST(CApi, PartsWithOtherStepsBetweenThemAndRowsMoved) {
  const CLayer layer(problem_of_batches());
  CStep first(layer, batch(1)), second(layer, batch(2)), third(layer, batch(3));
  first.forward();
  first.backward(1);
  second.forward();
  first.memory().move();
  second.backward(1);
  third.forward();
  third.backward();
  first.backward(2);
  second.memory().move();
  second.backward(2);
  first.expect_contract("first");
  second.expect_contract("second");
  third.expect_contract("third, whole");
}

TEST(CApi, WeightGradientsAreOverwrittenOrAddedTo) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  step.forward();
  const LayerData& d = step.data();
  std::vector<float> dw1(d.w1.size(), 0.75f), dw2(d.w2.size(), 0.75f);
  uniep_backward_call call = step.backward_call();
  call.weight_grad = 1;
  call.dw1 = dw1.data();
  call.dw2 = dw2.data();
  expect_ok(uniep_backward(layer.get(), &call));
  const LayerResult fp32 = reference::contract_into_main_grad(
      d, std::vector<float>(d.w1.size(), 0.75f), std::vector<float>(d.w2.size(), 0.75f));
  expect_same_bits(dw1, fp32.main_dw1, "dw1", "fp32");
  expect_same_bits(dw2, fp32.main_dw2, "dw2", "fp32");

  std::vector<bf16> main1(d.w1.size(), to_bf16(0.75f)), main2(d.w2.size(), to_bf16(-3.0f));
  const LayerResult want = reference::contract_into_bf16_main_grad(d, main1, main2);
  call.weight_grad = 2;
  call.dw1 = main1.data();
  call.dw2 = main2.data();
  expect_ok(uniep_backward(layer.get(), &call));
  expect_same_bits(main1, want.dw1, "dw1", "bf16");
  expect_same_bits(main2, want.dw2, "dw2", "bf16");
}

/// By part: a whole backward pass, or one in two.
class Overflow : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Parts, Overflow, ::testing::Values(0, 1));

TEST_P(Overflow, IsAValueAndTheLayerGoesOn) {
  Problem p = problem_of_batches();
  p.row_align = 16;
  p.capacity_rows = 48;
  p.max_tokens = 40;
  const CLayer layer(p);
  LayerData data = plain_layer(1, 40);
  std::ranges::fill(data.topk_ids, 1);
  CStep step(layer, data);
  std::array<std::int64_t, 2> overflow{-1, -1};
  uniep_forward_call forward = step.forward_call();
  forward.overflow = overflow.data();
  expect_ok(uniep_forward(layer.get(), &forward));
  EXPECT_EQ(overflow, (std::array<std::int64_t, 2>{1, 80}));
  for (const bf16 v : step.result().out) ASSERT_TRUE(std::isnan(to_float(v)));

  std::fill(step.result().dx.begin(), step.result().dx.end(), bf16{});
  std::vector<bf16> kept1 = step.result().dw1, kept2 = step.result().dw2;
  const auto run_backward = [&](int weight_grad) {
    for (int part : {1, 2}) {
      if (GetParam() == 0 && part == 2) break;
      uniep_backward_call call = step.backward_call(GetParam() == 0 ? 0 : part);
      call.weight_grad = weight_grad;
      call.ignore_overflow = 1;
      expect_ok(uniep_backward(layer.get(), &call));
    }
  };
  run_backward(2);
  EXPECT_EQ(step.result().dw1, kept1);
  EXPECT_EQ(step.result().dw2, kept2);
  run_backward(0);
  for (const bf16 v : step.result().dx) ASSERT_TRUE(std::isnan(to_float(v)));
  for (const float v : step.result().dprobs) ASSERT_EQ(v, 0.0f);
  for (const bf16 v : step.result().dw1) ASSERT_EQ(v.bits, 0);
  for (const bf16 v : step.result().dw2) ASSERT_EQ(v.bits, 0);

  // In place: the call holds the address.
  std::ranges::copy(plain_layer(1, 40).topk_ids, step.data().topk_ids.begin());
  step.data().topk_ids[7] = p.num_experts;
  expect_ok(uniep_forward(layer.get(), &forward));
  EXPECT_EQ(overflow, (std::array<std::int64_t, 2>{2, 0}));
  for (const bf16 v : step.result().out) ASSERT_TRUE(std::isnan(to_float(v)));

  CStep good(layer, batch(0));
  forward = good.forward_call();
  forward.overflow = overflow.data();
  expect_ok(uniep_forward(layer.get(), &forward));
  EXPECT_EQ(overflow, (std::array<std::int64_t, 2>{0, 32}));
  uniep_backward_call call = good.backward_call();
  call.ignore_overflow = 1;
  expect_ok(uniep_backward(layer.get(), &call));
  good.expect_contract("after an overflow");
}

// ---- Several ranks

/// An all-gather of bytes among threads.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), barrier_(size) {}

  int gather(int rank, const void* own, std::size_t bytes, void* all) {
    if (rank == 0) bytes_.resize(bytes * static_cast<std::size_t>(size_));
    barrier_.arrive_and_wait();
    std::memcpy(bytes_.data() + static_cast<std::size_t>(rank) * bytes, own, bytes);
    barrier_.arrive_and_wait();
    std::memcpy(all, bytes_.data(), bytes_.size());
    barrier_.arrive_and_wait();
    return 0;
  }

 private:
  const int size_;
  std::barrier<> barrier_;
  std::vector<std::byte> bytes_;
};

struct Seat {
  Meeting& meeting;
  int rank;
};

int gather_at(void* context, const void* own, std::size_t bytes, void* all) {
  const Seat& seat = *static_cast<Seat*>(context);
  return seat.meeting.gather(seat.rank, own, bytes, all);
}

/// Runs body(rank, layer) for ranks of a group from callbacks, each in a thread.
void on_ranks(int ranks, const Problem& problem,
              const std::function<void(int, uniep_layer*)>& body) {
  Meeting meeting(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Seat seat{meeting, rank};
      uniep_group_config config{};
      config.rank = rank;
      config.size = ranks;
      config.timeout_ms = 20000;
      config.all_gather = gather_at;
      config.context = &seat;
      uniep_group* group = nullptr;
      expect_ok(uniep_group_create(&config, &group));
      const uniep_problem p = c_problem(problem);
      uniep_layer* layer = nullptr;
      expect_ok(uniep_layer_create(group, &p, nullptr, &layer));
      uniep_group_destroy(group);
      body(rank, layer);
      uniep_layer_destroy(layer);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// A rank's part of a global layer, with memory of its step.
struct RankStep {
  RankStep(const workload::Split& split, int rank, LayerResult& result)
      : forward_args(split.forward_args(rank, result)),
        backward_args(split.backward_args(rank, result)),
        ids(split.topk_ids(rank)),
        tokens(split.tokens(rank).size()),
        memory(Layer::memory_needs(split.problem(), Backend::kCpu, split.ranks()),
               split.problem()) {}

  uniep_forward_call forward() {
    uniep_forward_call c{};
    c.tokens = tokens;
    c.topk_ids = ids.data();
    c.topk_probs = forward_args.topk_probs.data();
    c.x = forward_args.x.data();
    c.w1 = forward_args.w1.data();
    c.w2 = forward_args.w2.data();
    c.out = forward_args.out.data();
    c.plan = memory.plan.data();
    c.memory = {memory.x_rows.data(), memory.h.data(), memory.row_probs.as<float>().data(),
                memory.forward_rows.data()};
    return c;
  }
  uniep_backward_call backward() {
    uniep_backward_call c{};
    c.tokens = tokens;
    c.plan = memory.plan.data();
    c.x_rows = memory.x_rows.data();
    c.h = memory.h.data();
    c.row_probs = memory.row_probs.as<float>().data();
    c.dy = backward_args.dy.data();
    c.w1 = backward_args.w1.data();
    c.w2 = backward_args.w2.data();
    c.dx = backward_args.dx.data();
    c.dprobs = backward_args.dprobs.data();
    c.dw1 = std::get<std::span<bf16>>(backward_args.dw1).data();
    c.dw2 = std::get<std::span<bf16>>(backward_args.dw2).data();
    return c;
  }

  ForwardArgs forward_args;
  BackwardArgs backward_args;
  std::span<const std::int32_t> ids;
  std::int64_t tokens;
  GuardedStep memory;
};

TEST(CApiRanks, HaveTheContractsBits) {
  constexpr int kRanks = 3;
  const LayerData data = plain_layer(kRanks);
  const workload::Split split(data, kRanks);
  LayerResult result = workload::make_result(data, {});
  on_ranks(kRanks, split.problem(), [&](int rank, uniep_layer* layer) {
    RankStep step(split, rank, result);
    const uniep_forward_call forward = step.forward();
    expect_ok(uniep_forward(layer, &forward));
    step.memory.move();
    const uniep_backward_call backward = step.backward();
    expect_ok(uniep_backward(layer, &backward));
  });
  expect_same_bits(result, reference::contract(data), "three ranks");
}

/// What one rank cannot even begin fails on all of them, at once, and the layer stays usable.
TEST(CApiRanks, HearOfARankThatRefusesItsCall) {
  constexpr int kRanks = 2;
  const LayerData data = plain_layer(kRanks);
  const workload::Split split(data, kRanks);
  LayerResult result = workload::make_result(data, {});
  on_ranks(kRanks, split.problem(), [&](int rank, uniep_layer* layer) {
    RankStep step(split, rank, result);
    uniep_forward_call forward = step.forward();
    if (rank == 1) forward.schedule = "no-such-preset";
    EXPECT_EQ(uniep_forward(layer, &forward), 1);
    EXPECT_STATES(uniep_last_error(),
                  "rank 1: schedule has the word 'no-such-preset'; a preset (sequential, "
                  "pipelined:n, two-kernel, single) first, then key=value pairs are accepted");
    forward = step.forward();
    expect_ok(uniep_forward(layer, &forward));
    uniep_backward_call backward = step.backward();
    if (rank == 0) step.memory.plan.bytes()[0] ^= std::byte{1};
    EXPECT_EQ(uniep_backward(layer, &backward), 1);
    EXPECT_STATES(uniep_last_error(),
                  "rank 0: memory.plan does not hold a plan; what Layer::plan wrote, unchanged, is "
                  "accepted");
    if (rank == 0) step.memory.plan.bytes()[0] ^= std::byte{1};
    expect_ok(uniep_backward(layer, &backward));
  });
  expect_same_bits(result, reference::contract(data), "after refusals");
}

// ---- Schedules, release, and what is refused

TEST(CApi, SchedulesAreTextsOfTheLayerAndOfACall) {
  const CLayer layer(problem_of_batches());
  char text[1024];
  for (const int pass : {0, 1}) {
    expect_ok(uniep_layer_schedule(layer.get(), pass, text, sizeof(text)));
    EXPECT_EQ(std::string(text), to_string(parse_schedule("single,tile_m=16")));
  }
  expect_refused(uniep_layer_schedule(layer.get(), 0, text, 5),
                 cat("size is 5; ", std::strlen(text) + 1, " or more are accepted"));
  expect_refused(uniep_layer_schedule(layer.get(), 2, text, sizeof(text)),
                 "pass is 2; 0 (forward) and 1 (backward) are accepted");
  CStep step(layer, batch(0));
  uniep_forward_call forward = step.forward_call();
  forward.schedule = "sequential,tile_m=32";
  for (int i = 0; i < 2; ++i) expect_ok(uniep_forward(layer.get(), &forward));
  uniep_backward_call backward = step.backward_call();
  backward.schedule = "pipelined:3";
  expect_ok(uniep_backward(layer.get(), &backward));
  step.expect_contract("schedules of calls");
  forward.schedule = "sequential,tile_m=48";
  EXPECT_EQ(uniep_forward(layer.get(), &forward), 1) << "48 divides no alignment";
}

TEST(CApi, ReleaseIsCalledWhenTheLayerIsDestroyed) {
  const Problem problem = problem_of_batches();
  const uniep_problem p = c_problem(problem);
  uniep_memory_needs needs{};
  expect_ok(uniep_needs(&p, 0, 1, &needs));
  const GuardedMemory symmetric(needs.symmetric);
  int released = 0;
  uniep_layer_config config{};
  config.symmetric = symmetric.data();
  config.release = [](void* count) { ++*static_cast<int*>(count); };
  config.release_context = &released;
  uniep_group* group = group_of_one();
  uniep_layer* layer = nullptr;
  expect_ok(uniep_layer_create(group, &p, &config, &layer));
  EXPECT_EQ(released, 0);
  uniep_layer_destroy(layer);
  EXPECT_EQ(released, 1);
  config.schedule = "single,tile_m=256";
  EXPECT_NE(uniep_layer_create(group, &p, &config, &layer), 0);
  EXPECT_EQ(released, 1);
  uniep_group_destroy(group);
}

TEST(CApi, NeedsAreThoseOfTheLayer) {
  uniep_problem p = c_problem(problem_of_batches());
  uniep_memory_needs needs{};
  expect_ok(uniep_needs(&p, 0, 1, &needs));
  EXPECT_EQ(needs.rows, capacity_rows(problem_of_batches(), 1));
  EXPECT_EQ(needs.alignment, 64);
  p.row_align = 0;
  uniep_memory_needs by_default{};
  expect_ok(uniep_needs(&p, 0, 1, &by_default));
  EXPECT_EQ(by_default.rows, needs.rows) << "row_align is 128 by default";
  p.hidden = 9;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.hidden is 9; a multiple of 8 from 8 to 1048576 is accepted");
  p = c_problem(problem_of_batches());
  expect_refused(uniep_needs(&p, 2, 1, &needs), "backend is 2; 0 (cpu) and 1 (cuda) are accepted");
  expect_refused(uniep_needs(nullptr, 0, 1, &needs), "problem is NULL; an address is accepted");
  p.topk = std::int64_t{1} << 40;
  expect_refused(uniep_needs(&p, 0, 1, &needs),
                 "problem.topk is 1099511627776; a number of 32 bits is accepted");
  if (uniep_has_cuda() == 0) {
    p = c_problem(problem_of_batches());
    expect_refused(uniep_needs(&p, 1, 1, &needs),
                   "this build of uniep has no CUDA backend; one configured with -DUNIEP_CUDA=ON "
                   "has",
                   ErrorCode::kUnsupported);
  }
}

TEST(CApi, EveryMistakeOfACallIsASentence) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(0));
  const auto forward_refused = [&](const std::function<void(uniep_forward_call&)>& spoil,
                                   const std::string& sentence) {
    uniep_forward_call call = step.forward_call();
    spoil(call);
    expect_refused(uniep_forward(layer.get(), &call), "rank 0: " + sentence);
  };
  forward_refused([](auto& c) { c.tokens = 13; }, "tokens is 13; 0 to max_tokens=12 is accepted");
  forward_refused([](auto& c) { c.x = nullptr; }, "x is NULL; an address is accepted");
  forward_refused([](auto& c) { c.plan = nullptr; }, "plan is NULL; an address is accepted");
  forward_refused([](auto& c) { c.memory.h = nullptr; }, "h is NULL; an address is accepted");
  const auto* misaligned = step.memory().h.data() + 2;
  forward_refused([&](auto& c) { c.memory.h = const_cast<std::byte*>(misaligned); },
                  cat("memory.h starts at address ", reinterpret_cast<std::uintptr_t>(misaligned),
                      "; a multiple of 64 is accepted"));
  step.forward();
  const auto backward_refused = [&](const std::function<void(uniep_backward_call&)>& spoil,
                                    const std::string& sentence, int part = 0) {
    uniep_backward_call call = step.backward_call(part);
    spoil(call);
    expect_refused(uniep_backward(layer.get(), &call), sentence);
  };
  backward_refused([](auto& c) { c.part = 3; },
                   "rank 0: part is 3; 0 (whole), 1 (data) and 2 (weights) are accepted");
  backward_refused([](auto& c) { c.weight_grad = 3; },
                   "rank 0: weight_grad is 3; 0 (bf16, overwritten), 1 (fp32, added to) and 2 "
                   "(bf16, added to) are accepted");
  backward_refused([](auto& c) { c.ignore_overflow = 2; },
                   "rank 0: ignore_overflow is 2; 0 and 1 are accepted");
  backward_refused([](auto& c) { c.rows = 129; },
                   cat("rank 0: rows is 129; a multiple of row_align=128 below ",
                       layer.needs().rows, " is accepted, or 0 for that capacity"));
  backward_refused([](auto& c) { c.backward_rows = nullptr; },
                   "rank 0: backward_rows is NULL; an address is accepted", 1);
  backward_refused([](auto& c) { c.dw2 = nullptr; }, "dw2 is NULL; an address is accepted", 2);
  backward_refused([](auto& c) { c.tokens = 3; },
                   "rank 0: memory.plan holds a plan of 12 tokens; one of 3 is accepted");
  expect_refused(uniep_forward(layer.get(), nullptr),
                 "rank 0: call is NULL; an address is accepted");
  expect_refused(uniep_forward(nullptr, nullptr), "layer is NULL; an address is accepted");
  step.backward();
  step.expect_contract("after all these");

  LayerData bad = batch(0);
  bad.topk_ids[2] = 9;
  CStep of_bad(layer, bad);
  const uniep_forward_call call = of_bad.forward_call();
  expect_refused(uniep_forward(layer.get(), &call),
                 "topk_ids of rank 0, token 1, slot 0 is 9; -1 (dropped) to 1 is accepted");
}

/// Ends with its rounds, however slow the machine is.
uniep_tune_config short_search() {
  uniep_tune_config config{};
  config.budget_s = 3600;
  config.candidates = 2;
  config.max_rounds = 12;
  return config;
}

TEST(CApi, FindsASchedule) {
  const TunedCache cache;
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(0));
  const uniep_tune_config config = short_search();
  const uniep_forward_call forward = step.forward_call();
  uniep_tune_result found{};
  expect_ok(uniep_tune_forward(layer.get(), &forward, &config, &found));
  const uniep_backward_call backward = step.backward_call();
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (pass == Pass::kBackward) {
      expect_ok(uniep_tune_backward(layer.get(), &backward, &config, &found));
    }
    EXPECT_GT(found.seconds, 0);
    EXPECT_GT(found.default_seconds, 0);
    EXPECT_GE(found.candidates, 6);
    EXPECT_EQ(found.rejected, 0);
    EXPECT_EQ(found.stopped, 0);
    EXPECT_EQ(found.stored, 1);
    EXPECT_STRNE(found.why, "");
    EXPECT_STREQ(found.problem, "");
    const Layer later(layer.problem(), Communicator::cpu_group(1)[0]);
    EXPECT_EQ(to_string(later.schedule(pass)), found.schedule);
  }
  step.expect_contract("after the searches");
}

TEST(CApi, ASearchIsStoppedAndRefused) {
  const TunedCache cache;
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(0));
  const uniep_forward_call forward = step.forward_call();
  uniep_tune_result found{};
  uniep_tune_config config = short_search();
  int asked = 0;
  config.stop_context = &asked;
  config.stop = [](void* count) { return ++*static_cast<int*>(count) == 3 ? 7 : 0; };
  expect_ok(uniep_tune_forward(layer.get(), &forward, &config, &found));
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(found.stopped, 1);
  EXPECT_EQ(found.stored, 0);

  config = short_search();
  config.budget_s = -1;
  expect_refused(uniep_tune_forward(layer.get(), &forward, &config, &found),
                 "rank 0: options.budget_s is -1; 0.1 to 86400 is accepted");
  config = short_search();
  config.not_stored = 2;
  expect_refused(uniep_tune_forward(layer.get(), &forward, &config, &found),
                 "rank 0: not_stored is 2; 0 and 1 are accepted");
  expect_refused(uniep_tune_forward(layer.get(), &forward, &config, nullptr),
                 "rank 0: result is NULL; an address is accepted");
  step.forward();
  const uniep_backward_call part = step.backward_call(1);
  expect_refused(uniep_tune_backward(layer.get(), &part, nullptr, &found),
                 "rank 0: part is 1; 0 (whole) is accepted by a search");
  step.backward();
  step.expect_contract("after all these");
}

// ---- Row pools

/// A layer of this process alone that saves in a pool.
class CPool : public ::testing::Test {
 protected:
  CPool() {
    uniep_layer_config config{};
    config.schedule = "single,tile_m=16";
    expect_ok(uniep_needs(&problem_, 0, 1, &needs_));
    uniep_row_pool* pool = nullptr;
    expect_ok(uniep_row_pool_create(group_, &problem_, 1 << 20, nullptr, &pool));
    config.row_pool = pool_ = pool;
    expect_ok(uniep_layer_create(group_, &problem_, &config, &layer_));
  }
  ~CPool() override {
    uniep_layer_destroy(layer_);
    uniep_row_pool_destroy(pool_);
    uniep_group_destroy(group_);
  }

  std::int64_t held() const {
    uniep_row_pool_state state{};
    expect_ok(uniep_row_pool_ask(pool_, &state));
    EXPECT_EQ(state.page_bytes, page_bytes(cpp_));
    EXPECT_LE(state.bytes, 1 << 20);
    return state.pages - state.free_pages;
  }
  uniep_forward_call forward_call(uniep_saved** saved) {
    uniep_forward_call c{};
    c.tokens = data_.tokens;
    c.topk_ids = data_.topk_ids.data();
    c.topk_probs = data_.topk_probs.data();
    c.x = data_.x.data();
    c.w1 = data_.w1.data();
    c.w2 = data_.w2.data();
    c.out = result_.out.data();
    c.saved = saved;
    return c;
  }
  uniep_backward_call backward_call(uniep_saved* saved, int part = 0) {
    uniep_backward_call c{};
    c.part = part;
    c.tokens = data_.tokens;
    c.dy = data_.dy.data();
    c.w1 = data_.w1.data();
    c.w2 = data_.w2.data();
    c.dx = result_.dx.data();
    c.dprobs = result_.dprobs.data();
    c.dw1 = result_.dw1.data();
    c.dw2 = result_.dw2.data();
    c.saved = saved;
    return c;
  }
  uniep_saved* forward() {
    uniep_saved* saved = nullptr;
    const uniep_forward_call call = forward_call(&saved);
    expect_ok(uniep_forward(layer_, &call));
    return saved;
  }
  void backward(uniep_saved* saved, int part, bool keep = false) {
    uniep_backward_call call = backward_call(saved, part);
    call.keep_pages = keep ? 1 : 0;
    expect_ok(uniep_backward(layer_, &call));
  }

  const LayerData data_ = plain_layer(1, 40);
  const Problem cpp_ = workload::Split(data_, 1).problem();
  const uniep_problem problem_ = c_problem(cpp_);
  uniep_group* const group_ = group_of_one();
  uniep_memory_needs needs_{};
  uniep_row_pool* pool_ = nullptr;
  uniep_layer* layer_ = nullptr;
  LayerResult result_ = workload::make_result(data_, {});
};

TEST_F(CPool, StepsTakePagesAndGiveThemBack) {
  uniep_saved* const unused = forward();
  uniep_saved* const saved = forward();
  const std::int64_t pages = held() / 2;
  EXPECT_GT(pages, 0);
  backward(saved, 0, true);
  backward(saved, 1);
  EXPECT_EQ(held(), 2 * pages);
  backward(saved, 2);
  EXPECT_EQ(held(), pages);
  expect_same_bits(result_, reference::contract(data_), "through the C API");
  uniep_saved_destroy(unused);
  EXPECT_EQ(held(), 0);
  const uniep_backward_call again = backward_call(saved);
  expect_refused(uniep_backward(layer_, &again),
                 "rank 0: saved has no pages any more: a backward pass gave them back to the row "
                 "pool; one with CallOptions::keep_pages keeps them for another");
  uniep_saved_destroy(saved);
  uniep_saved_destroy(nullptr);
  uniep_row_pool_destroy(nullptr);
}

TEST_F(CPool, WhatIsGivenTwiceOrNotAtAllIsRefused) {
  uniep_saved* saved = nullptr;
  const auto forward_refused = [&](const char* sentence, const auto& change) {
    uniep_forward_call call = forward_call(&saved);
    change(call);
    expect_refused(uniep_forward(layer_, &call), sentence);
  };
  std::vector<float> memory(1 << 12);
  const char* twice =
      "rank 0: plan, x_rows, h, row_probs or allocate is given, and the layer has a row pool; NULL "
      "is accepted";
  forward_refused(twice, [&](auto& c) { c.plan = memory.data(); });
  forward_refused(twice, [&](auto& c) { c.memory.row_probs = memory.data(); });
  forward_refused(twice, [&](auto& c) {
    c.allocate = [](void*, const uniep_memory_needs*, uniep_row_memory*) { return 0; };
  });
  forward_refused("rank 0: saved is NULL; an address is accepted",
                  [&](auto& c) { c.saved = nullptr; });
  EXPECT_EQ(held(), 0);

  saved = forward();
  const auto backward_refused = [&](const char* sentence, int part, const auto& change) {
    uniep_backward_call call = backward_call(saved, part);
    change(call);
    expect_refused(uniep_backward(layer_, &call), sentence);
  };
  backward_refused(twice, 0, [&](auto& c) { c.x_rows = memory.data(); });
  backward_refused("rank 0: rows is 128, and the layer has a row pool; 0 is accepted", 0,
                   [&](auto& c) { c.rows = 128; });
  backward_refused("rank 0: keep_pages is 2; 0 and 1 are accepted", 0,
                   [&](auto& c) { c.keep_pages = 2; });
  backward_refused(
      "backward_rows is given to part 2, which takes those of part 1 where the layer has a row "
      "pool; NULL is accepted",
      2, [&](auto& c) { c.backward_rows = memory.data(); });
  uniep_saved_destroy(saved);

  const CLayer plain(cpp_);
  CStep step(plain, data_);
  uniep_forward_call call = step.forward_call();
  call.saved = &saved;
  expect_refused(uniep_forward(plain.get(), &call),
                 "rank 0: saved is given, and the layer has no row pool; NULL is accepted");
  uniep_row_pool* other = nullptr;
  expect_refused(uniep_row_pool_create(group_, &problem_, 0, memory.data(), &other),
                 "bytes is 0, and memory is given; as many bytes as that has are accepted");
}

/// A search for forward would need a plan a pass; one for backward keeps the pages.
TEST_F(CPool, ASearchKeepsPagesOrIsRefused) {
  const TunedCache cache;
  uniep_tune_config config = short_search();
  config.max_rounds = 2;
  config.not_stored = 1;
  uniep_tune_result found{};
  uniep_saved* saved = nullptr;
  const uniep_forward_call of_forward = forward_call(&saved);
  expect_refused(uniep_tune_forward(layer_, &of_forward, &config, &found),
                 "plan has pages of a row pool, which serve one forward pass, and a search runs "
                 "many; a plan of a layer without a pool is accepted, and what is found holds for "
                 "layers with one");
  EXPECT_EQ(held(), 0);
  saved = forward();
  const std::int64_t pages = held();
  const uniep_backward_call of_backward = backward_call(saved);
  expect_ok(uniep_tune_backward(layer_, &of_backward, &config, &found));
  EXPECT_GT(found.rounds, 0);
  EXPECT_EQ(held(), pages);
  uniep_saved_destroy(saved);
}

}  // namespace
}  // namespace uniep::testing
