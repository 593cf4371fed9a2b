#include "cuda/cuda_layer.h"

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/cuda/device_scope.h"
#include "base/cuda/driver.h"
#include "cuda/call_memory.h"
#include "cuda/call_protocol.h"
#include "cuda/device_turns.h"
#include "cuda/fault_injection.h"
#include "cuda/layer_group.h"
#include "cuda/memory_needs.h"
#include "cuda/pass.h"
#include "cuda/pass_record.h"
#include "cuda/plan_handle.h"
#include "cuda/profiler_range.h"
#include "cuda/row_pool.h"
#include "cuda/tensor_alignment.h"
#include "layer/arguments.h"
#include "layer/memory_arguments.h"
#include "layer/saved_pages.h"
#include "plan/plan_data.h"
#include "schedule/open_sizes.h"

namespace uniep::cuda {
namespace {

const RoutingPlan* plan_of(const Saved& saved) {
  return saved.data() != nullptr ? &saved.data()->plan : nullptr;
}

/// `reason`: of unsupported_reason.
void require_supported(const std::optional<std::string>& reason) {
  require(!reason, ErrorCode::kUnsupported, reason.value_or(""));
}

std::vector<LaunchQueues> launch_queues(const DeviceOrder& order, int launches) {
  std::vector<LaunchQueues> queues;
  for (int i = 0; i < launches; ++i) {
    queues.push_back({.comm = order.comm_queue(i), .main = order.main_queue(i)});
  }
  return queues;
}

/// What traces call the experts of this rank.
std::vector<std::int32_t> names_of_experts(const LayerGroup& group) {
  std::vector<std::int32_t> names;
  for (int e = 0; e < group.experts().of_rank(); ++e) {
    names.push_back(group.experts().global(group.rank(), group.size(), e));
  }
  return names;
}

/// The options' row pool, if it is one for this layer; null: they have none.
std::shared_ptr<DeviceRowPool> pool_of(const LayerOptions& options, const LayerGroup& group) {
  if (!options.row_pool) return nullptr;
  const auto& data = options.row_pool->data();
  check_pool(*data, Backend::kCuda, group.problem());
  auto pool = std::dynamic_pointer_cast<DeviceRowPool>(data);
  require(pool->device() == group.device(), ErrorCode::kInvalidArgument,
          "options.row_pool lies on device ", pool->device(), "; one on the layer's device ",
          group.device(), " is accepted");
  return pool;
}

void await(const WaveEvents& waves, int wave, cudaStream_t stream) {
  const auto i = static_cast<std::size_t>(wave);
  if (i >= waves.before.size() || waves.before[i] == nullptr) return;
  check_cuda(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(waves.before[i])),
             "wait for an event of waves.before");
}

void tell(const WaveEvents& waves, int wave, cudaStream_t stream) {
  const auto i = static_cast<std::size_t>(wave);
  if (i >= waves.after.size() || waves.after[i] == nullptr) return;
  check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(waves.after[i]), stream),
             "record an event of waves.after");
}

/// The calls of a layer: what each checks, which memory it works in, and what it launches.
class CudaLayer final : public LayerBackend {
 public:
  /// Makes the layer on this thread's device, which is the group's.
  CudaLayer(std::shared_ptr<const LayerGroup> group, const LayerOptions& options);
  /// Runs on any thread: what frees the layer's memory and events works on its device.
  ~CudaLayer() override { ending_.emplace(group_->device()); }

  /// Sets all counters. Not to be called while a peer may signal.
  void start_counters_at(std::uint32_t first_count);

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
  void synchronize() override;

  const Problem& problem() const override { return group_->problem(); }
  int limit_ms() const override { return group_->limit_ms(); }
  const Communicator& communicator() const override { return group_->communicator(); }
  const PassStats& last_pass() const override;
  std::vector<TimelineEvent> take_timeline() override;

 private:
  [[nodiscard]] std::unique_lock<std::mutex> begin_memory();
  template <class Body>
  auto collective(CallPlan plan, const CallOptions& options, const Body& body);

  RoutingPlan make_plan(std::span<const std::int32_t> topk_ids, const CallOptions& options);
  RoutingPlan plan_with(std::int64_t tokens, std::unique_ptr<CudaPlan> remote, bool flagged,
                        std::shared_ptr<PageLease> lease = nullptr) const;
  std::unique_ptr<SavedData> make_saved(const RoutingPlan& plan, const StepMemory& memory);
  Saved run_forward(const RoutingPlan& plan, const ForwardArgs& args, const CallOptions& options);
  void return_pages(const SavedData& saved, PassPart part, const CallOptions& options);
  void run_backward(const SavedData& saved, std::byte* rows, PassPart part,
                    const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                    const CallOptions& options);
  PassTensors tensors(const SavedData& saved, std::byte* rows, Pass pass) const;
  PassMemory pass_memory() const;
  void run(const SavedData& saved, Pass pass, PassPart part, const PassTensors& tensors,
           const CallOptions& options);
  void launch(PassLauncher& launcher, const OrderArgs& order, const EnterArgs& enter,
              const WaveEvents& waves);

  std::optional<DeviceScope> ending_;  // the last member to end
  const std::shared_ptr<const LayerGroup> group_;
  const std::shared_ptr<DeviceRowPool> pool_;  // or null
  const MemoryNeeds needs_;
  const FaultInjection fault_injection_;
  const int sms_;  // that a pass may hold
  const CudaErf erf_;
  CallProtocol calls_;
  CallMemory memory_;
  PassRecord record_;
  mutable PassStats last_pass_;  // which `last_pass` refers to
};

CudaLayer::CudaLayer(std::shared_ptr<const LayerGroup> group, const LayerOptions& options)
    : group_(std::move(group)),
      pool_(pool_of(options, *group_)),
      needs_(memory_needs(problem(), group_->size())),
      fault_injection_(options.fault_injection),
      sms_(sms_to_hold(group_->device())),
      erf_(options.erf),
      calls_(*group_, static_cast<cudaStream_t>(options.cuda_stream)),
      memory_(problem(), group_->size(), options.memory.workspace.data()),
      record_(sms_, names_of_experts(*group_), options.record_timeline) {
  prepare_kernels();
  memory_.reserve_step(pool_ != nullptr);
}

void CudaLayer::start_counters_at(std::uint32_t first_count) {
  const std::int64_t local_bytes = LocalCounterLayout(problem(), group_->size()).bytes;
  start_counters(memory_.workspace().counters(), local_bytes, first_count);
  const std::span<std::byte> symmetric = group_->counters();
  start_counters(symmetric.data(), static_cast<std::int64_t>(symmetric.size()), first_count);
}

/// Takes back memory of calls before. Comes before the work of every call, after
/// CallProtocol::begin. Other layers' calls that use the row pool, if there is one, wait for the
/// lock.
std::unique_lock<std::mutex> CudaLayer::begin_memory() {
  if (calls_.captured()) record_.forget_plan();  // a capture may need its memory
  if (!pool_) return {};
  return pool_->begin_call(calls_.stream(), calls_.captured());
}

/// The frame of every collective call.
template <class Body>
auto CudaLayer::collective(CallPlan plan, const CallOptions& options, const Body& body) {
  const DeviceScope scope(group_->device());
  calls_.begin(plan, options.cuda_stream);
  return calls_.together([&] {
    calls_.streams().require_same_in_threads();
    const auto pool_turn = begin_memory();
    const DeviceTurn turn(calls_.stream(), this);
    return body();
  });
}

void CudaLayer::refuse_call(const Error& error, const CallOptions& options) {
  collective({}, options, [&] { throw error; });
  throw error;  // not reached
}

void CudaLayer::synchronize() {
  const DeviceScope scope(group_->device());
  calls_.synchronize();
  record_.collect_trace(calls_.stream());
}

RoutingPlan CudaLayer::plan(std::span<const std::int32_t> topk_ids, const CallOptions& options) {
  return collective({}, options, [&] { return make_plan(topk_ids, options); });
}

RoutingPlan CudaLayer::make_plan(std::span<const std::int32_t> topk_ids,
                                 const CallOptions& options) {
  check_topk_ids(problem(), topk_ids);
  check_plan_pages(pool_.get(), options.memory);
  check_plan_memory(needs_, options.memory, topk_ids);
  const std::int64_t tokens = static_cast<std::int64_t>(topk_ids.size()) / problem().topk;
  auto remote = std::make_unique<CudaPlan>(
      group_->device(), memory_.plan(options.memory.plan, calls_.captured()),
      DevicePlanLayout(problem(), group_->size()), calls_.told_faults(), calls_.number_plan(),
      calls_.stream(), calls_.captured());
  PlanArgs args = plan_args(problem(), group_->rank(), group_->size(), tokens, topk_ids.data(),
                            group_->exchange(), memory_.plan_scratch(), remote->device(),
                            calls_.report(), group_->limit_ms());
  args.overflow = options.overflow;
  args.calls = group_->call_state(group_->rank());
  if (pool_) args.pool = pool_->for_plans();
  const ProfilerRange range([] { return std::string("uniep plan"); });
  check_cuda(launch_plan(args, sms_, calls_.stream()), "launch plan");
  calls_.counted();
  std::shared_ptr<PageLease> lease;
  if (pool_) {
    lease =
        std::make_shared<DeviceLease>(pool_, remote->memory(), remote->device(), calls_.captured());
  }
  return plan_with(tokens, std::move(remote), options.overflow != nullptr, std::move(lease));
}

RoutingPlan CudaLayer::plan_with(std::int64_t tokens, std::unique_ptr<CudaPlan> remote,
                                 bool flagged, std::shared_ptr<PageLease> lease) const {
  auto data = std::make_shared<PlanData>(problem(), group_->rank(), communicator().layout());
  data->tokens_per_rank[static_cast<std::size_t>(group_->rank())] = tokens;
  data->flagged = flagged;
  data->remote = std::move(remote);
  data->lease = std::move(lease);
  return RoutingPlan(std::move(data));
}

/// Which of the layer's plans it is, nobody knows here: it counts as the first, so that it is under
/// suspicion as soon as there was a fault.
Saved CudaLayer::restore(const StepMemory& memory, std::int64_t tokens, bool flagged) {
  check_restore_pages(pool_.get());
  const std::int64_t rows = check_restored_memory(problem(), needs_, memory, tokens);
  auto remote = std::make_unique<CudaPlan>(group_->device(), callers_memory(memory.plan.data()),
                                           DevicePlanLayout(problem(), group_->size()),
                                           calls_.told_faults(), 1, std::nullopt, false);
  return restored(plan_with(tokens, std::move(remote), flagged), rows, memory);
}

Saved CudaLayer::forward(const RoutingPlan& plan, const ForwardArgs& args,
                         const CallOptions& options) {
  const bool counts_rows = !pool_ && is_sized_by_routing(problem(), needs_, options.memory);
  return collective({&plan, counts_rows}, options,
                    [&] { return run_forward(plan, args, options); });
}

Saved CudaLayer::run_forward(const RoutingPlan& plan, const ForwardArgs& args,
                             const CallOptions& options) {
  const Schedule& schedule = *options.schedule;
  check_forward(problem(), communicator(), plan, args, schedule);
  check_alignment(args);
  require_supported(unsupported_reason(schedule, sms_));
  require_supported(unsupported_reason(args, problem()));
  check_forward_pages(pool_.get(), plan, options.memory);
  std::unique_ptr<SavedData> saved = make_saved(plan, options.memory);
  check_forward_memory(needs_, *saved, args, options.memory);
  const auto rows = memory_.rows(Pass::kForward, options.memory.forward_memory, calls_.captured());
  PassTensors t = tensors(*saved, rows.get(), Pass::kForward);
  set_tensors(t.table, args);
  t.set_weights(args);
  saved->take_pages();
  run(*saved, Pass::kForward, PassPart::kWhole, t, options);
  return Saved(std::move(saved));
}

std::unique_ptr<SavedData> CudaLayer::make_saved(const RoutingPlan& plan,
                                                 const StepMemory& memory) {
  if (pool_) return std::make_unique<SavedData>(plan, needs_.rows, *pool_);
  if (const auto rows = check_saved_memory(plan, needs_, memory)) {
    return std::make_unique<SavedData>(plan, *rows, memory);
  }
  const auto own = memory_.saved(calls_.captured());
  const SavedLayout layout = CallMemory::saved_layout(problem(), group_->size());
  return std::make_unique<SavedData>(plan, needs_.rows, layout, own, own.get());
}

void CudaLayer::backward(const Saved& saved, const BackwardArgs& args, const CallOptions& options) {
  collective({plan_of(saved)}, options, [&] {
    const Schedule& schedule = *options.schedule;
    check_backward(problem(), communicator(), saved, args, schedule);
    check_backward_pages(*saved.data(), PassPart::kWhole);
    check_alignment(data_args(args));
    check_alignment(weights_args(args));
    require_supported(unsupported_reason(schedule, sms_));
    require_supported(unsupported_ring_reason(schedule, problem(), sms_));
    require_supported(unsupported_reason(data_args(args), problem()));
    require_supported(unsupported_reason(weights_args(args), problem()));
    check_backward_memory(needs_, *saved.data(), data_args(args), weights_args(args),
                          options.memory);
    const auto rows =
        memory_.rows(Pass::kBackward, options.memory.backward_memory, calls_.captured());
    run_backward(*saved.data(), rows.get(), PassPart::kWhole, data_args(args), weights_args(args),
                 options);
    return_pages(*saved.data(), PassPart::kWhole, options);
  });
}

void CudaLayer::backward_data(Saved& saved, const BackwardDataArgs& args,
                              const CallOptions& options) {
  collective({plan_of(saved)}, options, [&] {
    const Schedule& schedule = *options.schedule;
    check_backward_data(problem(), communicator(), saved, args, schedule);
    check_backward_pages(*saved.data(), PassPart::kData);
    check_backward_memory(needs_, *saved.data(), args, {}, options.memory);
    check_alignment(args);
    require_supported(unsupported_reason(schedule, sms_));
    require_supported(unsupported_reason(args, problem()));
    SavedData& data = *saved.data();
    data.backward_memory.reset();  // a pass that fails leaves none
    const auto rows = memory_.backward_memory(options.memory.backward_memory, calls_.captured());
    if (calls_.captured()) data.keep_for_replays(rows);
    run_backward(data, rows.get(), PassPart::kData, args, {}, options);
    data.backward_memory = rows;
    return_pages(data, PassPart::kData, options);
  });
}

void CudaLayer::backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                                 const CallOptions& options) {
  const DeviceScope scope(group_->device());
  calls_.begin({plan_of(saved)}, options.cuda_stream);
  calls_.streams().require_same_in_threads();
  const auto pool_turn = begin_memory();
  const Schedule& schedule = *options.schedule;
  check_backward_weights(problem(), communicator(), saved, args, schedule, options.memory);
  check_weights_memory(needs_, *saved.data(), args, options.memory);
  check_backward_pages(*saved.data(), PassPart::kWeights);
  check_alignment(args);
  require_supported(unsupported_reason(schedule, sms_));
  require_supported(unsupported_reason(args, problem()));
  SavedData& data = *saved.data();
  const std::shared_ptr<std::byte> rows = data.rows_of_weights(options.memory.backward_memory);
  if (calls_.captured()) data.keep_for_replays(rows);
  run_backward(data, rows.get(), PassPart::kWeights, {}, args, options);
  data.forget_backward_memory(rows);
  return_pages(data, PassPart::kWeights, options);
}

void CudaLayer::return_pages(const SavedData& saved, PassPart part, const CallOptions& options) {
  if (!ends_pages(saved, part, options)) return;
  dynamic_cast<DeviceLease&>(*saved.lease).give_back_on(calls_.stream(), calls_.captured());
}

void CudaLayer::run_backward(const SavedData& saved, std::byte* rows, PassPart part,
                             const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                             const CallOptions& options) {
  PassTensors t = tensors(saved, rows, Pass::kBackward);
  if (part != PassPart::kWeights) {
    set_tensors(t.table, data);
  } else {
    set_tensors(t.table, weights);
  }
  t.set_weights(data);
  t.set_weight_grads(weights);
  run(saved, Pass::kBackward, part, t, options);
}

PassTensors CudaLayer::tensors(const SavedData& saved, std::byte* rows, Pass pass) const {
  PassTensors t{.table = saved.tensors};
  t.table.set(RowLayout(problem(), saved.rows, pass), rows);
  return t;
}

PassMemory CudaLayer::pass_memory() const {
  PassMemory memory{.counters = memory_.workspace().counters(),
                    .scratch = memory_.workspace().pass_scratch(),
                    .failure = calls_.failure(),
                    .calls = group_->call_state(group_->rank()),
                    .trace = record_.trace()};
  for (int r = 0; r < group_->size(); ++r) memory.heaps[r] = group_->heap(r);
  return memory;
}

/// Puts a pass, or the part of one, on the stream of the call.
void CudaLayer::run(const SavedData& saved, Pass pass, PassPart part, const PassTensors& tensors,
                    const CallOptions& options) {
  const Schedule& schedule = *options.schedule;
  record_.announce(saved.plan, part, schedule_of_pass(schedule, problem(), pass), calls_.streams());
  const DevicePlan& plan = on_device(saved.plan);
  const auto order_memory = memory_.order(calls_.captured());
  const DeviceOrder order = device_order(
      order_memory.get(), DeviceOrderLayout(problem(), group_->size(), pass, schedule, part));
  PassView view = make_pass_view(problem(), group_->rank(), group_->size(), saved.plan.tokens(),
                                 plan, order, pass, schedule, part);
  if (saved.lease) view.pages = plan.pages;
  const PassMemory memory = pass_memory();
  const DeviceContext context =
      device_context(problem(), view, memory, group_->limit_ms(),
                     device_injection(fault_injection_, group_->rank()), erf_);
  const std::int64_t rows = rows_at_a_time(problem(), saved.rows, pass);
  PassLauncher launcher(context, tensors, {rows, saved.saved_rows},
                        expert_maps(problem(), group_->size(), memory),
                        launch_queues(order, num_launches(view)), sms_, calls_.stream());
  check_wave_events(options.waves, launcher.num_waves());
  EnterArgs enter = enter_args(problem(), group_->size(), memory, plan.status);
  if (saved.plan.data().flagged) enter.fill = fault_fill(view, tensors);
  record_.start(pass, calls_.streams());
  launcher.write_expert_maps(saved.plan.data().flagged ? plan.status : nullptr);
  launch(launcher,
         {.view = view,
          .plan = plan,
          .order = order,
          .scratch = memory_.plan_scratch(),
          .failed = context.failed},
         enter, options.waves);
}

void CudaLayer::launch(PassLauncher& launcher, const OrderArgs& order, const EnterArgs& enter,
                       const WaveEvents& waves) {
  const cudaStream_t stream = calls_.stream();
  const ProfilerRange range([&] { return cat("uniep ", name(order.view.pass)); });
  await(waves, 0, stream);
  check_cuda(launch_order(order, sms_, stream), "launch order");
  launcher.enter(enter);
  calls_.counted();
  record_.lap(Stage::kEnter, stream);
  for (int i = 0; i < launcher.num_launches(); ++i) {
    if (i > 0 && i < launcher.num_waves()) {
      await(waves, i, stream);
      launcher.enter_wave(i);
    }
    launcher.launch(i);
    record_.lap(launcher.only_stage(i), stream);
    tell(waves, i, stream);
  }
}

const PassStats& CudaLayer::last_pass() const {
  const DeviceScope scope(group_->device());
  calls_.streams().require_no_capture("last_pass");
  last_pass_ = record_.stats();
  return last_pass_;
}

std::vector<TimelineEvent> CudaLayer::take_timeline() {
  const DeviceScope scope(group_->device());
  calls_.streams().require_no_capture("take_timeline");
  return record_.take_timeline(calls_.stream());
}

}  // namespace

std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options) {
  const auto group = std::make_shared<const LayerGroup>(problem, std::move(communicator), options);
  const DeviceScope scope(group->device());
  std::unique_ptr<CudaLayer> layer;
  group->agree(options.row_pool ? "memory of a step with a row pool" : "memory of a step",
               [&] { layer = std::make_unique<CudaLayer>(group, options); });
  const std::uint32_t first_count = options.fault_injection.first_count;
  if (first_count != 0) {
    group->agree(cat("first_count ", first_count), [&] { layer->start_counters_at(first_count); });
  }
  return layer;
}

}  // namespace uniep::cuda
