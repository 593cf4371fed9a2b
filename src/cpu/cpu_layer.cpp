#include "cpu/cpu_layer.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/error_of.h"
#include "cpu/engine.h"
#include "cpu/layer_heaps.h"
#include "cpu/lone_failure.h"
#include "cpu/plan_message.h"
#include "cpu/row_pool.h"
#include "group/agreement.h"
#include "layer/arguments.h"
#include "layer/fault_values.h"
#include "layer/memory_arguments.h"
#include "layer/options.h"
#include "layer/saved_data.h"
#include "layer/saved_pages.h"
#include "layer/traffic.h"
#include "plan/movable_plan.h"
#include "schedule/pass_order.h"

namespace uniep::cpu {
namespace {

class CpuLayer final : public LayerBackend {
 public:
  CpuLayer(const Problem& problem, Communicator communicator, const LayerOptions& options)
      : problem_(problem),
        communicator_(std::move(communicator)),
        comm_(dynamic_cast<CpuCommunicator&>(*communicator_.impl())),
        timeout_ms_(wait_limit_ms(options)),
        record_timeline_(options.record_timeline),
        pool_(options.row_pool ? options.row_pool->data() : nullptr),
        free_pages_(std::dynamic_pointer_cast<CpuRowPool>(pool_)),
        kernels_(agree_to_build(options)),
        number_(comm_.number_layer()),
        needs_(memory_needs(problem, comm_.size())),
        counters_(problem, comm_.rank(), mapped_heaps(options.memory),
                  options.fault_injection.first_count,
                  own_counters_ ? own_counters_->data() : options.memory.workspace.data(), hosts()),
        engine_(comm_.group(), comm_.rank(), counters_, options) {}

  RoutingPlan plan(std::span<const std::int32_t> topk_ids, const CallOptions& options) override;
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args,
                const CallOptions& options) override;
  Saved restore(const StepMemory& memory, std::int64_t tokens, bool flagged) override;
  void backward(const Saved& saved, const BackwardArgs& args, const CallOptions& options) override;
  void backward_data(Saved& saved, const BackwardDataArgs& args,
                     const CallOptions& options) override;
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                        const CallOptions& options) override;
  [[noreturn]] void refuse_call(const Error& error, const CallOptions& options) override;

  const Problem& problem() const override { return problem_; }
  int limit_ms() const override { return timeout_ms_; }
  const Communicator& communicator() const override { return communicator_; }
  const PassStats& last_pass() const override { return stats_; }
  std::vector<TimelineEvent> take_timeline() override { return std::exchange(timeline_, {}); }
  /// Calls return when they are done; what went wrong in another rank's may be new.
  void synchronize() override { comm_.group().failure().check(); }

 private:
  /// First collective act of a layer: all ranks want the same one, and each can build it.
  const Kernels& agree_to_build(const LayerOptions& options) {
    const Kernels* chosen = nullptr;
    const std::string call =
        cat("layer ", to_string(problem_), options.memory.peers.empty() ? "" : " with memory.peers",
            pool_ ? " with a row pool" : "");
    agree(comm_, timeout_ms_, Stage::kPlan, call, [&] {
      validate(problem_, comm_.size());
      validate(options);
      require(problem_.gathered_hosts == 1 || hosts() == 1, ErrorCode::kUnsupported,
              "problem.gathered_hosts is ", problem_.gathered_hosts, " in a group of ", hosts(),
              " hosts, whose tokens cross in its passes; 1 is accepted there");
      if (pool_) check_pool(*pool_, Backend::kCpu, problem_);
      chosen = &kernels();
      check_layer_memory(memory_needs(problem_, comm_.size()), options.memory, comm_.rank(),
                         comm_.size());
      heaps_.emplace(comm_, problem_, options.memory);
      if (options.memory.workspace.empty()) {
        own_counters_.emplace(memory_needs(problem_, comm_.size()).workspace);
      }
    });
    return *chosen;
  }

  int hosts() const { return comm_.group().layout().hosts; }

  /// Collective, after all have agreed.
  const std::vector<std::shared_ptr<Heap>>& mapped_heaps(const LayerMemory& memory) {
    heaps_->map(memory, number_, timeout_ms_);
    return heaps_->of_ranks();
  }

  RoutingPlan agree_to_plan(std::span<const std::int32_t> topk_ids, const CallOptions& options);
  Saved run_forward(const RoutingPlan& plan, const ForwardArgs& args, const CallOptions& options);
  std::string call_text(const char* pass, const RoutingPlan& plan, const Schedule& schedule) const;
  PassContext context(const PassView& view, const SavedData& saved, std::byte* rows) const;
  /// Whole or of data alone, which is the same to the other ranks: weight gradients are a rank's
  /// own.
  template <class Check>
  void agree_to_backward(const Saved& saved, const Schedule& schedule, const Check& check);
  void run_backward(const SavedData& saved, std::byte* rows, const PassOrder& order,
                    const BackwardDataArgs& data, const BackwardWeightsArgs& weights);
  /// What a pass copies to where peers pull it.
  struct Published {
    std::span<const bf16> tokens{};         // x, or dy
    std::span<const float> probs{};         // forward
    std::span<const float> shared_probs{};  // likewise, or empty
    std::span<const bf16> x_tokens{};       // backward, where it dispatches x again
  };
  static void publish_probs(const PassContext& ctx, const Published& published, float* probs);
  static void keep_shared_probs(const PassContext& ctx, const float* probs);
  void run(const PassContext& ctx, const Published& published);
  std::byte* row_memory(std::span<std::byte> given, const RoutingPlan& plan, Pass pass);
  std::unique_ptr<SavedData> make_saved(const RoutingPlan& plan, const StepMemory& memory) const;

  const Problem problem_;
  Communicator communicator_;
  CpuCommunicator& comm_;
  const int timeout_ms_;
  const bool record_timeline_;
  const std::shared_ptr<RowPoolData> pool_;       // or null
  const std::shared_ptr<CpuRowPool> free_pages_;  // likewise
  std::optional<LayerHeaps> heaps_;
  std::optional<Heap> own_counters_;  // where the caller brings no workspace
  const Kernels& kernels_;
  const int number_;  // among the communicator's layers
  const MemoryNeeds needs_;
  Counters counters_;
  Engine engine_;
  std::optional<Heap> row_heap_;
  PassStats stats_;
  std::vector<TimelineEvent> timeline_;
};

RoutingPlan CpuLayer::plan(std::span<const std::int32_t> topk_ids, const CallOptions& options) {
  return tell_lone_failure(comm_, [&] { return agree_to_plan(topk_ids, options); });
}

RoutingPlan CpuLayer::agree_to_plan(std::span<const std::int32_t> topk_ids,
                                    const CallOptions& options) {
  const bool flagged = options.overflow != nullptr;
  std::optional<PagePool::Planning> pages;
  std::string own;
  const std::vector<std::string> parts = agree(
      comm_, timeout_ms_, Stage::kPlan,
      cat("plan of layer ", number_, flagged ? " with overflow" : ""),
      [&] {
        check_topk_ids(problem_, topk_ids);
        check_plan_pages(pool_.get(), options.memory);
        check_plan_memory(needs_, options.memory, topk_ids);
        if (pool_) pages.emplace(free_pages_->free());
        own = plan_message(topk_ids, pages ? pages->count() : PageCount{});
      },
      own);
  const GatheredPlan all(parts, problem_.topk);
  // Every rank builds from the same routing and counts, so where it is refused every rank refuses
  // it.
  const Routing routing{all.tokens, all.ids, hosts()};
  RoutingCheck check = check_routing(problem_, routing);
  if (pool_) check_pages(problem_, all.pools, check);
  if (flagged) {
    options.overflow[0] = static_cast<std::int64_t>(overflow_of(check.fault));
    options.overflow[1] = overflow_amount(check, problem_);
  } else {
    throw_if_any(check.fault, problem_, comm_.size());
  }
  if (!options.memory.plan.empty()) {
    write_plan(options.memory.plan, problem_, comm_.rank(), routing);
  }
  if (!pages) return make_plan(problem_, comm_.rank(), routing, check, flagged);
  const bool fits = check.fault.kind == RoutingFault::Kind::kNone;
  const auto lease = std::make_shared<CpuLease>(
      free_pages_, *pages, fits ? pages_of(problem_, comm_.size(), check, comm_.rank()) : 0);
  return make_plan(problem_, comm_.rank(), routing, check, flagged, lease, lease->table());
}

Saved CpuLayer::restore(const StepMemory& memory, std::int64_t tokens, bool flagged) {
  check_restore_pages(pool_.get());
  const std::int64_t rows = check_restored_memory(problem_, needs_, memory, tokens);
  const RoutingPlan plan =
      read_plan(memory.plan, problem_, comm_.rank(), comm_.size(), tokens, flagged, hosts());
  check_saved_memory(plan, needs_, memory);
  return restored(plan, rows, memory);
}

/// The row buffer of a pass that leaves none behind: the caller's, or the layer's, grown where it
/// is too small.
std::byte* CpuLayer::row_memory(std::span<std::byte> given, const RoutingPlan& plan, Pass pass) {
  if (!given.empty()) return given.data();
  const std::int64_t bytes = RowLayout(problem_, plan.padded_rows(), pass).bytes;
  if (!row_heap_ || row_heap_->bytes() < bytes) {
    row_heap_.reset();
    row_heap_.emplace(bytes);
  }
  return row_heap_->data();
}

/// What ranks must agree on when they enter a pass.
std::string CpuLayer::call_text(const char* pass, const RoutingPlan& plan,
                                const Schedule& schedule) const {
  return cat(pass, " of layer ", number_, ", plan ", std::hex, plan.data().fingerprint,
             " with schedule ", to_string(schedule));
}

PassContext CpuLayer::context(const PassView& view, const SavedData& saved, std::byte* rows) const {
  PassContext ctx{.view = view,
                  .kernels = kernels_,
                  .heaps = heaps_->of_ranks(),
                  .layout = heaps_->layout(),
                  .tensors = saved.tensors,
                  .rail_memory = static_cast<std::uint64_t>(number_)};
  ctx.tensors.set(RowLayout(problem_, saved.plan.padded_rows(), view.pass), rows);
  return ctx;
}

/// Args: ForwardArgs or BackwardDataArgs.
template <class Args>
void set_weights(PassContext& ctx, const Args& args) {
  const PassView& v = ctx.view;
  ctx.routed_w1 = {args.w1, shape_of_w1(v, v.routed_experts(), v.halves())};
  ctx.routed_w2 = {args.w2, shape_of_w2(v, v.routed_experts())};
  ctx.shared_w1 = {args.shared_w1, shape_of_w1(v, v.shared_experts, v.halves())};
  ctx.shared_w2 = {args.shared_w2, shape_of_w2(v, v.shared_experts)};
}

/// A token's probabilities: of its experts, then of the shared ones.
void CpuLayer::publish_probs(const PassContext& ctx, const Published& published, float* probs) {
  const PassView& v = ctx.view;
  const float* routed = published.probs.data();
  const float* shared = published.shared_probs.data();
  for (std::int64_t t = 0; t < v.tokens; ++t) {
    probs = std::copy_n(routed + t * v.topk, v.topk, probs);
    for (int s = 0; s < v.shared_experts; ++s) {
      *probs++ = published.shared_probs.empty() ? 1.0f : shared[t * v.shared_experts + s];
    }
  }
}

/// Probabilities of the rows of shared experts, which nothing dispatches in forward.
void CpuLayer::keep_shared_probs(const PassContext& ctx, const float* probs) {
  const PassView& v = ctx.view;
  for (int e = v.routed_experts(); e < v.num_local_experts; ++e) {
    const float* of_expert = probs + v.topk + (e - v.routed_experts());
    for (std::int64_t t = 0; t < v.tokens; ++t) {
      const std::int64_t row = ctx.row<Tensor::kRowProbs>(v.segment_begin[e] + t);
      ctx.get<Tensor::kRowProbs>()[row] = of_expert[t * v.slots];
    }
  }
}

/// Copies this rank's tokens to where peers pull them, if the pass moves any, then runs it. Peers
/// may read these copies until their rows have come back, which `reduce` waits for: so when a pass
/// has ended its successor may overwrite them.
void CpuLayer::run(const PassContext& ctx, const Published& published) try {
  const Clock::time_point start = Clock::now();
  stats_ = {.pass = ctx.view.pass};
  if (ctx.view.moves_data()) counters_.begin_pass(ctx.view);
  const Peer own = ctx.peer(comm_.rank());
  const auto copy = [](auto* to, const auto& values) {
    if (!values.empty()) std::memcpy(to, values.data(), values.size_bytes());
  };
  copy(own.get<Tensor::kTokens>(), published.tokens);
  if (ctx.view.pass == Pass::kForward) {
    publish_probs(ctx, published, own.get<Tensor::kProbs>());
    keep_shared_probs(ctx, own.get<Tensor::kProbs>());
  }
  copy(own.get<Tensor::kXTokens>(), published.x_tokens);
  engine_.run(ctx, stats_, record_timeline_ ? &timeline_ : nullptr);
  if (ctx.view.moves_data() && ctx.view.has_hosts()) counters_.end_pass(ctx.view);
  stats_.elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
} catch (const std::exception& e) {
  // Peers are in the pass, too, and must not wait for this rank until their limit.
  comm_.group().failure().raise(comm_.rank(), error_of(e).what());
  throw;
}

Saved CpuLayer::forward(const RoutingPlan& plan, const ForwardArgs& args,
                        const CallOptions& options) {
  return tell_lone_failure(comm_, [&] { return run_forward(plan, args, options); });
}

Saved CpuLayer::run_forward(const RoutingPlan& plan, const ForwardArgs& args,
                            const CallOptions& options) {
  const Schedule& schedule = *options.schedule;
  std::unique_ptr<SavedData> saved;
  std::optional<PassOrder> order;
  std::byte* rows = nullptr;
  agree(comm_, timeout_ms_, Stage::kEnter, call_text("forward", plan, schedule), [&] {
    check_forward(problem_, communicator_, plan, args, schedule);
    check_wave_events(options.waves, 0);
    check_forward_pages(pool_.get(), plan, options.memory);
    saved = make_saved(plan, options.memory);
    order.emplace(plan.data(), Pass::kForward, schedule);
    check_forward_memory(needs_, *saved, args, options.memory);
    rows = row_memory(options.memory.forward_memory, plan, Pass::kForward);
  });
  saved->take_pages();
  if (has_fault(plan)) {
    stats_ = {.pass = Pass::kForward};
    fill_of_fault(args);
    return Saved(std::move(saved));
  }
  PassContext ctx = context(order->view(), *saved, rows);
  set_tensors(ctx.tensors, args);
  set_weights(ctx, args);
  run(ctx, {.tokens = args.x, .probs = args.topk_probs, .shared_probs = args.shared_probs});
  count_traffic(plan, schedule, stats_);
  return Saved(std::move(saved));
}

std::unique_ptr<SavedData> CpuLayer::make_saved(const RoutingPlan& plan,
                                                const StepMemory& memory) const {
  if (pool_) return std::make_unique<SavedData>(plan, plan.padded_rows(), *pool_);
  if (const auto rows = check_saved_memory(plan, needs_, memory)) {
    return std::make_unique<SavedData>(plan, *rows, memory);
  }
  const SavedLayout layout(problem_, plan.padded_rows(), plan.received_tokens());
  const auto heap = std::make_shared<Heap>(layout.bytes);
  return std::make_unique<SavedData>(plan, plan.padded_rows(), layout, heap, heap->data());
}

template <class Check>
void CpuLayer::agree_to_backward(const Saved& saved, const Schedule& schedule, const Check& check) {
  const char* pass = "backward";
  tell_lone_failure(comm_, [&] {
    const std::string call =
        saved.data() == nullptr ? pass : call_text(pass, saved.plan(), schedule);
    agree(comm_, timeout_ms_, Stage::kEnter, call, check);
  });
}

void CpuLayer::backward(const Saved& saved, const BackwardArgs& args, const CallOptions& options) {
  const Schedule& schedule = *options.schedule;
  std::optional<PassOrder> order;
  std::byte* rows = nullptr;
  agree_to_backward(saved, schedule, [&] {
    check_backward(problem_, communicator_, saved, args, schedule);
    check_wave_events(options.waves, 0);
    check_backward_pages(*saved.data(), PassPart::kWhole);
    check_backward_memory(needs_, *saved.data(), data_args(args), weights_args(args),
                          options.memory);
    order.emplace(saved.plan().data(), Pass::kBackward, schedule);
    rows = row_memory(options.memory.backward_memory, saved.plan(), Pass::kBackward);
  });
  run_backward(*saved.data(), rows, *order, data_args(args), weights_args(args));
  if (ends_pages(*saved.data(), PassPart::kWhole, options)) saved.data()->lease->give_back();
}

void CpuLayer::backward_data(Saved& saved, const BackwardDataArgs& args,
                             const CallOptions& options) {
  const Schedule& schedule = *options.schedule;
  const std::span<std::byte> given = options.memory.backward_memory;
  std::optional<PassOrder> order;
  std::shared_ptr<std::byte> rows = callers_memory(given.data());
  agree_to_backward(saved, schedule, [&] {
    check_backward_data(problem_, communicator_, saved, args, schedule);
    check_wave_events(options.waves, 0);
    check_backward_pages(*saved.data(), PassPart::kData);
    check_backward_memory(needs_, *saved.data(), args, {}, options.memory);
    order.emplace(saved.plan().data(), Pass::kBackward, schedule, PassPart::kData);
    if (!given.empty()) return;
    const auto heap = std::make_shared<Heap>(
        RowLayout(problem_, saved.plan().padded_rows(), Pass::kBackward).bytes);
    rows = {heap, heap->data()};
  });
  SavedData& data = *saved.data();
  data.backward_memory.reset();  // a pass that fails leaves none
  run_backward(data, rows.get(), *order, args, {});
  data.backward_memory = std::move(rows);
  if (ends_pages(data, PassPart::kData, options)) data.lease->give_back();
}

void CpuLayer::backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                                const CallOptions& options) {
  const Schedule& schedule = *options.schedule;
  comm_.group().failure().check();
  check_backward_weights(problem_, communicator_, saved, args, schedule, options.memory);
  check_weights_memory(needs_, *saved.data(), args, options.memory);
  check_wave_events(options.waves, 0);
  check_backward_pages(*saved.data(), PassPart::kWeights);
  const PassOrder order(saved.plan().data(), Pass::kBackward, schedule, PassPart::kWeights);
  const std::shared_ptr<std::byte> rows =
      saved.data()->rows_of_weights(options.memory.backward_memory);
  saved.data()->forget_backward_memory(rows);
  run_backward(*saved.data(), rows.get(), order, {}, args);
  if (ends_pages(*saved.data(), PassPart::kWeights, options)) saved.data()->lease->give_back();
}

void CpuLayer::refuse_call(const Error& error, const CallOptions& /*options*/) {
  agree(comm_, timeout_ms_, Stage::kEnter, "", [&] { throw error; });
  throw error;  // not reached: a rank that refuses makes all throw
}

void CpuLayer::run_backward(const SavedData& saved, std::byte* rows, const PassOrder& order,
                            const BackwardDataArgs& data, const BackwardWeightsArgs& weights) {
  const PassView& view = order.view();
  if (has_fault(saved.plan)) {
    stats_ = {.pass = Pass::kBackward};
    if (view.moves_data()) fill_of_fault(data);
    if (view.has_weight_grads()) fill_of_fault(weights);
    return;
  }
  PassContext ctx = context(view, saved, rows);
  if (view.moves_data()) {
    set_tensors(ctx.tensors, data);
  } else {
    set_tensors(ctx.tensors, weights);
  }
  set_weights(ctx, data);
  ctx.dw1 = weights.dw1;
  ctx.dw2 = weights.dw2;
  ctx.db1 = weights.db1;
  ctx.db2 = weights.db2;
  ctx.dshared_w1 = weights.dshared_w1;
  ctx.dshared_w2 = weights.dshared_w2;
  run(ctx, {.tokens = data.dy,
            .x_tokens = view.choice.drops_received ? data.x : std::span<const bf16>()});
  if (view.moves_data()) count_traffic(saved.plan, view.schedule, stats_);
}

}  // namespace

MemoryNeeds memory_needs(const Problem& p, int num_ranks, std::optional<std::int64_t> wanted_rows,
                         int hosts) {
  const std::int64_t rows = checked_rows(p, num_ranks, wanted_rows);
  return {.rows = rows,
          .rows_of_x = rows_of_x(p, num_ranks, rows),
          .symmetric = hosts * SymmetricLayout(p, num_ranks, kLayerGraph, hosts).bytes,
          .workspace = LocalCounterLayout(p, num_ranks).bytes,
          .plan = CpuPlanLayout(p, num_ranks).bytes,
          .forward_memory = RowLayout(p, rows, Pass::kForward).bytes,
          .backward_memory = RowLayout(p, rows, Pass::kBackward).bytes,
          .alignment = kCpuAlignment};
}

std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options) {
  auto& member = dynamic_cast<CpuCommunicator&>(*communicator.impl());
  return tell_lone_failure(
      member, [&] { return std::make_unique<CpuLayer>(problem, communicator, options); });
}

}  // namespace uniep::cpu
