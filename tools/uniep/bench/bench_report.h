#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "bench/bench_case.h"
#include "bench/bench_rank.h"
#include "common/machine.h"
#include "common/record_json.h"

namespace uniep::tool {

/// What the figures of a benchmark depend on.
struct BenchHeader {
  Build build;
  std::string backend;
  std::string machine;  ///< GPUs, if any, and CPU
  std::string date;
  std::string command;
  std::string link;           ///< emulated link; empty: none
  std::string sharing{};      ///< why times mean nothing; empty: ranks share no GPUs
  std::string no_floor;       ///< why there is no floor; empty: there is one
  std::string input{};        ///< the layer's file; empty: made up
  std::string save = "rows";  ///< what forward kept
  bool recompute_h = false;
  std::int64_t backward_rows = 0;  ///< that backward worked in at a time; 0: all
  std::uint64_t seed = 0;
  double skew = 0;  ///< of a file, as measured
};

/// A shape and what was measured of it.
struct BenchEntry {
  BenchCase bench;
  BenchReport report;
};

/// Comment lines.
void print_bench_header(std::ostream& out, const BenchHeader& header, const BenchOptions& options);

/// A row for each direction and its stages, below what the shape asks for.
void print_bench(std::ostream& out, const BenchEntry& entry, const BenchOptions& options);

/// Elements of any shape that are wrong.
Wrong all_wrong(const std::vector<BenchEntry>& entries);

void print_bench_verdict(std::ostream& out, const std::vector<BenchEntry>& entries,
                         const BenchOptions& options);

/// A file of schema "uniep-bench-1", which docs/results.md describes.
Json bench_json(const BenchHeader& header, const BenchOptions& options,
                const std::vector<BenchEntry>& entries);

}  // namespace uniep::tool
