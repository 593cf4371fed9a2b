// What a profiler hears: a tool for NVTX that is linked in, and writes down what is pushed.
#include "cuda/profiler_range.h"

#include <gtest/gtest.h>

#include <vector>

#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExt.h>

#include "base/check.h"
#include "schedule/launches.h"
#include "schedule/pass_stages.h"
#include "uniep/schedule.h"

namespace uniep::testing {
namespace {

std::vector<std::string>& heard() {
  static std::vector<std::string> all;
  return all;
}

int on_push(const char* name) {
  heard().push_back(name);
  return static_cast<int>(heard().size()) - 1;
}

int on_pop() {
  heard().push_back("pop");
  return 0;
}

int attach(NvtxGetExportTableFunc_t table_of) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(table_of(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &count)) return 0;
  *functions[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(on_push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(on_pop);
  return 1;
}

}  // namespace
}  // namespace uniep::testing

// By this NVTX finds a tool in the program itself.
extern "C" {
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = uniep::testing::attach;
}

namespace uniep::testing {
namespace {

PassView view_of(Pass pass, const std::string& schedule) {
  PassView view;
  view.pass = pass;
  view.schedule = parse_schedule(schedule);
  view.num_local_experts = 4;
  set_stages(view);
  return view;
}

std::vector<std::string> names(Pass pass, const std::string& schedule) {
  const PassView view = view_of(pass, schedule);
  std::vector<std::string> all;
  for (int i = 0; i < num_launches(view); ++i) all.push_back(cuda::range_name(view, i));
  return all;
}

TEST(RangeName, SaysTheStagesOfALaunch) {
  EXPECT_EQ(names(Pass::kForward, "sequential"),
            (std::vector<std::string>{"uniep forward: dispatch", "uniep forward: fc1",
                                      "uniep forward: fc2", "uniep forward: reduce"}));
  EXPECT_EQ(names(Pass::kForward, "single"),
            std::vector<std::string>{"uniep forward: dispatch, fc1, fc2, reduce"});
}

TEST(RangeName, SaysEveryStageOfAPassAndNoneTwiceInALaunch) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const char* schedule : {"sequential", "pipelined:2", "two-kernel", "single"}) {
      std::string all;
      for (const std::string& name : names(pass, schedule)) {
        all += name + "\n";
        for (int s = 0; s < kNumStages; ++s) {
          const std::string stage = uniep::name(static_cast<Stage>(s));
          const auto first = name.find(stage, name.find(':'));
          if (first == std::string::npos) continue;
          EXPECT_EQ(name.find(stage, first + 1), std::string::npos) << name;
        }
      }
      const std::vector<const char*> stages =
          pass == Pass::kForward
              ? std::vector{"dispatch", "fc1", "fc2", "reduce"}
              : std::vector{"dispatch", "dfc2", "dfc1", "wgrad2", "wgrad1", "reduce"};
      for (const char* stage : stages) EXPECT_NE(all.find(stage), std::string::npos) << stage;
    }
  }
}

TEST(ProfilerRange, IsPushedAndPoppedByItsName) {
  {
    const cuda::ProfilerRange first([] { return std::string("first"); });
  }
  heard().clear();
  {
    const cuda::ProfilerRange outer([] { return std::string("outer"); });
    const cuda::ProfilerRange inner([] { return std::string("inner"); });
  }
  EXPECT_EQ(heard(), (std::vector<std::string>{"outer", "inner", "pop", "pop"}));
}

}  // namespace
}  // namespace uniep::testing
