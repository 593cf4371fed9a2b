#include "reference/exact.h"

#include "reference/arithmetic.h"
#include "reference/layer.h"

namespace uniep::reference {

ExactResult exact(const LayerData& layer) { return exact(widen<double>(layer)); }

ExactResult exact(const Inputs<double>& inputs) { return run_layer<ExactArithmetic>(inputs); }

}  // namespace uniep::reference
