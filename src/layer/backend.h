#pragma once

#include "base/usage.h"
#include "uniep/error.h"
#include "uniep/layer.h"

namespace uniep {

/// What a backend implements; Layer forwards to it.
class LayerBackend {
 public:
  virtual ~LayerBackend() = default;
  virtual RoutingPlan plan(std::span<const std::int32_t> topk_ids, const CallOptions& options) = 0;
  // `options.schedule` is there in passes.
  virtual Saved forward(const RoutingPlan& plan, const ForwardArgs& args,
                        const CallOptions& options) = 0;
  virtual Saved restore(const StepMemory& memory, std::int64_t tokens, bool flagged) = 0;
  virtual void backward(const Saved& saved, const BackwardArgs& args,
                        const CallOptions& options) = 0;
  virtual void backward_data(Saved& saved, const BackwardDataArgs& args,
                             const CallOptions& options) = 0;
  virtual void backward_weights(Saved& saved, const BackwardWeightsArgs& args,
                                const CallOptions& options) = 0;
  /// In place of a collective call that this rank cannot even begin: tells the others, and throws.
  /// `options`: of that call, as far as they are known.
  [[noreturn]] virtual void refuse_call(const Error& error, const CallOptions& options) = 0;
  virtual const Problem& problem() const = 0;
  virtual int limit_ms() const = 0;  ///< LayerOptions::timeout_ms, or what stands for it
  virtual const Communicator& communicator() const = 0;
  virtual const PassStats& last_pass() const = 0;
  virtual std::vector<TimelineEvent> take_timeline() = 0;
  virtual void synchronize() = 0;

  Usage usage;
};

}  // namespace uniep
