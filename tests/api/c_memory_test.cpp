// The C API: memory of the rows that come, and what a layer does not keep.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <optional>

#include "api/c_steps.h"
#include "base/check.h"
#include "support/guarded_memory.h"
#include "support/tuned_cache.h"

namespace uniep::testing {
namespace {

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
               self.memory->row_probs.as<float>().data(), self.memory->forward_memory.data()};
    return 0;
  }

  /// Of `step`, in this memory.
  uniep_forward_call forward_call(CStep& step) {
    uniep_forward_call call = step.forward_call();
    call.memory = {};
    call.allocate = allocate;
    call.allocate_context = this;
    return call;
  }
  uniep_backward_call backward_call(CStep& step, int part) const {
    uniep_backward_call call = step.backward_call(part);
    call.rows = rows;
    call.x_rows = data_or_null(memory->x_rows);
    call.h = data_or_null(memory->h);
    call.row_probs = memory->row_probs.as<float>().data();
    call.backward_memory = memory->backward_memory.data();
    return call;
  }
};

TEST(CApi, MemoryOfTheRowsThatComeIsAskedForAndBackwardTakesItsNumber) {
  for (const Save save : kSaves) {
    for (const int part : {0, 1}) {
      const CLayer layer(problem_of_batches(save, save == Save::kNone));
      CStep step(layer, batch(1));
      ExactMemory exact{layer};
      const uniep_forward_call forward = exact.forward_call(step);
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
      EXPECT_LT(needs.backward_memory, layer.needs().backward_memory);
      exact.memory->move();
      for (int p = part; p <= 2 * part; ++p) {
        const uniep_backward_call backward = exact.backward_call(step, p);
        expect_ok(uniep_backward(layer.get(), &backward));
      }
      step.expect_contract(cat("exact rows, save ", name(save), ", part ", part));
    }
  }
}

/// Backward takes what forward has asked for, however little that is.
TEST(CApi, ALayerForNoTokensAsksForMemoryThatBackwardTakes) {
  for (const Save save : kSaves) {
    Problem problem = problem_of_batches(save, save == Save::kNone);
    problem.max_tokens = 0;
    const CLayer layer(problem);
    LayerData none = batch(1);
    none.tokens = 0;
    none.topk_ids.clear();
    none.topk_probs.clear();
    none.x.clear();
    none.dy.clear();
    CStep step(layer, none);
    ExactMemory exact{layer};
    const uniep_forward_call forward = exact.forward_call(step);
    expect_ok(uniep_forward(layer.get(), &forward));
    const uniep_backward_call backward = exact.backward_call(step, 0);
    expect_ok(uniep_backward(layer.get(), &backward));
    step.expect_contract(cat("no tokens, save ", name(save)));
  }
}

/// A search's passes work in it, too, and leave there what backward reads.
TEST(CApi, ASearchUsesTheMemoryThatItAskedFor) {
  const TunedCache cache;
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  ExactMemory exact{layer};
  const uniep_forward_call forward = exact.forward_call(step);
  const uniep_tune_config config = short_search();
  uniep_tune_result found{};
  expect_ok(uniep_tune_forward(layer.get(), &forward, &config, &found));
  const uniep_backward_call backward = exact.backward_call(step, 0);
  expect_ok(uniep_backward(layer.get(), &backward));
  step.expect_contract("after a search");
}

/// A routing of no rows at all has memory for one tile; one that cannot be planned asks for none.
TEST(CApi, MemoryIsAskedForOfAnyRoutingThatHasAPlan) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  ExactMemory exact{layer};
  const uniep_forward_call forward = exact.forward_call(step);
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

/// What a call is given in the same room, and the sentence that this brings.
template <class Call>
struct Shared {
  std::function<void(Call&, std::byte*)> give;
  const char* sentence;
};

template <class Call>
void expect_all_refused(const CLayer& layer, int (*run)(uniep_layer*, const Call*),
                        const Call& good, std::initializer_list<Shared<Call>> all,
                        const std::string& rank = "rank 0: ") {
  const GuardedMemory room(1 << 22);
  for (const auto& [give, sentence] : all) {
    Call call = good;
    give(call, room.data());
    expect_refused(run(layer.get(), &call), cat(rank, sentence, "; memory of its own is accepted"));
  }
}

TEST(CApi, MemoryOfAForwardThatSharesBytesIsRefused) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  using Call = uniep_forward_call;
  const auto floats = [](std::byte* room) { return reinterpret_cast<float*>(room); };
  expect_all_refused<Call>(
      layer, uniep_forward, step.forward_call(),
      {{[](Call& c, auto* room) { c.memory.x_rows = c.memory.h = room; },
        "memory.h shares memory with memory.x_rows"},
       {[&](Call& c, auto* room) {
          c.memory.h = room;
          c.memory.row_probs = floats(room + 64);
        },
        "memory.row_probs shares memory with memory.h"},
       {[&](Call& c, auto* room) {
          c.memory.forward_memory = room;
          c.memory.row_probs = floats(room);
        },
        "memory.forward_memory shares memory with memory.row_probs"},
       {[](Call& c, auto* room) { c.plan = c.memory.forward_memory = room; },
        "memory.forward_memory shares memory with memory.plan"},
       {[&](Call& c, auto* room) {
          c.plan = room;
          c.topk_ids = reinterpret_cast<std::int32_t*>(room + 64);
        },
        "memory.plan shares memory with topk_ids"},
       {[](Call& c, auto* room) { c.out = c.memory.h = room; }, "memory.h shares memory with out"},
       {[](Call& c, auto* room) { c.out = c.plan = room; }, "out shares memory with memory.plan"},
       {[](Call& c, auto* room) { c.w1 = c.memory.h = room; }, "memory.h shares memory with w1"},
       {[](Call& c, auto* room) { c.x = c.memory.x_rows = room; },
        "memory.x_rows shares memory with x"}});
  step.forward();
  step.backward();
  step.expect_contract("after refusals");
}

TEST(CApi, MemoryOfABackwardThatSharesBytesIsRefused) {
  const CLayer layer(problem_of_batches());
  CStep step(layer, batch(1));
  step.forward();
  using Call = uniep_backward_call;
  const Shared<Call> h{[](Call& c, auto* room) { c.h = c.backward_memory = room; },
                       "memory.backward_memory shares memory with memory.h"};
  const Shared<Call> dx{[](Call& c, auto* room) { c.x_rows = c.dx = room; },
                        "dx shares memory with memory.x_rows"};
  const Shared<Call> dy{[](Call& c, auto* room) { c.dy = c.backward_memory = room; },
                        "memory.backward_memory shares memory with dy"};
  const Shared<Call> dw1{[](Call& c, auto* room) { c.h = c.dw1 = room; },
                         "dw1 shares memory with memory.h"};
  const Shared<Call> dw2{[](Call& c, auto* room) { c.dw2 = c.backward_memory = room; },
                         "memory.backward_memory shares memory with dw2"};
  const Shared<Call> plan{
      [](Call& c, auto*) { c.dprobs = static_cast<float*>(const_cast<void*>(c.plan)); },
      "dprobs shares memory with memory.plan"};
  expect_all_refused(layer, uniep_backward, step.backward_call(), {h, dx, dy, dw1, dw2, plan});
  expect_all_refused(layer, uniep_backward, step.backward_call(1), {h, dx, dy, plan});
  step.backward(1);
  expect_all_refused(layer, uniep_backward, step.backward_call(2), {h, dw1, dw2}, "");
  step.backward(2);
  step.expect_contract("after refusals");
}

/// On one rank it is read where it lies, by tasks that no result waits for.
TEST(CApi, XThatIsDispatchedAgainIsApartFromDx) {
  const CLayer layer(problem_of_batches(Save::kNone, true));
  CStep step(layer, batch(1));
  step.forward();
  const Shared<uniep_backward_call> dx{[](auto& c, auto*) { c.x = c.dx; },
                                       "dx shares memory with x"};
  expect_all_refused(layer, uniep_backward, step.backward_call(), {dx});
  expect_all_refused(layer, uniep_backward, step.backward_call(1), {dx});
  step.backward();
  step.expect_contract("after refusals");
}

/// How many tokens were received, a backward call is not told: what lies behind them is not theirs.
TEST(CApi, MemoryBehindReceivedTokensIsNotTheirs) {
  const CLayer layer(problem_of_batches(Save::kTokens, false));
  CStep step(layer, batch(1));
  ExactMemory exact{layer};
  const uniep_forward_call forward = exact.forward_call(step);
  expect_ok(uniep_forward(layer.get(), &forward));
  const std::size_t received = exact.memory->x_rows.bytes().size();
  GuardedMemory both(static_cast<std::int64_t>(received + step.data().dy.size() * sizeof(bf16)));
  std::memcpy(both.data(), exact.memory->x_rows.data(), received);
  uniep_backward_call backward = exact.backward_call(step, 0);
  backward.x_rows = both.data();
  backward.dx = both.data() + received;
  expect_ok(uniep_backward(layer.get(), &backward));
  std::memcpy(step.result().dx.data(), backward.dx, step.result().dx.size() * sizeof(bf16));
  step.expect_contract("dx behind received tokens");
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

}  // namespace
}  // namespace uniep::testing
