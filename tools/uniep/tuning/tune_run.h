#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "commands.h"
#include "common/record_json.h"
#include "simulate/memory_plan.h"
#include "tuning/tuner.h"

namespace uniep::tool {

/// The command line as it was given.
struct TuneFlags {
  std::string shape;
  std::string input;
  int ranks = 0;
  int hosts = 0;
  std::string backend = "cpu";
  std::string pass = "both";
  std::uint64_t seed = 0;
  double skew = 0;
  KeptFlags kept;
  ArithmeticFlags arithmetic;
  MemoryFlags memory;
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

/// "--budget 1 is too small for the forward pass: ..."
std::string too_small_text(const TuneFlags& flags, Pass pass, double least_budget_s);

/// The estimate that a search begins with may be too low: one that spent its budget within the
/// first round has measured nothing that can be compared, and is told what would do for its
/// candidates.
void call_too_small(tune::TuneOutcome& out, std::size_t candidates);

void print_tune_header(const TuneCall& call);

/// What became of searches for the directions of a layer.
struct TunedLayer {
  Json passes = Json::array();      ///< figures of each, as schema "uniep-tune-1" has them
  std::optional<double> seconds{};  ///< of all directions under what was chosen, if all have that
  std::string schedules;            ///< what was chosen, for people: "lag=4 (forward), ..."
  bool failed = false;              ///< wrong bits, or it could not be stored
  bool too_small = false;           ///< the budget
  bool interrupted = false;
};

/// One direction after another until it is interrupted. Shows how it comes along and prints what it
/// found.
TunedLayer tune_layer(const TuneCall& call);

/// Writes what was found where --json says; `more` is what the file says besides.
void write_tuning(const TuneCall& call, const TunedLayer& layer, const Json& more = Json::object());

/// The exit code; to be asked for while the layer's Interrupt is alive.
int exit_code(const TunedLayer& layer);

// Each treats one direction after another until it is interrupted, shows how it comes along, prints
// and writes what it found, and returns the exit code.
int run_tuning(const TuneCall& call);
int run_survey(const TuneCall& call);

}  // namespace uniep::tool
