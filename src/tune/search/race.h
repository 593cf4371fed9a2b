#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

namespace uniep::tune {

struct RaceOptions {
  /// Candidate 0 is measured in every round, even when it was left behind: the others are compared
  /// with it, so that a machine that slows down meanwhile does no harm.
  bool keep_reference = false;
  int min_rounds = 5;  ///< before anybody is left behind
  int max_rounds = 40;
  double close =
      0.005;  ///< those that are no further from the best than this share need not be told apart
  std::uint64_t seed = 1;
};

/// Decides which of several candidates to measure next, until the fastest is separated from noise.
/// Rounds: each candidate that is still in the race once, in random order, so that whatever drifts
/// or disturbs meets all alike. Candidates are compared round by round with the best one; who is
/// slower by more than chance allows is left behind. Knows nothing of schedules or clocks.
class Race {
 public:
  Race(std::size_t candidates, const RaceOptions& options);

  /// The candidate to measure; nothing where the race is over.
  std::optional<std::size_t> next();
  /// The time of the candidate that `next` named.
  void record(std::size_t candidate, double seconds);
  /// Takes a candidate out for good.
  void reject(std::size_t candidate);

  bool decided() const { return decided_; }  ///< rather than out of rounds
  int rounds() const { return round_; }      ///< that are complete
  std::size_t running() const;
  bool rejected(std::size_t candidate) const { return candidates_[candidate].rejected; }
  const std::vector<double>& seconds(std::size_t candidate) const {
    return candidates_[candidate].seconds;
  }
  double median(std::size_t candidate) const;
  /// How many times as long the reference takes: the median over rounds.
  double speedup(std::size_t candidate) const;
  /// Whether that is more than chance would make the best of so many candidates.
  bool is_faster(std::size_t candidate) const;
  /// Rounds before which none can be called faster, whatever was measured: it grows with the
  /// logarithm of the number of candidates.
  int rounds_to_tell() const;

  /// Measured candidates that were not rejected, fastest first; those that are still running come
  /// before those that were left behind.
  std::vector<std::size_t> ranking() const;

 private:
  struct Candidate {
    std::vector<double> seconds;  // a round each, from the first on
    bool running = true;
    bool rejected = false;
  };

  void begin_round();
  void end_round();
  bool measures_reference() const {
    return options_.keep_reference && !candidates_.empty() && !candidates_[0].rejected;
  }
  /// A reference that was left behind may have been so by chance, and is measured on.
  bool contends(std::size_t i) const {
    return candidates_[i].running || (i == 0 && measures_reference());
  }
  bool is_behind(const Candidate& c, const Candidate& best) const;
  bool is_close(const Candidate& c, const Candidate& best) const;
  bool by_chance(std::size_t rounds, std::size_t lost) const;
  void leave_behind(std::size_t best);
  bool is_settled(std::size_t best) const;

  RaceOptions options_;
  std::vector<Candidate> candidates_;
  std::vector<std::size_t> order_;  // what is left of this round, last first
  int round_ = 0;
  bool decided_ = false;
  bool over_ = false;
  std::mt19937_64 rng_;
};

}  // namespace uniep::tune
