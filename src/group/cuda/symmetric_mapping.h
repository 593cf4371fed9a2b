#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/agreement.h"
#include "group/cuda/symmetric_memory.h"

namespace uniep::cuda {

/// Owns this rank's memory and its mappings of the peers'.
class SymmetricMemory::Mapping {
 public:
  virtual ~Mapping() = default;
  virtual void* local() const = 0;
  virtual std::vector<void*> peers() const = 0;  // by rank
  virtual const char* kind() const = 0;

  /// CallerMemory::release, from when all has been set up.
  std::function<void()> release;
};

/// What a collective set-up is made of.
struct SymmetricRequest {
  Bootstrap& bootstrap;
  int rank;
  int size;
  std::int64_t bytes;
  int limit_ms;
  CallerMemory caller;
  bool shares_device;
};

// Collective; where a rank fails, all throw the same Error.
std::unique_ptr<SymmetricMemory::Mapping> make_nccl_mapping(const SymmetricRequest& request);
std::unique_ptr<SymmetricMemory::Mapping> make_ipc_mapping(const SymmetricRequest& request);
std::unique_ptr<SymmetricMemory::Mapping> make_caller_mapping(const SymmetricRequest& request);

/// Collective: every rank does `work`, which may throw, and hears of all ranks' results or of the
/// first failure.
template <class Work>
std::vector<std::string> together(Bootstrap& bootstrap, int limit_ms, const std::string& call,
                                  const Work& work) {
  std::string result;
  std::exception_ptr error;
  try {
    result = work();
  } catch (...) {
    error = std::current_exception();
  }
  const auto report = [&] {
    if (error) std::rethrow_exception(error);
  };
  return agree(bootstrap, limit_ms, Stage::kPlan, call, report, result);
}

}  // namespace uniep::cuda
