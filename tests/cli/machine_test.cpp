#include "common/machine.h"

#include <gtest/gtest.h>

#include "base/memory_info.h"
#include "base/utc_now.h"

namespace uniep::tool {
namespace {

TEST(QuotedCommand, IsWhatAShellReadsBack) {
  const char* const argv[] = {"/usr/bin/uniep", "run", "--input", "my file", "it's", "", "a=b,c:d"};
  EXPECT_EQ(quoted_command(7, argv), "uniep run --input 'my file' 'it'\\''s' '' a=b,c:d");
}

TEST(ThisMachine, IsDescribed) {
  EXPECT_FALSE(this_machine().cpu.empty());
  EXPECT_GE(this_machine().cpus, 1);
  EXPECT_FALSE(this_machine().isa.empty());
  EXPECT_GT(available_memory(), 0);
}

TEST(ThisBuild, NamesVersionAndCompiler) {
  EXPECT_NE(to_string(this_build()).find(this_build().compiler), std::string::npos);
  EXPECT_EQ(utc_now().size(), std::string("2026-07-28T10:00:00Z").size());
}

}  // namespace
}  // namespace uniep::tool
