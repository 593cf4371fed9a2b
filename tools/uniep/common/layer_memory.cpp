#include "common/layer_memory.h"

#include <ostream>

#include "base/check.h"
#include "common/table.h"
#include "graph/description.h"
#include "layout/workspace.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/pass_memory.h"
#include "cuda/plan_memory.h"
#endif

namespace uniep::tool {
namespace {

using enum Table::Align;

struct Use {
  std::string what;
  std::string when;  // how long it is held
  std::int64_t bytes;
};

/// "symmetric memory: tokens, probs, ...".
std::string with_tensors(const char* what, const TensorLayout& layout) {
  return cat(what, ": ",
             tensor_names(kLayerGraph, [&](const TensorRow& t) { return layout.holds(t.tensor); }));
}

std::vector<Use> uses(const Problem& p, int ranks) {
  const std::int64_t rows = capacity_rows(p, ranks);
  std::vector<Use> all = {{with_tensors("symmetric", SymmetricLayout(p, ranks)), "layer",
                           SymmetricLayout(p, ranks).bytes},
                          {"counters of this rank", "layer", LocalCounterLayout(p, ranks).bytes},
                          {with_tensors("saved", SavedLayout(p, rows)), "until its backward",
                           SavedLayout(p, rows).bytes}};
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const RowLayout layout(p, rows, pass);
    all.push_back({with_tensors(cat("rows of ", name(pass)).c_str(), layout),
                   pass == Pass::kForward ? "pass" : "until backward_weights", layout.bytes});
  }
#ifdef UNIEP_HAS_CUDA
  all.push_back({"cuda: exchange of the routing", "layer", PlanExchangeLayout(p, ranks).bytes});
  all.push_back(
      {"cuda: scratch of plans and passes", "layer",
       cuda::PlanScratchLayout(p, ranks).bytes + cuda::PassScratchLayout(p, ranks).bytes});
  all.push_back({"cuda: plans, this step's and the last", "until its backward",
                 2 * cuda::DevicePlanLayout(p, ranks).bytes});
  all.push_back({"cuda: order of a pass", "pass", cuda::most_order_bytes(p, ranks)});
#endif
  return all;
}

}  // namespace

void print_memory(std::ostream& out, const workload::ShapeSpec& spec, int ranks,
                  std::int64_t capacity, const KeptFlags& kept) {
  Problem p = problem_of(spec, capacity);
  kept.apply_to(p);
  validate(p, ranks);
  const std::int64_t rows = capacity_rows(p, ranks);
  const std::int64_t balanced = spec.tokens * spec.topk;
  const std::int64_t most = rows_of_any_routing(p, ranks);
  Notes notes;
  notes.add("shape", workload::to_string(spec));
  notes.add("ranks", cat(ranks));
  notes.add("capacity",
            cat(rows, " rows a rank", rows >= most ? ", enough for any routing" : "",
                "; a balanced routing fills ", balanced, " and some padding, any at most ", most));
  notes.add("kept", cat("save=", name(p.save), ", recompute_h=", p.recompute_h ? "yes" : "no"));
  out << notes << "#\n# memory of one rank, without the caller's tensors\n";
  Table table({kLeft, kLeft, kRight, kRight});
  table.header({"what", "held for", "bytes", ""});
  std::int64_t total = 0;
  for (const Use& use : uses(p, ranks)) {
    total += use.bytes;
    table.row({use.what, use.when, cat(use.bytes), bytes_text(static_cast<double>(use.bytes))});
  }
  table.row({"total", "", cat(total), bytes_text(static_cast<double>(total))});
  out << table;
}

std::int64_t layer_memory(const Problem& problem, int ranks) {
  std::int64_t total = 0;
  for (const Use& use : uses(problem, ranks)) total += use.bytes;
  return total;
}

}  // namespace uniep::tool
