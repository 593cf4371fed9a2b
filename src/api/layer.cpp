#include "uniep/layer.h"

#include "api/layer_schedules.h"
#include "base/check.h"
#include "cpu/cpu_layer.h"
#include "layer/backend.h"
#include "layer/saved_data.h"
#ifdef UNIEP_HAS_CUDA
#include "cuda/cuda_layer.h"
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
  return {data_->h(), static_cast<std::size_t>(data_->plan.padded_rows() * 2 * p.intermediate)};
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

}  // namespace

Layer::Layer(const Problem& problem, Communicator communicator, const LayerOptions& options)
    : backend_(make_backend(problem, std::move(communicator), options)),
      schedules_(agree_on_layer_schedules(problem, backend_->communicator(), options)) {}
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;
Layer::~Layer() = default;

RoutingPlan Layer::plan(std::span<const std::int32_t> topk_ids) { return backend_->plan(topk_ids); }

Saved Layer::forward(const RoutingPlan& plan, const ForwardArgs& args) {
  return forward(plan, args, schedule(Pass::kForward));
}

Saved Layer::forward(const RoutingPlan& plan, const ForwardArgs& args, const Schedule& schedule) {
  return backend_->forward(plan, args, schedule);
}

void Layer::backward(const Saved& saved, const BackwardArgs& args) {
  backward(saved, args, schedule(Pass::kBackward));
}

void Layer::backward(const Saved& saved, const BackwardArgs& args, const Schedule& schedule) {
  backend_->backward(saved, args, schedule);
}

void Layer::backward_data(Saved& saved, const BackwardDataArgs& args) {
  backward_data(saved, args, schedule(Pass::kBackward));
}

void Layer::backward_data(Saved& saved, const BackwardDataArgs& args, const Schedule& schedule) {
  backend_->backward_data(saved, args, schedule);
}

void Layer::backward_weights(Saved& saved, const BackwardWeightsArgs& args) {
  backward_weights(saved, args, schedule(Pass::kBackward));
}

void Layer::backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                             const Schedule& schedule) {
  backend_->backward_weights(saved, args, schedule);
}

const Schedule& Layer::schedule(Pass pass) const {
  return schedules_[static_cast<std::size_t>(pass)];
}

void Layer::synchronize() { backend_->synchronize(); }

const Problem& Layer::problem() const { return backend_->problem(); }
const Communicator& Layer::communicator() const { return backend_->communicator(); }
const PassStats& Layer::last_pass() const { return backend_->last_pass(); }
std::vector<TimelineEvent> Layer::take_timeline() { return backend_->take_timeline(); }

}  // namespace uniep
