// The cache survives whatever happens to its file: damage, other programs' files, many processes.
#include "tune/book/cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "base/check.h"
#include "schedule/axes.h"
#include "schedule/open_sizes.h"
#include "support/cases.h"
#include "support/scoped_env.h"
#include "support/states.h"
#include "support/temporary_folder.h"
#include "tune/files/json_fields.h"
#include "tune/files/shared_files.h"

namespace uniep::tune {
namespace {

using testing::file_text;
using testing::TemporaryFolder;
using testing::write_file;

TunedEntry entry(std::int64_t hidden, const char* schedule = "two-kernel,tile_m=32") {
  return {.key = {.backend = Backend::kCpu,
                  .device = "some \"CPU\"",
                  .driver = "avx2",
                  .library = "0.1.0",
                  .hidden = hidden,
                  .intermediate = 128,
                  .num_experts = 16,
                  .topk = 4,
                  .ranks = 2,
                  .pass = Pass::kBackward,
                  .tokens = 512,
                  .skew = 0.5},
          .schedule = parse_schedule(schedule),
          .ms = 1.25,
          .default_ms = 2.5,
          .date = "2026-11-20T00:00:00Z"};
}

TEST(TokenBucket, IsTheNextPowerOfTwo) {
  EXPECT_EQ(token_bucket(0), 0);
  EXPECT_EQ(token_bucket(1), 1);
  EXPECT_EQ(token_bucket(4097), 8192);
  EXPECT_EQ(token_bucket(8192), 8192);
}

TEST(TuneCache, IsWhereTheEnvironmentSays) {
  const testing::ScopedEnv xdg("XDG_CACHE_HOME", "/x");
  const testing::ScopedEnv unset("UNIEP_TUNE_CACHE", "");
  {
    const testing::ScopedEnv own("UNIEP_TUNE_CACHE", "/some/file.json");
    EXPECT_EQ(TuneCache::default_path(), "/some/file.json");
  }
  EXPECT_EQ(TuneCache::default_path(), "/x/uniep/tuned.json");
}

TEST(TuneCache, KnowsTheHostsOfRanks) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  TunedEntry other = entry(64);
  other.key.hosts = 2;
  EXPECT_TRUE(cache.store(entry(64)).empty());
  EXPECT_TRUE(cache.store(other).empty());
  const std::vector<TunedEntry> entries = cache.load().entries;
  ASSERT_EQ(entries.size(), 2u) << "the same ranks on other hosts are another situation";
  EXPECT_EQ(find_entry(entries, entry(64).key), &entries[0]);
  EXPECT_EQ(find_entry(entries, other.key), &entries[1]);
  TuneKey four = other.key;
  four.hosts = 4;
  EXPECT_EQ(find_entry(entries, four), nullptr);
  EXPECT_NE(to_string(other.key).find("2 ranks on 2 hosts"), std::string::npos);

  // An entry that is older than the field is of one host.
  std::string text = file_text(cache.path());
  const std::string field = "\"hosts\": 1,";
  text.replace(text.find(field), field.size(), "");
  write_file(cache.path(), text);
  EXPECT_EQ(cache.load().entries[0].key.hosts, 1);
}

TEST(TuneCache, KnowsWhoseTokensALayerHasAndWhichSms) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  std::vector<TunedEntry> others(3, entry(64));
  others[0].key.gathered_hosts = 2;
  others[1].key.slot_rows = true;
  others[2].key.spare_sms = 16;
  EXPECT_TRUE(cache.store(entry(64)).empty());
  for (const TunedEntry& other : others) EXPECT_TRUE(cache.store(other).empty());
  const std::vector<TunedEntry> entries = cache.load().entries;
  ASSERT_EQ(entries.size(), 4u) << "each is another situation";
  EXPECT_EQ(find_entry(entries, entry(64).key), &entries[0]);
  for (std::size_t i = 0; i < others.size(); ++i) {
    EXPECT_EQ(find_entry(entries, others[i].key), &entries[i + 1]);
    EXPECT_NE(to_string(others[i].key), to_string(entry(64).key));
  }

  std::string text = file_text(cache.path());
  for (const std::string field :
       {"\"gathered_hosts\": 1,", "\"slot_rows\": \"no\",", "\"spare_sms\": 0,"}) {
    const std::size_t at = text.find(field);
    ASSERT_NE(at, text.npos) << field;
    text.replace(at, field.size(), "");
  }
  const TunedEntries older = parse_tuned(text, "f");
  EXPECT_TRUE(older.problems.empty());
  EXPECT_EQ(older.entries[0].key, entry(64).key) << "an entry that is older than the fields";
}

TEST(TuneCache, KnowsTheArithmeticOfLayers) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  TunedEntry other = entry(64);
  other.key.activation = Activation::kGptOss;
  other.key.probs = Probs::kAfter;
  other.key.bias = true;
  other.key.combine_groups = 2;
  other.key.combine_partials = CombinePartials::kBf16;
  other.key.backward_rows = 4096;
  TunedEntry no_gate_in_waves = entry(64);
  no_gate_in_waves.key.in_waves = true;
  no_gate_in_waves.key.shared_gate = false;
  EXPECT_TRUE(cache.store(no_gate_in_waves).empty());
  EXPECT_EQ(cache.load().entries.at(0).key, no_gate_in_waves.key);
  ASSERT_EQ(std::remove(folder.file("tuned.json").c_str()), 0);
  EXPECT_TRUE(cache.store(entry(64)).empty());
  EXPECT_TRUE(cache.store(other).empty());
  const std::vector<TunedEntry> entries = cache.load().entries;
  ASSERT_EQ(entries.size(), 2u) << "layers of another arithmetic are others";
  EXPECT_EQ(entries[0].key, entry(64).key);
  EXPECT_EQ(entries[1].key, other.key);
  EXPECT_EQ(find_entry(entries, other.key), &entries[1]);
  TuneKey unbiased = other.key;
  unbiased.bias = false;
  EXPECT_EQ(find_entry(entries, unbiased), nullptr);
  TuneKey one_group = other.key;
  one_group.combine_groups = 1;
  EXPECT_EQ(find_entry(entries, one_group), &entries[1]) << "that has the same kernels";
  TuneKey same_kernels = other.key;
  same_kernels.activation = Activation::kGeglu;
  same_kernels.probs = Probs::kBefore;
  EXPECT_EQ(find_entry(entries, same_kernels), &entries[1]) << "that has the same kernels";
  TuneKey ungated = other.key;
  ungated.activation = Activation::kGelu;
  EXPECT_EQ(find_entry(entries, ungated), nullptr) << "whose fc1 is half as wide";
  TunedEntry own = entries[1];
  own.key = same_kernels;
  own.key.skew = other.key.skew + 1;
  const std::vector<TunedEntry> both{entries[1], own};
  EXPECT_EQ(find_entry(both, same_kernels), &both[1]) << "its own, although of another skew";
  TuneKey no_gate = other.key;
  no_gate.shared_gate = false;
  EXPECT_EQ(find_entry(entries, no_gate), nullptr) << "whose rows of dy are others";
  TuneKey in_waves = other.key;
  in_waves.in_waves = true;
  EXPECT_EQ(find_entry(entries, in_waves), nullptr) << "of which other axes are forced";
  TuneKey all_rows = other.key;
  all_rows.backward_rows = 0;
  EXPECT_EQ(find_entry(entries, all_rows), nullptr);
  EXPECT_NE(to_string(other.key).find(",activation=gpt_oss,probs=after,bias,combine_groups=2,"
                                      "combine_partials=bf16,backward_rows=4096 with"),
            std::string::npos);

  // An entry that is older than these fields is of the arithmetic that there was; of a name that is
  // unknown here nothing is guessed.
  std::string text = file_text(folder.file("tuned.json"));
  const auto replace = [&](const std::string& old, const std::string& with) {
    const std::size_t at = text.find(old);
    ASSERT_NE(at, text.npos) << old;
    text.replace(at, old.size(), with);
  };
  replace("\"activation\": \"swiglu\",", "");
  replace("\"probs\": \"before\",", "");
  replace("\"bias\": \"no\",", "");
  replace("\"combine_groups\": 1,", "");
  replace("\"combine_partials\": \"fp32\",", "");
  replace("\"backward_rows\": 0,", "");
  replace("\"shared_gate\": \"yes\",", "");
  replace("\"in_waves\": \"no\",", "");
  replace("\"gpt_oss\"", "\"swish\"");
  const TunedEntries parsed = parse_tuned(text, "f");
  ASSERT_EQ(parsed.entries.size(), 1u);
  EXPECT_EQ(parsed.entries[0].key, entry(64).key);
  ASSERT_EQ(parsed.problems.size(), 1u);
  EXPECT_STATES(parsed.problems[0],
                "f: entry 1 is ignored: activation is 'swish'; swiglu, geglu, geglu_tanh, reglu, "
                "gpt_oss, swiglu_clamped, swiglu_softcapped, relu2, gelu, "
                "silu are accepted");
}

TEST(TuneCache, KeepsWhatIsStored) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("deep/er/tuned.json"));
  EXPECT_TRUE(cache.load().entries.empty());
  EXPECT_TRUE(cache.load().problems.empty()) << "no file is no problem";
  EXPECT_TRUE(cache.store(entry(64)).empty());
  EXPECT_TRUE(cache.store(entry(128)).empty());
  const TunedEntries loaded = cache.load();
  ASSERT_EQ(loaded.entries.size(), 2u);
  EXPECT_EQ(loaded.entries[0].key, entry(64).key);
  EXPECT_EQ(loaded.entries[0].schedule, entry(64).schedule);
  EXPECT_EQ(loaded.entries[0].ms, 1.25);
  EXPECT_EQ(loaded.entries[0].default_ms, 2.5);
  EXPECT_EQ(loaded.entries[0].date, "2026-11-20T00:00:00Z");
  EXPECT_EQ(loaded.entries[1].key.hidden, 128);
}

TEST(TuneCache, AnEntryTakesThePlaceOfItsPredecessor) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  cache.store(entry(64));
  cache.store(entry(64, "single,lag=2"));
  ASSERT_EQ(cache.load().entries.size(), 1u);
  EXPECT_EQ(cache.load().entries[0].schedule, parse_schedule("single,lag=2"));
}

TEST(TuneCache, DamagedFilesAreReportedIgnoredAndKeptAside) {
  for (const std::string& text :
       {std::string("{\"schema\""), std::string(""), std::string("[1,2]"), std::string(100, '\xff'),
        std::string("{\"schema\":\"another-program-3\",\"entries\":[]}"),
        std::string("{\"schema\":\"uniep-tuned-1\"}")}) {
    const TemporaryFolder folder;
    const TuneCache cache(folder.file("tuned.json"));
    write_file(cache.path(), text);
    const TunedEntries loaded = cache.load();
    EXPECT_TRUE(loaded.entries.empty());
    ASSERT_EQ(loaded.problems.size(), 1u) << text;
    EXPECT_NE(loaded.problems[0].find(cache.path()), std::string::npos);
    EXPECT_EQ(cache.store(entry(64)).size(), 2u);
    EXPECT_EQ(cache.load().entries.size(), 1u);
    EXPECT_TRUE(cache.load().problems.empty());
    EXPECT_EQ(file_text(cache.path() + ".damaged"), text);
  }
}

TEST(TuneCache, AFileOfANewerSchemaIsLeftAlone) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  const std::string text = R"({"schema": "uniep-tuned-2", "of": "the future"})";
  write_file(cache.path(), text);
  EXPECT_EQ(cache.load().problems.size(), 1u);
  EXPECT_THROW(cache.require_storable(), Error);
  EXPECT_THROW(cache.store(entry(64)), Error);
  EXPECT_EQ(file_text(cache.path()), text);
  EXPECT_EQ(folder.num_files(), 2u) << "the cache and its lock";
}

TEST(TuneCache, WithoutAPathThereIsNothingToLoadAndNowhereToStore) {
  const TuneCache none("");
  EXPECT_TRUE(none.load().entries.empty());
  EXPECT_TRUE(none.load().problems.empty());
  EXPECT_THROW(none.require_storable(), Error);
  EXPECT_THROW(none.store(entry(64)), Error);
}

TEST(TuneCache, IsClearedOnceAndStoresAgain) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  EXPECT_EQ(cache.clear(), std::nullopt);
  EXPECT_EQ(folder.num_files(), 0u) << "no lock where nothing was";
  cache.store(entry(64));
  cache.store(entry(128));
  EXPECT_EQ(cache.clear(), 2u);
  EXPECT_FALSE(std::filesystem::exists(cache.path()));
  EXPECT_TRUE(cache.load().entries.empty());
  cache.store(entry(64));
  EXPECT_EQ(cache.load().entries.size(), 1u);
}

TEST(TuneCache, OnlyACacheOfThisVersionIsCleared) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  for (const char* text : {"", "my thesis", "{}", R"({"schema": "uniep-tuned-2", "entries": []})",
                           R"({"schema": "uniep-run-1", "entries": []})"}) {
    write_file(cache.path(), text);
    EXPECT_THROW(cache.clear(), Error) << text;
    EXPECT_EQ(file_text(cache.path()), text);
  }
  EXPECT_THROW(TuneCache("").clear(), Error);
}

TEST(TuneCache, ClearedThroughALinkTheFileBehindItIsGone) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("link.json"));
  const std::string behind = folder.file("tuned.json");
  std::filesystem::create_symlink(behind, cache.path());
  cache.store(entry(64));
  ASSERT_TRUE(std::filesystem::exists(behind));
  EXPECT_EQ(cache.clear(), 1u);
  EXPECT_FALSE(std::filesystem::exists(behind));
  cache.store(entry(64));
  EXPECT_EQ(cache.load().entries.size(), 1u);
}

TEST(TuneCache, IsNotClearedWhileAnotherHoldsItsLock) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  cache.store(entry(64));
  std::atomic<bool> cleared = false;
  std::optional<FileLock> lock(cache.path() + ".lock");
  std::jthread other([&] {
    cache.clear();
    cleared = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(cleared);
  EXPECT_TRUE(std::filesystem::exists(cache.path()));
  lock.reset();
  other.join();
  EXPECT_FALSE(std::filesystem::exists(cache.path()));
}

TEST(TuneCache, WhatNestsWithoutEndIsReported) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  write_file(cache.path(), R"({"schema": "uniep-tuned-1", "entries": [{"tokens": )" + deep + "}]}");
  EXPECT_EQ(cache.load().problems.size(), 1u);
  EXPECT_EQ(cache.store(entry(64)).size(), 2u) << "moved aside";
}

TEST(TuneCache, WhatWasKeptAsideEarlierStays) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  for (const char* text : {"first", "second", "third"}) {
    write_file(cache.path(), text);
    EXPECT_EQ(cache.store(entry(64)).size(), 2u);
  }
  EXPECT_EQ(file_text(cache.path() + ".damaged"), "first");
  EXPECT_EQ(file_text(cache.path() + ".damaged.1"), "second");
  EXPECT_EQ(file_text(cache.path() + ".damaged.2"), "third");
}

TEST(TuneCache, WhatCannotBeMovedAsideIsNotOverwritten) {
  const TemporaryFolder folder;
  // A name of 255 bytes is the longest: with ".damaged" behind it this one is too long.
  const TuneCache cache(folder.file(std::string(248, 'x')));
  write_file(cache.path(), "of another program");
  EXPECT_THROW(cache.store(entry(64)), Error);
  EXPECT_EQ(file_text(cache.path()), "of another program");
}

TEST(TuneCache, AFolderInItsPlaceIsReportedAndNotMoved) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  std::filesystem::create_directory(cache.path());
  const TunedEntries loaded = cache.load();
  EXPECT_TRUE(loaded.entries.empty());
  ASSERT_EQ(loaded.problems.size(), 1u);
  EXPECT_NE(loaded.problems[0].find(cache.path() + ": is a directory"), std::string::npos);
  EXPECT_THROW(cache.require_storable(), Error);
  EXPECT_FALSE(std::filesystem::exists(cache.path() + ".lock"));
  EXPECT_THROW(cache.store(entry(64)), Error);
  EXPECT_TRUE(std::filesystem::is_directory(cache.path()));
  EXPECT_FALSE(std::filesystem::exists(cache.path() + ".damaged"));
}

TEST(TuneCache, ADeviceInItsPlaceIsNeitherWaitedForNorMoved) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  ASSERT_EQ(mkfifo(cache.path().c_str(), 0600), 0);
  EXPECT_EQ(cache.load().problems.size(), 1u);
  EXPECT_THROW(cache.store(entry(64)), Error);
  EXPECT_TRUE(std::filesystem::is_fifo(cache.path()));
}

TEST(TuneCache, WhetherItCanBeStoredIsKnownBeforehand) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("deep/er/tuned.json"));
  cache.require_storable();
  EXPECT_FALSE(std::filesystem::exists(cache.path())) << "nothing was stored yet";
  EXPECT_TRUE(cache.store(entry(64)).empty());
  const std::string text = file_text(cache.path());
  cache.require_storable();
  EXPECT_EQ(file_text(cache.path()), text);
  EXPECT_THROW(TuneCache("/proc/uniep/tuned.json").require_storable(), Error);
}

/// A cache with one entry, of which `from` was replaced.
void write_changed(const TuneCache& cache, const std::string& from, const std::string& to) {
  cache.store(entry(64));
  std::string text = file_text(cache.path());
  text.replace(text.find(from), from.size(), to);
  write_file(cache.path(), text);
}

/// No axis has its neutral value.
Schedule far_from_neutral(Backend backend) {
  Schedule s;
  for (std::size_t i = 0; i < axes().size(); ++i) {
    const AxisInfo& axis = axes()[i].info;
    set_axis(s, i, axes()[i].neutral_value(backend) == axis.max ? axis.min : axis.max);
  }
  return s;
}

TEST(TuneCache, AnEntryThatIsOlderThanAnAxisHasItsNeutralValue) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    TunedEntry whole = entry(64);
    whole.key.backend = backend;
    whole.schedule = far_from_neutral(backend);
    for (std::size_t i = 0; i < axes().size(); ++i) {
      const AxisInfo& axis = axes()[i].info;
      std::filesystem::remove(cache.path());
      cache.store(whole);
      Json file = parse_json(file_text(cache.path()));
      EXPECT_EQ(file["entries"][0]["schedule"].erase(std::string(axis.name)), 1u);
      write_file(cache.path(), file.dump());

      const TunedEntries loaded = cache.load();
      EXPECT_EQ(loaded.problems, std::vector<std::string>{});
      const TunedEntry* found = find_entry(loaded.entries, whole.key);
      ASSERT_NE(found, nullptr) << axis.name;
      Schedule expected = whole.schedule;
      set_axis(expected, i, axes()[i].neutral_value(backend));
      EXPECT_EQ(found->schedule, expected) << axis.name;
    }
  }
}

TEST(TuneCache, AnEntryThatIsOlderThanAnAxisIsReplacedByOneThatHasIt) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  write_changed(cache, "\"lag\": \"1\",", "");
  EXPECT_TRUE(cache.store(entry(64, "single,lag=2")).empty());
  ASSERT_EQ(cache.load().entries.size(), 1u);
  EXPECT_EQ(cache.load().entries[0].schedule, parse_schedule("single,lag=2"));
}

/// The file of a program that has an axis more than this one and a value more of another.
Json file_of_a_newer_program(const TuneCache& cache) {
  for (const std::int64_t hidden : {64, 128, 256}) cache.store(entry(hidden));
  Json file = parse_json(file_text(cache.path()));
  file["entries"][0]["schedule"]["axis_of_the_future"] = "7";
  file["entries"][1]["schedule"]["axis_of_the_future"] = "8";
  file["entries"][2]["schedule"]["launch"] = "of-the-future";
  return file;
}

TEST(TuneCache, EntriesOfANewerProgramAreNotedOnceAndSurviveEveryStore) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  const Json newer = file_of_a_newer_program(cache);
  write_file(cache.path(), newer.dump(1) + "\n");
  const TunedEntries before = cache.load();
  EXPECT_TRUE(before.entries.empty());
  ASSERT_EQ(before.problems.size(), 2u) << "one for the axis, one for the value";
  for (const char* unknown : {"axis_of_the_future", "'of-the-future'"}) {
    const auto names_it = [&](const std::string& p) { return p.find(unknown) != p.npos; };
    EXPECT_EQ(std::ranges::count_if(before.problems, names_it), 1) << unknown;
  }

  EXPECT_TRUE(cache.store(entry(64)).empty());  // for the same key as one of them
  EXPECT_TRUE(cache.store(entry(512)).empty());
  EXPECT_TRUE(cache.store(entry(512, "single,lag=2")).empty());
  const TunedEntries loaded = cache.load();
  EXPECT_EQ(loaded.problems, before.problems);
  ASSERT_EQ(loaded.entries.size(), 2u);
  EXPECT_EQ(loaded.entries[1].schedule, parse_schedule("single,lag=2"));

  Json after = parse_json(file_text(cache.path()));
  ASSERT_EQ(after["entries"].size(), 5u);
  after["entries"].erase(4);
  after["entries"].erase(3);
  EXPECT_EQ(after.dump(), newer.dump()) << "to the byte, in their order";
  EXPECT_FALSE(std::filesystem::exists(cache.path() + ".damaged"));
}

TEST(TuneCache, NumbersThatAreNoCountsAreRefused) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  for (const auto& [from, to] : {std::pair{"\"ranks\": 2", "\"ranks\": 4294967298"},
                                 {"\"ranks\": 2", "\"ranks\": 0"},
                                 {"\"hosts\": 1", "\"hosts\": 0"},
                                 {"\"hosts\": 1", "\"hosts\": 1.5"},
                                 {"\"hosts\": 1", "\"hosts\": 65"},
                                 {"\"gathered_hosts\": 1", "\"gathered_hosts\": 4097"},
                                 {"\"experts\": 16", "\"experts\": 16.7"},
                                 {"\"tokens\": 512", "\"tokens\": 512.9"},
                                 {"\"tokens\": 512", "\"tokens\": 18446744073709551615"},
                                 {"\"topk\": 4", "\"topk\": true"},
                                 {"\"hidden\": 64", "\"hidden\": -64"},
                                 {"\"intermediate\": 128", "\"intermediate\": \"128\""}}) {
    std::filesystem::remove(cache.path());
    write_changed(cache, from, to);
    const TunedEntries loaded = cache.load();
    EXPECT_TRUE(loaded.entries.empty()) << to;
    ASSERT_EQ(loaded.problems.size(), 1u) << to;
    EXPECT_NE(loaded.problems[0].find("is accepted"), std::string::npos) << loaded.problems[0];
  }
}

TEST(TuneCache, OneBadEntryDoesNotSpoilTheRest) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  cache.store(entry(64));
  cache.store(entry(128));
  const std::string text = file_text(cache.path());
  const auto damaged = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    write_file(cache.path(), changed);
    return cache.load();
  };
  for (const auto& [from, to] : {std::pair{"\"tile_m\": \"32\"", "\"tile_m\": \"33\""},
                                 {"\"lag\": \"1\"", "\"leg\": \"1\""},
                                 {"\"lag\": \"1\"", "\"lag\": 1"},
                                 {"\"backward\"", "\"sideways\""}}) {
    const TunedEntries loaded = damaged(from, to);
    EXPECT_EQ(loaded.entries.size(), 1u) << to;
    ASSERT_EQ(loaded.problems.size(), 1u) << to;
    EXPECT_NE(loaded.problems[0].find("entry 0 is ignored"), std::string::npos);
  }
}

TEST(TuneCache, ManyProcessesStoreAtOnceAndNothingIsLost) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  constexpr int kProcesses = 6;
  const int each = std::max(uniep::testing::cases(10), 2);
  for (int p = 0; p < kProcesses; ++p) {
    if (fork() != 0) continue;
    for (int i = 0; i < each; ++i) cache.store(entry(1000 * p + i + 1));
    _exit(0);
  }
  // Readers meanwhile never see half a file.
  for (int i = 0; i < 20 * each; ++i) EXPECT_TRUE(cache.load().problems.empty());
  for (int p = 0; p < kProcesses; ++p) {
    int status = 0;
    wait(&status);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(cache.load().entries.size(), static_cast<std::size_t>(kProcesses * each));
  EXPECT_EQ(folder.num_files(), 2u) << "the cache and its lock, nothing temporary";
}

TEST(FileLock, IsWaitedForWithALimit) {
  const TemporaryFolder folder;
  const std::string path = folder / "tuned.json.lock";
  auto held = std::make_unique<FileLock>(path);
  try {
    const FileLock second(path, 50);
    FAIL() << "two have the lock";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kTimeout) << e.what();
    EXPECT_NE(std::string(e.what()).find(path), std::string::npos) << e.what();
  }
  held.reset();
  EXPECT_NO_THROW(FileLock(path, 0));
}

TEST(TuneCache, WhatCannotBeWrittenSaysWhy) {
  const TuneCache cache("/proc/uniep/tuned.json");
  try {
    cache.store(entry(64));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kIo);
  }
}

TEST(FindEntry, TakesTheNearestSkewOfTheSameSituation) {
  std::vector<TunedEntry> entries{entry(64), entry(64), entry(64)};
  entries[1].key.skew = 2;
  entries[2].key.driver = "avx512";
  TuneKey key = entries[0].key;
  key.skew = 1.9;
  EXPECT_EQ(find_entry(entries, key), &entries[1]);
  key.skew = 0;
  EXPECT_EQ(find_entry(entries, key), &entries[0]);
  key.tokens = 1024;
  EXPECT_EQ(find_entry(entries, key), nullptr);
}

}  // namespace
}  // namespace uniep::tune
