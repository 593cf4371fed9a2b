#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "base/layer_data.h"
#include "step.h"

namespace uniep::tool {

/// A tensor may lie this far (relative L2 norm) from the float64 result: about three times as far
/// as the roundings of the numerics contract take it.
inline constexpr double kMaxRelativeL2 = 1e-2;

/// What is known of the correctness of one tensor.
struct TensorCheck {
  std::string name;
  Pass pass = Pass::kForward;
  std::int64_t elements = 0;
  std::int64_t differing = 0;       ///< elements whose bits the baseline does not have
  std::int64_t first_differs = -1;  ///< index of the first of these
  double relative_l2 = 0;           ///< from the float64 result

  bool ok() const { return differing == 0 && relative_l2 <= kMaxRelativeL2; }
};

/// Schedule `sequential` with the tiles of another one: a backend may have only these.
Schedule sequential_like(const Schedule& schedule);

/// Compares the result of a run with that of schedule `sequential` on one rank, which `run`
/// computes, bit by bit, and with the float64 oracle.
std::vector<TensorCheck> check_result(const LayerData& layer, const LayerResult& result,
                                      const StepOptions& options,
                                      const StepRunner& run = run_steps);

bool all_ok(const std::vector<TensorCheck>& checks);

/// The table of a check.
void print_checks(std::ostream& out, const std::vector<TensorCheck>& checks);

/// One line: what was found, or which tensors differ and from which element on.
std::string verdict(const std::vector<TensorCheck>& checks);

}  // namespace uniep::tool
