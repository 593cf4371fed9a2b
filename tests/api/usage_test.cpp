// Who may call a layer: not a process that was forked off, not two threads at once, not through an
// object that was moved from.
#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "api/c_steps.h"
#include "api/c_support.h"
#include "base/check.h"
#include "group/communicator_impl.h"
#include "reference/contract.h"
#include "support/expect_error.h"
#include "support/expect_same.h"
#include "support/layer_group.h"
#include "support/process_group.h"
#include "uniep/layer.h"

namespace uniep::testing {
namespace {

/// A rank's layer, and steps of it that are checked bit by bit.
struct Steps {
  Steps(const LayerData& data, int ranks, int own_rank, const Communicator& member,
        FaultInjection faults = {})
      : split(data, ranks),
        rank(own_rank),
        want(reference::contract(data)),
        result(want),
        layer(split.problem(), member,
              {.timeout_ms = 20000,
               .fault_injection = faults,
               .schedule = parse_schedule("single,workers=3")}) {}

  void run() {
    const RoutingPlan plan = layer.plan(split.topk_ids(rank));
    const Saved saved = layer.forward(plan, split.forward_args(rank, result));
    layer.backward(saved, split.backward_args(rank, result));
  }

  workload::Split split;
  int rank;
  LayerResult want, result;
  Layer layer;
};

/// What a forked process says.
std::string in_child(const std::function<std::string()>& body) {
  Crew child(1, [&](int) { return body(); });
  const Crew::End end = child.end_of(0, std::chrono::steady_clock::now());
  EXPECT_EQ(end.signal, 0) << end.said;
  EXPECT_EQ(end.exit_code, 0) << end.said;
  return end.said;
}

std::string sentence_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return cat(static_cast<int>(e.code()), ": ", e.what());
  }
  return "no error";
}

TEST(Fork, CallsOfAChildThrow) {
  const LayerData data = plain_layer(1);
  const Communicator member = Communicator::cpu_group(1)[0];
  Steps steps(data, 1, 0, member);
  steps.run();
  const std::string refusal = cat(static_cast<int>(ErrorCode::kUnsupported), ": process ");
  EXPECT_TRUE(in_child([&] { return sentence_of([&] { steps.run(); }); }).starts_with(refusal));
  EXPECT_TRUE(in_child([&] {
                return sentence_of([&] { steps.layer.synchronize(); });
              }).starts_with(refusal));
  EXPECT_TRUE(in_child([&] {
                return sentence_of([&] { Layer(steps.split.problem(), member); });
              }).starts_with(refusal));
  EXPECT_EQ(in_child([&] {
              Steps own(data, 1, 0, Communicator::cpu_group(1)[0]);
              own.run();
              expect_same_bits(own.result.out, own.want.out, "out", "a group of the child's");
              return std::string("done");
            }),
            "done");
  steps.run();
  expect_same_bits(steps.result.out, steps.want.out, "out", "after the forks");
}

TEST(Fork, AChildMayEndItsCopies) {
  const LayerData data = plain_layer(1);
  auto member = std::make_unique<Communicator>(Communicator::cpu_group(1)[0]);
  auto steps = std::make_unique<Steps>(data, 1, 0, *member);
  steps->run();
  EXPECT_EQ(in_child([&] {
              steps.reset();
              member.reset();
              return std::string("ended");
            }),
            "ended");
  EXPECT_EQ(in_child([&] {
              steps->layer = Layer(steps->split.problem(), Communicator::cpu_group(1)[0]);
              return std::string("replaced");
            }),
            "replaced");
  steps->run();
  expect_same_bits(steps->result.dw1, steps->want.dw1, "dw1", "after the forks");
}

// The end of a child's copies must not tell the other ranks that this one has left.
TEST(Fork, OtherRanksHearNothingOfIt) {
  const LayerData data = plain_layer(2);
  const Common<MeetingPlace> place;
  Crew crew(2, [&](int rank) {
    auto member =
        std::make_unique<Communicator>(Communicator::from_callbacks(place->options(rank, 2)));
    auto steps = std::make_unique<Steps>(data, 2, rank, *member);
    steps->run();
    if (rank == 1) {
      in_child([&] {
        steps.reset();
        member.reset();
        return std::string("ended");
      });
    }
    for (int i = 0; i < 3; ++i) steps->run();
    return std::string("fine");
  });
  for (const Crew::End& end : crew.ends()) EXPECT_EQ(end.said, "fine");
}

// Whatever a child calls, right or wrong, in C or in C++, the parent's group goes on.
TEST(Fork, CallsOfAChildDoNotReachOtherRanks) {
  const LayerData data = plain_layer(2);
  const Common<MeetingPlace> place;
  Crew crew(2, [&](int rank) {
    const Communicator member = Communicator::from_callbacks(place->options(rank, 2));
    Steps steps(data, 2, rank, member);
    steps.run();
    uniep_group group{member};
    const uniep_problem problem = c_problem(steps.split.problem());
    uniep_layer* layer = nullptr;
    expect_ok(uniep_layer_create(&group, &problem, nullptr, &layer));
    if (rank == 1) {
      const std::string said = in_child([&] {
        const uniep_forward_call forward{};
        const uniep_backward_call backward{};
        const uniep_problem none{};
        uniep_layer* another = nullptr;
        std::string unsupported;
        for (const int code :
             {uniep_forward(layer, &forward), uniep_backward(layer, &backward),
              uniep_layer_synchronize(layer), uniep_tune_forward(layer, &forward, nullptr, nullptr),
              uniep_layer_create(&group, &none, nullptr, &another)}) {
          unsupported += cat(code == 1 + static_cast<int>(ErrorCode::kUnsupported));
        }
        const auto of_ranks = sentence_of([&] { run_ranks({member}, [](Communicator&) {}); });
        unsupported +=
            cat(of_ranks.starts_with(cat(static_cast<int>(ErrorCode::kUnsupported), ":")));
        return unsupported;
      });
      EXPECT_EQ(said, "111111");
    }
    for (int i = 0; i < 3; ++i) steps.run();
    uniep_layer_destroy(layer);
    return std::string("fine");
  });
  for (const Crew::End& end : crew.ends()) EXPECT_EQ(end.said, "fine");
}

TEST(Threads, ASecondOneIsRefusedAndTheFirstGoesOn) {
  const LayerData data = plain_layer(1);
  Steps steps(data, 1, 0, Communicator::cpu_group(1)[0], {.max_delay_us = 20000});
  int refused = 0;
  for (int turn = 0; turn < 20 && refused == 0; ++turn) {
    std::latch begin(2);
    std::thread other([&] {
      begin.arrive_and_wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::string said = sentence_of([&] { steps.layer.synchronize(); });
      if (said.find("another thread is in a call of this layer") != std::string::npos) ++refused;
    });
    begin.arrive_and_wait();
    steps.run();
    other.join();
    expect_same_bits(steps.result.out, steps.want.out, "out", "beside another thread");
  }
  EXPECT_GT(refused, 0);
}

// Calls of all layers of a group meet in one place: those of two threads would meet the wrong ones.
TEST(Threads, ASecondOneIsRefusedByOtherLayersOfTheGroup) {
  const LayerData data = plain_layer(2);
  std::latch refused(1);
  run_ranks(Communicator::cpu_group(2), [&](Communicator& member) {
    Steps steps(data, 2, member.rank(), member), others(data, 2, member.rank(), member);
    if (member.rank() == 1) {
      refused.wait();  // until then the other rank's first thread waits in its call
      return steps.run();
    }
    const std::string busy = "another thread is in a collective call of this group";
    std::thread first([&] {
      while (sentence_of([&] { steps.run(); }).find(busy) != std::string::npos) {
      }
    });
    const auto is_busy = [&] {
      return sentence_of([&] { const CollectiveCall call(*member.impl()); }) != "no error";
    };
    while (!is_busy()) std::this_thread::yield();
    uniep_group group{member};
    const uniep_problem problem = c_problem(steps.split.problem());
    uniep_layer* layer = nullptr;
    EXPECT_NE(sentence_of([&] { others.run(); }).find(busy), std::string::npos);
    EXPECT_NE(sentence_of([&] { Layer(steps.split.problem(), member); }).find(busy),
              std::string::npos);
    // Right or wrong: the other rank does not hear of it.
    for (const uniep_problem* which : {&problem, static_cast<const uniep_problem*>(nullptr)}) {
      EXPECT_NE(uniep_layer_create(&group, which, nullptr, &layer), 0);
      EXPECT_NE(std::string(uniep_last_error()).find(busy), std::string::npos);
    }
    refused.count_down();
    first.join();
    expect_same_bits(steps.result.out, steps.want.out, "out", "beside another thread");
  });
}

// Alone a rank meets nobody.
TEST(Threads, LayersOfOneRankRunSideBySide) {
  const LayerData data = plain_layer(1);
  const Communicator member = Communicator::cpu_group(1)[0];
  const CollectiveUse::Call call(member.impl()->collective_use);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      Steps steps(data, 1, 0, member);
      steps.run();
      expect_same_bits(steps.result.out, steps.want.out, "out", "beside other threads' calls");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Threads, MayTakeTurns) {
  const LayerData data = plain_layer(1);
  Steps steps(data, 1, 0, Communicator::cpu_group(1)[0]);
  for (int i = 0; i < 3; ++i) std::thread([&] { steps.run(); }).join();
  expect_same_bits(steps.result.dx, steps.want.dx, "dx", "of threads that take turns");
}

TEST(MovedFrom, LayersThrow) {
  const LayerData data = plain_layer(1);
  Communicator member = Communicator::cpu_group(1)[0];
  Steps steps(data, 1, 0, member);
  const Layer moved = std::move(steps.layer);
  const auto expect_refusal = [](const std::function<void()>& call) {
    EXPECT_NE(sentence_of(call).find("was moved to another one"), std::string::npos);
  };
  expect_refusal([&] { steps.run(); });
  expect_refusal([&] { steps.layer.synchronize(); });
  expect_refusal([&] { steps.layer.take_timeline(); });
  expect_refusal([&] { (void)steps.layer.problem(); });
  expect_refusal([&] { (void)steps.layer.communicator(); });
  expect_refusal([&] { (void)steps.layer.last_pass(); });
  expect_refusal([&] { (void)steps.layer.schedule(Pass::kForward); });
  EXPECT_EQ(moved.problem(), steps.split.problem());
}

TEST(MovedFrom, HandlesMeanWhatTheyMeant) {
  const LayerData data = plain_layer(1);
  Communicator member = Communicator::cpu_group(1)[0];
  const Communicator taken_member = std::move(member);
  Steps steps(data, 1, 0, member);
  EXPECT_EQ(member.rank(), taken_member.rank());

  const Problem& problem = steps.split.problem();
  RowPool pool(problem, member, {.bytes = 1 << 20});
  const RowPool taken_pool = std::move(pool);
  EXPECT_EQ(pool.data(), taken_pool.data());

  const std::vector<std::int64_t> tokens = {1};
  const std::vector<std::int32_t> dropped(static_cast<std::size_t>(problem.topk), -1);
  RoutingPlan plan = RoutingPlan::build(problem, 0, tokens, dropped);
  const RoutingPlan taken_plan = std::move(plan);
  EXPECT_EQ(plan.problem(), problem);
}

}  // namespace
}  // namespace uniep::testing
