// What of the tuner cannot be seen from outside: that a wrong bit takes a candidate out, and the
// figures of surveys.
#include "tuning/tuner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include "common/machine.h"
#include "support/temporary_folder.h"
#include "tuning/survey.h"

namespace uniep::tool {
namespace {

constexpr int kAlways = -1;

/// Finds one wrong bit in the results of one pass, the `wrong`-th that it is asked about, or
/// always.
class LyingDevice final : public BenchDevice {
 public:
  explicit LyingDevice(int wrong) : wrong_(wrong) {}

  std::shared_ptr<std::byte> allocate(std::int64_t bytes) override { return cpu_->allocate(bytes); }
  void fill(std::span<bf16> to, const workload::Numbers& numbers, std::uint64_t first) override {
    cpu_->fill(to, numbers, first);
  }
  void poison(std::span<std::byte> memory) override { cpu_->poison(memory); }
  void upload(std::span<std::byte> to, const void* from) override { cpu_->upload(to, from); }
  void download(void* to, std::span<const std::byte> from) override { cpu_->download(to, from); }
  std::int64_t count_differing(std::span<const std::byte> a, std::span<const std::byte> b,
                               int width) override {
    EXPECT_EQ(cpu_->count_differing(a, b, width), 0);
    return ++asked_ == wrong_ || wrong_ == kAlways ? 1 : 0;
  }
  bool runs_ahead() const override { return false; }
  Bootstrap& bootstrap(const Communicator& member) const override {
    return cpu_->bootstrap(member);
  }
  std::optional<GemmSeconds> gemm_seconds(const BenchCase&, int, const BenchOptions&,
                                          std::span<const bf16>, std::span<const bf16>) override {
    return std::nullopt;
  }
  std::string no_gemms_reason() const override { return ""; }

 private:
  std::unique_ptr<BenchDevice> cpu_ = cpu_bench_device();
  const int wrong_;
  int asked_ = 0;
};

/// A search that ends with its rounds, however slow the machine is.
tune::TuneSettings short_search(const std::string& cache) {
  tune::TuneSettings settings;
  settings.candidates = 3;
  settings.budget_s = 3600;
  settings.max_rounds = 20;
  settings.cache = cache;
  return settings;
}

BenchCase tiny_case() { return make_case("tiny,tokens=5", 1, 0, 0); }

tune::TuneOutcome tune(const BenchCase& bench, const tune::TuneSettings& settings, int wrong = 0) {
  LyingDevice device(wrong);
  const Ranks ranks{.count = 1,
                    .speaks = true,
                    .backend = Backend::kCpu,
                    .machine = "",
                    .no_floor = "",
                    .run = [&](const auto& of_rank) {
                      run_ranks(Communicator::cpu_group(1),
                                [&](Communicator& member) { of_rank(member, device); });
                    }};
  return tune_pass(bench, Pass::kForward, settings, ranks);
}

tune::TuneOutcome tune_tiny(int wrong, const std::string& cache) {
  return tune(tiny_case(), short_search(cache), wrong);
}

TEST(Tuner, ACandidateWithOneWrongBitIsRejected) {
  const testing::TemporaryFolder folder;
  const std::size_t all = tune_tiny(0, folder.file("a")).ranking.size();
  EXPECT_GE(all, 6u);
  // The first pass of a candidate is not timed, but it is compared.
  for (const int wrong : {1, 2, 4, 20}) {
    // Beside a cache of its own: no search is to go on with another's session.
    const tune::TuneOutcome out = tune_tiny(wrong, folder.file("wrong" + std::to_string(wrong)));
    EXPECT_EQ(out.rejected.size(), 1u) << wrong;
    EXPECT_EQ(out.ranking.size(), all - 1);
    for (const tune::TunedCandidate& c : out.ranking) {
      EXPECT_NE(c.schedule, out.rejected.front().schedule);
    }
  }
}

TEST(Tuner, WhereAllAreRejectedNothingIsFound) {
  const testing::TemporaryFolder folder;
  const tune::TuneOutcome out = tune_tiny(kAlways, folder.file("tuned.json"));
  EXPECT_GE(out.rejected.size(), 6u);
  EXPECT_TRUE(out.ranking.empty());
  EXPECT_FALSE(out.chosen);
  EXPECT_FALSE(out.stored);
}

TEST(Tuner, WhatWasFoundIsStored) {
  const testing::TemporaryFolder folder;
  const tune::TuneOutcome out = tune_tiny(0, folder.file("tuned.json"));
  EXPECT_TRUE(out.stored);
  const auto loaded = tune::TuneCache(folder.file("tuned.json")).load();
  ASSERT_EQ(loaded.entries.size(), 1u);
  ASSERT_TRUE(out.chosen);
  EXPECT_EQ(loaded.entries[0].schedule, out.chosen->schedule);
  EXPECT_EQ(out.kept_default, out.chosen->schedule == Schedule{});
  EXPECT_EQ(loaded.entries[0].key, out.key);
  EXPECT_FALSE(out.ranking[0].why.empty());
}

TEST(Tuner, WhatTooFewRoundsKeptIsNotStored) {
  const testing::TemporaryFolder folder;
  tune::TuneSettings settings = short_search(folder.file("tuned.json"));
  settings.max_rounds = 3;
  const tune::TuneOutcome out = tune(tiny_case(), settings);
  EXPECT_TRUE(out.kept_default || out.ranking.front().schedule == out.chosen->schedule);
  EXPECT_FALSE(out.stored);
  EXPECT_FALSE(out.store_failed);
  EXPECT_TRUE(tune::TuneCache(settings.cache).load().entries.empty());
}

TEST(Tuner, WhatCannotBeStoredIsStillFoundAndTheSearchCanBeTakenUp) {
  const testing::TemporaryFolder folder;
  const tune::TuneSettings settings = short_search(folder.file("tuned.json"));
  std::filesystem::create_directory(settings.cache);
  const tune::TuneOutcome out = tune(tiny_case(), settings);
  EXPECT_TRUE(out.store_failed);
  EXPECT_FALSE(out.stored);
  ASSERT_TRUE(out.chosen);
  EXPECT_FALSE(out.ranking.empty());
  ASSERT_EQ(out.problems.size(), 1u);
  EXPECT_NE(out.problems[0].find(settings.cache), std::string::npos);

  std::filesystem::remove(settings.cache);
  const tune::TuneOutcome again = tune(tiny_case(), settings);
  EXPECT_EQ(again.resumed, out.measurements);
  EXPECT_EQ(again.measurements, 0u);
  EXPECT_TRUE(again.stored);
  EXPECT_EQ(again.chosen->schedule, out.chosen->schedule);
  EXPECT_EQ(folder.num_files(), 2u) << "the cache and its lock, no session";
}

TEST(Tuner, ASessionIsOfOneLayerOneSearchAndOneBuild) {
  tune::TuneSettings settings = short_search("");
  const std::string text = search_text(tiny_case(), settings);
  EXPECT_NE(text.find(to_string(this_build())), std::string::npos);
  // All of these have the key of tiny_case, or one that is printed alike.
  for (const BenchCase& other :
       {make_case("tiny,tokens=8", 1, 0, 0), make_case("tiny,tokens=5", 1, 1, 0),
        make_case("tiny,tokens=5", 1, 0, 1e-9)}) {
    EXPECT_NE(search_text(other, settings), text);
  }
  settings.restriction = "lag=1";
  EXPECT_NE(search_text(tiny_case(), settings), text);
}

TEST(Tuner, ASessionIsOfItsHosts) {
  const tune::TuneSettings settings = short_search("");
  BenchCase of_hosts = make_case("tiny,tokens=5", 2, 0, 0);
  const std::string text = search_text(of_hosts, settings);
  of_hosts.hosts = 2;
  EXPECT_NE(search_text(of_hosts, settings), text);
}

TEST(Tuner, ASearchIsSaidInWords) {
  const std::string text = search_for(tiny_case(), Pass::kBackward, short_search(""), "a CPU");
  EXPECT_TRUE(text.starts_with(kSearchFor)) << text;
  for (const char* words : {"the backward pass of tiny,tokens=5,", "; 1 rank, skew 0, seed 0; ",
                            "in the whole space", "3 candidates (profile: none)", "on a CPU"}) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  }
}

TEST(Tuner, ASessionOfAFileIsOfItsRouting) {
  BenchCase file = tiny_case();
  file.file = "layer.safetensors";
  BenchCase other = file;
  std::swap(other.routing.topk_ids.front(), other.routing.topk_ids.back());
  const tune::TuneSettings settings = short_search("");
  EXPECT_NE(search_text(file, settings), search_text(other, settings));
  EXPECT_NE(search_text(file, settings), search_text(tiny_case(), settings));
  other = file;
  other.file = "moved.safetensors";
  EXPECT_EQ(search_text(file, settings), search_text(other, settings));
}

TEST(Tuner, IsWatchedAndCanBeStopped) {
  // Within the third round: after two, candidates may be left behind, and after five it may be
  // over.
  constexpr std::size_t kBeforeItIsDecided = 20;
  const testing::TemporaryFolder folder;
  tune::TuneSettings settings = short_search(folder.file("tuned.json"));
  std::vector<tune::TuneState> states;
  settings.watch.measured = [&](const tune::TuneState& state) { states.push_back(state); };
  settings.watch.stop = [&] { return states.size() == kBeforeItIsDecided; };
  const tune::TuneOutcome out = tune(tiny_case(), settings);
  EXPECT_EQ(out.end, tune::TuneEnd::kInterrupted);
  EXPECT_EQ(out.measurements, kBeforeItIsDecided);
  ASSERT_EQ(states.size(), kBeforeItIsDecided);
  EXPECT_FALSE(states.front().best_s) << "no round is complete";
  EXPECT_EQ(states.back().pass, Pass::kForward);
  EXPECT_GE(states.back().rounds, 1);
  EXPECT_GT(*states.back().best_s, 0);
  EXPECT_LE(states.back().running, states.back().candidates);
  for (const tune::TunedCandidate& c : out.ranking) EXPECT_TRUE(c.why.empty()) << "it ends at once";

  settings.watch = {};
  EXPECT_EQ(tune(tiny_case(), settings).resumed, kBeforeItIsDecided);
}

/// Leaves a session of a finished search beside a cache that can be written by now.
void leave_session(const tune::TuneSettings& settings) {
  std::filesystem::create_directory(settings.cache);
  EXPECT_TRUE(tune(tiny_case(), settings).store_failed);
  std::filesystem::remove(settings.cache);
}

TEST(Tuner, ASessionOfAnotherLayerIsNotGoneOnWith) {
  const testing::TemporaryFolder folder;
  const tune::TuneSettings settings = short_search(folder.file("tuned.json"));
  leave_session(settings);
  EXPECT_EQ(tune(make_case("tiny,tokens=8", 1, 0, 0), settings).resumed, 0u);
  EXPECT_EQ(tune(make_case("tiny,tokens=5", 1, 1, 0), settings).resumed, 0u);
  EXPECT_GT(tune(tiny_case(), settings).resumed, 0u);
}

TEST(Agreement, OfTimesInTheSameOrder) {
  std::vector<SurveyPoint> points;
  for (int i = 1; i <= 10; ++i) points.push_back({{}, 1.1 * i * i, 1.0 * i * i});
  const Agreement a = agreement_of(points);
  EXPECT_NEAR(a.rank_correlation, 1, 1e-12);
  EXPECT_NEAR(a.median_error, 0.1, 1e-9);
  EXPECT_NEAR(a.pick, 1, 1e-12);
}

TEST(Agreement, OfTimesInTheOppositeOrderAndOfEqualOnes) {
  EXPECT_NEAR(agreement_of({{{}, 1, 3}, {{}, 2, 2}, {{}, 3, 1}}).rank_correlation, -1, 1e-12);
  EXPECT_NEAR(agreement_of({{{}, 1, 3}, {{}, 2, 2}, {{}, 3, 1}}).pick, 1.0 / 3, 1e-12);
  EXPECT_EQ(agreement_of({{{}, 1, 3}, {{}, 1, 2}}).rank_correlation, 0);
  EXPECT_EQ(agreement_of({}).rank_correlation, 0);
}

}  // namespace
}  // namespace uniep::tool
