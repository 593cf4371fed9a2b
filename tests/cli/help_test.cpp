#include "common/help.h"

#include <gtest/gtest.h>

#include "common/table.h"

namespace uniep::tool {
namespace {

TEST(NarrowHelp, DescriptionsGoOnBelowThemselves) {
  std::string words;
  while (words.size() < 90) words += "word ";
  const std::string text = narrowed("  run                  " + words + "end\n");
  EXPECT_NE(text.find("\n" + std::string(23, ' ') + "word"), std::string::npos) << text;
  EXPECT_EQ(narrowed(words + words).substr(90, 11), "word word\nw") << "not indented";
}

TEST(NarrowHelp, ExamplesGoOnBehindABackslash) {
  const std::string file(50, 'f');
  EXPECT_EQ(narrowed("  uniep run --plot " + file + " --trace " + file + " --check\n"),
            "  uniep run --plot " + file + " \\\n      --trace " + file + " --check\n");
}

TEST(NarrowHelp, WhatFitsStays) {
  const std::string text = "Examples:\n  uniep info\n\n" + std::string(kTextColumns, 'x') + "\n";
  EXPECT_EQ(narrowed(text), text);
}

}  // namespace
}  // namespace uniep::tool
