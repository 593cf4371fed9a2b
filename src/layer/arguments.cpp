#include "layer/arguments.h"

#include <algorithm>

#include "base/check.h"
#include "layer/expert_places.h"
#include "layer/memory_of_call.h"
#include "layer/weight_sizes.h"
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
  WeightSizes weights;
  std::int64_t tokens_shared;
  // As shapes are written.
  Written w1_shape;
  const char* b1_shape;
  const char* b2_shape;
  const char* results_shape;
};

Sizes sizes(const Problem& p, const RoutingPlan& plan) {
  const std::int64_t experts = p.num_experts / plan.num_ranks();
  const bool gated = is_gated(p.activation);
  return {.tokens_hidden = plan.tokens() * p.hidden,
          .tokens_topk = plan.tokens() * p.topk,
          .results = plan.tokens() * result_rows(p) * p.hidden,
          .w1 = shape_of_w1(p, experts, halves(p)),
          .w2 = shape_of_w2(p, experts),
          .weights = weight_sizes(p, experts),
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
  check_tensor("shared_w1", args.shared_w1, n.weights.shared_w1,
               "[S, 2I, H] of the shared experts");
  check_tensor("shared_w2", args.shared_w2, n.weights.shared_w2, "[S, H, I] of the shared experts");
  if (!probs.empty()) check_tensor(name, probs, n.tokens_shared, "[T, S] of the shared experts");
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
  check_tensor("b1", args.b1, n.weights.b1, n.b1_shape);
  check_tensor("b2", args.b2, n.weights.b2, n.b2_shape);
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
  check_tensor("b1", args.b1, n.weights.b1, n.b1_shape);
  check_tensor("b2", args.b2, n.weights.b2, n.b2_shape);
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
  if (n.weights.shared_w1 > 0) check_kinds(args);
  check_weight_grad("dw1", args.dw1, n.w1, n.w1_shape);
  check_weight_grad("dw2", args.dw2, n.w2, kW2);
  check_one_tensor("db1", args.db1, n.weights.b1, n.b1_shape);
  check_one_tensor("db2", args.db2, n.weights.b2, n.b2_shape);
  check_one_tensor("dshared_w1", args.dshared_w1, n.weights.shared_w1,
                   "[S, 2I, H] of the shared experts");
  check_one_tensor("dshared_w2", args.dshared_w2, n.weights.shared_w2,
                   "[S, H, I] of the shared experts");
  if (n.weights.shared_w1 == 0) return;
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

}  // namespace uniep
