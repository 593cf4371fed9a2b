#include "api/c_calls.h"

#include <initializer_list>

namespace uniep::c_api {

using uniep::cat;

namespace {

constexpr bool is(int number, Overflow overflow) { return number == static_cast<int>(overflow); }
static_assert(is(UNIEP_OVERFLOW_NONE, Overflow::kNone) &&
              is(UNIEP_OVERFLOW_ROWS, Overflow::kRows) &&
              is(UNIEP_OVERFLOW_IMPOSSIBLE, Overflow::kImpossible) &&
              is(UNIEP_OVERFLOW_PAGES, Overflow::kPages) &&
              is(UNIEP_OVERFLOW_EXPERT_ROWS, Overflow::kExpertRows));

/// What forward writes besides the plan.
uniep::StepMemory forward_memory(const uniep_layer& l, const uniep::MemoryNeeds& needs,
                                 const uniep_row_memory& memory) {
  uniep::StepMemory m =
      l.saved_memory(needs.rows, needs.rows_of_x, memory.x_rows, memory.h, memory.row_probs);
  m.forward_memory = scratch(memory.forward_memory, needs.forward_memory);
  return m;
}

/// Whether what forward saves is in a handle, as it must be where the layer has a row pool;
/// `memory` are the fields that have it elsewhere.
bool is_pooled(const uniep_layer& l, const void* saved, std::initializer_list<const void*> memory) {
  if (!l.has_pool) {
    require(saved == nullptr, ErrorCode::kInvalidArgument,
            "saved is given, and the layer has no row pool; NULL is accepted");
    return false;
  }
  require_given(saved, "saved");
  for (const void* given : memory) {
    require(
        given == nullptr, ErrorCode::kInvalidArgument,
        "plan, x_rows, h, row_probs or allocate is given, and the layer has a row pool; NULL is "
        "accepted");
  }
  return true;
}

/// Elements of shared_probs or their gradients at `data`: none, if these are not given.
std::int64_t shared_probs(const uniep::Problem& p, const void* data, std::int64_t tokens) {
  return data == nullptr ? 0 : tokens * p.shared_experts;
}

/// The tensors of a weight of `count` elements, or of its gradient, as the caller gave them.
template <class Pointer>
struct Given {
  const char* name;
  std::int64_t count;
  Pointer* one;
  Pointer* up = nullptr;
  Pointer* const* each = nullptr;
  std::int32_t interleaved = 0;
  std::int32_t in_out = 0;
};

/// The matrices that are given, taken as [out, in].
template <class T, class Pointer>
uniep::ExpertMatrices<T> out_in_matrices(const Given<Pointer>& given, std::int64_t experts,
                                         TensorList<T>& list) {
  using Matrices = uniep::ExpertMatrices<T>;
  const char* name = given.name;
  const bool interleaved = truth(given.interleaved, cat("interleaved of ", name).c_str());
  const int ways =
      (interleaved ? 1 : 0) + (given.up != nullptr ? 1 : 0) + (given.each != nullptr ? 1 : 0);
  require(ways <= 1, ErrorCode::kInvalidArgument, name, " is given in ", ways,
          " ways; one of interleaved, a tensor of up, and a tensor for each expert is accepted");
  if (interleaved) return Matrices::interleaved(elements<T>(given.one, given.count, name));
  if (given.up != nullptr) {
    const std::int64_t half = given.count / 2;
    return Matrices::gate_and_up(elements<T>(given.one, half, name),
                                 elements<T>(given.up, half, name));
  }
  if (given.each == nullptr) return elements<T>(given.one, given.count, name);
  require(given.one == nullptr, ErrorCode::kInvalidArgument, name,
          " is given beside a tensor for each expert; NULL is accepted");
  for (std::int64_t e = 0; e < experts; ++e) {
    list.push_back(
        elements<T>(given.each[e], given.count / experts, cat(name, "_each[", e, "]").c_str()));
  }
  return Matrices::one_each(list);
}

template <class T, class Pointer>
uniep::ExpertMatrices<T> matrices(const Given<Pointer>& given, std::int64_t experts,
                                  TensorList<T>& list) {
  const bool in_out = truth(given.in_out, cat("in_out of ", given.name).c_str());
  const uniep::ExpertMatrices<T> found = out_in_matrices(given, experts, list);
  return in_out ? found.in_out() : found;
}

/// Call: uniep_forward_call or uniep_backward_call.
template <class Call>
auto matrices_of_w1(const uniep_layer& l, const Call* call, TensorList<const bf16>& list) {
  const Given<const void> given{.name = "w1",
                                .count = l.sizes().w1,
                                .one = call->w1,
                                .up = call->w3,
                                .each = call->w1_each,
                                .interleaved = call->interleaved,
                                .in_out = call->in_out};
  return matrices<const bf16>(given, l.local_experts, list);
}
template <class Call>
auto matrices_of_w2(const uniep_layer& l, const Call* call, TensorList<const bf16>& list) {
  const Given<const void> given{.name = "w2",
                                .count = l.sizes().w2,
                                .one = call->w2,
                                .each = call->w2_each,
                                .in_out = call->in_out};
  return matrices<const bf16>(given, l.local_experts, list);
}

uniep::WaveEvents events_of(const uniep_wave_events& waves) {
  const auto list = [&](void* const* events, const char* name) {
    const bool is_left_out =
        events == nullptr && (waves.before != nullptr || waves.after != nullptr);
    if (is_left_out) return std::vector<void*>();
    const auto given = elements<void* const>(events, waves.count, name);
    return std::vector<void*>(given.begin(), given.end());
  };
  require(waves.count >= 0, ErrorCode::kInvalidArgument, "waves.count is ", waves.count,
          "; 0 or more is accepted");
  return {.before = list(waves.before, "waves.before"), .after = list(waves.after, "waves.after")};
}

}  // namespace

Forward forward_of(uniep_layer& l, const uniep_forward_call* call) {
  require_given(call, "call");
  const std::int64_t t = l.tokens(call->tokens);
  const uniep::Problem& p = l.problem();
  const uniep::WeightSizes n = l.sizes();
  const bool shared = p.shared_experts > 0;
  Forward f;
  f.topk_ids = elements<const std::int32_t>(call->topk_ids, t * p.topk, "topk_ids");
  f.args = {
      .x = elements<const bf16>(call->x, t * p.hidden, "x"),
      .topk_probs = elements<const float>(call->topk_probs, t * p.topk, "topk_probs"),
      .w1 = matrices_of_w1(l, call, f.w1),
      .w2 = matrices_of_w2(l, call, f.w2),
      .out = elements<bf16>(call->out, t * result_rows(p) * p.hidden, "out"),
      .b1 = of_bias<const bf16>(p.bias, call->b1, n.b1, "b1"),
      .b2 = of_bias<const bf16>(p.bias, call->b2, n.b2, "b2"),
      .shared_w1 = of_shared<const bf16>(shared, call->shared_w1, n.shared_w1, "shared_w1"),
      .shared_w2 = of_shared<const bf16>(shared, call->shared_w2, n.shared_w2, "shared_w2"),
      .shared_probs = of_shared<const float>(
          shared, call->shared_probs, shared_probs(p, call->shared_probs, t), "shared_probs")};
  f.options = l.options(call->schedule, call->stream);
  f.plan_options = f.options;
  f.options.waves = events_of(call->waves);
  f.plan_options.overflow = call->overflow;
  const uniep_row_memory& m = call->memory;
  const auto* allocate = reinterpret_cast<const void*>(call->allocate);
  if (is_pooled(l, call->saved, {call->plan, m.x_rows, m.h, m.row_probs, allocate})) {
    f.options.memory.forward_memory = scratch(m.forward_memory, l.needs.forward_memory);
    return f;
  }
  f.plan_options.memory.plan = read_only<std::byte>(call->plan, l.needs.plan, "plan");
  if (call->allocate == nullptr) f.options.memory = forward_memory(l, l.needs, m);
  f.options.memory.plan = f.plan_options.memory.plan;
  return f;
}

uniep::RoutingPlan plan_of(uniep_layer& l, const uniep_forward_call* call, Forward& f) {
  uniep::RoutingPlan plan = l.layer.plan(f.topk_ids, f.plan_options);
  if (call->allocate == nullptr) return plan;
  // Throws what is wrong with the routing, as a pass would: on all ranks, and once.
  if (call->overflow == nullptr) l.layer.synchronize();
  f.options.memory = prepared(l, call, true, [&] {
    uniep::MemoryNeeds needs = l.needs_of(std::min(plan.padded_rows(), l.needs.rows));
    if (l.problem().save == uniep::Save::kTokens) {
      needs.rows_of_x = std::max<std::int64_t>(plan.received_tokens(), 1);
    }
    const uniep_memory_needs wanted = c_needs(needs);
    uniep_row_memory memory{};
    const int code = call->allocate(call->allocate_context, &wanted, &memory);
    require(code == 0, ErrorCode::kInvalidArgument, "allocate returned ", code, " for ", needs.rows,
            " rows; 0 means that it worked");
    uniep::StepMemory step = forward_memory(l, needs, memory);
    step.plan = f.plan_options.memory.plan;
    return step;
  });
  return plan;
}

namespace {

uniep::WeightGrad weight_grad(std::int32_t kind, const Given<void>& given, std::int64_t experts,
                              TensorList<bf16>& list, TensorList<float>& fp32_list) {
  switch (kind) {
    case 0:
      return matrices<bf16>(given, experts, list);
    case 1:
      return matrices<float>(given, experts, fp32_list);
    case 2:
      return uniep::Bf16MainGrad{matrices<bf16>(given, experts, list)};
    default:
      throw Error(ErrorCode::kInvalidArgument,
                  uniep::cat("weight_grad is ", kind,
                             "; 0 (bf16, overwritten), 1 (fp32, added to) "
                             "and 2 (bf16, added to) are accepted"));
  }
}

}  // namespace

Part part_of(const uniep_backward_call* call) {
  require_given(call, "call");
  require(call->part >= 0 && call->part <= 2, ErrorCode::kInvalidArgument, "part is ", call->part,
          "; 0 (whole), 1 (data) and 2 (weights) are accepted");
  return static_cast<Part>(call->part);
}

namespace {

/// What forward saved, where it is the caller's memory; sets what the pass works in.
uniep::StepMemory restored_memory(const uniep_layer& l, const uniep_backward_call* call,
                                  Backward& b) {
  const uniep::MemoryNeeds needs = l.needs_of_call(call->rows);
  uniep::StepMemory memory =
      l.saved_memory(needs.rows, needs.rows_of_x, call->x_rows, call->h, call->row_probs);
  memory.plan = read_only<std::byte>(call->plan, needs.plan, "plan");
  const auto rows =
      b.part == Part::kWhole
          ? scratch(call->backward_memory, needs.backward_memory)
          : elements<std::byte>(call->backward_memory, needs.backward_memory, "backward_memory");
  (b.part == Part::kWeights ? memory : b.options.memory).backward_memory = rows;
  b.options.memory.plan = memory.plan;
  return memory;
}

/// What forward saved, where it is in pages of a row pool; sets what the pass works in.
void set_pooled(const uniep_layer& l, const uniep_backward_call* call, Backward& b) {
  require(call->rows == 0, ErrorCode::kInvalidArgument, "rows is ", call->rows,
          ", and the layer has a row pool; 0 is accepted");
  b.pooled = &call->saved->saved;
  b.options.keep_pages = truth(call->keep_pages, "keep_pages");
  b.options.memory.backward_memory = scratch(call->backward_memory, l.needs.backward_memory);
}

/// Sets the arguments of the first part of a pass.
void set_data(const uniep_layer& l, const uniep_backward_call* call, std::int64_t t, Backward& b) {
  const uniep::Problem& p = l.problem();
  const uniep::WeightSizes n = l.sizes();
  const bool shared = p.shared_experts > 0;
  b.data = {
      .dy = elements<const bf16>(call->dy, t * p.hidden, "dy"),
      .w1 = matrices_of_w1(l, call, b.w1),
      .w2 = matrices_of_w2(l, call, b.w2),
      .dx = elements<bf16>(call->dx, t * result_rows(p) * p.hidden, "dx"),
      .dprobs = elements<float>(call->dprobs, t * p.topk, "dprobs"),
      .b1 = of_bias<const bf16>(p.bias, call->b1, n.b1, "b1"),
      .b2 = of_bias<const bf16>(p.bias, call->b2, n.b2, "b2"),
      .shared_w1 = of_shared<const bf16>(shared, call->shared_w1, n.shared_w1, "shared_w1"),
      .shared_w2 = of_shared<const bf16>(shared, call->shared_w2, n.shared_w2, "shared_w2"),
      .dshared_probs = of_shared<float>(shared, call->dshared_probs,
                                        shared_probs(p, call->dshared_probs, t), "dshared_probs")};
  if (p.save == uniep::Save::kNone || shared) {
    b.data.x = elements<const bf16>(call->x, t * p.hidden, "x");
  }
}

/// Sets the arguments of its second part.
void set_weights(const uniep_layer& l, const uniep_backward_call* call, std::int64_t t,
                 Backward& b) {
  const uniep::Problem& p = l.problem();
  const uniep::WeightSizes n = l.sizes();
  const bool shared = p.shared_experts > 0;
  require_no_bias(p.bias, call->db1, "db1");
  require_no_bias(p.bias, call->db2, "db2");
  const Given<void> dw1{.name = "dw1",
                        .count = n.w1,
                        .one = call->dw1,
                        .up = call->dw3,
                        .each = call->dw1_each,
                        .interleaved = call->dw_interleaved,
                        .in_out = call->dw_in_out};
  const Given<void> dw2{.name = "dw2",
                        .count = n.w2,
                        .one = call->dw2,
                        .each = call->dw2_each,
                        .in_out = call->dw_in_out};
  (void)of_shared<bf16>(shared, call->dshared_w1, 0, "dshared_w1");
  (void)of_shared<bf16>(shared, call->dshared_w2, 0, "dshared_w2");
  const auto grad = [&](const Given<void>& given, TensorList<bf16>& list,
                        TensorList<float>& fp32_list) {
    return weight_grad(call->weight_grad, given, l.local_experts, list, fp32_list);
  };
  b.weights = {
      .dw1 = grad(dw1, b.dw1, b.fp32_dw1),
      .dw2 = grad(dw2, b.dw2, b.fp32_dw2),
      .db1 = grad({"db1", n.b1, call->db1}, b.dw1, b.fp32_dw1),
      .db2 = grad({"db2", n.b2, call->db2}, b.dw2, b.fp32_dw2),
      .dshared_w1 = grad({"dshared_w1", n.shared_w1, call->dshared_w1}, b.dw1, b.fp32_dw1),
      .dshared_w2 = grad({"dshared_w2", n.shared_w2, call->dshared_w2}, b.dw2, b.fp32_dw2)};
  if (shared) {
    b.weights.dy = elements<const bf16>(call->dy, t * p.hidden, "dy");
    b.weights.x = elements<const bf16>(call->x, t * p.hidden, "x");
  }
}

}  // namespace

Backward backward_of(uniep_layer& l, const uniep_backward_call* call) {
  const std::int64_t t = l.tokens(call->tokens);
  Backward b;
  b.part = part_of(call);
  b.options = l.options(call->schedule, call->stream);
  b.options.waves = events_of(call->waves);
  const bool pooled =
      is_pooled(l, call->saved, {call->plan, call->x_rows, call->h, call->row_probs});
  uniep::StepMemory memory;
  if (pooled) {
    set_pooled(l, call, b);
  } else {
    memory = restored_memory(l, call, b);
  }
  if (b.part != Part::kWeights) set_data(l, call, t, b);
  if (b.part != Part::kData) set_weights(l, call, t, b);
  const bool flagged = truth(call->ignore_overflow, "ignore_overflow");
  if (!pooled) b.restored = l.layer.restore(memory, t, flagged);
  return b;
}

uniep::BackwardArgs whole(const Backward& b) {
  return {.dy = b.data.dy,
          .w1 = b.data.w1,
          .w2 = b.data.w2,
          .dx = b.data.dx,
          .dprobs = b.data.dprobs,
          .dw1 = b.weights.dw1,
          .dw2 = b.weights.dw2,
          .x = b.data.x,
          .b1 = b.data.b1,
          .b2 = b.data.b2,
          .db1 = b.weights.db1,
          .db2 = b.weights.db2,
          .shared_w1 = b.data.shared_w1,
          .shared_w2 = b.data.shared_w2,
          .dshared_probs = b.data.dshared_probs,
          .dshared_w1 = b.weights.dshared_w1,
          .dshared_w2 = b.weights.dshared_w2};
}

}  // namespace uniep::c_api

using namespace uniep::c_api;

int uniep_forward(uniep_layer* layer, const uniep_forward_call* call) {
  return guarded_of(layer, "layer", [&] {
    const GroupTurn turn(*layer);
    Forward f = prepared(*layer, call, true, [&] { return forward_of(*layer, call); });
    const uniep::RoutingPlan plan = plan_of(*layer, call, f);
    uniep::Saved saved = layer->layer.forward(plan, f.args, f.options);
    if (call->saved != nullptr) *call->saved = new uniep_saved{std::move(saved)};
  });
}

void uniep_saved_destroy(uniep_saved* saved) { delete saved; }

int uniep_backward(uniep_layer* layer, const uniep_backward_call* call) {
  return guarded_of(layer, "layer", [&] {
    const bool collective = call == nullptr || call->part != 2;
    const GroupTurn turn(*layer, collective);
    Backward b = prepared(*layer, call, collective, [&] {
      require_given(call, "call");
      return backward_of(*layer, call);
    });
    switch (b.part) {
      case Part::kWhole:
        layer->layer.backward(b.saved(), whole(b), b.options);
        break;
      case Part::kData:
        layer->layer.backward_data(b.saved(), b.data, b.options);
        break;
      case Part::kWeights:
        layer->layer.backward_weights(b.saved(), b.weights, b.options);
        break;
    }
  });
}
