#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/expert_numbers.h"
#include "cuda/layer_memory.h"
#include "cuda/plan_kernels.h"
#include "group/cuda/cuda_communicator.h"
#include "uniep/layer.h"

namespace uniep::cuda {

/// The ranks of one layer as one of them sees them: who they are, what they agree on, and the
/// memory that all of them reach.
class LayerGroup {
 public:
  /// Collective. Where a rank refuses what it was given, throws the same Error on all.
  LayerGroup(const Problem& problem, Communicator communicator, const LayerOptions& options);

  const Problem& problem() const { return problem_; }
  const Communicator& communicator() const { return communicator_; }
  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  int device() const { return comm_.device(); }
  int limit_ms() const { return limit_ms_; }  ///< of every wait
  ExpertNumbers experts() const { return expert_numbers(problem_, size()); }

  /// Collective: what `act` throws on one rank, all throw.
  void agree(const std::string& call, const std::function<void()>& act) const;

  // In symmetric memory, as mapped here.
  std::byte* heap(int rank) const;        ///< SymmetricLayout
  CallState* call_state(int rank) const;  ///< see refusal.h
  std::span<std::byte> counters() const;  ///< of this rank, that peers add to
  const PlanExchange& exchange() const { return exchange_; }

 private:
  PlanExchange make_exchange() const;

  const Communicator communicator_;
  CudaCommunicator& comm_;
  const int limit_ms_;
  const Problem problem_;
  const LayerSymmetricLayout layout_;
  const std::unique_ptr<SymmetricMemory> memory_;
  const PlanExchange exchange_;
};

}  // namespace uniep::cuda
