#pragma once

#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "schedule/pass_view.h"
#include "tune/model/network.h"
#include "tune/model/pushed_tiles.h"
#include "uniep/routing_plan.h"

namespace uniep::tune {

/// How tokens and rows of a simulated pass travel: straight, or from host to host by relays
/// (plan/host_routes.h). A relay fetches its host's tokens from the beginning of the pass on, in
/// the order in which ranks of the host need them. Rows go to the relay as their tiles are done; it
/// sends them on, or a partial sum with the last of its rows. Adding them up takes no time.
class Relays {
 public:
  Relays(std::span<const RoutingPlan> plans, const Topology& topology);

  /// Lets relays fetch what dispatch will ask them for. `entered`: when tokens of each rank are
  /// published. Once, before `fetch`.
  void cross(Network& network, std::span<const PassView> views, std::span<const double> entered);

  /// When the rank of `v` has these tokens, all of one source, that it asks for at `asked`. `rate`
  /// is that of pulls over the link.
  double fetch(Network& network, const PassView& v, Stage stage, std::span<const Pull> pulls,
               double asked, double rate);

  struct Sent {
    double begun;    ///< when the first byte leaves
    double done;     ///< when the last has left this rank
    double arrived;  ///< when the rows' source has them
  };
  /// Columns of a tile's rows that return to the rank of `run`; `element`: bytes of one.
  Sent send(Network& network, const PassView& v, const Task& task, const PushedTiles::Run& run,
            std::int64_t columns, std::int64_t element, double asked, double rate);

 private:
  /// Tokens of a source that a host needs, in the order of the first rank that needs them.
  std::vector<std::int32_t> needed(std::span<const PassView> views, int source, int host) const;
  /// Of a run's rows, how many partial sums are complete now, and when the last row has come.
  struct Complete {
    std::int64_t sums = 0;
    double from = 0;
  };
  Complete complete(const PassView& v, const Task& task, int source, double came);
  std::size_t sum_index(int source, std::int64_t token, int expert) const;

  RankLayout layout_;
  bool relayed_ = false;
  bool sums_ = false;  // whether relays add rows up
  int groups_ = 1;
  int group_experts_ = 0;
  std::int64_t sum_element_ = 0;           // bytes of an element of a partial sum
  std::vector<std::int64_t> first_token_;  // of each source, among those of all
  /// When tokens of a source are at a host, by stage, host and source.
  std::map<std::tuple<Stage, int, int>, std::vector<double>> there_;
  std::vector<std::uint8_t> rows_;               // of each partial sum
  std::vector<std::vector<std::uint8_t>> left_;  // by column tile: rows that have not come
  std::vector<double> came_;                     // of each partial sum: the latest row
};

}  // namespace uniep::tune
