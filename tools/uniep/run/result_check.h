#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "base/layer_data.h"
#include "run/step.h"

namespace uniep::tool {

/// What is known of the correctness of one tensor.
struct TensorCheck {
  std::string name;
  Pass pass = Pass::kForward;
  std::int64_t elements = 0;
  std::int64_t differing = 0;       ///< elements whose bits the baseline does not have
  std::int64_t first_differs = -1;  ///< index of the first of these
  double relative_l2 = 0;           ///< from the float64 result
  double limit = 0;                 ///< of relative_l2: what the contract's roundings make likely
  /// Elements that are infinite or NaN, where all of these are so in the reference as well, which
  /// rounds as the contract says. Then no distance from float64 is asked for.
  std::int64_t overflows = 0;

  bool ok() const { return differing == 0 && (overflows > 0 || relative_l2 <= limit); }
};

/// Schedule `sequential` with the tiles of another one: a backend may have only these.
Schedule sequential_like(const Schedule& schedule);

/// Thrown by check_result where an Interrupt was requested meanwhile.
struct CheckInterrupted {};

/// Compares the result of a run with that of schedule `sequential` on one rank, which `run`
/// computes, bit by bit, and with the float64 oracle, whose errors by rounding it adds up as well.
std::vector<TensorCheck> check_result(const LayerData& layer, const LayerResult& result,
                                      const StepOptions& options,
                                      const StepRunner& run = run_steps);

bool all_ok(const std::vector<TensorCheck>& checks);

/// The table of a check.
void print_checks(std::ostream& out, const std::vector<TensorCheck>& checks);

/// One line: what was found, or which tensors differ and from which element on.
std::string verdict(const std::vector<TensorCheck>& checks);

}  // namespace uniep::tool
