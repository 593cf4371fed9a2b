#include "uniep/layer.h"

#include "api/layer_schedules.h"
#include "api/no_cuda.h"
#include "base/check.h"
#include "cpu/cpu_layer.h"
#include "group/communicator_impl.h"
#include "layer/backend.h"
#include "layer/saved_data.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/cuda_layer.h"
#include "cuda/memory_needs.h"
#endif

namespace uniep {

Saved::Saved() = default;
Saved::Saved(Saved&&) noexcept = default;
Saved& Saved::operator=(Saved&&) noexcept = default;
Saved::~Saved() = default;
Saved::Saved(std::unique_ptr<SavedData> data) : data_(std::move(data)) {}

const RoutingPlan& Saved::plan() const {
  require(data_ != nullptr, ErrorCode::kInvalidArgument,
          "saved is empty; what forward returned has a plan");
  return data_->plan;
}

std::span<const bf16> Saved::h() const {
  if (data_ == nullptr) return {};
  const Problem& p = data_->plan.problem();
  if (p.recompute_h || data_->lease) return {};
  return {data_->h(),
          static_cast<std::size_t>(data_->plan.padded_rows() * halves(p) * p.intermediate)};
}

std::size_t Saved::bytes() const {
  return data_ == nullptr ? 0 : static_cast<std::size_t>(data_->bytes());
}

namespace {

std::unique_ptr<LayerBackend> make_backend(const Problem& problem, Communicator communicator,
                                           const LayerOptions& options) {
#ifdef UNIEP_HAS_CUDA
  if (communicator.backend() == Backend::kCuda) {
    return cuda::make_layer(problem, std::move(communicator), options);
  }
#endif
  return cpu::make_layer(problem, std::move(communicator), options);
}

CallOptions with(const Schedule& schedule) { return {.schedule = schedule}; }

LayerBackend& present(const std::unique_ptr<LayerBackend>& backend) {
  require(backend != nullptr, ErrorCode::kInvalidArgument,
          "the layer was moved to another one; that one can be called");
  return *backend;
}

/// A call of a layer's backend, for as long as this lives.
class Call {
 public:
  explicit Call(const std::unique_ptr<LayerBackend>& backend)
      : backend_(present(backend)), call_(backend_.usage) {}
  LayerBackend* operator->() { return &backend_; }

 private:
  LayerBackend& backend_;
  Usage::Call call_;
};

/// A call that all ranks make, for as long as this lives.
class GroupCall : public Call {
 public:
  explicit GroupCall(const std::unique_ptr<LayerBackend>& backend)
      : Call(backend), call_(*backend->communicator().impl()) {}

 private:
  CollectiveCall call_;
};

/// Lets go of a backend, but not in a process that was forked off: what holds it is its parent's.
void end(std::unique_ptr<LayerBackend>& backend) {
  if (backend && !backend->usage.in_own_process()) (void)backend.release();
  backend.reset();
}

}  // namespace

Layer::Layer(const Problem& problem, Communicator communicator, const LayerOptions& options) {
  const auto group = communicator.impl();  // which the backend takes
  group->usage.require_own_process();
  const CollectiveCall call(*group);
  // Memory of a layer that could not be made is not said to be released.
  const auto made = std::make_shared<bool>(false);
  LayerOptions own = options;
  if (options.memory.release) {
    own.memory.release = [made, release = options.memory.release] {
      if (*made) release();
    };
  }
  backend_ = make_backend(problem, std::move(communicator), own);
  schedules_ = agree_on_layer_schedules(problem, backend_->communicator(), own);
  *made = true;
}
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&& other) noexcept {
  if (this != &other) {
    end(backend_);
    backend_ = std::move(other.backend_);
    schedules_ = other.schedules_;
  }
  return *this;
}
Layer::~Layer() { end(backend_); }

MemoryNeeds Layer::memory_needs(const Problem& problem, Backend backend, int num_ranks,
                                std::optional<std::int64_t> rows, int hosts) {
  require_group_size(num_ranks);
  validate(problem, num_ranks);
  (void)layout_of_hosts(num_ranks, hosts);
  if (backend == Backend::kCpu) return cpu::memory_needs(problem, num_ranks, rows, hosts);
  require(hosts == 1, ErrorCode::kUnsupported, "hosts is ", hosts,
          "; the cuda backend has groups on one");
#ifdef UNIEP_HAS_CUDA
  return cuda::memory_needs(problem, num_ranks, rows);
#else
  throw Error(ErrorCode::kUnsupported, kNoCuda);
#endif
}

RoutingPlan Layer::plan(std::span<const std::int32_t> topk_ids, const CallOptions& options) {
  return GroupCall(backend_)->plan(topk_ids, options);
}

Saved Layer::forward(const RoutingPlan& plan, const ForwardArgs& args) {
  return forward(plan, args, CallOptions{});
}

Saved Layer::forward(const RoutingPlan& plan, const ForwardArgs& args, const Schedule& schedule) {
  return forward(plan, args, with(schedule));
}

Saved Layer::forward(const RoutingPlan& plan, const ForwardArgs& args, const CallOptions& options) {
  return GroupCall(backend_)->forward(plan, args, complete(options, Pass::kForward));
}

Saved Layer::restore(const StepMemory& memory, std::int64_t tokens, bool flagged) {
  return Call(backend_)->restore(memory, tokens, flagged);
}

void Layer::backward(const Saved& saved, const BackwardArgs& args) {
  backward(saved, args, CallOptions{});
}

void Layer::backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule) {
  backward(saved, args, with(schedule));
}

void Layer::backward(const Saved& saved, const BackwardArgs& args, const CallOptions& options) {
  GroupCall(backend_)->backward(saved, args, complete(options, Pass::kBackward));
}

void Layer::backward_data(Saved& saved, const BackwardDataArgs& args) {
  backward_data(saved, args, CallOptions{});
}

void Layer::backward_data(Saved& saved, const BackwardDataArgs& args, const Schedule& schedule) {
  backward_data(saved, args, with(schedule));
}

void Layer::backward_data(Saved& saved, const BackwardDataArgs& args, const CallOptions& options) {
  GroupCall(backend_)->backward_data(saved, args, complete(options, Pass::kBackward));
}

void Layer::backward_weights(Saved& saved, const BackwardWeightsArgs& args) {
  backward_weights(saved, args, CallOptions{});
}

void Layer::backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                             const Schedule& schedule) {
  backward_weights(saved, args, with(schedule));
}

void Layer::backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                             const CallOptions& options) {
  Call(backend_)->backward_weights(saved, args, complete(options, Pass::kBackward));
}

/// The options, with the schedule under which the pass runs.
CallOptions Layer::complete(const CallOptions& options, Pass pass) const {
  CallOptions own = options;
  if (!own.schedule) own.schedule = schedule(pass);
  return own;
}

const Schedule& Layer::schedule(Pass pass) const {
  (void)present(backend_);
  require(pass == Pass::kForward || pass == Pass::kBackward, ErrorCode::kInvalidArgument,
          "pass is ", static_cast<int>(pass), "; 0 (forward) and 1 (backward) are accepted");
  return schedules_[static_cast<std::size_t>(pass)];
}

void Layer::synchronize() { Call(backend_)->synchronize(); }

const Problem& Layer::problem() const { return present(backend_).problem(); }
const Communicator& Layer::communicator() const { return present(backend_).communicator(); }
const PassStats& Layer::last_pass() const { return present(backend_).last_pass(); }
std::vector<TimelineEvent> Layer::take_timeline() { return Call(backend_)->take_timeline(); }

}  // namespace uniep
