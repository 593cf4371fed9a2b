#include "reference/exact.h"

#include "reference/arithmetic.h"
#include "reference/layer.h"

namespace uniep::reference {

ExactResult exact(const LayerData& layer) { return exact(widen<double>(layer)); }

ExactResult exact(const Inputs<double>& inputs, const std::function<void()>& expert_done) {
  return run_layer<ExactArithmetic>(inputs, expert_done);
}

}  // namespace uniep::reference
