#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "uniep/backend.h"
#include "uniep/stage.h"

namespace uniep::tune {

/// A quantity that depends on another: straight lines between points, level beyond the ends.
struct Curve {
  struct Point {
    double at, value;
    friend bool operator==(const Point&, const Point&) = default;
  };
  std::vector<Point> points;  // ascending

  double operator()(double at) const;
  friend bool operator==(const Curve&, const Curve&) = default;
};

/// Seconds that one worker takes for a tile of a product, m x n summed over k: the sum of these
/// coefficients times their sizes. n counts both halves of an fc1 tile.
struct GemmCost {
  Stage stage = Stage::kFc1;
  int tile_n = 0;  ///< of schedules with this tile_n; 0: of all that have no entry of their own
  double fixed = 0;
  double per_mnk = 0;
  double per_mk = 0;
  double per_nk = 0;
  double per_mn = 0;
  friend bool operator==(const GemmCost&, const GemmCost&) = default;
};

/// Seconds that one worker takes for a task that moves data: of dispatch (items are pulls, bytes
/// those that it stores) and reduce (items are tokens, bytes those that it reads and writes).
struct MoveCost {
  double fixed = 0;
  double per_item = 0;
  double per_byte = 0;  ///< with `crowd` tasks or more at a time
  double alone = 1;     ///< what a byte costs a task with none beside it, as a share of that
  double crowd = 0;     ///< 0: a byte costs the same however many there are
  friend bool operator==(const MoveCost&, const MoveCost&) = default;
};

/// The link of a rank to its peers, in each direction. No bandwidth: transfers take no time.
struct LinkProfile {
  double bytes_per_s = 0;
  double latency_s = 0;
  /// A transfer holds the sender's and the receiver's side together, as the CPU's emulated link
  /// does; else each serves its transfers for itself.
  bool exclusive = false;
  double pull_bytes_per_s = 0;  ///< of pulls; 0: as bytes_per_s
  Curve push;                   ///< bytes/s over bytes in a row's segment; empty: as bytes_per_s
  friend bool operator==(const LinkProfile&, const LinkProfile&) = default;
};

/// How a worker notices that a counter has risen.
struct WakeProfile {
  double flag_s = 0;  ///< from the signal to the first look that can see it
  /// Looks of a waiting CPU thread: sleeps double from `first_sleep_s` to `longest_sleep_s`, each
  /// longer by `sleep_slack_s` than asked for. 0: it looks all the time.
  double first_sleep_s = 0;
  double longest_sleep_s = 0;
  double sleep_slack_s = 0;
  friend bool operator==(const WakeProfile&, const WakeProfile&) = default;
};

/// What the cost model knows of a machine. docs/tuning.md describes the file.
struct MachineProfile {
  std::string name;
  Backend backend = Backend::kCpu;
  std::string device;  ///< what `uniep info` calls the machine or its GPUs
  std::string source;  ///< where the figures come from

  int cores = 0;        ///< that all ranks share; 0: every worker has its own (a GPU's SMs)
  int workers = 0;      ///< of a rank with workers=0; 0: as the CPU backend counts them
  int lanes = 1;        ///< dispatch tasks that one worker has under way
  int push_depth = -1;  ///< pushed tiles under way; -1: the schedule's push_depth
  double padding = 0;   ///< what rows and columns that a tile lacks cost, as a share of others
  int k_step = 1;       ///< reductions are rounded up to a multiple of this
  /// Memory's cache that all workers of a rank share (a GPU's L2); 0: it holds everything.
  double cache_bytes = 0;

  std::vector<GemmCost> gemms;
  MoveCost dispatch;
  MoveCost reduce;
  MoveCost enter;  ///< of a pass, before its launches; bytes are those of the rank's tokens
  double launch_s = 0;
  double draw_s = 0;       ///< from one product of a worker to its next, however small they are
  double beside_link = 1;  ///< how much longer a product takes while its rank pulls
  LinkProfile link;
  WakeProfile wake;

  friend bool operator==(const MachineProfile&, const MachineProfile&) = default;
};

/// "uniep-profile-1" as JSON, and back; Error(kIo) says what is wrong with a text, and `origin`
/// where it comes from.
std::string profile_to_json(const MachineProfile& profile);
MachineProfile profile_from_json(std::string_view text, const std::string& origin);

MachineProfile read_profile(const std::string& path);

/// What is compiled in from profiles/: "h100" and "h200".
MachineProfile shipped_profile(std::string_view name);

}  // namespace uniep::tune
