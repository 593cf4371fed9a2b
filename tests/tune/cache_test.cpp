// The cache survives whatever happens to its file: damage, other programs' files, many processes.
#include "tune/cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "base/check.h"
#include "schedule/open_sizes.h"
#include "support/scoped_env.h"
#include "support/temporary_folder.h"
#include "tune/shared_files.h"

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
  EXPECT_THROW(cache.store(entry(64)), Error);
  EXPECT_THROW(cache.require_storable(), Error);
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

TEST(TuneCache, EntriesOfAnotherVersionSurviveAStore) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  const std::string axis = "\"axis_of_the_future\": \"7\"";
  write_changed(cache, "\"schedule\": {", "\"schedule\": {" + axis + ",");
  ASSERT_TRUE(cache.load().entries.empty());
  EXPECT_TRUE(cache.store(entry(128)).empty());
  EXPECT_TRUE(cache.store(entry(128, "single,lag=2")).empty());
  const TunedEntries loaded = cache.load();
  EXPECT_EQ(loaded.problems.size(), 1u) << "the one of another version";
  ASSERT_EQ(loaded.entries.size(), 1u);
  EXPECT_EQ(loaded.entries[0].schedule, parse_schedule("single,lag=2"));
  EXPECT_NE(file_text(cache.path()).find(axis), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(cache.path() + ".damaged"));
}

TEST(TuneCache, NumbersThatAreNoCountsAreRefused) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  for (const auto& [from, to] : {std::pair{"\"ranks\": 2", "\"ranks\": 4294967298"},
                                 {"\"ranks\": 2", "\"ranks\": 0"},
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
                                 {"\"backward\"", "\"sideways\""},
                                 {"\"lag\": \"1\",", ""}}) {
    const TunedEntries loaded = damaged(from, to);
    EXPECT_EQ(loaded.entries.size(), 1u) << to;
    ASSERT_EQ(loaded.problems.size(), 1u) << to;
    EXPECT_NE(loaded.problems[0].find("entry 0 is ignored"), std::string::npos);
  }
}

TEST(TuneCache, ManyProcessesStoreAtOnceAndNothingIsLost) {
  const TemporaryFolder folder;
  const TuneCache cache(folder.file("tuned.json"));
  constexpr int kProcesses = 6, kEach = 10;
  for (int p = 0; p < kProcesses; ++p) {
    if (fork() != 0) continue;
    for (int i = 0; i < kEach; ++i) cache.store(entry(1000 * p + i + 1));
    _exit(0);
  }
  // Readers meanwhile never see half a file.
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(cache.load().problems.empty());
  for (int p = 0; p < kProcesses; ++p) {
    int status = 0;
    wait(&status);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(cache.load().entries.size(), std::size_t{kProcesses * kEach});
  EXPECT_EQ(folder.num_files(), 2u) << "the cache and its lock, nothing temporary";
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
