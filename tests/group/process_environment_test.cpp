#include "group/process_environment.h"

#include <gtest/gtest.h>

#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "support/expect_error.h"
#include "support/scoped_env.h"

namespace uniep::testing {
namespace {

using Variables = std::vector<std::pair<const char*, const char*>>;

/// Sets these variables of launchers while it lives, and no others.
struct Set {
  explicit Set(const Variables& given) {
    for (const EnvVariable& v : environment_variables()) {
      const std::string name(v.name);
      if (!name.starts_with("UNIEP_")) variables.emplace_back(name.c_str(), "");
    }
    for (const auto& [name, value] : given) variables.emplace_back(name, value);
  }
  ~Set() {
    while (!variables.empty()) variables.pop_back();  // the last first
  }
  std::deque<ScopedEnv> variables;
};

/// As torchrun sets them; an empty text counts as not set.
struct Launched : Set {
  Launched(const char* rank, const char* size, const char* local, const char* address,
           const char* port)
      : Set({{"RANK", rank},
             {"WORLD_SIZE", size},
             {"LOCAL_RANK", local},
             {"MASTER_ADDR", address},
             {"MASTER_PORT", port}}) {}
};

TEST(ProcessEnvironment, AllOrNone) {
  {
    const Launched none("", "", "", "", "");
    EXPECT_FALSE(process_environment().has_value());
  }
  {
    const Launched all("3", "4", "1", "localhost", "29500");
    const auto environment = process_environment();
    ASSERT_TRUE(environment.has_value());
    EXPECT_EQ(environment->rank, 3);
    EXPECT_EQ(environment->size, 4);
    EXPECT_EQ(environment->local_rank, 1);
    EXPECT_EQ(environment->master_address, "localhost");
    EXPECT_EQ(environment->master_port, 29500);
  }
  const Launched some("3", "4", "", "", "29500");
  expect_invalid(
      "of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT these are not set: LOCAL_RANK, "
      "MASTER_ADDR; all of them (as torchrun sets them) or none are accepted",
      [] { process_environment(); });
}

TEST(ProcessEnvironment, RefusesWhatIsOutOfRange) {
  {
    const Launched l("4", "4", "0", "localhost", "29500");
    expect_invalid(
        "environment variable RANK is 4 and WORLD_SIZE is 4; a RANK from 0 to 3 is accepted",
        [] { process_environment(); });
  }
  {
    const Launched l("0", "65", "0", "localhost", "29500");
    expect_invalid("environment variable WORLD_SIZE is '65'; an integer from 1 to 64 is accepted",
                   [] { process_environment(); });
  }
  const Launched l("0", "2", "0", "localhost", "29500x");
  expect_invalid(
      "environment variable MASTER_PORT is '29500x'; an integer from 1 to 65535 is accepted",
      [] { process_environment(); });
}

void expect_place(const ProcessEnvironment& e, int rank, int size, int local_rank,
                  const std::string& address, int port) {
  EXPECT_EQ(e.rank, rank);
  EXPECT_EQ(e.size, size);
  EXPECT_EQ(e.local_rank, local_rank);
  EXPECT_EQ(e.master_address, address);
  EXPECT_EQ(e.master_port, port);
}

const Variables kSlurm = {{"SLURM_PROCID", "5"},    {"SLURM_STEP_NUM_TASKS", "8"},
                          {"SLURM_LOCALID", "1"},   {"SLURM_STEP_NODELIST", "gpu[03-04]"},
                          {"SLURM_JOB_ID", "4711"}, {"SLURM_STEP_ID", "0"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "1234567"}};
const Variables kMpich = {
    {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "3"}, {"MPI_LOCALNRANKS", "4"}};

Variables with(Variables variables, const Variables& more) {
  variables.insert(variables.end(), more.begin(), more.end());
  return variables;
}

TEST(ProcessEnvironment, SlurmTellsRanksOfAStep) {
  const Set set(kSlurm);
  expect_place(process_environment().value(), 5, 8, 1, "gpu03", 29500);
}

TEST(ProcessEnvironment, OfSlurmsJobAloneNobodyIsARank) {
  const Set script({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}});
  EXPECT_FALSE(process_environment().has_value());
}

TEST(ProcessEnvironment, MpirunTellsRanksOfOneHost) {
  {
    const Set set(kOpenMpi);
    expect_place(process_environment().value(), 2, 4, 2, "127.0.0.1", 29500);
  }
  const Set set(kMpich);
  expect_place(process_environment().value(), 3, 4, 3, "127.0.0.1", 29500);
}

TEST(ProcessEnvironment, OnSeveralHostsMpirunDoesNotTellRank0s) {
  for (const auto& [variables, local_size] :
       {std::pair(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE"), std::pair(kMpich, "MPI_LOCALNRANKS")}) {
    const Set set(with(variables, {{local_size, "2"}}));
    try {
      process_environment();
      ADD_FAILURE() << local_size;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find("MASTER_ADDR"), std::string::npos) << e.what();
    }
    const Set told(with(variables, {{local_size, "2"}, {"MASTER_ADDR", "n7"}}));
    EXPECT_EQ(process_environment()->master_address, "n7");
  }
}

TEST(ProcessEnvironment, WhatTheUserSaysGoesBefore) {
  const Set set(with(kSlurm, {{"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "4000"}}));
  expect_place(process_environment().value(), 5, 8, 1, "10.0.0.7", 4000);
}

TEST(ProcessEnvironment, TheInnermostLauncherCounts) {
  {  // srun starts one helper of mpirun on each host
    const Set set(with(kSlurm, kOpenMpi));
    EXPECT_EQ(process_environment()->rank, 2);
  }
  const Set set(with(with(kSlurm, kOpenMpi), {{"RANK", "1"},
                                              {"WORLD_SIZE", "2"},
                                              {"LOCAL_RANK", "1"},
                                              {"MASTER_ADDR", "localhost"},
                                              {"MASTER_PORT", "5000"}}));
  expect_place(process_environment().value(), 1, 2, 1, "localhost", 5000);
}

TEST(ProcessEnvironment, WhatIsStartedAloneStartsItsOwnRanks) {
  const Set slurm(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}));
  EXPECT_FALSE(process_environment().has_value());
  const Set mpi(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}));
  EXPECT_FALSE(process_environment().has_value());
}

TEST(ProcessEnvironment, RunsHaveNumbersOfTheirOwn) {
  std::set<std::uint64_t> runs;
  const auto note = [&](const Variables& variables) {
    const Set set(variables);
    runs.insert(process_environment()->run);
  };
  note(kSlurm);
  note(with(kSlurm, {{"SLURM_PROCID", "1"}, {"SLURM_LOCALID", "0"}}));
  EXPECT_EQ(runs.size(), 1u);
  note(with(kSlurm, {{"SLURM_STEP_ID", "1"}}));
  note(with(kSlurm, {{"SLURM_JOB_ID", "471"}, {"SLURM_STEP_ID", "10"}}));
  note(with(kSlurm, {{"SLURM_JOB_ID", "4711"}, {"SLURM_STEP_ID", "10"}}));
  note(kOpenMpi);
  EXPECT_EQ(runs.size(), 5u);
}

TEST(ProcessEnvironment, RefusesWhatALauncherCannotMean) {
  {
    const Set set(with(kSlurm, {{"SLURM_PROCID", "8"}}));
    expect_invalid(
        "environment variable SLURM_PROCID is 8 and SLURM_STEP_NUM_TASKS is 8; a SLURM_PROCID from "
        "0 to 7 is accepted",
        [] { process_environment(); });
  }
  const Set set(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "65"}}));
  expect_invalid(
      "environment variable OMPI_COMM_WORLD_SIZE is '65'; an integer from 1 to 64 is accepted",
      [] { process_environment(); });
}

TEST(HostList, TheFirstIsFound) {
  for (const auto& [list, first] :
       std::vector<std::pair<std::string, std::string>>{{"gpu1", "gpu1"},
                                                        {"gpu1,gpu2", "gpu1"},
                                                        {"gpu[1-4]", "gpu1"},
                                                        {"gpu[007,9-12],login", "gpu007"},
                                                        {"r[2-3]n[05-08]-ib,x", "r2n05-ib"},
                                                        {"a-b.c.d", "a-b.c.d"},
                                                        {"gpu[1", "gpu1"},
                                                        {"gpu[", "gpu"},
                                                        {"", ""}}) {
    EXPECT_EQ(first_of_host_list(list), first) << list;
  }
}

}  // namespace
}  // namespace uniep::testing
