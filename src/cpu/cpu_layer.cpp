#include "cpu/cpu_layer.h"

#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "comm/agreement.h"
#include "cpu/engine.h"
#include "layer/arguments.h"
#include "layer/options.h"
#include "layer/saved_data.h"
#include "layer/traffic.h"

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
        kernels_(agree_to_build(options)),
        number_(comm_.number_layer()),
        symmetric_(problem, comm_.size()),
        heaps_(comm_.group().share(comm_.rank(), own_heap_, timeout_ms_)),
        counters_(problem, comm_.rank(), heaps_, options.faults.first_count),
        engine_(comm_.group(), comm_.rank(), counters_, options) {}

  RoutingPlan plan(std::span<const std::int32_t> topk_ids) override;
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args,
                const Schedule& schedule) override;
  void backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule) override;
  void backward_data(Saved& saved, const BackwardDataArgs& args, const Schedule& schedule) override;
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                        const Schedule& schedule) override;

  const Problem& problem() const override { return problem_; }
  const Communicator& communicator() const override { return communicator_; }
  const PassStats& last_pass() const override { return stats_; }
  std::vector<TimelineEvent> take_timeline() override { return std::exchange(timeline_, {}); }
  /// Calls return when they are done; what went wrong in another rank's may be new.
  void synchronize() override { comm_.group().failure().check(); }

 private:
  /// First collective act of a layer: all ranks want the same one, and each can build it.
  const Kernels& agree_to_build(const LayerOptions& options) {
    const Kernels* chosen = nullptr;
    agree(comm_, timeout_ms_, Stage::kPlan, "layer " + to_string(problem_), [&] {
      validate(problem_, comm_.size());
      validate(options);
      chosen = &kernels();
      own_heap_ = std::make_shared<Heap>(SymmetricLayout(problem_, comm_.size()).bytes);
    });
    return *chosen;
  }

  std::string call_text(const char* pass, const RoutingPlan& plan, const Schedule& schedule) const;
  PassContext context(const PassView& view, const SavedData& saved, std::byte* rows) const;
  template <class Check>
  void agree_to_backward(const char* pass, const Saved& saved, const Schedule& schedule,
                         const Check& check);
  void run_backward(const SavedData& saved, std::byte* rows, const PassOrder& order,
                    const BackwardDataArgs& data, const BackwardWeightsArgs& weights);
  void run(const PassContext& ctx, std::span<const bf16> tokens, std::span<const float> probs);
  std::byte* row_memory(std::int64_t bytes);

  const Problem problem_;
  Communicator communicator_;
  CpuCommunicator& comm_;
  const int timeout_ms_;
  const bool record_timeline_;
  std::shared_ptr<Heap> own_heap_;  // element rank of heaps_
  const Kernels& kernels_;
  const int number_;  // among the communicator's layers
  const SymmetricLayout symmetric_;
  std::vector<std::shared_ptr<Heap>> heaps_;
  Counters counters_;
  Engine engine_;
  std::optional<Heap> row_heap_;
  PassStats stats_;
  std::vector<TimelineEvent> timeline_;
};

RoutingPlan CpuLayer::plan(std::span<const std::int32_t> topk_ids) {
  const std::string own(reinterpret_cast<const char*>(topk_ids.data()), topk_ids.size_bytes());
  const std::vector<std::string> parts = agree(
      comm_, timeout_ms_, Stage::kPlan, cat("plan of layer ", number_),
      [&] { check_topk_ids(problem_, topk_ids); }, own);
  std::vector<std::int64_t> tokens;
  std::vector<std::int32_t> ids;
  for (const std::string& part : parts) {
    const std::size_t count = part.size() / sizeof(std::int32_t);
    const std::size_t before = ids.size();
    ids.resize(before + count);
    if (count > 0) std::memcpy(ids.data() + before, part.data(), part.size());
    tokens.push_back(static_cast<std::int64_t>(count) / problem_.topk);
  }
  // Every rank builds from the same routing, so where it is refused every rank refuses it.
  return RoutingPlan::build(problem_, comm_.rank(), tokens, ids);
}

/// The row buffer of a pass that leaves none behind, grown where it is too small.
std::byte* CpuLayer::row_memory(std::int64_t bytes) {
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
  const RowLayout layout(problem_, saved.plan.padded_rows(), view.pass);
  PassContext ctx{.view = view, .kernels = kernels_, .peers = {heaps_, symmetric_}};
  ctx.x_rows = saved.x_rows();
  ctx.h = saved.h();
  ctx.row_probs = saved.row_probs();
  ctx.a = reinterpret_cast<bf16*>(rows + layout.a);
  if (view.pass == Pass::kBackward) {
    ctx.dy_rows = reinterpret_cast<bf16*>(rows + layout.dy_rows);
    ctx.dh = reinterpret_cast<bf16*>(rows + layout.dh);
    ctx.dprob_groups = reinterpret_cast<float*>(rows + layout.dprob_groups);
  }
  ctx.dispatched = view.pass == Pass::kForward ? ctx.x_rows : ctx.dy_rows;
  return ctx;
}

/// Stages this rank's tokens where peers pull them, if the pass moves any, then runs it. Peers may
/// read the staged tokens until their rows have come back, which `reduce` waits for: so when a pass
/// has ended its successor may overwrite them.
void CpuLayer::run(const PassContext& ctx, std::span<const bf16> tokens,
                   std::span<const float> probs) try {
  const Clock::time_point start = Clock::now();
  stats_ = {.pass = ctx.view.pass};
  if (ctx.view.moves_data()) counters_.begin_pass(ctx.view);
  const int rank = comm_.rank();
  if (!tokens.empty()) std::memcpy(ctx.peers.tokens(rank), tokens.data(), tokens.size_bytes());
  if (!probs.empty()) std::memcpy(ctx.peers.probs(rank), probs.data(), probs.size_bytes());
  engine_.run(ctx, stats_, record_timeline_ ? &timeline_ : nullptr);
  stats_.elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
} catch (const std::exception& e) {
  // Peers are in the pass, too, and must not wait for this rank until their limit.
  comm_.group().failure().raise(comm_.rank(), e.what());
  throw;
}

Saved CpuLayer::forward(const RoutingPlan& plan, const ForwardArgs& args,
                        const Schedule& schedule) {
  std::unique_ptr<SavedData> saved;
  std::optional<PassOrder> order;
  std::byte* rows = nullptr;
  agree(comm_, timeout_ms_, Stage::kEnter, call_text("forward", plan, schedule), [&] {
    check_forward(problem_, communicator_, plan, args, schedule);
    const SavedLayout layout(problem_, plan.padded_rows());
    const auto memory = std::make_shared<Heap>(layout.bytes);
    saved = std::make_unique<SavedData>(plan, plan.padded_rows(), memory, memory->data());
    order.emplace(plan.data(), Pass::kForward, schedule);
    rows = row_memory(RowLayout(problem_, plan.padded_rows(), Pass::kForward).bytes);
  });
  PassContext ctx = context(order->view(), *saved, rows);
  ctx.w1 = args.w1.data();
  ctx.w2 = args.w2.data();
  ctx.token_out = args.out.data();
  run(ctx, args.x, args.topk_probs);
  count_traffic(plan, schedule, stats_);
  return Saved(std::move(saved));
}

template <class Check>
void CpuLayer::agree_to_backward(const char* pass, const Saved& saved, const Schedule& schedule,
                                 const Check& check) {
  const std::string call = saved.data() == nullptr ? pass : call_text(pass, saved.plan(), schedule);
  agree(comm_, timeout_ms_, Stage::kEnter, call, check);
}

void CpuLayer::backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule) {
  std::optional<PassOrder> order;
  std::byte* rows = nullptr;
  agree_to_backward("backward", saved, schedule, [&] {
    check_backward(problem_, communicator_, saved, args, schedule);
    order.emplace(saved.plan().data(), Pass::kBackward, schedule);
    rows = row_memory(RowLayout(problem_, saved.data()->rows, Pass::kBackward).bytes);
  });
  run_backward(*saved.data(), rows, *order, data_args(args), weights_args(args));
}

void CpuLayer::backward_data(Saved& saved, const BackwardDataArgs& args, const Schedule& schedule) {
  std::optional<PassOrder> order;
  std::shared_ptr<std::byte> rows;
  agree_to_backward("backward_data", saved, schedule, [&] {
    check_backward_data(problem_, communicator_, saved, args, schedule);
    order.emplace(saved.plan().data(), Pass::kBackward, schedule, PassPart::kData);
    const auto heap =
        std::make_shared<Heap>(RowLayout(problem_, saved.data()->rows, Pass::kBackward).bytes);
    rows = {heap, heap->data()};
  });
  saved.data()->backward_rows.reset();  // a pass that fails leaves none
  run_backward(*saved.data(), rows.get(), *order, args, {});
  saved.data()->backward_rows = std::move(rows);
}

void CpuLayer::backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                                const Schedule& schedule) {
  comm_.group().failure().check();
  check_backward_weights(problem_, communicator_, saved, args, schedule);
  const PassOrder order(saved.plan().data(), Pass::kBackward, schedule, PassPart::kWeights);
  const auto rows = std::exchange(saved.data()->backward_rows, std::nullopt);
  run_backward(*saved.data(), rows->get(), order, {}, args);
}

void CpuLayer::run_backward(const SavedData& saved, std::byte* rows, const PassOrder& order,
                            const BackwardDataArgs& data, const BackwardWeightsArgs& weights) {
  const PassView& view = order.view();
  PassContext ctx = context(view, saved, rows);
  ctx.w1 = data.w1.data();
  ctx.w2 = data.w2.data();
  ctx.token_out = data.dx.data();
  ctx.dprobs_out = data.dprobs.data();
  ctx.dw1 = weights.dw1;
  ctx.dw2 = weights.dw2;
  run(ctx, data.dy, {});
  if (view.moves_data()) count_traffic(saved.plan, view.schedule, stats_);
}

}  // namespace

std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options) {
  return std::make_unique<CpuLayer>(problem, std::move(communicator), options);
}

}  // namespace uniep::cpu
