#include "common/layer_memory.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "common/table.h"
#include "graph/description.h"
#include "layout/page_pool.h"
#include "layout/workspace.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/layer_memory.h"
#endif

namespace uniep::tool {
namespace {

using enum Table::Align;

enum class Held { kLayer, kUntilBackward, kForward, kBackward, kAnyPass };

struct Use {
  std::string name;
  std::string tensors;  // that follow from the graph; empty: none
  Held held;
  std::int64_t bytes;
  int times = 1;  // that a layer with memory of its own has it at once

  std::int64_t all_bytes() const { return times * bytes; }
  bool has_rows() const { return held != Held::kLayer && !tensors.empty(); }
  std::string text() const { return cat(name, tensors.empty() ? "" : ": ", tensors); }
};

const char* duration(Held held) {
  switch (held) {
    case Held::kLayer:
      return "layer";
    case Held::kUntilBackward:
      return "until its backward";
    case Held::kForward:
    case Held::kAnyPass:
      return "pass";
    case Held::kBackward:
      break;
  }
  return "until backward_weights";
}

/// "tokens, probs, ...".
std::string tensors_of(const TensorLayout& layout) {
  return tensor_names(kLayerGraph, [&](const TensorRow& t) { return layout.holds(t.tensor); });
}

std::vector<Use> uses(const Problem& p, int ranks, const StepRows& step, int hosts = 1) {
  const std::int64_t rows = step.rows;
  std::vector<Use> all;
  const auto add_layout = [&](std::string name, Held held, const TensorLayout& layout) {
    all.push_back({std::move(name), tensors_of(layout), held, layout.bytes});
  };
  // On several hosts a rank has a part for each rank of its rail, which it stands in for.
  const SymmetricLayout symmetric(p, ranks, kLayerGraph, hosts);
  add_layout("symmetric", Held::kLayer, symmetric);
  all.back().bytes *= hosts;
  all.push_back({"counters of this rank", "", Held::kLayer, LocalCounterLayout(p, ranks).bytes});
  add_layout("saved", Held::kUntilBackward, SavedLayout(p, rows, step.received));
  add_layout("rows of forward", Held::kForward, RowLayout(p, rows, Pass::kForward));
  add_layout("rows of backward", Held::kBackward, RowLayout(p, rows, Pass::kBackward));
#ifdef UNIEP_HAS_CUDA
  all.push_back({"cuda: exchange of routing and errors", "", Held::kLayer,
                 cuda::LayerSymmetricLayout(p, ranks).bytes - SymmetricLayout(p, ranks).bytes});
  all.push_back(
      {"cuda: scratch of plans and passes", "", Held::kLayer,
       cuda::PlanScratchLayout(p, ranks).bytes + cuda::PassScratchLayout(p, ranks).bytes});
  all.push_back({"cuda: plans, this step's and the last", "", Held::kUntilBackward,
                 cuda::DevicePlanLayout(p, ranks).bytes, 2});
  all.push_back({"cuda: order of a pass", "", Held::kAnyPass, cuda::most_order_bytes(p, ranks)});
#endif
  return all;
}

std::int64_t total(const std::vector<Use>& all) {
  std::int64_t bytes = 0;
  for (const Use& use : all) bytes += use.all_bytes();
  return bytes;
}

std::string size_text(std::int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

Table table_of(const std::vector<Use>& all) {
  Table table({kLeft, kLeft, kRight, kRight});
  table.header({"what", "held for", "bytes", ""});
  for (const Use& use : all) {
    const std::int64_t bytes = use.all_bytes();
    table.row({use.text(), duration(use.held), cat(bytes), size_text(bytes)});
  }
  table.row({"total", "", cat(total(all)), size_text(total(all))});
  return table;
}

/// "saved 1.48 GB, rows of forward ...": of what has rows, and the sum of everything.
std::string balanced_text(const Problem& p, int ranks) {
  const StepRows step = balanced_rows(p, ranks);
  const std::vector<Use> all = uses(p, ranks, step);
  std::string text;
  for (const Use& use : all) {
    if (!use.has_rows()) continue;
    text += cat(use.name, ' ', size_text(use.all_bytes()), ", ");
  }
  return cat("what ", step.rows, " rows of a balanced routing take, as with exact_rows: ", text,
             "total ", size_text(total(all)));
}

/// "a row pool has pages of ...": and how many of them a balanced routing takes.
std::string pool_text(const Problem& p, int ranks) {
  const PageShape shape = page_shape(p);
  const StepRows step = balanced_rows(p, ranks);
  const std::int64_t pages = shape.pages_of(step.rows, step.received);
  return cat("in a row pool: pages of ", page_bytes(p), " bytes, each of ", p.row_align, " rows",
             shape.tokens == 0 ? ""
                               : cat(shape.tokens_apart ? " or " : " and ", shape.tokens,
                                     shape.tokens == 1 ? " token" : " tokens"),
             "; a balanced routing takes ", pages, " of them, ", size_text(pages * page_bytes(p)));
}

}  // namespace

void print_memory(std::ostream& out, const workload::ShapeSpec& spec, int ranks,
                  std::int64_t capacity, const KeptFlags& kept) {
  Problem p = problem_of(spec, capacity);
  kept.apply_to(p);
  validate(p, ranks);
  const std::int64_t rows = capacity_rows(p, ranks);
  const std::int64_t balanced = spec.tokens * (spec.topk + spec.shared_experts);
  const std::int64_t most = rows_of_any_routing(p, ranks);
  Notes notes;
  notes.add("shape", workload::to_string(spec));
  notes.add("ranks", cat(ranks));
  notes.add("capacity",
            cat(rows, " rows a rank", rows >= most ? ", enough for any routing" : "",
                "; a balanced routing fills ", balanced, " and some padding, any at most ", most));
  notes.add("kept", cat("save=", name(p.save), ", recompute_h=", p.recompute_h ? "yes" : "no",
                        p.backward_rows == 0
                            ? ""
                            : cat("; backward works in ", p.backward_rows, " rows at a time")));
  notes.add("arithmetic", cat("activation=", name(p.activation), ", probs=", name(p.probs),
                              ", bias=", p.bias ? "yes" : "no", ", combine_groups=",
                              p.combine_groups, ", combine_partials=", name(p.combine_partials),
                              ", shared_experts=", p.shared_experts));
  out << notes << "#\n# memory of one rank, without the caller's tensors\n"
      << table_of(uses(p, ranks, room_for(p, ranks))) << comment(balanced_text(p, ranks))
      << comment(pool_text(p, ranks));
}

std::int64_t layer_memory(const Problem& problem, int ranks, int hosts) {
  return total(uses(problem, ranks, room_for(problem, ranks), hosts));
}

StepRows room_for(const Problem& problem, int ranks, std::int64_t rows) {
  return {.rows = rows, .received = most_received(problem, ranks, rows)};
}

StepRows room_for(const Problem& problem, int ranks) {
  return room_for(problem, ranks, capacity_rows(problem, ranks));
}

RankBytes rank_bytes(const Problem& problem, int ranks, const StepRows& rows, int hosts) {
  RankBytes sum;
  for (const Use& use : uses(problem, ranks, rows, hosts)) {
    switch (use.held) {
      case Held::kLayer:
      case Held::kAnyPass:  // part of the workspace
        sum.shared += use.bytes;
        break;
      case Held::kUntilBackward:
        sum.kept += use.bytes;
        if (!use.has_rows()) sum.plan += use.bytes;
        break;
      case Held::kForward:
      case Held::kBackward:
        sum.pass = std::max(sum.pass, use.bytes);
    }
  }
  return sum;
}

namespace {

/// The share of all tokens that have none of their K experts on a rank: (E - El choose K) of
/// (E choose K).
double share_elsewhere(const Problem& problem, int ranks) {
  const int local = problem.num_experts / ranks;
  double share = 1;
  for (int k = 0; k < problem.topk; ++k) {
    const double left = std::max(problem.num_experts - k, 1);
    share *= std::max(left - local, 0.0) / left;
  }
  return share;
}

}  // namespace

StepRows balanced_rows(const Problem& problem, int ranks) {
  const std::int64_t rows = problem.max_tokens * problem.topk;
  const std::int64_t experts = problem.num_experts / ranks;
  const std::int64_t with_one_more = rows % experts;
  const auto padded = [&](std::int64_t n) { return round_up<std::int64_t>(n, problem.row_align); };
  const auto tokens = static_cast<double>(ranks * problem.max_tokens);
  const double elsewhere = share_elsewhere(problem, ranks);
  // Shared experts have all of the rank's own tokens.
  const double own = problem.shared_experts > 0 ? static_cast<double>(problem.max_tokens) : 0;
  return {.rows = with_one_more * padded(rows / experts + 1) +
                  (experts - with_one_more) * padded(rows / experts) +
                  problem.shared_experts * padded(problem.max_tokens),
          .received = std::llround(tokens * (1 - elsewhere) + own * elsewhere)};
}

std::int64_t weight_parameters(const Problem& problem, int ranks) {
  const Extents extents = extents_of(problem, ranks, 0);
  std::int64_t parameters = 0;
  for (const Tensor weight : {Tensor::kW1, Tensor::kW2, Tensor::kSharedW1, Tensor::kSharedW2}) {
    parameters += elements_of(kLayerGraph[weight], extents);
  }
  return parameters;
}

}  // namespace uniep::tool
