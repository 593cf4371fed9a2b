#include "cpu/kernels/kernels.h"

#include <cstdint>
#include <string>
#include <utility>

#include "cpu/kernels_testing.h"
#include "uniep/error.h"

namespace uniep::cpu {
namespace {

std::string sentence_of(const char* forced) {
  try {
    select_kernels(forced);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
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
  EXPECT_EQ(&select_kernels(nullptr), testing::available_kernels().back());
  EXPECT_EQ(&select_kernels(""), testing::available_kernels().back());
}

TEST(Kernels, UnknownNameIsAnError) {
  const std::string sentence = sentence_of("sse9");
  for (const char* part : {"UNIEP_CPU_ISA", "'sse9'", "portable, avx2, avx512"}) {
    EXPECT_NE(sentence.find(part), std::string::npos) << sentence;
  }
}

TEST(Kernels, UnsupportedNameIsAnError) {
  for (const char* name : {"avx2", "avx512"}) {
    const Isa isa = std::string(name) == "avx2" ? Isa::kAvx2 : Isa::kAvx512;
    if (kernels_for(isa) != nullptr) continue;
    EXPECT_NE(sentence_of(name).find("lacks"), std::string::npos) << sentence_of(name);
  }
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
