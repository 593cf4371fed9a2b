// The C API with several ranks, whose bytes the caller gathers.
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <functional>
#include <new>
#include <thread>

#include "api/c_steps.h"
#include "reference/contract.h"
#include "support/expect_same.h"
#include "support/guarded_memory.h"
#include "support/layer_group.h"
#include "support/states.h"

namespace uniep::testing {
namespace {

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

/// Runs body(config) for ranks of a group from callbacks, each in a thread.
void in_seats(int ranks, const std::function<void(uniep_group_config)>& body) {
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
      body(config);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Likewise body(rank, group), which destroys it.
void in_groups(int ranks, const std::function<void(int, uniep_group*)>& body) {
  in_seats(ranks, [&](const uniep_group_config& config) {
    std::int32_t hosts = 0, local_ranks = 0;
    expect_ok(uniep_group_find_hosts(&config, &hosts, &local_ranks));
    EXPECT_EQ(hosts, 1);
    EXPECT_EQ(local_ranks, ranks);
    hosts = local_ranks = 0;
    uniep_group* group = nullptr;
    expect_ok(uniep_group_create(&config, &group));
    expect_ok(uniep_group_layout(group, &hosts, &local_ranks));
    EXPECT_EQ(hosts, 1);
    EXPECT_EQ(local_ranks, ranks);
    body(config.rank, group);
  });
}

/// Likewise body(rank, layer), of layers that outlive their groups.
void on_ranks(int ranks, const Problem& problem,
              const std::function<void(int, uniep_layer*)>& body) {
  in_groups(ranks, [&](int rank, uniep_group* group) {
    const uniep_problem p = c_problem(problem);
    uniep_layer* layer = nullptr;
    expect_ok(uniep_layer_create(group, &p, nullptr, &layer));
    uniep_group_destroy(group);
    body(rank, layer);
    uniep_layer_destroy(layer);
  });
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
                memory.forward_memory.data()};
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
    c.dw1 = std::get<ExpertMatrices<bf16>>(backward_args.dw1).tensor().data();
    c.dw2 = std::get<ExpertMatrices<bf16>>(backward_args.dw2).tensor().data();
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

/// Whatever a rank's own function throws, the others hear of, and the layer stays usable.
TEST(CApiRanks, HearOfARankWhoseAllocationThrows) {
  const LayerData data = plain_layer(2);
  const workload::Split split(data, 2);
  LayerResult result = workload::make_result(data, {});
  const decltype(uniep_forward_call::allocate) kThrow[] = {
      [](void*, const uniep_memory_needs*, uniep_row_memory*) -> int { throw std::bad_alloc(); },
      [](void*, const uniep_memory_needs*, uniep_row_memory*) -> int { throw 42; }};
  on_ranks(2, split.problem(), [&](int rank, uniep_layer* layer) {
    RankStep step(split, rank, result);
    for (const auto throws : kThrow) {
      uniep_forward_call forward = step.forward();
      if (rank == 1) {
        forward.memory = {};
        forward.allocate = throws;
      }
      EXPECT_NE(uniep_forward(layer, &forward), 0);
      const std::string said = uniep_last_error();
      EXPECT_EQ(said.rfind("rank 1: ", 0), 0U) << said;
    }
    const uniep_forward_call forward = step.forward();
    expect_ok(uniep_forward(layer, &forward));
    const uniep_backward_call backward = step.backward();
    expect_ok(uniep_backward(layer, &backward));
  });
  expect_same_bits(result, reference::contract(data), "after refusals");
}

/// Memory for a forward, asked for when a second thread calls the layer, too.
struct Interrupted {
  uniep_layer* layer;
  uniep_row_memory memory;
  std::int64_t rows = 0;
  std::vector<std::string> said{};

  static int allocate(void* context, const uniep_memory_needs* needs, uniep_row_memory* memory) {
    auto& self = *static_cast<Interrupted*>(context);
    self.rows = needs->rows;
    *memory = self.memory;
    std::thread([&] {
      const uniep_forward_call forward{};
      const uniep_backward_call backward{};
      for (const int code :
           {uniep_forward(self.layer, &forward), uniep_backward(self.layer, &backward),
            uniep_layer_synchronize(self.layer)}) {
        EXPECT_NE(code, 0);
      }
      self.said.emplace_back(uniep_last_error());
    }).join();
    return 0;
  }
};

/// A call of another thread is that rank's mistake, of which the others hear nothing.
TEST(CApiRanks, GoOnBesideACallOfASecondThread) {
  const LayerData data = plain_layer(2);
  const workload::Split split(data, 2);
  LayerResult result = workload::make_result(data, {});
  on_ranks(2, split.problem(), [&](int rank, uniep_layer* layer) {
    RankStep step(split, rank, result);
    uniep_forward_call forward = step.forward();
    Interrupted interrupted{layer, forward.memory};
    if (rank == 1) {
      forward.memory = {};
      forward.allocate = Interrupted::allocate;
      forward.allocate_context = &interrupted;
    }
    expect_ok(uniep_forward(layer, &forward));
    uniep_backward_call backward = step.backward();
    backward.rows = interrupted.rows;
    expect_ok(uniep_backward(layer, &backward));
    for (const std::string& said : interrupted.said) {
      EXPECT_NE(said.find("another thread is in a call"), std::string::npos) << said;
    }
    EXPECT_EQ(interrupted.said.size(), static_cast<std::size_t>(rank));
  });
  expect_same_bits(result, reference::contract(data), "beside another thread");
}

/// Nobody waits for a rank whose config describes no group.
TEST(CApiRanks, HearOfARankThatRefusesItsGroup) {
  const std::function<void(uniep_group_config&)> spoils[] = {
      [](uniep_group_config& c) { c.backend = 5; },
      [](uniep_group_config& c) { c.share_device = 2; },
      [](uniep_group_config& c) { c.timeout_ms = -1; }};
  for (const auto& spoil : spoils) {
    in_seats(2, [&](uniep_group_config config) {
      if (config.rank == 1) spoil(config);
      std::int32_t hosts = 0, local_ranks = 0;
      uniep_group* group = nullptr;
      EXPECT_EQ(uniep_group_find_hosts(&config, &hosts, &local_ranks), 1);
      const std::string said = uniep_last_error();
      EXPECT_EQ(said.rfind("rank 1: ", 0), 0U) << said;
      EXPECT_EQ(uniep_group_create(&config, &group), 1);
      EXPECT_EQ(uniep_last_error(), said);
      EXPECT_EQ(group, nullptr);
    });
  }
}

/// Nor for one that has nowhere to put it.
TEST(CApiRanks, HearOfARankWithoutAPlaceForItsGroup) {
  in_seats(2, [&](const uniep_group_config& config) {
    std::int32_t hosts = 0, local_ranks = 0;
    uniep_group* group = nullptr;
    const bool wrong = config.rank == 1;
    EXPECT_EQ(uniep_group_find_hosts(&config, wrong ? nullptr : &hosts, &local_ranks), 1);
    EXPECT_STATES(uniep_last_error(), "rank 1: hosts is NULL; an address is accepted");
    EXPECT_EQ(uniep_group_create(&config, wrong ? nullptr : &group), 1);
    EXPECT_STATES(uniep_last_error(), "rank 1: group is NULL; an address is accepted");
    EXPECT_EQ(group, nullptr);
  });
}

/// Errors say which ranks are meant, where they name any.
TEST(CApiRanks, AreExplainedInErrors) {
  const auto ends_with_note = [] {
    const std::string said = uniep_last_error();
    const std::string note = " (of the last two of four)";
    return said.size() > note.size() && said.substr(said.size() - note.size()) == note;
  };
  const LayerData data = plain_layer(2);
  const Problem problem = workload::Split(data, 2).problem();
  in_seats(2, [&](uniep_group_config config) {
    config.ranks_note = "of the last two of four";
    uniep_group* group = nullptr;
    EXPECT_EQ(uniep_group_create(&config, config.rank == 1 ? nullptr : &group), 1);
    EXPECT_TRUE(ends_with_note()) << uniep_last_error();
    expect_ok(uniep_group_create(&config, &group));
    uniep_problem p = c_problem(problem);
    uniep_layer* layer = nullptr;
    EXPECT_EQ(uniep_layer_create(group, &p, nullptr, config.rank == 1 ? nullptr : &layer), 1);
    EXPECT_TRUE(ends_with_note()) << uniep_last_error();
    expect_ok(uniep_layer_create(group, &p, nullptr, &layer));
    uniep_group_destroy(group);
    EXPECT_EQ(uniep_forward(layer, nullptr), 1);
    EXPECT_TRUE(ends_with_note()) << uniep_last_error();
    EXPECT_EQ(uniep_layer_needs(layer, 0, nullptr), 1);
    EXPECT_STATES(uniep_last_error(), "needs is NULL; an address is accepted");
    uniep_layer_destroy(layer);
  });
}

/// Nobody waits for a rank whose arguments make no layer; the group stays usable.
TEST(CApiRanks, HearOfARankThatRefusesItsLayer) {
  struct Case {
    const char* named;
    std::function<void(uniep_problem&, uniep_layer_config&)> spoil;
  };
  const Case cases[] = {
      {"schedule", [](uniep_problem&, uniep_layer_config& c) { c.schedule = "no-such-preset"; }},
      {"record_timeline", [](uniep_problem&, uniep_layer_config& c) { c.record_timeline = 2; }},
      {"erf_since_13_2", [](uniep_problem&, uniep_layer_config& c) { c.erf_since_13_2 = -1; }},
      {"timeout_ms", [](uniep_problem&, uniep_layer_config& c) { c.timeout_ms = -1; }},
      {"hidden", [](uniep_problem& p, uniep_layer_config&) { p.hidden = 9; }},
  };
  const LayerData data = plain_layer(2);
  const Problem problem = workload::Split(data, 2).problem();
  for (const Case& spoilt : cases) {
    SCOPED_TRACE(spoilt.named);
    in_groups(2, [&](int rank, uniep_group* group) {
      uniep_problem p = c_problem(problem);
      uniep_layer_config config{};
      if (rank == 1) spoilt.spoil(p, config);
      uniep_layer* layer = nullptr;
      EXPECT_EQ(uniep_layer_create(group, &p, &config, &layer), 1);
      EXPECT_EQ(layer, nullptr);
      const std::string said = uniep_last_error();
      EXPECT_EQ(said.rfind("rank 1: ", 0), 0U) << said;
      EXPECT_NE(said.find(spoilt.named), std::string::npos) << said;
      p = c_problem(problem);
      expect_ok(uniep_layer_create(group, &p, nullptr, &layer));
      uniep_layer_destroy(layer);
      uniep_group_destroy(group);
    });
  }
}

}  // namespace
}  // namespace uniep::testing
