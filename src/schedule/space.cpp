#include "schedule/space.h"

#include <algorithm>

#include "base/check.h"
#include "base/quotes.h"
#include "schedule/open_sizes.h"

namespace uniep {
namespace {

std::size_t axis_named(std::string_view name) {
  const auto all = axes();
  const auto axis = std::ranges::find(all, name, [](const Axis& a) { return a.info.name; });
  require(axis != all.end(), ErrorCode::kInvalidArgument, "the space has no axis ", in_quotes(name),
          "; uniep info lists them");
  return static_cast<std::size_t>(axis - all.begin());
}

/// The first piece of `text` up to `separator`, which is taken away.
std::string_view next_piece(std::string_view& text, char separator) {
  const std::string_view piece = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(text.size(), piece.size() + 1));
  return piece;
}

}  // namespace

Space::Space(const Problem& problem, Pass pass, const Place& place)
    : problem_(problem), pass_(pass), place_(place) {
  for (const Axis& axis : axes()) {
    const auto forced = forced_value(axis);
    values_.push_back(forced ? std::vector{*forced} : axis.candidates(place.backend));
  }
}

/// The value that the problem gives the axis whatever a schedule says; nothing where it does not.
std::optional<int> Space::forced_value(const Axis& axis) const {
  const auto runs_with = [&](int value) {
    Schedule s = default_schedule(place_.backend);
    axis.set(s, value);
    return axis.get(with_forced_axes(s, problem_, pass_));
  };
  const int value = runs_with(axis.info.min);
  if (axis.info.min == axis.info.max || runs_with(axis.info.max) != value) return std::nullopt;
  return value;
}

void Space::restrict_to(std::string_view text) {
  while (!text.empty()) {
    std::string_view item = next_piece(text, ',');
    const std::size_t axis = axis_named(next_piece(item, '='));
    std::vector<int> values;
    do {
      const AxisInfo& info = axes()[axis].info;
      Schedule in_range;
      const int value = parse_axis_value(info, next_piece(item, '|'));
      set_axis(in_range, axis, value);
      if (std::ranges::find(values, value) == values.end()) values.push_back(value);
    } while (!item.empty());
    if (!forced_value(axes()[axis])) values_[axis] = std::move(values);
  }
}

double Space::combinations() const {
  double product = 1;
  for (const auto& values : values_) product *= static_cast<double>(values.size());
  return product;
}

bool Space::has_value(std::size_t axis, int value) const {
  return std::ranges::find(values_[axis], value) != values_[axis].end();
}

bool Space::allows(const Schedule& schedule) const {
  for (std::size_t i = 0; i < values_.size(); ++i) {
    if (!has_value(i, axis_value(schedule, i))) return false;
  }
  return !invalid_reason(schedule, problem_, place_);
}

/// Leaves a size open that is what it would then be.
void Space::leave_open(Schedule& schedule, std::string_view name) const {
  const std::size_t axis = axis_named(name);
  Schedule open = schedule;
  axes()[axis].set(open, 0);
  const bool is_same =
      schedule_of_pass(open, problem_, pass_) == schedule_of_pass(schedule, problem_, pass_);
  if (has_value(axis, 0) && is_same) schedule = open;
}

/// With the values of which the problem leaves no choice.
Schedule Space::as_it_runs(const Schedule& schedule) const {
  Schedule s = schedule;
  const Schedule forced = with_forced_axes(s, problem_, pass_);
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const int value = axes()[i].get(forced);
    if (has_value(i, value)) axes()[i].set(s, value);
  }
  return s;
}

Schedule Space::canonical(const Schedule& schedule) const {
  const Schedule runs = as_it_runs(schedule);
  Schedule s = runs;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const Axis& axis = axes()[i];
    if (axis.matters == nullptr || axis.matters(runs, pass_, place_.backend)) continue;
    const int usual = axis.default_value(place_.backend);
    axis.set(s, has_value(i, usual) ? usual : values_[i].front());
  }
  // Counters of more rows than a tile has are not used (PassView::rows_per_counter).
  if (s.ready_rows > s.tile_m && has_value(axis_named("ready_rows"), s.tile_m)) {
    s.ready_rows = s.tile_m;
  }
  leave_open(s, "pull_tokens");
  leave_open(s, "token_block");
  leave_open(s, "wgrad_run");
  return s;
}

void Space::for_each(const std::function<void(const Schedule&)>& f) const {
  std::vector<std::size_t> digit(values_.size(), 0);
  Schedule s;
  for (std::size_t i = 0; i < values_.size(); ++i) axes()[i].set(s, values_[i][0]);
  for (;;) {
    if (canonical(s) == s && allows(s)) f(s);
    std::size_t i = values_.size();  // the last axis turns fastest
    while (i > 0 && ++digit[i - 1] == values_[i - 1].size()) {
      digit[i - 1] = 0;
      axes()[i - 1].set(s, values_[i - 1][0]);
      --i;
    }
    if (i == 0) return;
    axes()[i - 1].set(s, values_[i - 1][digit[i - 1]]);
  }
}

std::int64_t Space::size() const {
  std::int64_t count = 0;
  for_each([&](const Schedule&) { ++count; });
  return count;
}

Schedule Space::sample(Rng& rng) const {
  constexpr int kTries = 10000;
  for (int i = 0; i < kTries; ++i) {
    Schedule s;
    for (std::size_t a = 0; a < values_.size(); ++a) {
      axes()[a].set(s, values_[a][static_cast<std::size_t>(rng() % values_[a].size())]);
    }
    s = canonical(s);
    if (allows(s)) return s;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "the space has no point that the constraints allow; one with wider axes is accepted");
}

std::vector<Schedule> Space::neighbours(const Schedule& schedule) const {
  std::vector<Schedule> found;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    for (const int value : values_[i]) {
      Schedule s = schedule;
      axes()[i].set(s, value);
      s = canonical(s);
      const bool is_new = s != schedule && std::ranges::find(found, s) == found.end();
      if (is_new && allows(s)) found.push_back(s);
    }
  }
  return found;
}

}  // namespace uniep
