#include "reference/compare.h"

#include <cmath>

namespace uniep::reference {

std::vector<double> to_double(std::span<const bf16> values) {
  std::vector<double> wide;
  wide.reserve(values.size());
  for (const bf16 v : values) wide.push_back(to_float(v));
  return wide;
}

std::vector<double> to_double(std::span<const float> values) {
  return {values.begin(), values.end()};
}

double relative_l2(std::span<const double> got, std::span<const double> want) {
  require(got.size() == want.size(), ErrorCode::kInvalidArgument, "comparing ", got.size(),
          " elements with ", want.size());
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return error == 0 ? 0 : std::sqrt(error / norm);
}

}  // namespace uniep::reference
