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

Problem problem_of(const BenchCase& bench, const HostWay& way) {
  Problem problem = bench.problem;
  problem.combine_groups = way.combine_groups;
  problem.combine_partials = way.combine_partials;
  return problem;
}

void print_ways(std::ostream& out, const std::vector<HostWay>& ways,
                const std::vector<Pass>& passes, int ranks) {
  using enum Table::Align;
  Table table({kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kRight});
  table.header({"", "", "combine", "time", "exposed", "network", "link", "own"});
  table.header({"pass", "between hosts", "groups", "(ms)", "(ms)", "(MB)", "(MB)", "(MB)"});
  const auto mb = [ranks](std::int64_t bytes) {
    return formatted("%.1f", static_cast<double>(bytes) * 1e-6 / ranks);
  };
  for (std::size_t i = 0; i < passes.size(); ++i) {
    for (const HostWay& way : ways) {
      const tune::Prediction& p = way.passes[i];
      const LinkBytes& bytes = p.simulated.bytes;
      table.row({name(passes[i]), way.name, cat(way.combine_groups), milliseconds(p.seconds()),
                 milliseconds(p.exposed_s()), mb(bytes.network), mb(bytes.nvlink), mb(bytes.own)});
    }
  }
  out << table;
}

}  // namespace uniep::tool
