#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace uniep::testing {

/// A sentence taken apart: what it states, and the words around that.
struct Sentence {
  std::vector<std::string> facts;  ///< in order
  std::vector<std::string> words;  ///< of four letters and more
};

/// Facts are numbers, whatever has a digit, a capital or a sign in it (`tile_n=64`, `[T, H]`, 'x',
/// own-first), and the word of which the sentence says something (`part` in "part is 3"). How the
/// sentence is put around them is not a fact.
inline Sentence taken_apart(std::string_view sentence) {
  constexpr std::string_view kVerbs[] = {"is", "has", "are", "holds", "says", "contains", "needs"};
  Sentence result;
  std::string before;
  bool said = false;  // what it is about
  for (std::size_t at = 0; at < sentence.size();) {
    const std::size_t end = std::min(sentence.find_first_of(" \n", at), sentence.size());
    std::string_view word = sentence.substr(at, end - at);
    at = end + 1;
    const bool only_begins = word.ends_with(':');  // as "rank 1:"
    while (!word.empty() && std::string_view(",;:.()").find(word.back()) != word.npos) {
      word.remove_suffix(1);
    }
    while (!word.empty() && word.front() == '(') word.remove_prefix(1);
    const bool plain = std::ranges::all_of(word, [](char c) { return c >= 'a' && c <= 'z'; });
    if (!plain) {
      result.facts.emplace_back(word);
    } else if (!said && std::ranges::find(kVerbs, word) != std::end(kVerbs) && !before.empty()) {
      result.facts.push_back(before);
      said = true;
    } else if (word.size() >= 4) {
      result.words.emplace_back(word);
    }
    before = plain ? word : "";
    if (only_begins) said = false;
  }
  return result;
}

/// Whether a sentence states what an example of it states: the same facts in the same order, in at
/// least half of the example's other words. So an error may be put better without a test that
/// knows, and may not name another argument, value or range.
inline ::testing::AssertionResult states(const char*, const char*, const std::string& said,
                                         const std::string& example) {
  const Sentence got = taken_apart(said), want = taken_apart(example);
  const auto common = std::ranges::count_if(want.words, [&](const std::string& word) {
    return std::ranges::find(got.words, word) != got.words.end();
  });
  const bool alike = 2 * common >= static_cast<std::ptrdiff_t>(want.words.size()) &&
                     said.empty() == example.empty();
  if (alike && got.facts == want.facts) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << '"' << said << "\" states " << ::testing::PrintToString(got.facts)
         << (alike ? "" : ", in other words,") << "\nand should state "
         << ::testing::PrintToString(want.facts) << " as in\n\"" << example << '"';
}

/// Likewise of lists of sentences.
inline ::testing::AssertionResult states(const char*, const char*,
                                         const std::vector<std::string>& said,
                                         const std::vector<std::string>& examples) {
  if (said.size() != examples.size()) {
    return ::testing::AssertionFailure() << ::testing::PrintToString(said) << "\nshould state as\n"
                                         << ::testing::PrintToString(examples);
  }
  for (std::size_t i = 0; i < said.size(); ++i) {
    const auto result = states("", "", said[i], examples[i]);
    if (!result) return result;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace uniep::testing

/// `said` states what the example states.
#define EXPECT_STATES(said, example) EXPECT_PRED_FORMAT2(::uniep::testing::states, said, example)
#define ASSERT_STATES(said, example) ASSERT_PRED_FORMAT2(::uniep::testing::states, said, example)
