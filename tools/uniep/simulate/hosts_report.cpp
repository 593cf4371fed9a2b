#include "simulate/hosts_report.h"

#include <ostream>

#include "base/check.h"
#include "common/table.h"

namespace uniep::tool {

std::vector<HostWay> ways_between(int hosts) {
  std::vector<HostWay> ways{{.name = "direct"},
                            {.name = "relayed, all rows", .wire = HostWire::kRelayed}};
  for (const CombinePartials partials : {CombinePartials::kFp32, CombinePartials::kBf16}) {
    ways.push_back({.name = cat("relayed, sums in ", name(partials)),
                    .wire = HostWire::kRelayed,
                    .combine_groups = hosts,
                    .combine_partials = partials});
  }
  return ways;
}

namespace {

/// Of an average rank.
double per_rank(const tune::Prediction& p, std::int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(p.simulated.stats.size());
}

/// What a port takes for all that a rank sends, while as much comes in: no schedule is faster.
double wire_seconds(const tune::Prediction& p, double nic) {
  return per_rank(p, p.simulated.bytes.network) / nic;
}

}  // namespace

Problem problem_of(const BenchCase& bench, const HostWay& way) {
  Problem problem = bench.problem;
  problem.combine_groups = way.combine_groups;
  problem.combine_partials = way.combine_partials;
  return problem;
}

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
