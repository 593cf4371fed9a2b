#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "tune/files/shipped_files.h"
#include "tune/made_up_profile.h"
#include "tune/model/machine_profile.h"

namespace uniep::tune {
namespace {

TEST(Curve, IsStraightBetweenPointsAndLevelBeyond) {
  const Curve curve{{{2, 10}, {4, 20}}};
  EXPECT_DOUBLE_EQ(curve(1), 10);
  EXPECT_DOUBLE_EQ(curve(2), 10);
  EXPECT_DOUBLE_EQ(curve(3), 15);
  EXPECT_DOUBLE_EQ(curve(9), 20);
  EXPECT_DOUBLE_EQ(Curve{}(3), 0);
}

TEST(Profile, WhatIsWrittenIsReadBack) {
  MachineProfile p = testing::made_up_profile();
  p.device = "a \"device\"";
  p.link = {.bytes_per_s = 1e9,
            .latency_s = 1e-6,
            .exclusive = true,
            .pull_bytes_per_s = 2e9,
            .push = {{{1, 2}, {3, 4}}}};
  p.wake = {1, 2, 3, 4};
  p.dispatch = {.fixed = 1e-9, .per_item = 2, .per_byte = 3, .alone = 0.5, .crowd = 7};
  EXPECT_EQ(profile_from_json(profile_to_json(p), "text"), p);
}

TEST(Profile, ShippedOnesCanBeUsed) {
  ASSERT_FALSE(shipped_profiles().empty());
  for (const ShippedFile& file : shipped_profiles()) {
    const MachineProfile p = shipped_profile(file.name);
    EXPECT_EQ(p.name, file.name);
    EXPECT_FALSE(p.source.empty());
  }
  testing::expect_error(ErrorCode::kInvalidArgument,
                        "there is no shipped profile 'h2'; h100, h200 are accepted",
                        [] { shipped_profile("h2"); });
}

/// What is said of a profile that cannot be used; nothing of one that can.
std::string sentence(const std::string& text) {
  try {
    profile_from_json(text, "p.json");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kIo);
    return e.what();
  }
  return "";
}

/// The same of one in which a key, given by its path, has another value.
std::string changed(const std::string& path, const nlohmann::json& value) {
  auto json = nlohmann::json::parse(profile_to_json(testing::made_up_profile()));
  json[nlohmann::json::json_pointer(path)] = value;
  return sentence(json.dump());
}

void expect_refused(const std::string& path, const nlohmann::json& value,
                    const std::string& reason) {
  EXPECT_STATES(changed(path, value), "profile p.json cannot be used: " + reason) << path;
}

TEST(Profile, WhatCannotBeUsedSaysWhy) {
  EXPECT_NE(sentence("{").find("profile p.json cannot be used: "), std::string::npos);
  EXPECT_NE(sentence("{\"schema\":\"x\"}").find("uniep-profile-1 is accepted"), std::string::npos);
  std::string text = profile_to_json(testing::made_up_profile());
  text.replace(text.find("launch_s"), 8, "lunch_ss");
  EXPECT_NE(sentence(text).find("launch_s"), std::string::npos);
  text = profile_to_json(testing::made_up_profile());
  text.replace(text.find("fc1"), 3, "fc9");
  EXPECT_NE(sentence(text).find("there is no stage 'fc9'"), std::string::npos);
  MachineProfile free_bytes = testing::made_up_profile();
  free_bytes.reduce.alone = 0;
  free_bytes.reduce.crowd = 8;
  EXPECT_NE(sentence(profile_to_json(free_bytes))
                .find("reduce.alone is 0.0; more than 0 and at most 1 is accepted"),
            std::string::npos);
  free_bytes.reduce.alone = 1;
  text = profile_to_json(free_bytes);
  text.insert(text.find('8', text.find("crowd")), 1, '-');
  EXPECT_NE(sentence(text).find("reduce.crowd is -8.0; 0 to 1e18 is accepted"), std::string::npos);
}

TEST(Profile, IntegersAreIntegersWithinBounds) {
  const std::string cores = "; an integer from 0 to 4096 is accepted";
  expect_refused("/cores", -3, "cores is -3" + cores);
  expect_refused("/cores", 1.9, "cores is 1.9" + cores);
  expect_refused("/cores", 4294967297, "cores is 4294967297" + cores);
  expect_refused("/cores", "4", "cores is \"4\"" + cores);
  expect_refused("/workers", 2000000000,
                 "workers is 2000000000; an integer from 0 to 1024 is accepted");
  expect_refused("/lanes", 2000000000, "lanes is 2000000000; an integer from 1 to 64 is accepted");
  expect_refused("/lanes", 0, "lanes is 0; an integer from 1 to 64 is accepted");
  expect_refused("/push_depth", -2, "push_depth is -2; an integer from -1 to 256 is accepted");
  // As 64 bits with a sign this is -1.
  expect_refused("/push_depth", 18446744073709551615u,
                 "push_depth is 18446744073709551615; an integer from -1 to 256 is accepted");
  expect_refused("/k_step", 3e12,
                 "k_step is 3000000000000.0; an integer from 1 to 65536 is accepted");
  expect_refused("/gemms/1/tile_n", -1,
                 "gemms[1].tile_n is -1; an integer from 0 to 4096 is accepted");
  expect_refused("/workers", 0, "cores and workers are 0; at least 1 of one of them is accepted");
}

TEST(Profile, TimesAndRatesAreSuch) {
  const std::string seconds = "; 0 to 1000 seconds are accepted";
  for (const char* key : {"launch_s", "draw_s"}) {
    expect_refused(std::string("/") + key, -1, std::string(key) + " is -1" + seconds);
  }
  expect_refused("/launch_s", 1e300, "launch_s is 1e+300" + seconds);
  expect_refused("/launch_s", nullptr, "launch_s is null" + seconds);
  for (const char* key : {"fixed_s", "per_mnk_s", "per_mk_s", "per_nk_s", "per_mn_s"}) {
    expect_refused(std::string("/gemms/0/") + key, -1e-9,
                   std::string("gemms[0].") + key + " is -1e-09" + seconds);
  }
  for (const char* key : {"fixed_s", "per_item_s", "per_byte_s"}) {
    expect_refused(std::string("/enter/") + key, -1,
                   std::string("enter.") + key + " is -1" + seconds);
  }
  expect_refused("/link/latency_s", -1, "link.latency_s is -1" + seconds);
  const std::string rate = "; 0, or 1 to 1e18 bytes/s, are accepted";
  expect_refused("/link/bytes_per_s", -1, "link.bytes_per_s is -1" + rate);
  expect_refused("/link/pull_bytes_per_s", 1e-300, "link.pull_bytes_per_s is 1e-300" + rate);
  expect_refused("/padding", 2, "padding is 2; 0 to 1 is accepted");
  expect_refused("/cache_bytes", -1, "cache_bytes is -1; 0 to 1e18 is accepted");
  expect_refused("/beside_link", 0, "beside_link is 0; more than 0 and at most 1000 is accepted");
}

TEST(Profile, PushedRatesRiseWithTheirBytes) {
  const auto curve = [](const std::string& text) { return nlohmann::json::parse(text); };
  const std::string key = "link.push_by_segment_bytes";
  const std::string path = "/link/push_by_segment_bytes";
  EXPECT_EQ(changed(path, curve("[[128, 1e9], [256, 2e9]]")), "");
  expect_refused(path, curve("[[128, 1e9], [128, 2e9]]"),
                 key + " does not rise; pairs with more bytes from each to the next are accepted");
  expect_refused(path, curve("[[128, 0]]"), key + "[0][1] is 0; 1 to 1e18 bytes/s are accepted");
  expect_refused(path, curve("[[128]]"),
                 key + "[0] is an array; a list of bytes and bytes/s is accepted");
  expect_refused(path, 3, key + " is 3; a list is accepted");
}

// A simulated thread looks at the end of each sleep until there is something to see.
TEST(Profile, SleepsBringTheClockForward) {
  auto json = nlohmann::json::parse(profile_to_json(testing::made_up_profile()));
  json["wake"] = {
      {"flag_s", 0}, {"first_sleep_s", 5e-5}, {"longest_sleep_s", 0}, {"sleep_slack_s", 0}};
  EXPECT_STATES(sentence(json.dump()),
                "profile p.json cannot be used: wake.longest_sleep_s is 0; at least "
                "wake.first_sleep_s, 5e-05, is accepted");
  for (const double first : {-1.0, 1e-300}) {
    json["wake"]["first_sleep_s"] = first;
    EXPECT_NE(sentence(json.dump()).find("; 0, or 1e-6 to 1000 seconds, are accepted"),
              std::string::npos);
  }
  json["wake"]["first_sleep_s"] = 5e-5;
  json["wake"]["longest_sleep_s"] = 5e-5;
  EXPECT_EQ(sentence(json.dump()), "");
}

TEST(Profile, KeysThatNobodyReadsAreRefused) {
  EXPECT_NE(changed("/prefetch", 2).find("key prefetch is unknown; schema, name, "),
            std::string::npos);
  expect_refused("/wake/nap_s", 1,
                 "key wake.nap_s is unknown; flag_s, first_sleep_s, longest_sleep_s, "
                 "sleep_slack_s are accepted");
  expect_refused("/reduce/alon", 1,
                 "key reduce.alon is unknown; fixed_s, per_item_s, per_byte_s, alone, crowd are "
                 "accepted");
  EXPECT_NE(changed("/link/push", 1).find("key link.push is unknown"), std::string::npos);
  EXPECT_NE(changed("/gemms/2/n", 1).find("key gemms[2].n is unknown"), std::string::npos);
  expect_refused("/wake", 1, "wake is 1; an object is accepted");
  EXPECT_NE(sentence("[]").find("it is an array; an object is accepted"), std::string::npos);
}

/// Paths of all keys of an object, or of a list's objects, and of what is in these.
void add_keys(const nlohmann::json& json, const nlohmann::json::json_pointer& path,
              std::vector<nlohmann::json::json_pointer>& keys) {
  for (const auto& [key, value] : json.items()) {
    if (json.is_object()) keys.push_back(path / key);
    if (value.is_structured()) add_keys(value, path / key, keys);
  }
}

/// "/gemms/0/stage" as sentences have it: "gemms[0].stage".
std::string said(const nlohmann::json::json_pointer& path) {
  const std::string text = path.to_string().substr(1);
  return std::regex_replace(std::regex_replace(text, std::regex("/([0-9]+)"), "[$1]"),
                            std::regex("/"), ".");
}

TEST(Profile, EveryKeyIsRequiredButThoseThatCameLater) {
  MachineProfile p = testing::made_up_profile();
  p.gemms.resize(1);
  p.dispatch.crowd = p.reduce.crowd = p.enter.crowd = 7;
  const auto json = nlohmann::json::parse(profile_to_json(p));
  std::vector<nlohmann::json::json_pointer> keys;
  add_keys(json, nlohmann::json::json_pointer(), keys);
  EXPECT_GE(keys.size(), 21u + 7 + 3 * 5 + 5 + 4) << "of the file, gemms, moves, link and wake";
  const std::set<std::string> later = {"draw_s", "alone", "crowd"};
  for (const auto& key : keys) {
    auto without = json;
    without[key.parent_pointer()].erase(key.back());
    const std::string expected =
        later.contains(key.back())
            ? ""
            : "profile p.json cannot be used: there is no key " + said(key) + "; it is required";
    EXPECT_STATES(sentence(without.dump()), expected) << key.to_string();
  }
}

TEST(Profile, OnesFromBeforeAKeyCanBeUsed) {
  auto json = nlohmann::json::parse(profile_to_json(testing::made_up_profile()));
  json.erase("draw_s");
  EXPECT_EQ(profile_from_json(json.dump(), "text"), testing::made_up_profile());
}

TEST(Profile, AFolderIsNone) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("");
  for (const auto& [none, reason] :
       {std::pair{path, ": is a directory; a regular file is needed"},
        {path + "missing", ": there is none; a file that `uniep profile` wrote is accepted"}}) {
    testing::expect_error(ErrorCode::kIo, "cannot read profile " + none + reason,
                          [&] { read_profile(none); });
  }
  // More than is read at a time.
  MachineProfile p = testing::made_up_profile();
  p.source = std::string(10000, 'x');
  testing::write_file(folder.file("p.json"), profile_to_json(p));
  EXPECT_EQ(read_profile(folder.file("p.json")), p);
}

TEST(Profile, OnlyMovesThatACrowdSlowsSayWhatTheyCostAlone) {
  MachineProfile p = testing::made_up_profile();
  EXPECT_EQ(profile_to_json(p).find("alone"), std::string::npos);
  p.reduce.crowd = 8;
  const std::string text = profile_to_json(p);
  EXPECT_EQ(text.find("alone"), text.rfind("alone"));
  EXPECT_EQ(profile_from_json(text, "text"), p);
}

}  // namespace
}  // namespace uniep::tune
