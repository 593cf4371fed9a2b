#pragma once

#include <mutex>
#include <utility>

#include "plan/routing_fault.h"

namespace uniep::cuda {

/// The fault that an accessor of a layer's plan has thrown, until the layer takes it: it need not
/// be thrown again. Accessors may be called on any thread, and when the layer has ended.
class ToldFaults {
 public:
  void tell(const RoutingFault& fault) {
    const std::scoped_lock lock(mutex_);
    fault_ = fault;
  }
  RoutingFault take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(fault_, {});
  }

 private:
  std::mutex mutex_;
  RoutingFault fault_;
};

}  // namespace uniep::cuda
