#include "cpu/cpu_layer.h"

#include <cstring>
#include <optional>
#include <utility>

#include "api/arguments.h"
#include "api/saved_data.h"
#include "api/traffic.h"
#include "base/check.h"
#include "base/env.h"
#include "comm/agreement.h"
#include "cpu/engine.h"

namespace uniep::cpu {
namespace {

/// What ranks must agree on when they enter a pass.
std::string call_text(const char* pass, const RoutingPlan& plan, const Schedule& schedule) {
  return cat(pass, " of plan ", std::hex, plan.data().fingerprint, " with schedule ",
             to_string(schedule));
}

class CpuLayer final : public LayerBackend {
 public:
  CpuLayer(const Problem& problem, Communicator communicator, const LayerOptions& options)
      : problem_(problem),
        communicator_(std::move(communicator)),
        comm_(dynamic_cast<CpuCommunicator&>(*communicator_.impl())),
        timeout_ms_(options.timeout_ms > 0 ? options.timeout_ms : env_timeout_ms()),
        record_timeline_(options.record_timeline),
        kernels_(agree_to_build()),
        symmetric_(problem, comm_.size()),
        heaps_(comm_.group().share(comm_.rank(), own_heap_, timeout_ms_)),
        counters_(problem, comm_.rank(), heaps_, options.faults.first_count),
        engine_(comm_.group(), comm_.rank(), counters_, options) {}

  RoutingPlan plan(std::span<const std::int32_t> topk_ids) override;
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args,
                const Schedule& schedule) override;
  void backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule) override;

  const Problem& problem() const override { return problem_; }
  const Communicator& communicator() const override { return communicator_; }
  const PassStats& last_pass() const override { return stats_; }
  std::vector<TimelineEvent> take_timeline() override { return std::exchange(timeline_, {}); }
  void synchronize() override {}  // calls return when they are done

 private:
  /// First collective act of a layer: all ranks want the same one, and each can build it.
  const Kernels& agree_to_build() {
    const Kernels* chosen = nullptr;
    agree(comm_, timeout_ms_, Stage::kPlan, "layer " + to_string(problem_), [&] {
      validate(problem_, comm_.size());
      chosen = &kernels();
      own_heap_ = std::make_shared<Heap>(SymmetricLayout(problem_, comm_.size()).bytes);
    });
    return *chosen;
  }

  PassContext context(const PassView& view, const SavedData& saved, const Heap& rows) const;
  void run(const PassContext& ctx, std::span<const bf16> tokens, std::span<const float> probs);
  Heap& row_heap(std::int64_t bytes);

  const Problem problem_;
  Communicator communicator_;
  CpuCommunicator& comm_;
  const int timeout_ms_;
  const bool record_timeline_;
  std::shared_ptr<Heap> own_heap_;  // element rank of heaps_
  const Kernels& kernels_;
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
      comm_, timeout_ms_, Stage::kPlan, "plan", [&] { check_topk_ids(problem_, topk_ids); }, own);
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

/// The pass's row buffer, grown where it is too small.
Heap& CpuLayer::row_heap(std::int64_t bytes) {
  if (!row_heap_ || row_heap_->bytes() < bytes) {
    row_heap_.reset();
    row_heap_.emplace(bytes);
  }
  return *row_heap_;
}

PassContext CpuLayer::context(const PassView& view, const SavedData& saved,
                              const Heap& rows) const {
  const RowLayout layout(problem_, saved.plan.padded_rows(), view.pass);
  PassContext ctx{.view = view, .kernels = kernels_, .peers = {heaps_, symmetric_}};
  ctx.x_rows = saved.x_rows();
  ctx.h = saved.h();
  ctx.row_probs = saved.row_probs();
  ctx.a = reinterpret_cast<bf16*>(rows.data() + layout.a);
  if (view.pass == Pass::kBackward) {
    ctx.dy_rows = reinterpret_cast<bf16*>(rows.data() + layout.dy_rows);
    ctx.dh = reinterpret_cast<bf16*>(rows.data() + layout.dh);
    ctx.dprob_groups = reinterpret_cast<float*>(rows.data() + layout.dprob_groups);
  }
  ctx.dispatched = view.pass == Pass::kForward ? ctx.x_rows : ctx.dy_rows;
  return ctx;
}

/// Stages this rank's tokens where peers pull them, then runs the pass. Peers may read the staged
/// tokens until their rows have come back, which `reduce` waits for: so when a pass has ended its
/// successor may overwrite them.
void CpuLayer::run(const PassContext& ctx, std::span<const bf16> tokens,
                   std::span<const float> probs) {
  const Clock::time_point start = Clock::now();
  stats_ = {.pass = ctx.view.pass};
  counters_.begin_pass(ctx.view);
  const int rank = comm_.rank();
  if (!tokens.empty()) std::memcpy(ctx.peers.tokens(rank), tokens.data(), tokens.size_bytes());
  if (!probs.empty()) std::memcpy(ctx.peers.probs(rank), probs.data(), probs.size_bytes());
  engine_.run(ctx, stats_, record_timeline_ ? &timeline_ : nullptr);
  stats_.elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
}

Saved CpuLayer::forward(const RoutingPlan& plan, const ForwardArgs& args,
                        const Schedule& schedule) {
  std::unique_ptr<SavedData> saved;
  agree(comm_, timeout_ms_, Stage::kEnter, call_text("forward", plan, schedule), [&] {
    check_forward(problem_, communicator_, plan, args, schedule);
    const SavedLayout layout(problem_, plan.padded_rows());
    const auto memory = std::make_shared<Heap>(layout.bytes);
    saved = std::make_unique<SavedData>(plan, plan.padded_rows(), memory, memory->data());
    row_heap(RowLayout(problem_, plan.padded_rows(), Pass::kForward).bytes);
  });
  const PassOrder order(plan.data(), Pass::kForward, schedule);
  PassContext ctx = context(order.view(), *saved, *row_heap_);
  ctx.w1 = args.w1.data();
  ctx.w2 = args.w2.data();
  ctx.token_out = args.out.data();
  run(ctx, args.x, args.topk_probs);
  count_traffic(plan, schedule, stats_);
  return Saved(std::move(saved));
}

void CpuLayer::backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule) {
  const std::string call =
      saved.data() == nullptr ? "backward" : call_text("backward", saved.plan(), schedule);
  agree(comm_, timeout_ms_, Stage::kEnter, call, [&] {
    check_backward(problem_, communicator_, saved, args, schedule);
    row_heap(RowLayout(problem_, saved.plan().padded_rows(), Pass::kBackward).bytes);
  });
  const PassOrder order(saved.plan().data(), Pass::kBackward, schedule);
  PassContext ctx = context(order.view(), *saved.data(), *row_heap_);
  ctx.w1 = args.w1.data();
  ctx.w2 = args.w2.data();
  ctx.token_out = args.dx.data();
  ctx.dprobs_out = args.dprobs.data();
  ctx.dw1 = args.dw1;
  ctx.dw2 = args.dw2;
  run(ctx, args.dy, {});
  count_traffic(saved.plan(), schedule, stats_);
}

}  // namespace

std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options) {
  return std::make_unique<CpuLayer>(problem, std::move(communicator), options);
}

}  // namespace uniep::cpu
