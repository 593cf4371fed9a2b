#include "simulate/hosts_report.h"

#include <ostream>

#include "base/check.h"
#include "base/problem_limits.h"
#include "common/table.h"

namespace uniep::tool {

namespace {

/// Adds the ways of tokens that are gathered, with one sum of each host in bf16, or with all rows.
void add_gathered(std::vector<HostWay>& ways, int hosts, bool all_rows) {
  using enum tune::CrossesUnder;
  const auto add = [&](const char* how, tune::CrossesUnder under, bool exact_hosts) {
    HostWay way{.name = cat(all_rows ? "all rows" : "gathered", how),
                .gathered = under,
                .exact_hosts = exact_hosts};
    if (!all_rows) {
      way.combine_groups = hosts;
      way.combine_partials = CombinePartials::kBf16;
    }
    ways.push_back(std::move(way));
  };
  const bool in_waves = hosts <= kMaxHostsInWaves;
  add("", kWeights, false);
  if (in_waves) add(", in waves", kPasses, false);
  add(", exact_hosts", kWeights, true);
  if (in_waves) add(", waves, exact", kPasses, true);
}

}  // namespace

std::vector<HostWay> ways_between(int hosts, Backend backend) {
  std::vector<HostWay> ways;
  if (backend == Backend::kCuda && hosts > 1) {
    for (const bool all_rows : {false, true}) add_gathered(ways, hosts, all_rows);
  }
  ways.push_back({.name = "direct"});
  ways.push_back({.name = "relayed, all rows", .wire = HostWire::kRelayed});
  for (const CombinePartials partials : {CombinePartials::kFp32, CombinePartials::kBf16}) {
    ways.push_back({.name = cat("relayed, sums in ", name(partials)),
                    .wire = HostWire::kRelayed,
                    .combine_groups = hosts,
                    .combine_partials = partials});
  }
  return ways;
}

std::string explained_ways(int hosts, Backend backend) {
  std::string said;
  if (backend == Backend::kCuda && hosts > 1) {
    said =
        "# gathered: what GPUs do; all tokens go to all hosts ahead of the pass, and sums come "
        "back\n"
        "# behind it; all rows: rows do, which are added up in one group; in waves: under the "
        "pass, on\n"
        "# SMs of their own (UNIEP_SPARE_SMS); exact_hosts: tokens go to hosts that need them. "
        "What\n"
        "# follows is what a pass would take that exchanges as those of CPUs do.\n";
  }
  return said + "# relayed: a token crosses to a host once, and rows return by the same rank\n";
}

namespace {

std::vector<tune::Prediction> predict_gathered(const HostWay& way, const BenchCase& bench,
                                               const std::vector<Pass>& passes,
                                               const HostSetting& s) {
  const bool all_rows = way.combine_groups == 1;
  const auto host_with = [&](tune::CrossesUnder under) {
    return tune::gathered_host(bench.problem, bench.ranks, s.hosts, bench.routing.topk_ids, under,
                               all_rows);
  };
  const tune::MachineProfile profile =
      tune::with_spare_workers(s.profile, way.in_waves() ? s.spare_sms : 0);
  const tune::GatheredHost host = host_with(*way.gathered);
  const auto undivided = host_with(tune::CrossesUnder::kNothing).plans;
  const tune::MachineProfile free = tune::without_communication(s.profile);
  std::vector<tune::Prediction> found;
  for (const Pass pass : passes) {
    found.push_back(
        {tune::simulate_gathered(host, way.exact_hosts, pass, s.schedule, profile, s.topology),
         tune::simulate(undivided, pass, s.schedule, free).seconds});
  }
  return found;
}

}  // namespace

std::vector<tune::Prediction> predict_way(const HostWay& way, const BenchCase& bench,
                                          const std::vector<Pass>& passes, const HostSetting& s) {
  if (way.gathered) return predict_gathered(way, bench, passes, s);
  Problem problem = bench.problem;
  problem.combine_groups = way.combine_groups;
  problem.combine_partials = way.combine_partials;
  const int hosts = way.wire == HostWire::kRelayed ? s.hosts : 1;
  const std::vector<RoutingPlan> plans = tune::plans_to_simulate(
      problem, bench.tokens_per_rank(), bench.routing.topk_ids, kMostRanksOfHosts, hosts);
  std::vector<tune::Prediction> found;
  for (const Pass pass : passes) {
    found.push_back(tune::predict(plans, pass, s.schedule, s.profile, {.topology = s.topology}));
  }
  return found;
}

namespace {

/// The bytes of an average rank.
double per_rank(const tune::Prediction& p, std::int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(p.simulated.stats.size());
}

/// What a port takes for all that a rank sends, while as much comes in: no schedule is faster.
double wire_seconds(const tune::Prediction& p, double nic) {
  return per_rank(p, p.simulated.bytes.network) / nic;
}

}  // namespace

void print_ways(std::ostream& out, const std::vector<HostWay>& ways,
                const std::vector<Pass>& passes, double nic) {
  using enum Table::Align;
  Table table({kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kRight, kRight});
  table.header({"", "", "combine", "time", "exposed", "wire", "network", "link", "own"});
  table.header({"pass", "between hosts", "groups", "(ms)", "(ms)", "(ms)", "(MB)", "(MB)", "(MB)"});
  for (std::size_t i = 0; i < passes.size(); ++i) {
    for (const HostWay& way : ways) {
      const tune::Prediction& p = way.passes[i];
      const LinkBytes& bytes = p.simulated.bytes;
      const auto mb = [&](std::int64_t all) { return formatted("%.1f", per_rank(p, all) * 1e-6); };
      table.row({name(passes[i]), way.name, cat(way.combine_groups), milliseconds(p.seconds()),
                 milliseconds(p.exposed_s()), milliseconds(wire_seconds(p, nic)), mb(bytes.network),
                 mb(bytes.nvlink), mb(bytes.own)});
    }
  }
  out << table;
}

Json ways_json(const std::vector<HostWay>& ways, const std::vector<Pass>& passes, double nic,
               const Json& common) {
  Json records = Json::array();
  for (std::size_t i = 0; i < passes.size(); ++i) {
    for (const HostWay& way : ways) {
      const tune::Prediction& p = way.passes[i];
      const LinkBytes& bytes = p.simulated.bytes;
      Json record = common;
      record.update({{"direction", name(passes[i])},
                     {"way", way.name},
                     {"combine_groups", way.combine_groups},
                     {"combine_partials", name(way.combine_partials)},
                     {"predicted_ms", 1e3 * p.seconds()},
                     {"exposed_ms", 1e3 * p.exposed_s()},
                     {"wire_ms", 1e3 * wire_seconds(p, nic)},
                     {"network_bytes", per_rank(p, bytes.network)},
                     {"link_bytes", per_rank(p, bytes.nvlink)},
                     {"own_bytes", per_rank(p, bytes.own)},
                     {"simulated_ranks", p.simulated.stats.size()}});
      records.push_back(std::move(record));
    }
  }
  return records;
}

}  // namespace uniep::tool
