#pragma once

#include <cstdint>
#include <string>

#include "commands.h"
#include "tuning/tuner.h"

namespace uniep::tool {

/// The command line as it was given.
struct TuneFlags {
  std::string shape;
  std::string input;
  int ranks = 0;
  std::string backend = "cpu";
  std::string pass = "both";
  std::uint64_t seed = 0;
  double skew = 0;
  KeptFlags kept;
  double budget = 60;
  int candidates = 16;
  std::string space;
  std::string profile = "auto";
  bool fresh = false;
  int survey = 0;
  std::string json;
  std::string plot;
};

/// A search or a survey that is to be run, as every process of its ranks knows it.
struct TuneCall {
  const TuneFlags& flags;
  const Invocation& invocation;
  const Ranks& ranks;
  const tune::TuneSettings& settings;
  const BenchCase& bench;
};

/// The estimate that a search begins with may be too low: one that spent its budget within the
/// first round has measured nothing that can be compared, and is told what would do for its
/// candidates.
void call_too_small(tune::TuneOutcome& out, std::size_t candidates);

void print_tune_header(const TuneCall& call);

// Each treats one direction after another until it is interrupted, shows how it comes along, prints
// and writes what it found, and returns the exit code.
int run_tuning(const TuneCall& call);
int run_survey(const TuneCall& call);

}  // namespace uniep::tool
