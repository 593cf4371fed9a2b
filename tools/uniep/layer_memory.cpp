#include "layer_memory.h"

#include <ostream>

#include "base/check.h"
#include "layout/workspace.h"
#include "table.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/device_plan.h"
#include "cuda/pass_memory.h"
#endif

namespace uniep::tool {
namespace {

using enum Table::Align;

struct Use {
  std::string what;
  std::string when;  // how long it is held
  std::int64_t bytes;
};

std::vector<Use> uses(const Problem& p, int ranks) {
  const std::int64_t rows = capacity_rows(p, ranks);
  std::vector<Use> all = {
      {"symmetric memory: staged tokens, combine slots, counters", "layer",
       SymmetricLayout(p, ranks).bytes},
      {"counters of this rank", "layer", LocalCounterLayout(p, ranks).bytes},
      {"saved by forward: x rows, h, probabilities", "until its backward",
       SavedLayout(p, rows).bytes},
      {"rows of a forward pass: a", "pass", RowLayout(p, rows, Pass::kForward).bytes},
      {"rows of a backward pass: a, dy, dh, dprobs", "pass, or until backward_weights",
       RowLayout(p, rows, Pass::kBackward).bytes}};
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
                  std::int64_t capacity) {
  const Problem p = problem_of(spec, capacity);
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
