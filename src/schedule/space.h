#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string_view>
#include <vector>

#include "schedule/axes.h"
#include "schedule/constraints.h"

namespace uniep {

/// The points of the parameter space that are worth trying for one direction of a problem at one
/// place: every combination of the axes' candidates that the constraints allow. Of points that mean
/// the same pass, because they differ in axes that have no effect there, one stands for all.
class Space {
 public:
  using Rng = std::mt19937_64;

  Space(const Problem& problem, Pass pass, const Place& place);

  /// Tries only the values of "axis=value|value,axis=value": an axis that it names keeps these, but
  /// for those of which the problem leaves no choice.
  /// Throws Error(kInvalidArgument) for what is no axis or no value.
  void restrict_to(std::string_view text);

  /// Combinations of values, those that constraints exclude or that mean the same included.
  double combinations() const;

  bool allows(const Schedule& schedule) const;
  /// The point that stands for all which mean the same pass.
  Schedule canonical(const Schedule& schedule) const;

  /// Every point once, in a fixed order. For spaces that were made small.
  void for_each(const std::function<void(const Schedule&)>& f) const;
  std::int64_t size() const;

  Schedule sample(Rng& rng) const;
  /// The points that differ in one axis.
  std::vector<Schedule> neighbours(const Schedule& schedule) const;

 private:
  std::optional<int> forced_value(const Axis& axis) const;
  bool has_value(std::size_t axis, int value) const;
  Schedule as_it_runs(const Schedule& schedule) const;
  void leave_open(Schedule& schedule, std::string_view axis) const;

  Problem problem_;
  Pass pass_;
  Place place_;
  std::vector<std::vector<int>> values_;  // by axis
};

}  // namespace uniep
