// Counters of one rank among two, through a wrap of 32 bits.
#include "cpu/counters.h"

#include <gtest/gtest.h>

#include "schedule/pass_order.h"

namespace uniep::cpu {
namespace {

class CountersFrom : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  CountersFrom()
      : problem_{.hidden = 8,
                 .intermediate = 8,
                 .num_experts = 2,
                 .topk = 1,
                 .max_tokens = 4,
                 .row_align = 16},
        heaps_{heap(), heap()},
        own_(problem_, 0, heaps_, GetParam()),
        peer_(problem_, 1, heaps_, GetParam()),
        plan_(RoutingPlan::build(problem_, 0, tokens_, ids_)),
        order_(plan_.data(), Pass::kForward, schedule()) {}

  std::shared_ptr<Heap> heap() const {
    return std::make_shared<Heap>(SymmetricLayout(problem_, 2).bytes);
  }
  static Schedule schedule() {
    Schedule s;
    s.tile_m = 16;
    return s;
  }

  /// Rank `rank` tells both that its tokens can be pulled.
  static void publish(Counters& counters, int rank) {
    for (const int peer : {0, 1}) add(counters.counter(CounterKind::kPublished, peer, rank), 1);
  }

  const std::vector<std::int64_t> tokens_{4, 4};
  const std::vector<std::int32_t> ids_{0, 1, 0, 1, 0, 1, 0, 1};
  const Problem problem_;
  std::vector<std::shared_ptr<Heap>> heaps_;
  Counters own_;
  Counters peer_;
  RoutingPlan plan_;
  PassOrder order_;
};

INSTANTIATE_TEST_SUITE_P(Wrap, CountersFrom,
                         ::testing::Values(0u, 1u, 0x7ffffffeu, 0x80000000u, 0xfffffffdu,
                                           0xffffffffu));

TEST_P(CountersFrom, SeenCountsFromThePassesBase) {
  for (int pass = 0; pass < 5; ++pass) {
    own_.begin_pass(order_.view());
    for (const CounterKind kind : {CounterKind::kRowsReady, CounterKind::kTileDone,
                                   CounterKind::kExpertDone, CounterKind::kArrived}) {
      EXPECT_EQ(own_.seen(kind, 0), 0u) << name(kind);
      add(own_.counter(kind, 0, 0), 3);
      EXPECT_EQ(own_.seen(kind, 0), 3u) << name(kind);
      add(own_.counter(kind, 0, 0), 2);
      EXPECT_EQ(own_.seen(kind, 0), 5u) << name(kind);
    }
  }
}

TEST_P(CountersFrom, PublishedCountsPassesWhoeverBeginsFirst) {
  for (int pass = 0; pass < 5; ++pass) {
    if (pass % 2 == 0) {  // the peer is ahead
      peer_.begin_pass(order_.view());
      publish(peer_, 1);
      own_.begin_pass(order_.view());
      EXPECT_EQ(own_.seen(CounterKind::kPublished, 1), 1u);
    } else {
      own_.begin_pass(order_.view());
      EXPECT_EQ(own_.seen(CounterKind::kPublished, 1), 0u);
      peer_.begin_pass(order_.view());
      publish(peer_, 1);
    }
    EXPECT_EQ(own_.seen(CounterKind::kPublished, 1), 1u);
    EXPECT_EQ(own_.seen(CounterKind::kPublished, 0), 0u) << "not published itself yet";
    publish(own_, 0);
    EXPECT_EQ(own_.seen(CounterKind::kPublished, 0), 1u);
    EXPECT_EQ(peer_.seen(CounterKind::kPublished, 0), 1u);
  }
}

TEST_P(CountersFrom, EachCounterHasItsOwnPlace) {
  std::vector<std::uint32_t*> places;
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 2; ++i) places.push_back(own_.counter(CounterKind::kPublished, rank, i));
    for (int i = 0; i < 8; ++i) places.push_back(own_.counter(CounterKind::kArrived, rank, i));
  }
  for (int i = 0; i < 2; ++i) places.push_back(own_.counter(CounterKind::kRowsReady, 0, i));
  for (int i = 0; i < 2; ++i) places.push_back(own_.counter(CounterKind::kTileDone, 0, i));
  places.push_back(own_.counter(CounterKind::kExpertDone, 0, 0));
  for (std::size_t i = 0; i < places.size(); ++i) {
    EXPECT_EQ(*places[i], GetParam()) << "where it starts";
    *places[i] = static_cast<std::uint32_t>(i);
  }
  for (std::size_t i = 0; i < places.size(); ++i) EXPECT_EQ(*places[i], i);
}

}  // namespace
}  // namespace uniep::cpu
