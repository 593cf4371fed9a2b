// Random interleavings of the calls of layers that share a row pool: plans, forwards, backwards in
// any order, whole or in parts, repeated or never, ended by any thread, with too few pages now and
// then. No page is ever in two plans, none is lost, all come back, and every result has the bits of
// the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>

#include "contract/contract_testing.h"
#include "cpu/row_pool.h"
#include "layer/saved_pages.h"
#include "plan/plan_data.h"
#include "support/cases.h"
#include "support/layer_group.h"

namespace uniep::testing {
namespace {

constexpr int kRanks = 2;
constexpr int kLayers = 3;
constexpr int kBatches = 3;

/// What layers keep, and the pages of their pool.
struct KeptAs {
  Save save;
  bool recompute_h;
  std::int64_t pages;
};
constexpr KeptAs kChoices[] = {
    {Save::kRows, false, 10},    // a plan takes 0 to 7
    {Save::kTokens, false, 13},  // likewise, and up to 2 of tokens
    {Save::kTokens, true, 64},   // a page for each of up to 48 tokens
};

/// A batch of one of the layers, and what it gives.
struct Batch {
  LayerData data;
  std::optional<workload::Split> split;
  LayerResult expected;
};

/// Layers of one width, but with other experts, slots and tokens: what a page holds is the same.
std::deque<Batch> all_batches() {
  std::deque<Batch> batches;
  Rng rng(11);
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerBounds bounds{.max_tokens = 40};
    LayerData shape = random_layer(rng, kRanks, bounds);
    shape.num_experts = kRanks * (layer + 1);
    shape.topk = layer + 1;
    shape.hidden = shape.intermediate = 16;
    shape.w1 = random_bf16(rng, shape.num_experts * 2 * 16 * 16, 0.3f);
    shape.w2 = random_bf16(rng, shape.num_experts * 16 * 16, 0.3f);
    for (int i = 0; i < kBatches; ++i) {
      Batch& b = batches.emplace_back();
      b.data = shape;
      b.data.tokens = i == 0 ? 24 : pick(rng, 0, 24);
      b.data.x = random_bf16(rng, b.data.tokens * 16, 1);
      b.data.dy = random_bf16(rng, b.data.tokens * 16, 1);
      b.data.topk_ids.clear();
      b.data.topk_probs.clear();
      const std::int64_t used = pick(rng, 1, shape.num_experts);
      for (std::int64_t slot = 0; slot < b.data.tokens * shape.topk; ++slot) {
        b.data.topk_ids.push_back(static_cast<std::int32_t>(pick(rng, -1, used - 1)));
        b.data.topk_probs.push_back(0.1f + 0.01f * static_cast<float>(slot % 50));
      }
      b.split.emplace(b.data, kRanks);
      b.expected = reference::contract(b.data);
    }
  }
  return batches;
}

/// A step that is under way.
struct Step {
  int layer = 0;
  Batch* batch = nullptr;
  bool planned = true;  // else the pool was too full, and its results are NaNs
  std::optional<RoutingPlan> plan;
  Saved saved;
  bool had_forward = false;
  bool has_data = false;   // backward_data without its backward_weights
  bool may_repeat = true;  // backward, once the weight gradients are there
  LayerResult result;
};

/// What one rank does. Ranks draw the same numbers, so they make the same calls.
class RankOfInterleavings {
 public:
  RankOfInterleavings(Communicator& c, std::deque<Batch>& batches, const KeptAs& choice)
      : rank_(c.rank()), batches_(batches), pool_(pool_of(c, choice)) {
    for (int i = 0; i < kLayers; ++i) {
      Problem problem = batches[static_cast<std::size_t>(kBatches * i)].split->problem();
      problem.row_align = 16;
      problem.save = choice.save;
      problem.recompute_h = choice.recompute_h;
      layers_.emplace_back(problem, c, LayerOptions{.row_pool = pool_});
    }
  }

  void run(unsigned seed) {
    Rng rng(seed);
    const auto calls = pick(rng, 4, 16);
    for (std::int64_t i = 0; i < calls && !::testing::Test::HasFailure(); ++i) {
      call(rng);
      expect_no_page_twice(seed);
    }
    while (!steps_.empty()) end(rng, 0);
    join();
    expect_all_free(seed);
  }

  int full() const { return full_; }

 private:
  static RowPool pool_of(const Communicator& c, const KeptAs& choice) {
    const Problem problem{.hidden = 16,
                          .intermediate = 16,
                          .num_experts = kRanks,
                          .topk = 1,
                          .max_tokens = 1,
                          .row_align = 16,
                          .save = choice.save,
                          .recompute_h = choice.recompute_h};
    return RowPool(problem, c, {.bytes = PagePoolLayout(problem, choice.pages).bytes});
  }

  static CallOptions under(Rng& rng) {
    static const Schedule schedules[] = {parse_schedule("single,tile_m=16,workers=1"),
                                         parse_schedule("two-kernel,tile_m=16,workers=2")};
    return {.schedule = schedules[chance(rng, 20) ? 1 : 0]};
  }

  void call(Rng& rng) {
    if (steps_.size() < 2 || (steps_.size() < 8 && chance(rng, 40))) return begin(rng);
    const auto i = static_cast<std::size_t>(pick(rng, 0, std::ssize(steps_) - 1));
    Step& step = steps_[i];
    if (chance(rng, 10)) return end(rng, i);
    if (!step.had_forward) return forward(rng, step);
    backward(rng, i);
  }

  void begin(Rng& rng) {
    Step& step = steps_.emplace_back();
    step.layer = static_cast<int>(pick(rng, 0, kLayers - 1));
    step.batch = &batches_[static_cast<std::size_t>(kBatches * step.layer + pick(rng, 0, 2))];
    step.result = workload::make_result(step.batch->data, {});
    const auto ids = step.batch->split->topk_ids(rank_);
    Layer& layer = layers_[static_cast<std::size_t>(step.layer)];
    if (chance(rng, 50)) {
      std::int64_t overflow[2];
      step.plan = layer.plan(ids, {.overflow = overflow});
      step.planned = overflow[0] == 0;
    } else {
      try {
        step.plan = layer.plan(ids);
      } catch (const Error& error) {
        EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(ErrorCode::kCapacity))
            << error.what();
        steps_.pop_back();
        ++full_;
        return;
      }
    }
    if (!step.planned) ++full_;
  }

  void forward(Rng& rng, Step& step) {
    step.saved = layers_[static_cast<std::size_t>(step.layer)].forward(
        *step.plan, step.batch->split->forward_args(rank_, step.result), under(rng));
    step.had_forward = true;
    if (chance(rng, 50)) step.plan.reset();
    if (step.planned) expect_tokens(step, &BackwardArgsOf::out, "out");
  }

  void backward(Rng& rng, std::size_t i) {
    Step& step = steps_[i];
    Layer& layer = layers_[static_cast<std::size_t>(step.layer)];
    const BackwardArgs args = step.batch->split->backward_args(rank_, step.result);
    CallOptions options = under(rng);
    options.keep_pages = chance(rng, 30);
    bool ends = !options.keep_pages;
    if (step.has_data) {
      ends = ends || !step.may_repeat;
      layer.backward_weights(step.saved, weights_args(args), options);
      step.has_data = false;
    } else if (chance(rng, 40)) {
      layer.backward_data(step.saved, data_args(args), options);
      step.has_data = true;
      step.may_repeat = options.keep_pages || reads_saved(PassPart::kWeights, layer.problem());
      return;
    } else {
      layer.backward(step.saved, args, options);
    }
    if (step.planned) {
      expect_tokens(step, &BackwardArgsOf::dx, "dx");
      expect_tokens(step, &BackwardArgsOf::dw1, "dw1");
      expect_tokens(step, &BackwardArgsOf::dw2, "dw2");
    }
    if (ends) end(rng, i);
  }

  /// Now and then in another thread, beside what comes next.
  void end(Rng& rng, std::size_t i) {
    Step step = std::move(steps_[i]);
    steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(i));
    if (chance(rng, 20)) others_.emplace_back([s = std::move(step)] {});
  }
  void join() {
    for (std::thread& other : others_) other.join();
    others_.clear();
  }

  /// This rank's part of a result.
  struct BackwardArgsOf {
    std::span<const bf16> out, dx, dw1, dw2;
    BackwardArgsOf(const Step& step, int rank, LayerResult& result)
        : out(step.batch->split->forward_args(rank, result).out) {
      const BackwardArgs args = step.batch->split->backward_args(rank, result);
      dx = args.dx;
      dw1 = std::get<ExpertMatrices<bf16>>(args.dw1).tensor();
      dw2 = std::get<ExpertMatrices<bf16>>(args.dw2).tensor();
    }
  };
  void expect_tokens(Step& step, std::span<const bf16> BackwardArgsOf::*part, const char* name) {
    const BackwardArgsOf got(step, rank_, step.result);
    const BackwardArgsOf want(step, rank_, step.batch->expected);
    const auto bytes = (got.*part).size_bytes();
    EXPECT_TRUE(bytes == 0 || std::memcmp((got.*part).data(), (want.*part).data(), bytes) == 0)
        << name << " of layer " << step.layer;
  }

  const cpu::CpuLease* lease_of(const Step& step) const {
    if (!step.plan && step.saved.data() == nullptr) return nullptr;
    const RoutingPlan& plan = step.plan ? *step.plan : step.saved.plan();
    return dynamic_cast<const cpu::CpuLease*>(plan.data().lease.get());
  }

  void expect_no_page_twice(unsigned seed) {
    join();
    std::vector<std::int32_t> pages = free_pages();
    for (const Step& step : steps_) {
      const cpu::CpuLease* lease = lease_of(step);
      if (lease == nullptr || !lease->is_held()) continue;
      pages.insert(pages.end(), lease->table(), lease->table() + lease->pages());
    }
    expect_each_once(std::move(pages), seed);
  }
  void expect_all_free(unsigned seed) { expect_each_once(free_pages(), seed); }
  void expect_each_once(std::vector<std::int32_t> pages, unsigned seed) {
    std::ranges::sort(pages);
    ASSERT_EQ(std::ssize(pages), pool_.pages()) << "rank " << rank_ << ", seed " << seed;
    for (std::int32_t i = 0; i < pool_.pages(); ++i) {
      ASSERT_EQ(pages[static_cast<std::size_t>(i)], i) << "rank " << rank_ << ", seed " << seed;
    }
  }
  std::vector<std::int32_t> free_pages() const {
    const PageStack stack = pool_.data()->stack();
    return {stack.pages, stack.pages + pool_.free_pages()};
  }

  const int rank_;
  std::deque<Batch>& batches_;
  RowPool pool_;
  std::deque<Layer> layers_;
  std::deque<Step> steps_;
  std::vector<std::thread> others_;
  int full_ = 0;
};

TEST(RowPages, NoneIsLostInRandomInterleavings) {
  std::deque<Batch> batches = all_batches();
  const int count = cases(10000);
  run_ranks(Communicator::cpu_group(kRanks), [&](Communicator& c) {
    std::deque<RankOfInterleavings> choices;
    for (const KeptAs& choice : kChoices) choices.emplace_back(c, batches, choice);
    for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
      choices[static_cast<std::size_t>(i) % std::size(kChoices)].run(static_cast<unsigned>(i));
    }
    for (const RankOfInterleavings& rank : choices) {
      EXPECT_GT(rank.full(), count / 30) << "the pool was too full now and then";
    }
  });
}

}  // namespace
}  // namespace uniep::testing
