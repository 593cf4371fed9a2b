#include "check.h"

#include <algorithm>
#include <ostream>

#include "base/check.h"
#include "progress.h"
#include "reference/compare.h"
#include "reference/exact.h"
#include "table.h"

namespace uniep::tool {
namespace {

template <class T>
TensorCheck compare(const char* name, Pass pass, const std::vector<T>& got,
                    const std::vector<T>& baseline, const std::vector<double>& exact) {
  const reference::Difference difference = reference::first_difference(got, baseline);
  return {.name = name,
          .pass = pass,
          .elements = static_cast<std::int64_t>(got.size()),
          .differing = difference.count,
          .first_differs = difference.index,
          .relative_l2 = reference::relative_l2(reference::to_double(got), exact)};
}

LayerResult sequential_result(const LayerData& layer, const StepOptions& options,
                              const StepRunner& run) {
  StepOptions baseline = options;
  baseline.ranks = 1;
  baseline.capacity_rows = 0;  // that of a rank of several
  baseline.defer_weights = false;
  baseline.schedule = sequential_like(options.schedule);
  baseline.backward_schedule.reset();
  baseline.repeat = 0;
  baseline.record_timeline = false;
  return run(layer, baseline).result;
}

reference::ExactResult exact_result(const LayerData& layer, bool backward) {
  Progress progress("computing in float64", layer.num_experts);
  auto inputs = reference::widen<double>(layer);
  if (!backward) inputs.dy.clear();
  return reference::exact(inputs, [&] { progress.advance(); });
}

std::string names(const std::vector<TensorCheck>& checks) {
  std::string list;
  for (const TensorCheck& c : checks) list += cat(list.empty() ? "" : " ", c.name);
  return list;
}

std::string complaint(const TensorCheck& c) {
  if (c.differing > 0) {
    return cat(c.name, " differs in ", c.differing, " of ", c.elements, " elements, first at ",
               c.first_differs);
  }
  return cat(c.name, " is ", formatted("%.2e", c.relative_l2), " from float64");
}

}  // namespace

Schedule sequential_like(const Schedule& schedule) {
  Schedule sequential = parse_schedule("sequential");
  sequential.tile_m = schedule.tile_m;
  sequential.tile_n = schedule.tile_n;
  return sequential;
}

std::vector<TensorCheck> check_result(const LayerData& layer, const LayerResult& result,
                                      const StepOptions& options, const StepRunner& run) {
  const bool backward = options.passes != PassChoice::kForward;
  const LayerResult base = sequential_result(layer, options, run);
  const reference::ExactResult exact = exact_result(layer, backward);
  std::vector<TensorCheck> checks = {
      compare("out", Pass::kForward, result.out, base.out, exact.out)};
  if (!backward) return checks;
  const auto add = [&](const char* name, const auto& got, const auto& baseline,
                       const std::vector<double>& want) {
    checks.push_back(compare(name, Pass::kBackward, got, baseline, want));
  };
  add("dx", result.dx, base.dx, exact.dx);
  add("dprobs", result.dprobs, base.dprobs, exact.dprobs);
  if (options.main_grad) {
    add("dw1", result.main_dw1, base.main_dw1, exact.dw1);
    add("dw2", result.main_dw2, base.main_dw2, exact.dw2);
  } else {
    add("dw1", result.dw1, base.dw1, exact.dw1);
    add("dw2", result.dw2, base.dw2, exact.dw2);
  }
  return checks;
}

bool all_ok(const std::vector<TensorCheck>& checks) {
  return std::ranges::all_of(checks, &TensorCheck::ok);
}

void print_checks(std::ostream& out, const std::vector<TensorCheck>& checks) {
  using enum Table::Align;
  Table table({kLeft, kRight, kRight, kRight, kLeft});
  table.header({"tensor", "elements", "#wrong", "rel. L2", "verdict"});
  for (const TensorCheck& c : checks) {
    table.row({c.name, cat(c.elements), cat(c.differing), formatted("%.2e", c.relative_l2),
               c.ok()            ? "ok"
               : c.differing > 0 ? "DIFFERS"
                                 : "INEXACT"});
  }
  out << "#\n# check: #wrong are elements that differ in any bit from schedule sequential at 1 "
         "rank;\n#        rel. L2 is the distance from float64 (at most "
      << formatted("%.0e", kMaxRelativeL2) << " is ok)\n"
      << table;
}

std::string verdict(const std::vector<TensorCheck>& checks) {
  if (all_ok(checks)) {
    double furthest = 0;
    for (const TensorCheck& c : checks) furthest = std::max(furthest, c.relative_l2);
    return cat("PASSED: ", names(checks), " are bitwise those of sequential at 1 rank, and within ",
               formatted("%.2e", furthest), " of float64");
  }
  std::string text = "FAILED: ";
  bool first = true;
  for (const TensorCheck& c : checks) {
    if (c.ok()) continue;
    text += (first ? "" : "; ") + complaint(c);
    first = false;
  }
  return text;
}

}  // namespace uniep::tool
