#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench_case.h"
#include "common/record_json.h"
#include "tune/model/cost_model.h"
#include "tune/model/gathered_hosts.h"

namespace uniep::tool {

/// Ranks of several hosts that are all simulated. In larger groups the ranks of one host stand for
/// all, and where rows go straight, one rank does.
inline constexpr int kMostRanksOfHosts = 32;

/// A way to exchange tokens and rows between hosts, and what it takes in each direction.
struct HostWay {
  std::string name;
  HostWire wire = HostWire::kDirect;
  std::optional<tune::CrossesUnder> gathered{};  ///< by collectives around the pass, as GPUs do
  bool exact_hosts = false;  ///< of what is gathered, tokens only where they are needed
  int combine_groups = 1;
  CombinePartials combine_partials = CombinePartials::kFp32;
  std::vector<tune::Prediction> passes{};

  /// Tokens and sums cross under the pass, on SMs of their own.
  bool in_waves() const { return gathered == tune::CrossesUnder::kPasses; }
};

/// The ways of the pass itself: straight; by relays, with all rows; by relays, with a partial sum
/// of each host. On GPUs those of the Python package around it come first.
std::vector<HostWay> ways_between(int hosts, Backend backend);

/// What the names mean, as comments.
std::string explained_ways(int hosts, Backend backend);

/// What passes of a way are predicted for.
struct HostSetting {
  int hosts = 1;
  int spare_sms = 0;  ///< where what crosses has SMs of its own
  Schedule schedule{};
  tune::Topology topology{};
  const tune::MachineProfile& profile;
};
std::vector<tune::Prediction> predict_way(const HostWay& way, const BenchCase& bench,
                                          const std::vector<Pass>& passes,
                                          const HostSetting& setting);

/// A table of the ways: times, and bytes of an average rank by what carries them. `nic`: bytes a
/// second of a rank's port.
void print_ways(std::ostream& out, const std::vector<HostWay>& ways,
                const std::vector<Pass>& passes, double nic);

/// The ways as records of uniep-hosts-1, with what `common` has.
Json ways_json(const std::vector<HostWay>& ways, const std::vector<Pass>& passes, double nic,
               const Json& common);

}  // namespace uniep::tool
