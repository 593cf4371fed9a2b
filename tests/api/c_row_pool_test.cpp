// The C API: layers that save in a row pool.
#include <gtest/gtest.h>

#include "api/c_steps.h"
#include "layout/page_pool.h"
#include "reference/contract.h"
#include "support/expect_same.h"
#include "support/layer_group.h"
#include "support/tuned_cache.h"

namespace uniep::testing {
namespace {

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

/// The rows of part 1 say whose weight gradients part 2 computes, also behind another part 1.
TEST_F(CPool, PartsThatAreUnderWayKeepTheirRows) {
  uniep_saved* const saved = forward();
  GuardedMemory rows[] = {GuardedMemory(needs_.backward_memory),
                          GuardedMemory(needs_.backward_memory)};
  const auto part = [&](int number, const GuardedMemory& memory, const auto& change) {
    uniep_backward_call call = backward_call(saved, number);
    call.backward_memory = memory.data();
    call.keep_pages = 1;
    change(call);
    expect_ok(uniep_backward(layer_, &call));
  };
  part(1, rows[0], [](auto&) {});
  std::vector<bf16> other_dy(data_.dy.rbegin(), data_.dy.rend());
  LayerResult other = result_;
  part(1, rows[1], [&](auto& c) {
    c.dy = other_dy.data();
    c.dx = other.dx.data();
    c.dprobs = other.dprobs.data();
  });
  part(2, rows[0], [](auto&) {});
  expect_same_bits(result_, reference::contract(data_), "of the first part 1");
  part(2, rows[1], [&](auto& c) {
    c.dw1 = other.dw1.data();
    c.dw2 = other.dw2.data();
  });
  LayerData reversed = data_;
  reversed.dy = other_dy;
  expect_same_bits(other.dw1, reference::contract(reversed).dw1, "dw1", "of the second part 1");
  uniep_saved_destroy(saved);
  EXPECT_EQ(held(), 0);
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
