// What tests take two sentences to have in common.
#include "support/states.h"

#include <gtest/gtest.h>

namespace uniep::testing {
namespace {

constexpr const char* kExample = "part is 3; 0 (whole), 1 (data) and 2 (weights) are accepted";

bool states_it(const std::string& said, const std::string& example = kExample) {
  return bool{states("", "", said, example)};
}

TEST(States, ASentenceMayBePutOtherwise) {
  EXPECT_TRUE(states_it(kExample));
  EXPECT_TRUE(states_it("the part is 3, but only 0 (whole), 1 (data) or 2 (weights) is accepted"));
}

TEST(States, AnotherValueArgumentOrRangeIsAnotherStatement) {
  EXPECT_FALSE(states_it("part is 4; 0 (whole), 1 (data) and 2 (weights) are accepted"));
  EXPECT_FALSE(states_it("pass is 3; 0 (whole), 1 (data) and 2 (weights) are accepted"));
  EXPECT_FALSE(states_it("part is 3; 0 (whole) and 1 (data) are accepted"));
  EXPECT_FALSE(states_it("part is 3"));
  EXPECT_FALSE(states_it(""));
  EXPECT_FALSE(states_it(kExample, ""));
}

TEST(States, OfAListEachCountsInItsPlace) {
  using List = std::vector<std::string>;
  const auto list_states = [](const List& said, const List& examples) {
    return bool{states("", "", said, examples)};
  };
  EXPECT_TRUE(list_states({"x is 3", "y is 4"}, {"x is 3", "y is 4"}));
  EXPECT_FALSE(list_states({"x is 3", "y is 4"}, {"y is 4", "x is 3"}));
  EXPECT_FALSE(list_states({"x is 3"}, {"x is 3", "y is 4"}));
}

TEST(States, NamesWithSignsAreFacts) {
  const Sentence s =
      taken_apart("rank 1: topk_ids has 23 elements; a multiple of topk=2 is accepted");
  EXPECT_EQ(s.facts, (std::vector<std::string>{"1", "topk_ids", "23", "topk=2"}));
  EXPECT_EQ(s.words, (std::vector<std::string>{"rank", "elements", "multiple", "accepted"}));
}

TEST(States, OtherWordsForEverythingAreAnotherStatement) {
  EXPECT_TRUE(states_it("f: is empty; a safetensors file is accepted",
                        "f: is empty; a safetensors file is needed"));
  EXPECT_FALSE(states_it("f: is a folder; a regular file is needed",
                         "f: is empty; a safetensors file is accepted"));
}

}  // namespace
}  // namespace uniep::testing
