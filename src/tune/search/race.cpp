#include "tune/search/race.h"

#include <algorithm>
#include <cmath>

#include "base/quantile.h"

namespace uniep::tune {
namespace {

/// The median of how many times as long `a` took as `b`, round by round, and how far off that may
/// be: four times the standard error that the spread of rounds around the median stands for. Of few
/// rounds that is a guess, good enough for whom to measure on.
struct Ratio {
  double middle = 1;
  double error = 0;
};

Ratio ratio_of(const std::vector<double>& a, const std::vector<double>& b) {
  const std::size_t rounds = std::min(a.size(), b.size());
  std::vector<double> logs;
  for (std::size_t i = 0; i < rounds; ++i) logs.push_back(std::log(a[i] / b[i]));
  if (rounds == 0) return {};
  const double middle = median(logs);
  std::vector<double> distances;
  for (const double l : logs) distances.push_back(std::abs(l - middle));
  // 1.48 median distances are a standard deviation, of a median's error there are 1.25.
  const double deviation = 1.48 * median(distances);
  const double error = 4 * 1.25 * deviation / std::sqrt(static_cast<double>(rounds));
  return {std::exp(middle), error};
}

}  // namespace

Race::Race(std::size_t candidates, const RaceOptions& options)
    : options_(options), candidates_(candidates), rng_(options.seed) {
  begin_round();
}

std::size_t Race::running() const {
  return static_cast<std::size_t>(std::ranges::count_if(candidates_, &Candidate::running));
}

void Race::begin_round() {
  order_.clear();
  for (std::size_t i = 0; i < candidates_.size(); ++i) {
    const bool reference = i == 0 && measures_reference();
    if (candidates_[i].running || reference) order_.push_back(i);
  }
  std::ranges::shuffle(order_, rng_);
  if (order_.empty() || running() == 0) over_ = true;
}

std::optional<std::size_t> Race::next() {
  if (over_) return std::nullopt;
  return order_.back();
}

void Race::record(std::size_t candidate, double seconds) {
  candidates_[candidate].seconds.push_back(seconds);
  std::erase(order_, candidate);
  if (order_.empty()) end_round();
}

void Race::reject(std::size_t candidate) {
  candidates_[candidate].running = false;
  candidates_[candidate].rejected = true;
  std::erase(order_, candidate);
  if (order_.empty()) end_round();
}

double Race::median(std::size_t candidate) const {
  return uniep::median(candidates_[candidate].seconds);
}

double Race::speedup(std::size_t candidate) const {
  return ratio_of(candidates_[0].seconds, candidates_[candidate].seconds).middle;
}

bool Race::is_faster(std::size_t candidate) const {
  if (candidate == 0 || candidates_[candidate].rejected) return false;
  const std::vector<double>& reference = candidates_[0].seconds;
  const std::vector<double>& own = candidates_[candidate].seconds;
  const std::size_t rounds = std::min(reference.size(), own.size());
  std::size_t lost = 0;
  for (std::size_t i = 0; i < rounds; ++i) lost += own[i] < reference[i] ? 0 : 1;
  return !by_chance(rounds, lost);
}

int Race::rounds_to_tell() const {
  std::size_t rounds = 0;
  while (by_chance(rounds, 0)) ++rounds;
  return static_cast<int>(rounds);
}

/// The sign test. Of two that are equally fast either wins a round with probability 1/2, since a
/// round's order is random, whatever noise there is; so losing at most `lost` of `rounds` has a
/// probability that needs no estimate of the noise, which few rounds cannot give. Whoever is asked
/// about was picked for being in front, so all rivals together may be called faster wrongly with a
/// probability of kWrong.
bool Race::by_chance(std::size_t rounds, std::size_t lost) const {
  constexpr double kWrong = 0.05;
  const double n = static_cast<double>(rounds);
  double probability = 0;
  for (std::size_t i = 0; i <= lost; ++i) {
    const double k = static_cast<double>(i);
    const double log_ways = std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1);
    probability += std::exp(log_ways - n * std::log(2.0));
  }
  const double rivals = static_cast<double>(std::max<std::size_t>(candidates_.size(), 2) - 1);
  return rivals * probability > kWrong;
}

bool Race::is_behind(const Candidate& c, const Candidate& best) const {
  const Ratio ratio = ratio_of(c.seconds, best.seconds);
  return std::log(ratio.middle) > std::max(ratio.error, 1e-9);
}

bool Race::is_close(const Candidate& c, const Candidate& best) const {
  const Ratio ratio = ratio_of(c.seconds, best.seconds);
  return std::abs(std::log(ratio.middle)) + ratio.error <= options_.close;
}

void Race::end_round() {
  ++round_;
  const std::vector<std::size_t> order = ranking();
  if (order.empty()) {
    over_ = true;
    return;
  }
  const std::size_t best = order.front();
  leave_behind(best);
  decided_ = round_ >= options_.min_rounds && is_settled(best);
  over_ = decided_ || round_ >= options_.max_rounds;
  if (!over_) begin_round();
}

void Race::leave_behind(std::size_t best) {
  // Far behind needs no statistics, and measuring it is dear.
  constexpr double kHopeless = 1.5;
  for (std::size_t i = 0; i < candidates_.size(); ++i) {
    Candidate& c = candidates_[i];
    if (!c.running || i == best) continue;
    const bool hopeless = round_ >= 2 && std::ranges::min(c.seconds) > kHopeless * median(best);
    if (hopeless || (round_ >= options_.min_rounds && is_behind(c, candidates_[best]))) {
      c.running = false;
    }
  }
}

bool Race::is_settled(std::size_t best) const {
  for (std::size_t i = 0; i < candidates_.size(); ++i) {
    if (i == best || !candidates_[i].running) continue;
    if (!is_close(candidates_[i], candidates_[best])) return false;
  }
  // That a reference was left behind is no proof that the best is faster: that takes more rounds,
  // which are short with so few left.
  return best == 0 || !measures_reference() || is_faster(best) ||
         is_close(candidates_[0], candidates_[best]);
}

std::vector<std::size_t> Race::ranking() const {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < candidates_.size(); ++i) {
    if (!candidates_[i].rejected && !candidates_[i].seconds.empty()) order.push_back(i);
  }
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
    if (contends(a) != contends(b)) return contends(a);
    return measures_reference() ? speedup(a) > speedup(b) : median(a) < median(b);
  });
  return order;
}

}  // namespace uniep::tune
