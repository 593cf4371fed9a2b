#include "tuning/tune_report.h"

#include <gtest/gtest.h>

#include "tuning/tune_run.h"

namespace uniep::tool {
namespace {

std::string why_of(double speedup, const std::string& why) {
  return why_text({.schedule = {}, .speedup = speedup, .why = why});
}

TEST(Why, IsNotSaidAgainstTheRace) {
  const std::string slower = "0.472 ms more in dfc1, 0.386 ms more waiting for inputs";
  const std::string said = why_of(1.1, slower);
  EXPECT_NE(said.find("within noise"), std::string::npos) << said;
  EXPECT_NE(said.find("0.858 ms slower"), std::string::npos) << said;
  EXPECT_EQ(why_of(0.9, slower), slower);
  const std::string faster = "0.500 ms less in fc1; 0.100 ms more in fc2";
  EXPECT_EQ(why_of(1.1, faster), faster);
  EXPECT_NE(why_of(0.9, faster).find("0.400 ms faster"), std::string::npos);
}

TEST(Why, WordsWithoutFiguresStay) {
  for (const char* why : {"", "the default", "no part differs by a fiftieth of the time"}) {
    EXPECT_EQ(why_of(1.1, why), why);
    EXPECT_EQ(why_of(1, why), why);
  }
}

TEST(TooSmall, IsABudgetThatDidNotReachForARound) {
  tune::TuneOutcome out;
  out.end = tune::TuneEnd::kBudget;
  out.seconds = 0.1;
  out.default_s = 0.05;
  tune::TuneOutcome measured = out;
  measured.rounds = 1;
  call_too_small(measured, 20);
  EXPECT_EQ(measured.end, tune::TuneEnd::kBudget);
  call_too_small(out, 20);
  EXPECT_EQ(out.end, tune::TuneEnd::kTooSmall);
  EXPECT_GE(out.least_budget_s, 0.1 + 20 * 2 * 0.05) << "two passes of each";
  out.end = tune::TuneEnd::kInterrupted;
  call_too_small(out, 20);
  EXPECT_EQ(out.end, tune::TuneEnd::kInterrupted);
}

}  // namespace
}  // namespace uniep::tool
