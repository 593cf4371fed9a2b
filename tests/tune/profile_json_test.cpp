#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "tune/machine_profile.h"
#include "tune/made_up_profile.h"
#include "tune/shipped_files.h"

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
                        "there is no shipped profile 'h2'; h200 are accepted",
                        [] { shipped_profile("h2"); });
}

TEST(Profile, WhatCannotBeUsedSaysWhy) {
  const auto sentence = [](const std::string& text) -> std::string {
    try {
      profile_from_json(text, "p.json");
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kIo);
      return e.what();
    }
    return "";
  };
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
                .find("alone is 0; more than 0 and at most 1 is accepted"),
            std::string::npos);
  free_bytes.reduce.alone = 1;
  text = profile_to_json(free_bytes);
  text.insert(text.find('8', text.find("crowd")), 1, '-');
  EXPECT_NE(sentence(text).find("crowd is -8; 0 or more is accepted"), std::string::npos);
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
