#include "cuda/layer_group.h"

#include <utility>

#include "base/check.h"
#include "base/cuda/driver.h"
#include "base/env.h"
#include "cuda/memory_needs.h"
#include "group/agreement.h"
#include "layer/memory_arguments.h"
#include "layer/options.h"

namespace uniep::cuda {
namespace {

const char* text_of(const LayerMemory& memory) {
  if (!memory.peers.empty()) return " with memory.peers";
  return memory.symmetric.empty() ? "" : " with memory.symmetric";
}

/// Which erf activations have, if they have one.
const char* text_of_erf(Activation activation, CudaErf erf) {
  const bool has_erf = activation == Activation::kGeglu || activation == Activation::kGelu;
  return has_erf && erf == CudaErf::kSince13_2 ? " with the erf of CUDA 13.2" : "";
}

/// UNIEP_SPARE_SMS as it is set: values out of range are refused by all ranks together.
std::string text_of_spare_sms() {
  const std::string spare = env_text("UNIEP_SPARE_SMS").value_or("0");
  return spare == "0" ? "" : cat(" with UNIEP_SPARE_SMS=", spare);
}

/// The problem, when all ranks want such a layer.
Problem agreed(const Problem& problem, CudaCommunicator& comm, int limit_ms,
               const LayerOptions& options) {
  const std::string call = cat("layer ", to_string(problem), text_of(options.memory),
                               text_of_erf(problem.activation, options.erf), text_of_spare_sms());
  agree(comm.bootstrap(), limit_ms, Stage::kPlan, call, [&] {
    validate(problem, comm.size());
    validate(options);
    (void)sms_to_hold(comm.device());  // throws where none are left
    check_layer_memory(memory_needs(problem, comm.size()), options.memory, comm.rank(),
                       comm.size());
  });
  return problem;
}

CallerMemory caller_memory(const LayerMemory& memory) {
  return {.local = memory.symmetric.data(),
          .peers = {memory.peers.begin(), memory.peers.end()},
          .release = memory.release};
}

}  // namespace

LayerGroup::LayerGroup(const Problem& problem, Communicator communicator,
                       const LayerOptions& options)
    : communicator_(std::move(communicator)),
      comm_(dynamic_cast<CudaCommunicator&>(*communicator_.impl())),
      limit_ms_(wait_limit_ms(options)),
      problem_(agreed(problem, comm_, limit_ms_, options)),
      layout_(problem_, size()),
      memory_(comm_.symmetric_memory(layout_.bytes, limit_ms_, caller_memory(options.memory))),
      exchange_(make_exchange()) {}

PlanExchange LayerGroup::make_exchange() const {
  PlanExchange exchange{.layout = PlanExchangeLayout(problem_, size())};
  for (int r = 0; r < size(); ++r) {
    exchange.parts[r] = static_cast<std::byte*>(memory_->peer(r)) + layout_.exchange;
  }
  return exchange;
}

void LayerGroup::agree(const std::string& call, const std::function<void()>& act) const {
  uniep::agree(comm_.bootstrap(), limit_ms_, Stage::kPlan, call, act);
}

std::byte* LayerGroup::heap(int rank) const {
  return static_cast<std::byte*>(memory_->peer(rank)) + layout_.passes;
}

CallState* LayerGroup::call_state(int rank) const {
  return reinterpret_cast<CallState*>(static_cast<std::byte*>(memory_->peer(rank)) + layout_.calls);
}

std::span<std::byte> LayerGroup::counters() const {
  const SymmetricLayout symmetric(problem_, size());
  std::byte* const own = static_cast<std::byte*>(memory_->local()) + layout_.passes;
  return {own + symmetric.first_counter,
          static_cast<std::size_t>(symmetric.bytes - symmetric.first_counter)};
}

}  // namespace uniep::cuda
