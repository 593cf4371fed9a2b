#include "cpu/kernels/kernels.h"

#include <cstdint>
#include <string>
#include <utility>

#include "cpu/kernels_testing.h"
#include "support/expect_error.h"

namespace uniep::cpu {
namespace {

using ::uniep::testing::expect_error;

/// What sentences say this machine has: the best first.
std::string names_of_available() {
  std::string names;
  for (const Kernels* kernels : testing::available_kernels()) {
    names = kernels->name + (names.empty() ? "" : ", " + names);
  }
  return names;
}

TEST(Kernels, PortableIsAlwaysThere) {
  ASSERT_NE(kernels_for(Isa::kPortable), nullptr);
  EXPECT_STREQ(kernels_for(Isa::kPortable)->name, "portable");
}

TEST(Kernels, NamesSelect) {
  for (const Kernels* kernels : testing::available_kernels()) {
    EXPECT_EQ(&select_kernels(kernels->name), kernels);
    EXPECT_EQ(kernels_for(kernels->isa), kernels);
  }
}

TEST(Kernels, BestIsTheDefault) {
  EXPECT_EQ(&select_kernels(""), testing::available_kernels().back());
}

TEST(Kernels, UnknownNameIsAnError) {
  expect_error(
      ErrorCode::kInvalidArgument,
      "UNIEP_CPU_ISA is 'sse9'; accepted are portable, avx2, avx512, or empty for the best "
      "one; this CPU and build have " +
          names_of_available(),
      [] { select_kernels("sse9"); });
}

TEST(Kernels, UnsupportedNameIsAnError) {
  bool lacks_any = false;
  for (const char* name : {"avx2", "avx512"}) {
    const Isa isa = std::string(name) == "avx2" ? Isa::kAvx2 : Isa::kAvx512;
    if (kernels_for(isa) != nullptr) continue;
    lacks_any = true;
    expect_error(ErrorCode::kUnsupported,
                 std::string("UNIEP_CPU_ISA is '") + name +
                     "', which this CPU or this build lacks; it has " + names_of_available(),
                 [&] { select_kernels(name); });
  }
  if (!lacks_any) GTEST_SKIP() << "this CPU and this build lack no instruction set";
}

TEST(GemmScratch, IsAlignedAndGrows) {
  GemmScratch scratch;
  for (const std::size_t count : {1u, 1000u, 10u, 100000u}) {
    float* data = scratch.reserve(count);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, 0u);
    data[0] = data[count - 1] = 1.0f;
  }
  GemmScratch moved(std::move(scratch));
  EXPECT_EQ(moved.reserve(100000)[99999], 1.0f);
  EXPECT_NE(scratch.reserve(1), nullptr);  // the one moved from is empty, and can grow again
}

}  // namespace
}  // namespace uniep::cpu
