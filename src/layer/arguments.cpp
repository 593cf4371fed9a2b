#include "layer/arguments.h"

#include "base/check.h"
#include "layer/saved_data.h"

namespace uniep {
namespace {

/// `shape` is how the argument's shape is written, for the sentence.
void check_size(const char* name, std::size_t elements, std::int64_t expected, const char* shape) {
  require(static_cast<std::int64_t>(elements) == expected, ErrorCode::kInvalidArgument, name,
          " has ", elements, " elements; ", shape, " needs ", expected);
}

void check_weight_grad(const char* name, const WeightGrad& grad, std::int64_t expected,
                       const char* shape) {
  std::visit([&](const auto& span) { check_size(name, span.size(), expected, shape); }, grad);
}

void check_plan(const Problem& problem, const Communicator& communicator, const RoutingPlan& plan) {
  require(plan.problem() == problem, ErrorCode::kInvalidArgument, "plan was made for ",
          to_string(plan.problem()), "; a plan for ", to_string(problem), " is accepted");
  require(plan.rank() == communicator.rank() && plan.num_ranks() == communicator.size(),
          ErrorCode::kInvalidArgument, "plan is that of rank ", plan.rank(), " of ",
          plan.num_ranks(), "; the plan of rank ", communicator.rank(), " of ", communicator.size(),
          " is accepted");
}

struct Sizes {
  std::int64_t tokens_hidden, tokens_topk, w1, w2;
};

Sizes sizes(const Problem& p, const RoutingPlan& plan) {
  const std::int64_t experts = plan.num_local_experts();
  return {plan.tokens() * p.hidden, plan.tokens() * p.topk, experts * 2 * p.intermediate * p.hidden,
          experts * p.hidden * p.intermediate};
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
  check_size("x", args.x.size(), n.tokens_hidden, "[T, H]");
  check_size("topk_probs", args.topk_probs.size(), n.tokens_topk, "[T, K]");
  check_size("w1", args.w1.size(), n.w1, "[E / ranks, 2I, H]");
  check_size("w2", args.w2.size(), n.w2, "[E / ranks, H, I]");
  check_size("out", args.out.size(), n.tokens_hidden, "[T, H]");
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
  check_size("dy", args.dy.size(), n.tokens_hidden, "[T, H]");
  check_size("w1", args.w1.size(), n.w1, "[E / ranks, 2I, H]");
  check_size("w2", args.w2.size(), n.w2, "[E / ranks, H, I]");
  check_size("dx", args.dx.size(), n.tokens_hidden, "[T, H]");
  check_size("dprobs", args.dprobs.size(), n.tokens_topk, "[T, K]");
}

void check_sizes(const Sizes& n, const BackwardWeightsArgs& args) {
  check_weight_grad("dw1", args.dw1, n.w1, "[E / ranks, 2I, H]");
  check_weight_grad("dw2", args.dw2, n.w2, "[E / ranks, H, I]");
}

}  // namespace

void check_backward_data(const Problem& problem, const Communicator& communicator,
                         const Saved& saved, const BackwardDataArgs& args,
                         const Schedule& schedule) {
  check_saved(problem, communicator, saved, schedule);
  check_sizes(sizes(problem, saved.plan()), args);
}

void check_backward_weights(const Problem& problem, const Communicator& communicator,
                            const Saved& saved, const BackwardWeightsArgs& args,
                            const Schedule& schedule) {
  check_saved(problem, communicator, saved, schedule);
  require(saved.data()->backward_rows.has_value(), ErrorCode::kInvalidArgument,
          "saved holds no rows of a backward pass; backward_weights is accepted once after each "
          "backward_data on the same saved");
  check_sizes(sizes(problem, saved.plan()), args);
}

void check_backward(const Problem& problem, const Communicator& communicator, const Saved& saved,
                    const BackwardArgs& args, const Schedule& schedule) {
  check_backward_data(problem, communicator, saved, data_args(args), schedule);
  check_sizes(sizes(problem, saved.plan()), weights_args(args));
}

}  // namespace uniep
