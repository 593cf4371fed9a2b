#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "uniep/layer.h"
#include "uniep/macros.h"

namespace uniep {

/// How a search for the fastest schedule goes. The same on all ranks, but for `call` and
/// `stop`.
struct TuneOptions {
  double budget_s = 60;    ///< seconds that the search takes at most, a fifth more with the reasons
                           ///< for what it found: 0.1 to 86400
  int candidates = 16;     ///< schedules to measure besides the default and the presets: 1 to 1000
  int max_rounds = 200;    ///< each measures every candidate that is left once: 1 to 10000
  std::string space{};     ///< "axis=value|value,...": tries these values only of the axes named
  std::uint64_t seed = 1;  ///< of what is drawn at random
  /// The cost model that proposes candidates: "auto" takes the shipped profile of this device,
  /// where there is one; "none" draws them at random; or a shipped profile's name ("h200").
  std::string profile = "auto";
  bool store = true;    ///< keeps what was found, so that layers that are made later take it
  std::string cache{};  ///< file to keep it in; empty: the user's (UNIEP_TUNE_CACHE)
  double skew = 0;      ///< how uneven the routing is that it is kept for; layers look for 0
  /// Stream and memory of the passes; a schedule in it is not read.
  CallOptions call{};
  /// Asked on rank 0 between passes: true ends the search with what it has.
  std::function<bool()> stop{};
};

/// What a search found; the same on all ranks.
struct TuneResult {
  /// The fastest; the backend's default where none is faster than that by more than chance.
  Schedule schedule;
  double seconds = 0;          ///< of a pass under it, on the slowest rank: a median; 0: the search
                               ///< ended before there was one
  double default_seconds = 0;  ///< of a pass under the default
  double speedup = 1;          ///< over the default, round by round: a median
  bool faster = false;         ///< than the default, by more than chance
  bool decided = false;        ///< nothing that is left could be faster by more than half a percent
  bool stopped = false;        ///< by `stop`; else, where it is not decided, by budget or rounds
  bool stored = false;         ///< a search with too few rounds to tell stores nothing
  int rounds = 0;              ///< that are complete
  int candidates = 0;          ///< that were measured
  int rejected = 0;            ///< of these, for wrong bits: there should be none
  std::string why{};  ///< what sets the schedule apart from the default: times by stage. Empty for
                      ///< a layer on a GPU that records no timeline
  std::string problem{};  ///< why it could not be stored, or what of the cache cannot be used
};

// Both search for the schedule under which a pass of this layer, with these tensors and this
// routing, takes least time, as `uniep tune` does (docs/tuning.md). They run the pass a few hundred
// times: give them tensors and a routing like those of the steps to come.
//
// Collective. Every schedule is measured on all ranks together, and its results are compared with
// those of preset `sequential`, bit by bit, on every rank; one wrong bit takes a schedule out.
//
// The results are written to the caller's tensors (`out`; dx, dprobs, dw1, dw2), which are
// overwritten with NaNs between passes. At the end they hold the pass's results, but for weight
// gradients that are added to: these have the values that they had before. Beside them, the host
// holds a copy of the results, and with CUDA the device is waited for after each pass. Events that
// a layer with `record_timeline` holds are dropped.
//
// What is stored is found by layers with the same problem that are made afterwards, also in this
// process, up to the same power of two of `max_tokens`; `layer` itself stays as it is.
//
// Throws Error(kInvalidArgument), on all ranks, for an option that is out of its range, and for a
// budget that does not reach for one round, naming one that would do; Error(kIo) where the cache
// cannot be written, before anything is measured; and what the layer's own calls throw. What `stop`
// throws ends the search on all ranks.

/// Tunes forward passes of `plan`, which has no pages of a row pool: these serve one pass.
UNIEP_API TuneResult tune_forward(Layer& layer, const RoutingPlan& plan, const ForwardArgs& args,
                                  const TuneOptions& options = {});

/// Tunes backward passes of `saved`, which keeps its pages of a row pool.
UNIEP_API TuneResult tune_backward(Layer& layer, const Saved& saved, const BackwardArgs& args,
                                   const TuneOptions& options = {});

}  // namespace uniep
