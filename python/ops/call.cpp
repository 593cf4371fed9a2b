#include "call.h"

namespace uniep::ops {

Call::Call(const Tensor& key) {
  // The address says it without a look at memory. A copy of the tensor, as tests of ops and some
  // transformations make it, holds the same number.
  bound_ = layer_at(key.const_data_ptr());
  if (!bound_) bound_ = layer_of(number_in(key));
  if (bound_) lock_ = std::unique_lock(bound_->mutex);
  if (!bound_ || !bound_->layer) {
    refuse("the workspace of this call is closed; calls need one that is open");
  }
}

uniep_memory_needs Call::needs(std::int64_t rows) const {
  uniep_memory_needs needs{};
  check(uniep_layer_needs(layer(), rows, &needs));
  return needs;
}

namespace {
thread_local int last = 0;
}

void Call::check(int result) {
  if (result == 0) return;
  last = result;
  refuse(uniep_last_error());
}

int Call::last_failure() { return last; }

}  // namespace uniep::ops
