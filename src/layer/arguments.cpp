#include "layer/arguments.h"

#include <algorithm>

#include "base/check.h"
#include "layer/expert_places.h"
#include "layer/memory_of_call.h"
#include "layout/workspace.h"

namespace uniep {
namespace {

/// `shape` is how the argument's shape is written, for the sentence.
template <class T>
void check_tensor(const char* name, std::span<T> tensor, std::int64_t expected, const char* shape) {
  require(std::ssize(tensor) == expected, ErrorCode::kInvalidArgument, name, " has ", tensor.size(),
          " elements; ", shape, " needs ", expected);
  require(tensor.empty() || tensor.data() != nullptr, ErrorCode::kInvalidArgument, name, " has ",
          tensor.size(), " elements at address 0; an address is accepted");
}

/// How the shape of a weight is written, for sentences.
struct Written {
  const char* out_in;
  const char* in_out;
};
constexpr Written kHalfOfW1{"[E / ranks, I, H]", "[E / ranks, H, I]"};
constexpr Written kW2{"[E / ranks, H, I]", "[E / ranks, I, H]"};

/// A weight or its gradient: `shape` is that of one tensor, `parts` are those of an expert.
template <class T>
void check_matrices(const std::string& name, const ExpertMatrices<T>& m, const ExpertShape& shape,
                    const Written& written) {
  const auto of = [&](const Written& w) { return m.is_in_out() ? w.in_out : w.out_in; };
  const std::int64_t all = shape.experts * shape.elements();
  const bool halved = m.form() == ExpertForm::kInterleaved || m.form() == ExpertForm::kGateAndUp;
  require(!halved || shape.parts == 2, ErrorCode::kInvalidArgument, name, " is given as ",
          m.form() == ExpertForm::kInterleaved ? "rows of gate and up by turns"
                                               : "tensors of gate and up",
          ", which it does not have; one tensor is accepted, or one for each expert");
  switch (m.form()) {
    case ExpertForm::kOneTensor:
    case ExpertForm::kInterleaved:
      return check_tensor(name.c_str(), m.tensor(), all, of(written));
    case ExpertForm::kGateAndUp:
      check_tensor((name + "'s gate").c_str(), m.tensor(), all / 2, of(kHalfOfW1));
      return check_tensor((name + "'s up").c_str(), m.up(), all / 2, of(kHalfOfW1));
    case ExpertForm::kOneEach:
      break;
  }
  require(static_cast<std::int64_t>(m.each().size()) == shape.experts, ErrorCode::kInvalidArgument,
          name, " has ", m.each().size(), " tensors; one for each of ", shape.experts,
          " experts of the rank is accepted");
  for (std::size_t e = 0; e < m.each().size(); ++e) {
    check_tensor(cat(name, "[", e, "]").c_str(), m.each()[e], shape.elements(),
                 "the matrix of an expert");
  }
}

void check_weight_grad(const char* name, const WeightGrad& grad, const ExpertShape& shape,
                       const Written& written) {
  with_matrices(grad, [&](const auto& m) { check_matrices(name, m, shape, written); });
}

/// Checks a gradient of biases or of shared experts, which is one tensor.
void check_one_tensor(const char* name, const WeightGrad& grad, std::int64_t expected,
                      const char* shape) {
  with_matrices(grad, [&](const auto& m) {
    require(m.form() == ExpertForm::kOneTensor && !m.is_in_out(), ErrorCode::kInvalidArgument, name,
            " is given as several tensors, by turns, or as [in, out]; one tensor ", shape,
            " is accepted");
    check_tensor(name, m.tensor(), expected, shape);
  });
}

void check_plan(const Problem& problem, const Communicator& communicator, const RoutingPlan& plan) {
  require(plan.problem() == problem, ErrorCode::kInvalidArgument, "plan was made for ",
          to_string(plan.problem()), "; a plan for ", to_string(problem), " is accepted");
  require(plan.rank() == communicator.rank() && plan.num_ranks() == communicator.size(),
          ErrorCode::kInvalidArgument, "plan is that of rank ", plan.rank(), " of ",
          plan.num_ranks(), "; the plan of rank ", communicator.rank(), " of ", communicator.size(),
          " is accepted");
  const RankLayout of_plan = plan.data().layout, own = communicator.layout();
  require(of_plan == own, ErrorCode::kInvalidArgument, "plan was made for ranks on ", of_plan.hosts,
          " hosts; a plan for ", own.hosts, ", as the group's are, is accepted");
}

struct Sizes {
  std::int64_t tokens_hidden, tokens_topk, results;  // `results`: of out, and of dx
  ExpertShape w1, w2;
  std::int64_t b1, b2;  // 0: experts have no biases
  std::int64_t shared_w1, shared_w2, tokens_shared;
  // As shapes are written.
  Written w1_shape;
  const char* b1_shape;
  const char* b2_shape;
  const char* results_shape;
};

Sizes sizes(const Problem& p, const RoutingPlan& plan) {
  const std::int64_t experts = p.num_experts / plan.num_ranks();
  const std::int64_t shared_w1_rows = p.shared_experts * halves(p) * p.intermediate;
  const std::int64_t w1_rows = experts * halves(p) * p.intermediate;
  const bool gated = is_gated(p.activation);
  return {.tokens_hidden = plan.tokens() * p.hidden,
          .tokens_topk = plan.tokens() * p.topk,
          .results = plan.tokens() * result_rows(p) * p.hidden,
          .w1 = shape_of_w1(p, experts, halves(p)),
          .w2 = shape_of_w2(p, experts),
          .b1 = p.bias ? w1_rows : 0,
          .b2 = p.bias ? experts * p.hidden : 0,
          .shared_w1 = shared_w1_rows * p.hidden,
          .shared_w2 = p.shared_experts * p.hidden * p.intermediate,
          .tokens_shared = plan.tokens() * p.shared_experts,
          .w1_shape = gated ? Written{"[E / ranks, 2I, H]", "[E / ranks, H, 2I]"}
                            : Written{"[E / ranks, I, H], without a gate,",
                                      "[E / ranks, H, I], without a gate,"},
          .b1_shape = !p.bias ? "a layer without biases"
                      : gated ? "[E / ranks, 2I]"
                              : "[E / ranks, I], without a gate,",
          .b2_shape = !p.bias ? "a layer without biases" : "[E / ranks, H]",
          .results_shape = p.slot_rows ? "[T, K, H], with slot_rows," : "[T, H]"};
}

/// Checks tensors of shared experts, in forward and in backward; `probs`: shared_probs, or their
/// gradients.
template <class Args, class T>
void check_shared(const Sizes& n, const Args& args, const char* name, std::span<T> probs) {
  check_tensor("shared_w1", args.shared_w1, n.shared_w1, "[S, 2I, H] of the shared experts");
  check_tensor("shared_w2", args.shared_w2, n.shared_w2, "[S, H, I] of the shared experts");
  if (!probs.empty()) check_tensor(name, probs, n.tokens_shared, "[T, S] of the shared experts");
}

template <class Args>
void note_weights(const Args& args, MemoryOfCall& memory) {
  memory.reads("w1", args.w1);
  memory.reads("w2", args.w2);
  memory.reads("b1", args.b1);
  memory.reads("b2", args.b2);
  memory.reads("shared_w1", args.shared_w1);
  memory.reads("shared_w2", args.shared_w2);
}

void note(const Problem& problem, const ForwardArgs& args, MemoryOfCall& memory) {
  // Some are read where the caller has them, until after the first results.
  if (problem.shared_experts > 0) {
    memory.reads("x", args.x);
  } else {
    memory.enters("x", args.x);
  }
  if (problem.probs == Probs::kAfter) {
    memory.reads("topk_probs", args.topk_probs);
    memory.reads("shared_probs", args.shared_probs);
  } else {
    memory.enters("topk_probs", args.topk_probs);
    memory.enters("shared_probs", args.shared_probs);
  }
  note_weights(args, memory);
  memory.writes("out", args.out);
}

void note(const BackwardDataArgs& args, MemoryOfCall& memory) {
  note_weights(args, memory);
  memory.writes("dx", args.dx);
  memory.writes("dprobs", args.dprobs);
  memory.writes("dshared_probs", args.dshared_probs);
}

void note(const BackwardWeightsArgs& args, MemoryOfCall& memory) {
  memory.writes("dw1", args.dw1);
  memory.writes("dw2", args.dw2);
  memory.writes("db1", args.db1);
  memory.writes("db2", args.db2);
  memory.writes("dshared_w1", args.dshared_w1);
  memory.writes("dshared_w2", args.dshared_w2);
}

}  // namespace

void check_topk_ids(const Problem& problem, std::span<const std::int32_t> topk_ids) {
  const auto n = static_cast<std::int64_t>(topk_ids.size());
  require(n % problem.topk == 0, ErrorCode::kInvalidArgument, "topk_ids has ", n,
          " elements; a multiple of topk=", problem.topk, " is accepted");
  require(n / problem.topk <= problem.max_tokens, ErrorCode::kInvalidArgument, "topk_ids holds ",
          n / problem.topk, " tokens; at most max_tokens=", problem.max_tokens, " is accepted");
}

void check_forward(const Problem& problem, const Communicator& communicator,
                   const RoutingPlan& plan, const ForwardArgs& args, const Schedule& schedule) {
  check_plan(problem, communicator, plan);
  validate(schedule, problem);
  const Sizes n = sizes(problem, plan);
  check_tensor("x", args.x, n.tokens_hidden, "[T, H]");
  check_tensor("topk_probs", args.topk_probs, n.tokens_topk, "[T, K]");
  check_matrices("w1", args.w1, n.w1, n.w1_shape);
  check_matrices("w2", args.w2, n.w2, kW2);
  check_tensor("b1", args.b1, n.b1, n.b1_shape);
  check_tensor("b2", args.b2, n.b2, n.b2_shape);
  require(problem.shared_gate || args.shared_probs.empty(), ErrorCode::kInvalidArgument,
          "shared_probs has ", args.shared_probs.size(),
          " elements, and problem.shared_gate is false; 0 elements are accepted");
  check_shared(n, args, "shared_probs", args.shared_probs);
  check_tensor("out", args.out, n.results, n.results_shape);
}

namespace {

void check_saved(const Problem& problem, const Communicator& communicator, const Saved& saved,
                 const Schedule& schedule) {
  require(saved.data() != nullptr, ErrorCode::kInvalidArgument,
          "saved is empty; what forward returned is accepted");
  check_plan(problem, communicator, saved.plan());
  validate(schedule, problem);
}

void check_sizes(const Sizes& n, const BackwardDataArgs& args) {
  check_tensor("dy", args.dy, n.tokens_hidden, "[T, H]");
  check_matrices("w1", args.w1, n.w1, n.w1_shape);
  check_matrices("w2", args.w2, n.w2, kW2);
  check_tensor("b1", args.b1, n.b1, n.b1_shape);
  check_tensor("b2", args.b2, n.b2, n.b2_shape);
  check_tensor("dx", args.dx, n.results, n.results_shape);
  check_tensor("dprobs", args.dprobs, n.tokens_topk, "[T, K]");
  check_shared(n, args, "dshared_probs", args.dshared_probs);
}

void check_kinds(const BackwardWeightsArgs& args) {
  const std::size_t kind = args.dw1.index();
  require(args.dw2.index() == kind && args.dshared_w1.index() == kind &&
              args.dshared_w2.index() == kind,
          ErrorCode::kInvalidArgument,
          "dw2, dshared_w1 or dshared_w2 is of another kind than dw1; with shared experts the same "
          "kind (overwritten in bf16, or added to in fp32 or in bf16) is accepted");
}

void check_sizes(const Sizes& n, const BackwardWeightsArgs& args) {
  if (n.shared_w1 > 0) check_kinds(args);
  check_weight_grad("dw1", args.dw1, n.w1, n.w1_shape);
  check_weight_grad("dw2", args.dw2, n.w2, kW2);
  check_one_tensor("db1", args.db1, n.b1, n.b1_shape);
  check_one_tensor("db2", args.db2, n.b2, n.b2_shape);
  check_one_tensor("dshared_w1", args.dshared_w1, n.shared_w1, "[S, 2I, H] of the shared experts");
  check_one_tensor("dshared_w2", args.dshared_w2, n.shared_w2, "[S, H, I] of the shared experts");
  if (n.shared_w1 == 0) return;
  check_tensor("dy", args.dy, n.tokens_hidden, "[T, H], with shared experts,");
  check_tensor("x", args.x, n.tokens_hidden, "[T, H], with shared experts,");
}

}  // namespace

namespace {

/// Weight gradients of shared experts read tokens where they lie, when dx may be written already.
void check_apart(const char* name, std::span<const bf16> tokens, std::span<const bf16> dx) {
  const bool apart =
      tokens.empty() || dx.empty() || are_apart(std::as_bytes(tokens), std::as_bytes(dx));
  require(apart, ErrorCode::kInvalidArgument, "dx shares memory with ", name,
          ", which shared experts read until the end of a backward pass; memory of its own is "
          "accepted");
}

void check_data_args(const Problem& problem, const RoutingPlan& plan,
                     const BackwardDataArgs& args) {
  const Sizes n = sizes(problem, plan);
  check_sizes(n, args);
  if (problem.save == Save::kNone || problem.shared_experts > 0) {
    check_tensor("x", args.x, n.tokens_hidden, "[T, H], with save=none or shared experts,");
  }
  if (problem.shared_experts == 0) return;
  check_apart("dy", args.dy, args.dx);
  check_apart("x", args.x, args.dx);
}

/// Between the parts of a pass all of its rows are kept.
void check_room_for_parts(const Problem& problem) {
  require(problem.backward_rows == 0, ErrorCode::kInvalidArgument,
          "backward_data and backward_weights keep all rows in between, but the layer has "
          "backward_rows=",
          problem.backward_rows, "; backward is accepted, or a layer with backward_rows=0");
}

}  // namespace

void check_backward_data(const Problem& problem, const Communicator& communicator,
                         const Saved& saved, const BackwardDataArgs& args,
                         const Schedule& schedule) {
  check_saved(problem, communicator, saved, schedule);
  check_room_for_parts(problem);
  check_data_args(problem, saved.plan(), args);
}

void check_backward_weights(const Problem& problem, const Communicator& communicator,
                            const Saved& saved, const BackwardWeightsArgs& args,
                            const Schedule& schedule, const StepMemory& memory) {
  check_saved(problem, communicator, saved, schedule);
  check_room_for_parts(problem);
  const bool has_rows =
      saved.data()->backward_memory.has_value() || !memory.backward_memory.empty();
  require(has_rows, ErrorCode::kInvalidArgument,
          "saved holds no rows of a backward pass; backward_weights is accepted once after each "
          "backward_data on the same saved");
  check_sizes(sizes(problem, saved.plan()), args);
}

void check_backward(const Problem& problem, const Communicator& communicator, const Saved& saved,
                    const BackwardArgs& args, const Schedule& schedule) {
  check_saved(problem, communicator, saved, schedule);
  check_data_args(problem, saved.plan(), data_args(args));
  check_sizes(sizes(problem, saved.plan()), weights_args(args));
}

void check_wave_events(const WaveEvents& events, int waves) {
  const auto check = [&](const char* name, const std::vector<void*>& given) {
    require(given.empty() || std::ssize(given) == waves, ErrorCode::kInvalidArgument, "waves.",
            name, " has ", given.size(), " events; ", waves == 0 ? "none" : cat("none, or ", waves),
            " of this pass is accepted");
  };
  check("before", events.before);
  check("after", events.after);
}

namespace {

/// Memory of at least `expected` elements, named for the sentence.
template <class T>
void check_memory(const char* name, std::span<T> memory, std::int64_t expected,
                  std::int64_t alignment) {
  const bool bytes = sizeof(T) == 1;
  require(static_cast<std::int64_t>(memory.size()) >= expected, ErrorCode::kInvalidArgument, name,
          " has ", memory.size(), bytes ? " bytes; " : " elements; ", expected,
          " or more are accepted (Layer::memory_needs)");
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  require(address % static_cast<std::uintptr_t>(alignment) == 0, ErrorCode::kInvalidArgument, name,
          " starts at address ", address, "; a multiple of ", alignment, " is accepted");
}

/// What is needed of memory that may be larger, or empty.
std::span<std::byte> needed_of(std::span<std::byte> memory, std::int64_t bytes) {
  return memory.first(std::min(memory.size(), static_cast<std::size_t>(bytes)));
}

/// Whether these share no byte, of what is needed of each.
bool are_apart_from(const std::byte* a, std::int64_t a_bytes, const std::byte* b,
                    std::int64_t b_bytes) {
  return are_apart({a, static_cast<std::size_t>(a_bytes)}, {b, static_cast<std::size_t>(b_bytes)});
}

void check_workspace_apart(const MemoryNeeds& needs, const LayerMemory& memory) {
  if (memory.workspace.empty()) return;
  const auto is_apart = [&](const std::byte* symmetric) {
    return are_apart_from(memory.workspace.data(), needs.workspace, symmetric, needs.symmetric);
  };
  require(is_apart(memory.symmetric.data()), ErrorCode::kInvalidArgument,
          "memory.workspace shares memory with memory.symmetric; memory of its own is accepted");
  for (std::size_t r = 0; r < memory.peers.size(); ++r) {
    require(is_apart(memory.peers[r]), ErrorCode::kInvalidArgument,
            "memory.workspace shares memory with memory.peers[", r,
            "]; memory of its own is accepted");
  }
}

}  // namespace

void check_layer_memory(const MemoryNeeds& needs, const LayerMemory& memory, int rank,
                        int num_ranks) {
  if (!memory.workspace.empty()) {
    check_memory("memory.workspace", memory.workspace, needs.workspace, needs.alignment);
  }
  if (memory.symmetric.empty()) {
    require(memory.peers.empty() && !memory.release, ErrorCode::kInvalidArgument, "memory.",
            memory.peers.empty() ? "release" : "peers",
            " is given without memory.symmetric; both or neither are accepted");
    return;
  }
  check_memory("memory.symmetric", memory.symmetric, needs.symmetric, needs.alignment);
  const auto peers = static_cast<int>(memory.peers.size());
  require(peers == 0 || peers == num_ranks, ErrorCode::kInvalidArgument, "memory.peers has ", peers,
          " elements; one for each of ", num_ranks, " ranks is accepted, or none");
  for (std::size_t r = 0; r < memory.peers.size(); ++r) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.peers[r]);
    require(address != 0 && address % static_cast<std::uintptr_t>(needs.alignment) == 0,
            ErrorCode::kInvalidArgument, "memory.peers[", r, "] is address ", address,
            "; a multiple of ", needs.alignment, " above 0 is accepted");
    const auto end = memory.peers.begin() + static_cast<std::ptrdiff_t>(r);
    const auto shared = std::find_if(memory.peers.begin(), end, [&](const std::byte* peer) {
      return !are_apart_from(peer, needs.symmetric, memory.peers[r], needs.symmetric);
    });
    require(shared == end, ErrorCode::kInvalidArgument, "memory.peers[", r,
            "] shares memory with that of rank ", shared - memory.peers.begin(),
            "; memory of its own for each rank is accepted");
  }
  require(peers == 0 || memory.peers[static_cast<std::size_t>(rank)] == memory.symmetric.data(),
          ErrorCode::kInvalidArgument, "memory.peers[", rank,
          "] is not memory.symmetric, which is accepted there as this rank's");
  check_workspace_apart(needs, memory);
}

void check_plan_memory(const MemoryNeeds& needs, const StepMemory& memory,
                       std::span<const std::int32_t> topk_ids) {
  if (memory.plan.empty()) return;
  check_memory("memory.plan", memory.plan, needs.plan, needs.alignment);
  MemoryOfCall call;
  call.enters("topk_ids", topk_ids);
  call.works_in("memory.plan", needed_of(memory.plan, needs.plan));
  call.require_apart();
}

namespace {

bool has_saved_memory(const StepMemory& memory) {
  return !memory.x_rows.empty() || !memory.h.empty() || !memory.row_probs.empty();
}

/// Rows that there is memory for, as row_probs says; what is beyond the capacity is of no use.
std::int64_t given_rows(const Problem& problem, const MemoryNeeds& needs,
                        const StepMemory& memory) {
  const auto count = static_cast<std::int64_t>(memory.row_probs.size());
  if (count >= needs.rows) return needs.rows;
  require(count % problem.row_align == 0, ErrorCode::kInvalidArgument, "memory.row_probs has ",
          count, " elements; a multiple of row_align=", problem.row_align, " is accepted, or ",
          needs.rows, " or more");
  return count;
}

/// `rows_of_x`: what is kept of x takes at least so many.
void check_rows(const Problem& problem, const MemoryNeeds& needs, const StepMemory& memory,
                std::int64_t rows, std::int64_t rows_of_x) {
  const GraphChoice choice = choice_of(problem);
  if (!choice.drops_received) {
    check_memory("memory.x_rows", memory.x_rows, rows_of_x * problem.hidden, needs.alignment);
  }
  if (!choice.drops_h) {
    check_memory("memory.h", memory.h, rows * halves(problem) * problem.intermediate,
                 needs.alignment);
  }
  check_memory("memory.row_probs", memory.row_probs, rows, needs.alignment);
}

void check_if_given(const char* name, std::span<std::byte> memory, std::int64_t expected,
                    std::int64_t alignment) {
  if (!memory.empty()) check_memory(name, memory, expected, alignment);
}

std::int64_t backward_bytes(const Problem& problem, std::int64_t rows) {
  return RowLayout(problem, rows, Pass::kBackward).bytes;
}

/// The caller's memory of what is saved, with so many rows of what is kept of x.
struct SavedMemory {
  SavedMemory(const SavedData& saved, std::int64_t rows_of_x) {
    if (!saved.of_caller) return;  // uniep's own, of which nothing of a call can be a part
    const Problem& p = saved.plan.problem();
    bf16* const of_x = p.save == Save::kTokens ? saved.tensors.get<Tensor::kReceived>()
                                               : saved.tensors.get<Tensor::kXRows>();
    x_rows = part(of_x, rows_of_x * p.hidden);
    h = part(saved.h(), saved.rows * halves(p) * p.intermediate);
    row_probs = part(saved.tensors.get<Tensor::kRowProbs>(), saved.rows);
  }

  template <class T>
  static std::span<T> part(T* begin, std::int64_t count) {
    return {begin, begin == nullptr ? 0 : static_cast<std::size_t>(count)};
  }

  std::span<bf16> x_rows{}, h{};
  std::span<float> row_probs{};
};

/// Notes the tokens that a backward pass reads; x may be given where it does not.
void note_tokens(const Problem& problem, const BackwardDataArgs& data,
                 const BackwardWeightsArgs& weights, MemoryOfCall& memory) {
  const bool in_place = problem.shared_experts > 0;
  memory.enters("dy", data.dy);
  if (in_place || problem.save == Save::kNone) memory.enters("x", data.x);
  if (!in_place) return;
  memory.enters("dy", weights.dy);
  memory.enters("x", weights.x);
}

/// `rows`: what the pass works in; null: uniep's own.
void require_apart_in_backward(const MemoryNeeds& needs, const SavedData& saved,
                               const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                               const StepMemory& memory, std::byte* rows) {
  const Problem& problem = saved.plan.problem();
  // How many tokens were received, only the plan knows, which may be on its way yet: one, or more.
  const SavedMemory kept(saved, problem.save == Save::kTokens ? 1 : saved.rows);
  MemoryOfCall call;
  call.reads("memory.plan", needed_of(memory.plan, needs.plan));
  call.reads("memory.x_rows", kept.x_rows);
  call.reads("memory.h", kept.h);
  call.reads("memory.row_probs", kept.row_probs);
  note_tokens(problem, data, weights, call);
  note(data, call);
  note(weights, call);
  call.works_in("memory.backward_memory",
                SavedMemory::part(rows, backward_bytes(problem, saved.rows)));
  call.require_apart();
}

}  // namespace

bool is_sized_by_routing(const Problem& problem, const MemoryNeeds& needs,
                         const StepMemory& memory) {
  if (!has_saved_memory(memory)) return false;
  const auto rows = static_cast<std::int64_t>(memory.row_probs.size());
  const auto x = static_cast<std::int64_t>(memory.x_rows.size());
  return rows < needs.rows ||
         (problem.save == Save::kTokens && x < needs.rows_of_x * problem.hidden);
}

std::optional<std::int64_t> check_saved_memory(const RoutingPlan& plan, const MemoryNeeds& needs,
                                               const StepMemory& memory) {
  if (!has_saved_memory(memory)) return std::nullopt;
  const std::int64_t rows = given_rows(plan.problem(), needs, memory);
  if (rows < needs.rows) {
    require(rows >= plan.padded_rows(), ErrorCode::kInvalidArgument, "memory.row_probs has ", rows,
            " elements; this routing brings ", plan.padded_rows(),
            " rows (RoutingPlan::padded_rows), and as many or more are accepted");
  }
  const Problem& problem = plan.problem();
  std::int64_t kept = rows_of_x(problem, plan.num_ranks(), rows);
  const auto given = static_cast<std::int64_t>(memory.x_rows.size());
  if (problem.save == Save::kTokens && given < kept * problem.hidden) {
    kept = plan.received_tokens();
  }
  check_rows(problem, needs, memory, rows, kept);
  return rows;
}

void check_forward_memory(const MemoryNeeds& needs, const SavedData& saved, const ForwardArgs& args,
                          const StepMemory& memory) {
  const Problem& problem = saved.plan.problem();
  const std::int64_t bytes = RowLayout(problem, saved.rows, Pass::kForward).bytes;
  check_if_given("memory.forward_memory", memory.forward_memory, bytes, needs.alignment);
  const auto given = static_cast<std::int64_t>(memory.x_rows.size()) / problem.hidden;
  const std::int64_t most = rows_of_x(problem, saved.plan.num_ranks(), saved.rows);
  const SavedMemory kept(saved, std::min(given, most));
  MemoryOfCall call;
  call.reads("memory.plan", needed_of(memory.plan, needs.plan));
  note(problem, args, call);
  call.works_in("memory.x_rows", kept.x_rows);
  call.works_in("memory.h", kept.h);
  call.works_in("memory.row_probs", kept.row_probs);
  call.works_in("memory.forward_memory", needed_of(memory.forward_memory, bytes));
  call.require_apart();
}

void check_backward_memory(const MemoryNeeds& needs, const SavedData& saved,
                           const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                           const StepMemory& memory) {
  check_if_given("memory.backward_memory", memory.backward_memory,
                 backward_bytes(saved.plan.problem(), saved.rows), needs.alignment);
  require_apart_in_backward(needs, saved, data, weights, memory, memory.backward_memory.data());
}

void check_weights_memory(const MemoryNeeds& needs, const SavedData& saved,
                          const BackwardWeightsArgs& args, const StepMemory& memory) {
  check_if_given("memory.backward_memory", memory.backward_memory,
                 backward_bytes(saved.plan.problem(), saved.rows), needs.alignment);
  require_apart_in_backward(needs, saved, {}, args, memory,
                            saved.rows_of_weights(memory.backward_memory).get());
}

std::int64_t check_restored_memory(const Problem& problem, const MemoryNeeds& needs,
                                   const StepMemory& memory, std::int64_t tokens) {
  require(tokens >= 0 && tokens <= problem.max_tokens, ErrorCode::kInvalidArgument, "tokens is ",
          tokens, "; 0 to max_tokens=", problem.max_tokens, " is accepted");
  check_memory("memory.plan", memory.plan, needs.plan, needs.alignment);
  require(has_saved_memory(memory) || needs.rows == 0, ErrorCode::kInvalidArgument,
          "memory has no x_rows, h and row_probs; what forward was given is accepted");
  const std::int64_t rows = given_rows(problem, needs, memory);
  // Of received tokens there are as many as forward had room for.
  check_rows(problem, needs, memory, rows, problem.save == Save::kRows ? rows : 0);
  check_if_given("memory.backward_memory", memory.backward_memory, backward_bytes(problem, rows),
                 needs.alignment);
  return rows;
}

std::int64_t rows_of_x(const Problem& problem, int num_ranks, std::int64_t rows) {
  switch (problem.save) {
    case Save::kRows:
      return rows;
    case Save::kTokens:
      return most_received(problem, num_ranks, rows);
    case Save::kNone:
      break;
  }
  return 0;
}

std::int64_t checked_rows(const Problem& problem, int num_ranks, std::optional<std::int64_t> rows) {
  const std::int64_t capacity = capacity_rows(problem, num_ranks);
  if (!rows || *rows == capacity) return capacity;
  require(*rows >= 0 && *rows < capacity && *rows % problem.row_align == 0,
          ErrorCode::kInvalidArgument, "rows is ", *rows,
          "; a multiple of row_align=", problem.row_align, " below ", capacity,
          " is accepted, or that capacity");
  return std::min<std::int64_t>(std::max<std::int64_t>(*rows, problem.row_align), capacity);
}

}  // namespace uniep
