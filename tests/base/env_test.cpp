#include "base/env.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "support/expect_error.h"
#include "support/scoped_env.h"

namespace uniep::testing {
namespace {

TEST(Environment, DefaultsHoldWhereNothingOrAnEmptyTextIsSet) {
  const ScopedEnv timeout("UNIEP_TIMEOUT_MS", "");
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "");
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "");
  const ScopedEnv isa("UNIEP_CPU_ISA", "");
  EXPECT_EQ(env_timeout_ms(), 30000);
  EXPECT_EQ(env_link_gbps(), std::nullopt);
  EXPECT_EQ(env_link_latency_us(), 5.0);
  EXPECT_EQ(env_cpu_isa(), "");
}

TEST(Environment, ReadsWhatIsSet) {
  const ScopedEnv timeout("UNIEP_TIMEOUT_MS", "250");
  const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", "0.125");
  const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", "0");
  const ScopedEnv isa("UNIEP_CPU_ISA", "portable");
  EXPECT_EQ(env_timeout_ms(), 250);
  EXPECT_EQ(env_link_gbps(), 0.125);
  EXPECT_EQ(env_link_latency_us(), 0.0);
  EXPECT_EQ(env_cpu_isa(), "portable");
}

TEST(Environment, TheEndsOfTheRangesAreAccepted) {
  for (const char* text : {"1", "3000000"}) {
    const ScopedEnv timeout("UNIEP_TIMEOUT_MS", text);
    EXPECT_EQ(env_timeout_ms(), std::atoi(text));
  }
  for (const char* text : {"1e-6", "1000000"}) {
    const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", text);
    EXPECT_EQ(env_link_gbps(), std::atof(text));
  }
  for (const char* text : {"0", "1000000"}) {
    const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", text);
    EXPECT_EQ(env_link_latency_us(), std::atof(text));
  }
}

TEST(Environment, WhatWasTunedIsKeptInTheFolderForCaches) {
  const ScopedEnv none("UNIEP_TUNE_CACHE", "");
  const ScopedEnv home("HOME", "/h");
  {
    const ScopedEnv caches("XDG_CACHE_HOME", "/caches");
    EXPECT_EQ(env_tune_cache(), "/caches/uniep/tuned.json");
  }
  const ScopedEnv no_caches("XDG_CACHE_HOME", "");
  EXPECT_EQ(env_tune_cache(), "/h/.cache/uniep/tuned.json");
  const ScopedEnv no_home("HOME", "");
  EXPECT_EQ(env_tune_cache(), "") << "no folder that others can write to";
}

TEST(Environment, RefusesWhatIsNoNumberInRangeAndSaysWhatIs) {
  for (const char* text : {"0", "-1", "3000001", "1s", "ten", "nan", "inf", "1e400"}) {
    const ScopedEnv timeout("UNIEP_TIMEOUT_MS", text);
    expect_invalid(cat("environment variable UNIEP_TIMEOUT_MS is '", text,
                       "'; a number from 1 to 3000000 is accepted"),
                   [] { env_timeout_ms(); });
  }
  for (const char* text : {"0", "-2", "fast", "inf"}) {
    const ScopedEnv speed("UNIEP_CPU_LINK_GBPS", text);
    expect_invalid(cat("environment variable UNIEP_CPU_LINK_GBPS is '", text,
                       "'; a number from 1e-06 to 1000000 is accepted"),
                   [] { env_link_gbps(); });
  }
  for (const char* text : {"-0.5", "1000001", "5us"}) {
    const ScopedEnv latency("UNIEP_CPU_LINK_LATENCY_US", text);
    expect_invalid(cat("environment variable UNIEP_CPU_LINK_LATENCY_US is '", text,
                       "'; a number from 0 to 1000000 is accepted"),
                   [] { env_link_latency_us(); });
  }
}

TEST(Environment, RefusesAnUnknownKindOfSymmetricMemory) {
  const ScopedEnv kind("UNIEP_SYMMETRIC_MEMORY", "nvshmem");
  expect_invalid(
      "environment variable UNIEP_SYMMETRIC_MEMORY is 'nvshmem'; auto, nccl and ipc are accepted",
      [] { env_symmetric_memory(); });
}

TEST(Environment, NoSmIsSparedUnlessItIsSaid) {
  {
    const ScopedEnv spare("UNIEP_SPARE_SMS", "");
    EXPECT_EQ(env_spare_sms(), 0);
  }
  const ScopedEnv spare("UNIEP_SPARE_SMS", "64");
  EXPECT_EQ(env_spare_sms(), 64);
}

TEST(Environment, RanksShareAGpuOnlyWhereItIsSaid) {
  for (const char* text : {"", "0"}) {
    const ScopedEnv share("UNIEP_SHARE_DEVICE", text);
    EXPECT_FALSE(env_share_device());
  }
  const ScopedEnv share("UNIEP_SHARE_DEVICE", "1");
  EXPECT_TRUE(env_share_device());
  const ScopedEnv yes("UNIEP_SHARE_DEVICE", "yes");
  expect_invalid(
      "environment variable UNIEP_SHARE_DEVICE is 'yes'; an integer from 0 to 1 is accepted",
      [] { env_share_device(); });
}

TEST(Environment, FindsWhatIsSetButReadByNothing) {
  const ScopedEnv known("UNIEP_TEST_CASES", "1");
  const ScopedEnv of_the_build("UNIEP_CUDA", "ON");
  const ScopedEnv other("UNIEPIC", "1");
  const ScopedEnv empty("UNIEP_EMPTY", "");
  EXPECT_TRUE(unknown_environment_variables().empty());
  const ScopedEnv far("UNIEP_SOMETHING_ELSE", "1");
  const ScopedEnv near("UNIEP_SHARE_DEVCE", "1");
  const auto unknown = unknown_environment_variables();
  ASSERT_EQ(unknown.size(), 2u);
  EXPECT_EQ(unknown[0].name, "UNIEP_SHARE_DEVCE");
  EXPECT_EQ(unknown[0].nearest, "UNIEP_SHARE_DEVICE");
  EXPECT_EQ(unknown[1].name, "UNIEP_SOMETHING_ELSE");
  EXPECT_EQ(unknown[1].nearest, "");
}

TEST(Environment, TheListDescribesEachVariable) {
  EXPECT_EQ(environment_variables().size(), 36u);
  for (const EnvVariable& v : environment_variables()) {
    EXPECT_FALSE(v.meaning.empty());
    EXPECT_FALSE(v.default_text.empty());
  }
  // Reading one that is not listed is an error.
  env_nccl_library();
  env_nccl_nvls_enable();
  env_symmetric_memory();
  env_share_device();
  env_rank();
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) env_ranks(name);
  for (const char* name : {"LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"}) env_rank(name);
  env_text("SLURM_STEP_NODELIST");
  env_host_id();
  env_socket_interface();
  env_master_addr();
  env_master_port();
  env_tune_cache();
}

}  // namespace
}  // namespace uniep::testing
