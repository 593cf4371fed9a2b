#include "run/result_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "common/interrupt.h"
#include "common/progress.h"
#include "common/table.h"
#include "reference/bounded.h"
#include "reference/compare.h"
#include "reference/contract.h"
#include "run/shared_layer.h"

namespace uniep::tool {
namespace {

using reference::Bounded;

/// Which elements of a tensor have errors of one cause: its index to the number of the cause.
using Cause = std::function<std::size_t(std::size_t)>;

/// How many of them matter: few large ones may outweigh all others.
double those_that_matter(const std::vector<double>& squares) {
  double sum = 0, of_squares = 0;
  for (const double s : squares) {
    sum += s;
    of_squares += s * s;
  }
  return of_squares > 0 ? sum * sum / of_squares : 1;
}

/// A tensor may lie off by so many times the error that its roundings make likely. One element is
/// hardly ever off by more than twice that. Of many, those on one side make up for others; but they
/// share roundings, so that `count` of them are as good as the root of it, or as the causes that
/// they have, where these are fewer.
double spread(double count, double causes) {
  return 1 + 3 / std::sqrt(std::max(1.0, std::min(std::sqrt(count), causes)));
}

void set_distance(TensorCheck& check, const std::vector<double>& got,
                  const std::vector<Bounded>& exact, const Cause& cause) {
  std::vector<double> values, squares, by_cause;
  double likely = 0, norm = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const Bounded& e = exact[i];
    values.push_back(e.value);
    squares.push_back(e.square);
    by_cause.resize(std::max(by_cause.size(), cause(i) + 1));
    by_cause[cause(i)] += e.square;
    likely += e.square;
    norm += e.value * e.value;
  }
  const double factor = spread(those_that_matter(squares), those_that_matter(by_cause));
  check.relative_l2 = reference::relative_l2(got, values);
  // If all numbers are zero, nothing may differ.
  check.limit = likely == 0 || norm == 0 ? 0 : factor * std::sqrt(likely / norm);
}

/// What is computed along `hidden` comes from one number of a row's h, a, da or dh, or from few.
struct Causes {
  explicit Causes(const LayerData& layer)
      : hidden(static_cast<std::size_t>(layer.hidden)),
        intermediate(static_cast<std::size_t>(layer.intermediate)) {}

  Cause of_rows() const {  // of out, dx and dw1
    return [h = hidden](std::size_t i) { return i / h; };
  }
  Cause of_dw2() const {
    return [h = hidden, n = intermediate](std::size_t i) { return i / (h * n) * n + i % n; };
  }

  std::size_t hidden, intermediate;
};

Cause each() {
  return [](std::size_t i) { return i; };
}

template <class T>
TensorCheck compare(const char* name, Pass pass, const std::vector<T>& got,
                    const std::vector<T>& baseline, const std::vector<Bounded>& exact,
                    const Cause& cause) {
  const reference::Difference difference = reference::first_difference(got, baseline);
  TensorCheck check{.name = name,
                    .pass = pass,
                    .elements = static_cast<std::int64_t>(got.size()),
                    .differing = difference.count,
                    .first_differs = difference.index};
  set_distance(check, reference::to_double(got), exact, cause);
  return check;
}

LayerResult sequential_result(const LayerData& layer, const StepOptions& options,
                              const StepRunner& run) {
  StepOptions baseline = options;
  baseline.ranks = 1;
  baseline.hosts = 1;
  baseline.capacity_rows = 0;  // that of a rank of several
  baseline.kept = {};
  baseline.row_pool = 0;
  baseline.defer_weights = false;
  baseline.schedule = sequential_like(options.schedule);
  baseline.backward_schedule.reset();
  baseline.repeat = 0;
  baseline.record_timeline = false;
  return run(layer, baseline).result;
}

/// What memory has of a weight gradient: a main gradient is fp32.
std::vector<Bounded> in_memory(std::vector<Bounded> sums, bool main_grad) {
  if (!main_grad) std::ranges::transform(sums, sums.begin(), reference::rounded_to_bf16);
  return sums;
}

reference::Outputs<Bounded> exact_result(const LayerData& layer, bool backward, bool main_grad) {
  Progress progress("computing in float64", layer.num_experts + layer.shared_experts);
  auto exact = reference::bounded(layer, backward, [&] {
    if (Interrupt::requested()) throw CheckInterrupted();
    progress.advance();
  });
  exact.dw1 = in_memory(std::move(exact.dw1), main_grad);
  exact.dw2 = in_memory(std::move(exact.dw2), main_grad);
  exact.db1 = in_memory(std::move(exact.db1), main_grad);
  exact.db2 = in_memory(std::move(exact.db2), main_grad);
  return exact;
}

constexpr std::string_view kTensors[] = {"out", "dx",  "dprobs",        "dw1",        "dw2",
                                         "db1", "db2", "dshared_probs", "dshared_w1", "dshared_w2"};

/// Which elements are infinite or NaN, tensor by tensor in the order of kTensors.
std::vector<std::vector<std::size_t>> not_finite(const LayerResult& result, bool main_grad) {
  std::vector<std::vector<std::size_t>> all;
  const auto add = [&](const auto& tensor) {
    const std::vector<double> values = reference::to_double(tensor);
    all.emplace_back();
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!std::isfinite(values[i])) all.back().push_back(i);
    }
  };
  add(result.out);
  add(result.dx);
  add(result.dprobs);
  main_grad ? add(result.main_dw1) : add(result.dw1);
  main_grad ? add(result.main_dw2) : add(result.dw2);
  main_grad ? add(result.main_db1) : add(result.db1);
  main_grad ? add(result.main_db2) : add(result.db2);
  add(result.dshared_probs);
  main_grad ? add(result.main_dshared_w1) : add(result.dshared_w1);
  main_grad ? add(result.main_dshared_w2) : add(result.dshared_w2);
  return all;
}

LayerResult reference_result(const LayerData& layer, bool main_grad) {
  if (!main_grad) return reference::contract(layer);
  return reference::contract_into_main_grad(
      layer, std::vector<float>(layer.w1.size()), std::vector<float>(layer.w2.size()),
      std::vector<float>(layer.b1.size()), std::vector<float>(layer.b2.size()));
}

template <class T>
void append(std::vector<T>& to, const std::vector<T>& part) {
  to.insert(to.end(), part.begin(), part.end());
}

/// Replaces the weight gradients of shared experts by those of each rank's tokens, as ranks have
/// them; `compute` gives the gradients of a layer.
template <class Compute>
void set_shared_wgrads(LayerResult& result, const LayerData& layer, int ranks,
                       const Compute& compute) {
  result.dshared_w1.clear(), result.dshared_w2.clear();
  result.main_dshared_w1.clear(), result.main_dshared_w2.clear();
  for (const LayerData& of_rank : shared_layers(layer, ranks)) {
    const LayerResult part = compute(of_rank);
    append(result.dshared_w1, part.dw1);
    append(result.dshared_w2, part.dw2);
    append(result.main_dshared_w1, part.main_dw1);
    append(result.main_dshared_w2, part.main_dw2);
  }
}

/// Replaces the weight gradients of shared experts in float64 results.
void set_exact_shared_wgrads(reference::Outputs<Bounded>& exact, const LayerData& layer, int ranks,
                             bool main_grad) {
  exact.dshared_w1.clear(), exact.dshared_w2.clear();
  for (const LayerData& of_rank : shared_layers(layer, ranks)) {
    const reference::Outputs<Bounded> part = exact_result(of_rank, true, main_grad);
    append(exact.dshared_w1, part.dw1);
    append(exact.dshared_w2, part.dw2);
  }
}

/// Numbers too large for bf16 or fp32 are no error of a run, if the reference has them too.
void mark_overflows(std::vector<TensorCheck>& checks, const LayerData& layer,
                    const LayerResult& result, int ranks, bool main_grad) {
  const auto found = not_finite(result, main_grad);
  if (std::ranges::all_of(found, [](const auto& where) { return where.empty(); })) return;
  LayerResult reference = reference_result(layer, main_grad);
  set_shared_wgrads(reference, layer, ranks,
                    [&](const LayerData& of_rank) { return reference_result(of_rank, main_grad); });
  const auto wanted = not_finite(reference, main_grad);
  for (TensorCheck& check : checks) {
    const auto i = static_cast<std::size_t>(std::ranges::find(kTensors, check.name) - kTensors);
    if (found[i] == wanted[i]) check.overflows = static_cast<std::int64_t>(found[i].size());
  }
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
  return cat(c.name, " is ", formatted("%.2e", c.relative_l2),
             " from float64, where roundings make ", formatted("%.2e", c.limit), " the limit");
}

const char* word(const TensorCheck& c) {
  if (c.differing > 0) return "DIFFERS";
  if (c.overflows > 0) return "overflow, as the reference does";
  return c.ok() ? "ok" : "INEXACT";
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
  LayerResult base = sequential_result(layer, options, run);
  reference::Outputs<Bounded> exact = exact_result(layer, backward, options.main_grad);
  if (backward) {
    set_shared_wgrads(base, layer, options.ranks, [&](const LayerData& of_rank) {
      return sequential_result(of_rank, options, run);
    });
    set_exact_shared_wgrads(exact, layer, options.ranks, options.main_grad);
  }
  const Causes causes(layer);
  std::vector<TensorCheck> checks = {
      compare("out", Pass::kForward, result.out, base.out, exact.out, causes.of_rows())};
  const auto add = [&](const char* name, const auto& got, const auto& baseline,
                       const std::vector<Bounded>& want, const Cause& cause) {
    checks.push_back(compare(name, Pass::kBackward, got, baseline, want, cause));
  };
  if (backward) {
    add("dx", result.dx, base.dx, exact.dx, causes.of_rows());
    add("dprobs", result.dprobs, base.dprobs, exact.dprobs, each());
  }
  if (backward && options.main_grad) {
    add("dw1", result.main_dw1, base.main_dw1, exact.dw1, causes.of_rows());
    add("dw2", result.main_dw2, base.main_dw2, exact.dw2, causes.of_dw2());
  } else if (backward) {
    add("dw1", result.dw1, base.dw1, exact.dw1, causes.of_rows());
    add("dw2", result.dw2, base.dw2, exact.dw2, causes.of_dw2());
  }
  if (backward && layer.has_bias() && options.main_grad) {
    add("db1", result.main_db1, base.main_db1, exact.db1, each());
    add("db2", result.main_db2, base.main_db2, exact.db2, each());
  } else if (backward && layer.has_bias()) {
    add("db1", result.db1, base.db1, exact.db1, each());
    add("db2", result.db2, base.db2, exact.db2, each());
  }
  const bool shared = backward && layer.shared_experts > 0;
  if (shared) {
    add("dshared_probs", result.dshared_probs, base.dshared_probs, exact.dshared_probs, each());
  }
  if (shared && options.main_grad) {
    add("dshared_w1", result.main_dshared_w1, base.main_dshared_w1, exact.dshared_w1,
        causes.of_rows());
    add("dshared_w2", result.main_dshared_w2, base.main_dshared_w2, exact.dshared_w2,
        causes.of_dw2());
  } else if (shared) {
    add("dshared_w1", result.dshared_w1, base.dshared_w1, exact.dshared_w1, causes.of_rows());
    add("dshared_w2", result.dshared_w2, base.dshared_w2, exact.dshared_w2, causes.of_dw2());
  }
  mark_overflows(checks, layer, result, options.ranks, options.main_grad);
  return checks;
}

bool all_ok(const std::vector<TensorCheck>& checks) {
  return std::ranges::all_of(checks, &TensorCheck::ok);
}

void print_checks(std::ostream& out, const std::vector<TensorCheck>& checks) {
  using enum Table::Align;
  Table table({kLeft, kRight, kRight, kRight, kRight, kLeft});
  table.header({"tensor", "elements", "#wrong", "rel. L2", "limit", "verdict"});
  for (const TensorCheck& c : checks) {
    table.row({c.name, cat(c.elements), cat(c.differing), formatted("%.2e", c.relative_l2),
               formatted("%.2e", c.limit), word(c)});
  }
  out << "#\n# check: #wrong are elements that differ in any bit from schedule sequential at 1 "
         "rank;\n#        rel. L2 is the distance from float64, limit how far roundings may take "
         "it\n"
      << table;
}

std::string verdict(const std::vector<TensorCheck>& checks) {
  std::string text;
  if (!all_ok(checks)) {
    for (const TensorCheck& c : checks) {
      if (!c.ok()) text += (text.empty() ? "FAILED: " : "; ") + complaint(c);
    }
    return text;
  }
  double furthest = 0;
  for (const TensorCheck& c : checks) {
    if (c.overflows == 0) furthest = std::max(furthest, c.relative_l2);
    if (c.overflows > 0) text += cat(text.empty() ? "; not finite: " : " ", c.name);
  }
  return cat("PASSED: ", names(checks), " are bitwise those of sequential at 1 rank, and within ",
             formatted("%.2e", furthest), " of float64", text,
             text.empty() ? "" : ", as in the reference");
}

}  // namespace uniep::tool
