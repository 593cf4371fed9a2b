#include "cuda/cuda_layer.h"

#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/cuda/device_scope.h"
#include "cuda/buffer_pool.h"
#include "cuda/capture.h"
#include "cuda/cuda_plan.h"
#include "cuda/fault_injection.h"
#include "cuda/layer_memory.h"
#include "cuda/pass.h"
#include "cuda/plan_launch.h"
#include "cuda/profiler_range.h"
#include "cuda/stream_order.h"
#include "cuda/tensor_alignment.h"
#include "cuda/wait_failure.h"
#include "group/agreement.h"
#include "group/cuda/cuda_communicator.h"
#include "layer/arguments.h"
#include "layer/options.h"
#include "layer/saved_data.h"
#include "layer/traffic.h"
#include "plan/plan_data.h"

namespace uniep::cuda {
namespace {

/// Tasks of a pass that a timeline has room for, of each CTA and each dispatching warp.
constexpr int kTracedTasks = 2048;

const RoutingPlan* plan_of(const Saved& saved) {
  return saved.data() != nullptr ? &saved.data()->plan : nullptr;
}

/// Memory that somebody else keeps.
std::shared_ptr<std::byte> callers(std::byte* memory) { return {std::shared_ptr<void>(), memory}; }

CallerMemory caller_memory(const LayerMemory& memory) {
  return {.local = memory.symmetric.data(),
          .peers = {memory.peers.begin(), memory.peers.end()},
          .release = memory.release};
}

class CudaLayer final : public LayerBackend {
 public:
  CudaLayer(const Problem& problem, Communicator communicator, const LayerOptions& options);

  RoutingPlan plan(std::span<const std::int32_t> topk_ids, const CallOptions& options) override;
  Saved forward(const RoutingPlan& plan, const ForwardArgs& args,
                const CallOptions& options) override;
  Saved restore(const StepMemory& memory, std::int64_t tokens, bool flagged) override;
  void backward(const Saved& saved, const BackwardArgs& args, const CallOptions& options) override;
  void backward_data(Saved& saved, const BackwardDataArgs& args,
                     const CallOptions& options) override;
  void backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                        const CallOptions& options) override;
  [[noreturn]] void refuse_call(const Error& error) override;
  void synchronize() override;

  const Problem& problem() const override { return problem_; }
  const Communicator& communicator() const override { return communicator_; }
  const PassStats& last_pass() const override;
  std::vector<TimelineEvent> take_timeline() override;

 private:
  static Problem checked(const Problem& problem, CudaCommunicator& comm,
                         const LayerOptions& options);
  using Use = BufferPool::Use;

  void throw_if_failed() const;
  void notice_fault();
  void throw_if_unusable(const RoutingPlan& plan);
  CallState* call_state(int rank) const;
  Error refusal_of_peer() const;
  [[noreturn]] void refuse(const Error& error);
  void begin_call(const RoutingPlan* plan, const CallOptions& options);
  template <class Body>
  auto collective(const RoutingPlan* plan, const CallOptions& options, const Body& body);
  RoutingPlan make_plan(std::span<const std::int32_t> topk_ids, const CallOptions& options);
  RoutingPlan plan_with(std::int64_t tokens, std::unique_ptr<CudaPlan> remote, bool flagged) const;
  Saved run_forward(const RoutingPlan& plan, const ForwardArgs& args, const CallOptions& options);
  void run_backward(const SavedData& saved, std::byte* rows, PassPart part,
                    const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                    const Schedule& schedule);
  void require_supported(const Schedule& schedule) const;
  void require_supported(const BackwardWeightsArgs& args) const;
  int num_ctas(const Schedule& schedule) const {
    return schedule.workers > 0 ? schedule.workers : sms_;
  }
  void start_counters_at(std::uint32_t first_count);
  PlanScratch scratch() const;
  void make_memory(const LayerOptions& options);
  void reserve_step();
  std::shared_ptr<std::byte> take(std::int64_t bytes, Use use) {
    return pool_.take(bytes, use, captured_);
  }
  /// Until the call at hand ends: in the caller's workspace at `place`, where there is one.
  std::shared_ptr<std::byte> take_for_call(std::byte* place, std::int64_t bytes) {
    return place != nullptr ? callers(place) : take(bytes, Use::kCall);
  }
  PassMemory pass_memory() const;
  void collect_trace();
  PassTensors tensors(const SavedData& saved, std::byte* rows, Pass pass) const;
  void run(const SavedData& saved, Pass pass, PassPart part, const PassTensors& tensors,
           const Schedule& schedule);

  Communicator communicator_;
  CudaCommunicator& comm_;
  const int timeout_ms_;
  const FaultInjection faults_;
  const Problem problem_;
  const MemoryNeeds needs_;
  const cudaStream_t own_stream_;  // of calls that are given none
  cudaStream_t stream_;            // of the call at hand, or the last
  StreamOrder stream_order_;
  const std::int64_t capacity_;
  const LayerSymmetricLayout shared_;
  const SymmetricLayout symmetric_;
  const PlanExchangeLayout exchange_;
  const PlanScratchLayout scratch_layout_;
  std::unique_ptr<SymmetricMemory> memory_;  // shared_
  std::optional<LayerOwnMemory> own_;
  BufferPool pool_;
  int sms_ = 0;
  bool captured_ = false;         // the call at hand is captured in a CUDA graph
  bool counted_ = false;          // its first kernel, which counts it, was launched
  std::optional<Error> refused_;  // what this rank told its peers
  std::int64_t plans_ = 0;        // made so far
  std::int64_t suspects_ = 0;     // the first so many of them may have no rows, and say so
  RoutingFault fault_;            // of one of these, until somebody was told of it
  bool trace_pending_ = false;    // records may be on the device that the next pass would overwrite
  bool trace_in_graphs_ = false;  // then that is always so: replays are not seen here
  std::vector<TimelineEvent> timeline_;     // of passes before the last
  std::optional<PassStats> traced_stages_;  // of the last pass, once they were collected
  // Empty where that pass was captured or moved no rows, and where its plan is the caller's.
  std::optional<RoutingPlan> last_plan_;
  Schedule last_schedule_;
  mutable PassStats stats_;
};

Problem CudaLayer::checked(const Problem& problem, CudaCommunicator& comm,
                           const LayerOptions& options) {
  const char* memory = !options.memory.peers.empty()       ? " with memory.peers"
                       : !options.memory.symmetric.empty() ? " with memory.symmetric"
                                                           : "";
  const std::string call = cat("layer ", to_string(problem), memory);
  agree(comm.bootstrap(), wait_limit_ms(options), Stage::kPlan, call, [&] {
    validate(problem, comm.size());
    validate(options);
    check_layer_memory(memory_needs(problem, comm.size()), options.memory, comm.size());
  });
  return problem;
}

CudaLayer::CudaLayer(const Problem& problem, Communicator communicator, const LayerOptions& options)
    : communicator_(std::move(communicator)),
      comm_(dynamic_cast<CudaCommunicator&>(*communicator_.impl())),
      timeout_ms_(wait_limit_ms(options)),
      faults_(options.faults),
      problem_(checked(problem, comm_, options)),
      needs_(memory_needs(problem_, comm_.size())),
      own_stream_(static_cast<cudaStream_t>(options.cuda_stream)),
      stream_(own_stream_),
      capacity_(needs_.rows),
      shared_(problem_, comm_.size()),
      symmetric_(problem_, comm_.size()),
      exchange_(problem_, comm_.size()),
      scratch_layout_(problem_, comm_.size()),
      memory_(comm_.symmetric_memory(shared_.bytes, timeout_ms_, caller_memory(options.memory))) {
  const DeviceScope scope(comm_.device());
  agree(comm_.bootstrap(), timeout_ms_, Stage::kPlan, "memory of a step", [&] {
    make_memory(options);
    prepare_kernels();
    if (options.memory.workspace.empty()) reserve_step();
  });
  if (faults_.first_count != 0) start_counters_at(faults_.first_count);
}

void CudaLayer::make_memory(const LayerOptions& options) {
  check_cuda(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, comm_.device()),
             "ask for the number of SMs");
  own_.emplace(problem_, comm_.size(), options.memory.workspace.data());
  if (options.record_timeline) own_->trace.emplace(sms_, kTracedTasks);
}

/// What one step takes is there from the start, so that it can be captured in a CUDA graph, and
/// that a lack of memory shows here. Two plans: `last_pass` asks for the last one's traffic.
void CudaLayer::reserve_step() {
  const int ranks = comm_.size();
  const auto plan_bytes = DevicePlanLayout(problem_, ranks).bytes;
  const std::int64_t held_together[] = {plan_bytes,
                                        plan_bytes,
                                        SavedLayout(problem_, capacity_).bytes,
                                        RowLayout(problem_, capacity_, Pass::kForward).bytes,
                                        RowLayout(problem_, capacity_, Pass::kBackward).bytes,
                                        most_order_bytes(problem_, ranks)};
  std::vector<std::shared_ptr<std::byte>> buffers;
  for (const std::int64_t bytes : held_together) buffers.push_back(take(bytes, Use::kHeld));
}

/// No peer may signal before all counters are set, hence the agreement.
void CudaLayer::start_counters_at(std::uint32_t first_count) {
  agree(comm_.bootstrap(), timeout_ms_, Stage::kPlan, cat("first_count ", first_count), [&] {
    start_counters(own_->counters(), LocalCounterLayout(problem_, comm_.size()).bytes, first_count);
    start_counters(static_cast<std::byte*>(memory_->local()) + symmetric_.published,
                   symmetric_.bytes - symmetric_.published, first_count);
  });
}

PlanScratch CudaLayer::scratch() const {
  return plan_scratch(own_->plan_scratch(), scratch_layout_);
}

/// What has failed for good, as every later call says.
void CudaLayer::throw_if_failed() const {
  if (refused_) throw *refused_;
  const WaitFailure& w = *own_->failure.get();
  if (*static_cast<const volatile int*>(&w.raised) == 1) {
    throw w.refused != 0 ? refusal_of_peer() : pass_wait_error(w, comm_.rank(), timeout_ms_);
  }
  const PlanReport& report = *own_->report.get();
  if (*static_cast<const volatile int*>(&report.wait.raised) != 1) return;
  if (report.wait.refused != 0) throw refusal_of_peer();
  throw_if_any(report, problem_, comm_.rank(), comm_.size(), timeout_ms_);
}

/// Takes the first routing fault since the last one from where the device reports it. Any plan made
/// so far may have it, and others may have faults that found the place taken.
void CudaLayer::notice_fault() {
  RoutingFault& reported = own_->report.get()->fault;
  using Kind = RoutingFault::Kind;
  if (*static_cast<const volatile Kind*>(&reported.kind) == Kind::kNone) return;
  stream_order_.synchronize(stream_);  // all of it is written then
  if (fault_.kind == Kind::kNone) fault_ = reported;
  reported = {};
  suspects_ = plans_;
}

/// Passes of a plan that cannot be used do nothing on any rank, so that one that throws instead
/// keeps in step with the others. No other call may throw for it: ranks hear of the fault at
/// different times.
void CudaLayer::throw_if_unusable(const RoutingPlan& plan) {
  if (plan.data().flagged) return;
  notice_fault();
  const CudaPlan* made = cuda_plan(plan);
  if (made == nullptr || made->number() > suspects_) return;
  check_cuda(cudaStreamSynchronize(stream_), "wait for a plan");  // where it was moved, too
  const RoutingFault fault = made->status().fault;
  if (fault == fault_) fault_ = {};
  throw_if_any(fault, problem_, comm_.size());
}

CallState* CudaLayer::call_state(int rank) const {
  return reinterpret_cast<CallState*>(static_cast<std::byte*>(memory_->peer(rank)) + shared_.calls);
}

Error CudaLayer::refusal_of_peer() const {
  const UncapturedScope scope;  // it may be told to a call that is captured
  Refusal refusal;
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
  cudaError_t result = cudaMemcpyAsync(&refusal, &call_state(comm_.rank())->refusal,
                                       sizeof(refusal), cudaMemcpyDefault, stream);
  if (result == cudaSuccess) result = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  check_cuda(result, "read why a rank refused");
  return Error(static_cast<ErrorCode>(refusal.code), refusal.sentence);
}

/// Tells all ranks that this one will not take part in the call, and throws why. Waits until they
/// have been told: this rank may go away next. Where nobody waits, since the group is this rank or
/// nothing runs yet, the layer stays usable.
void CudaLayer::refuse(const Error& error) {
  const Error named(error.code(), cat("rank ", comm_.rank(), ": ", error.what()));
  if (comm_.size() == 1 || captured_) throw named;
  Refusal refusal;
  refusal.call = counted_ ? 0 : 1;
  refusal.code = static_cast<std::int32_t>(named.code());
  std::strncpy(refusal.sentence, named.what(), sizeof(refusal.sentence) - 1);
  CallStates calls{.by_rank = {}, .num_ranks = comm_.size()};
  for (int r = 0; r < comm_.size(); ++r) calls.by_rank[r] = call_state(r);
  // Where the device fails, peers' waits expire: there is nothing left to tell them by.
  if (launch_refuse(calls, comm_.rank(), refusal, stream_) == cudaSuccess) {
    (void)cudaStreamSynchronize(stream_);
  }
  refused_ = named;
  throw named;
}

/// `plan`: of a pass, where it has one.
void CudaLayer::begin_call(const RoutingPlan* plan, const CallOptions& options) {
  throw_if_failed();
  stream_ = options.cuda_stream ? static_cast<cudaStream_t>(*options.cuda_stream) : own_stream_;
  captured_ = stream_order_.begin_call(stream_);
  counted_ = false;
  if (captured_) {
    last_plan_.reset();  // a capture may need its memory
  } else if (plan != nullptr) {
    throw_if_unusable(*plan);
  }
}

/// The frame of every collective call: what goes wrong before its launches are all made, other
/// ranks must hear of.
template <class Body>
auto CudaLayer::collective(const RoutingPlan* plan, const CallOptions& options, const Body& body) {
  const DeviceScope scope(comm_.device());
  begin_call(plan, options);
  try {
    return body();
  } catch (const Error& error) {
    refuse(error);
  } catch (const std::exception& error) {
    refuse(Error(ErrorCode::kInternal, error.what()));
  }
}

void CudaLayer::synchronize() {
  const DeviceScope scope(comm_.device());
  require_no_capture(stream_, "synchronize");
  stream_order_.synchronize(stream_);
  throw_if_failed();
  notice_fault();
  throw_if_any(std::exchange(fault_, {}), problem_, comm_.size());
  collect_trace();
}

void CudaLayer::refuse_call(const Error& error) {
  collective(nullptr, {}, [&] { throw error; });
  throw error;  // not reached
}

RoutingPlan CudaLayer::plan(std::span<const std::int32_t> topk_ids, const CallOptions& options) {
  return collective(nullptr, options, [&] { return make_plan(topk_ids, options); });
}

RoutingPlan CudaLayer::make_plan(std::span<const std::int32_t> topk_ids,
                                 const CallOptions& options) {
  check_topk_ids(problem_, topk_ids);
  check_plan_memory(needs_, options.memory);
  const std::int64_t tokens = static_cast<std::int64_t>(topk_ids.size()) / problem_.topk;
  const DevicePlanLayout layout(problem_, comm_.size());
  const std::span<std::byte> given = options.memory.plan;
  auto remote = std::make_unique<CudaPlan>(
      given.empty() ? take(layout.bytes, Use::kHeld) : callers(given.data()), layout, plans_ + 1,
      stream_, captured_);
  PlanExchange exchange{.layout = exchange_};
  for (int r = 0; r < comm_.size(); ++r) {
    exchange.parts[r] = static_cast<std::byte*>(memory_->peer(r)) + shared_.exchange;
  }
  PlanArgs args = plan_args(problem_, comm_.rank(), comm_.size(), tokens, topk_ids.data(), exchange,
                            scratch(), remote->device(), own_->report.get(),
                            static_cast<std::uint64_t>(timeout_ms_) * 1'000'000);
  args.overflow = options.overflow;
  args.calls = call_state(comm_.rank());
  const ProfilerRange range([] { return std::string("uniep plan"); });
  check_cuda(launch_plan(args, 0, stream_), "launch plan");
  counted_ = true;
  ++plans_;
  return plan_with(tokens, std::move(remote), options.overflow != nullptr);
}

RoutingPlan CudaLayer::plan_with(std::int64_t tokens, std::unique_ptr<CudaPlan> remote,
                                 bool flagged) const {
  auto data = std::make_shared<PlanData>();
  data->problem = problem_;
  data->rank = comm_.rank();
  data->num_local_experts = problem_.num_experts / comm_.size();
  data->tokens_per_rank.assign(static_cast<std::size_t>(comm_.size()), 0);
  data->tokens_per_rank[static_cast<std::size_t>(comm_.rank())] = tokens;
  data->flagged = flagged;
  data->remote = std::move(remote);
  return RoutingPlan(std::move(data));
}

/// Which of the layer's plans it is, nobody knows here: it counts as the first, so that it is under
/// suspicion as soon as there was a fault.
Saved CudaLayer::restore(const StepMemory& memory, std::int64_t tokens, bool flagged) {
  check_restored_memory(problem_, needs_, memory, tokens);
  auto remote =
      std::make_unique<CudaPlan>(callers(memory.plan.data()),
                                 DevicePlanLayout(problem_, comm_.size()), 1, std::nullopt, false);
  auto saved = std::make_unique<SavedData>(plan_with(tokens, std::move(remote), flagged), capacity_,
                                           saved_tensors(memory));
  if (!memory.backward_rows.empty()) saved->hold_callers_rows(memory.backward_rows);
  return Saved(std::move(saved));
}

/// Moves what the last pass to run recorded to the host.
void CudaLayer::collect_trace() {
  if (!own_->trace || !trace_pending_) return;
  trace_pending_ = trace_in_graphs_;
  const int first_expert = comm_.rank() * (problem_.num_experts / comm_.size());
  const auto events = own_->trace->take(first_expert, stream_);
  if (events.empty()) return;
  // Those of a replay are not of the last pass that the host saw.
  if (!trace_in_graphs_) traced_stages_ = stage_sums(events);
  timeline_.insert(timeline_.end(), events.begin(), events.end());
}

std::vector<TimelineEvent> CudaLayer::take_timeline() {
  const DeviceScope scope(comm_.device());
  require_no_capture(stream_, "take_timeline");
  collect_trace();
  return std::exchange(timeline_, {});
}

PassMemory CudaLayer::pass_memory() const {
  PassMemory memory{.counters = own_->counters(),
                    .scratch = own_->pass_scratch(),
                    .failure = own_->failure.get(),
                    .calls = call_state(comm_.rank())};
  if (own_->trace) memory.trace = own_->trace->device();
  for (int r = 0; r < comm_.size(); ++r) {
    memory.heaps[r] = static_cast<std::byte*>(memory_->peer(r));
  }
  return memory;
}

PassTensors CudaLayer::tensors(const SavedData& saved, std::byte* rows, Pass pass) const {
  const RowLayout layout(problem_, capacity_, pass);
  PassTensors t;
  t.x_rows = saved.tensors.x_rows;
  t.h = saved.tensors.h;
  t.row_probs = saved.tensors.row_probs;
  t.a = reinterpret_cast<bf16*>(rows + layout.a);
  if (pass == Pass::kBackward) {
    t.dy_rows = reinterpret_cast<bf16*>(rows + layout.dy_rows);
    t.dh = reinterpret_cast<bf16*>(rows + layout.dh);
    t.dprob_groups = reinterpret_cast<float*>(rows + layout.dprob_groups);
  }
  return t;
}

void CudaLayer::run(const SavedData& saved, Pass pass, PassPart part, const PassTensors& tensors,
                    const Schedule& schedule) {
  if (!captured_) collect_trace();
  last_schedule_ = schedule;
  last_plan_.reset();
  const DevicePlan& plan = on_device(saved.plan);
  if (!captured_ && part != PassPart::kWeights && !cuda_plan(saved.plan)->is_callers()) {
    last_plan_ = saved.plan;
  }
  const DeviceOrderLayout order_layout(problem_, comm_.size(), pass, schedule, part);
  const auto order_memory = take_for_call(own_->order(), most_order_bytes(problem_, comm_.size()));
  const DeviceOrder order = device_order(order_memory.get(), order_layout);
  const PassView view = make_pass_view(problem_, comm_.rank(), comm_.size(), saved.plan.tokens(),
                                       plan, order, pass, schedule, part);
  std::vector<QueuePair> queues;
  for (int i = 0; i < num_launches(view); ++i) {
    queues.push_back({order.comm_queue(i), order.main_queue(i)});
  }
  const PassMemory memory = pass_memory();
  const PassCall this_call{.limit_ms = timeout_ms_, .faults = device_faults(faults_, comm_.rank())};
  const DeviceContext context = device_context(problem_, view, memory, this_call);
  PassLauncher launcher(context, tensors, capacity_, std::move(queues), sms_, stream_);
  if (own_->trace) own_->trace->start(pass, num_ctas(schedule), stream_);
  trace_pending_ = true;
  trace_in_graphs_ = trace_in_graphs_ || captured_;
  traced_stages_.reset();
  PassClock& clock = own_->clock;
  captured_ ? clock.skip(pass) : clock.start(pass, stream_);
  const OrderArgs order_args{
      .view = view, .plan = plan, .order = order, .scratch = scratch(), .failed = context.failed};
  const ProfilerRange range([&] { return cat("uniep ", name(pass)); });
  check_cuda(launch_order(order_args, 0, stream_), "launch order");
  EnterArgs enter =
      enter_args(problem_, comm_.size(), memory, tensors.tokens, tensors.probs, plan.status);
  if (saved.plan.data().flagged) enter.fill = fault_fill(view, tensors);
  launcher.enter(enter);
  counted_ = true;
  clock.lap(Stage::kEnter, stream_);
  for (int i = 0; i < launcher.num_launches(); ++i) {
    launcher.launch(i);
    clock.lap(launcher.only_stage(i), stream_);
  }
}

Saved CudaLayer::forward(const RoutingPlan& plan, const ForwardArgs& args,
                         const CallOptions& options) {
  return collective(&plan, options, [&] { return run_forward(plan, args, options); });
}

void CudaLayer::backward(const Saved& saved, const BackwardArgs& args, const CallOptions& options) {
  collective(plan_of(saved), options, [&] {
    const Schedule& schedule = *options.schedule;
    check_backward(problem_, communicator_, saved, args, schedule);
    check_alignment(data_args(args));
    check_alignment(weights_args(args));
    require_supported(schedule);
    require_supported(weights_args(args));
    const auto rows =
        take_for_call(own_->rows(), RowLayout(problem_, capacity_, Pass::kBackward).bytes);
    run_backward(*saved.data(), rows.get(), PassPart::kWhole, data_args(args), weights_args(args),
                 schedule);
  });
}

void CudaLayer::backward_data(Saved& saved, const BackwardDataArgs& args,
                              const CallOptions& options) {
  collective(plan_of(saved), options, [&] {
    const Schedule& schedule = *options.schedule;
    check_backward_data(problem_, communicator_, saved, args, schedule);
    check_backward_rows_memory(needs_, options.memory);
    check_alignment(args);
    require_supported(schedule);
    SavedData& data = *saved.data();
    data.backward_rows.reset();  // a pass that fails leaves none
    const std::span<std::byte> given = options.memory.backward_rows;
    const auto rows = given.empty()
                          ? take(RowLayout(problem_, capacity_, Pass::kBackward).bytes, Use::kHeld)
                          : callers(given.data());
    if (captured_ && given.empty()) data.captured_rows.push_back(rows);
    run_backward(data, rows.get(), PassPart::kData, args, {}, schedule);
    data.backward_rows = rows;
  });
}

void CudaLayer::backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                                 const CallOptions& options) {
  const DeviceScope scope(comm_.device());
  begin_call(plan_of(saved), options);
  const Schedule& schedule = *options.schedule;
  check_backward_weights(problem_, communicator_, saved, args, schedule);
  check_alignment(args);
  require_supported(schedule);
  require_supported(args);
  SavedData& data = *saved.data();
  const std::shared_ptr<std::byte> rows = *data.backward_rows;
  if (captured_ && rows.use_count() > 0) data.captured_rows.push_back(rows);
  run_backward(data, rows.get(), PassPart::kWeights, {}, args, schedule);
  data.backward_rows.reset();
}

Saved CudaLayer::run_forward(const RoutingPlan& plan, const ForwardArgs& args,
                             const CallOptions& options) {
  const Schedule& schedule = *options.schedule;
  check_forward(problem_, communicator_, plan, args, schedule);
  check_alignment(args);
  require_supported(schedule);
  std::unique_ptr<SavedData> saved;
  if (check_saved_memory(problem_, needs_, options.memory)) {
    saved = std::make_unique<SavedData>(plan, capacity_, saved_tensors(options.memory));
  } else {
    const auto memory = take(SavedLayout(problem_, capacity_).bytes, Use::kHeld);
    saved = std::make_unique<SavedData>(plan, capacity_, memory, memory.get());
  }
  const auto rows =
      take_for_call(own_->rows(), RowLayout(problem_, capacity_, Pass::kForward).bytes);
  PassTensors t = tensors(*saved, rows.get(), Pass::kForward);
  t.tokens = args.x.data();
  t.probs = args.topk_probs.data();
  t.w1 = args.w1.data();
  t.w2 = args.w2.data();
  t.token_out = args.out.data();
  run(*saved, Pass::kForward, PassPart::kWhole, t, schedule);
  return Saved(std::move(saved));
}

void CudaLayer::run_backward(const SavedData& saved, std::byte* rows, PassPart part,
                             const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                             const Schedule& schedule) {
  PassTensors t = tensors(saved, rows, Pass::kBackward);
  t.tokens = data.dy.data();
  t.w1 = data.w1.data();
  t.w2 = data.w2.data();
  t.token_out = data.dx.data();
  t.dprobs_out = data.dprobs.data();
  t.dw1 = weights.dw1;
  t.dw2 = weights.dw2;
  run(saved, Pass::kBackward, part, t, schedule);
}

void CudaLayer::require_supported(const Schedule& schedule) const {
  const auto reason = unsupported_reason(schedule, sms_);
  require(!reason, ErrorCode::kUnsupported, reason.value_or(""));
}

void CudaLayer::require_supported(const BackwardWeightsArgs& args) const {
  const auto reason = unsupported_reason(args);
  require(!reason, ErrorCode::kUnsupported, reason.value_or(""));
}

const PassStats& CudaLayer::last_pass() const {
  const DeviceScope scope(comm_.device());
  require_no_capture(stream_, "last_pass");
  stats_ = {};
  own_->clock.read(stats_);
  stats_.workers = num_ctas(last_schedule_);
  // A launch of several stages has one time; the trace, once it was collected, has one a task.
  for (std::size_t i = 0; traced_stages_ && i < stats_.stages.size(); ++i) {
    if (traced_stages_->stages[i].tasks > 0) stats_.stages[i] = traced_stages_->stages[i];
  }
  if (last_plan_) count_traffic(*last_plan_, last_schedule_, stats_);
  return stats_;
}

}  // namespace

MemoryNeeds memory_needs(const Problem& p, int num_ranks) {
  const auto reason = unsupported_reason(p, num_ranks);
  require(!reason, ErrorCode::kUnsupported, reason.value_or(""));
  const std::int64_t rows = capacity_rows(p, num_ranks);
  return {.rows = rows,
          .symmetric = LayerSymmetricLayout(p, num_ranks).bytes,
          .workspace = LayerWorkspaceLayout(p, num_ranks).bytes,
          .plan = DevicePlanLayout(p, num_ranks).bytes,
          .backward_rows = RowLayout(p, rows, Pass::kBackward).bytes,
          .alignment = kDeviceAlignment};
}

std::unique_ptr<LayerBackend> make_layer(const Problem& problem, Communicator communicator,
                                         const LayerOptions& options) {
  return std::make_unique<CudaLayer>(problem, std::move(communicator), options);
}

}  // namespace uniep::cuda
