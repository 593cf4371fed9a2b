#pragma once

#include <compare>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "uniep/backend.h"
#include "uniep/problem.h"
#include "uniep/schedule.h"
#include "uniep/stage.h"

namespace uniep::tune {

/// What a schedule was tuned for. Two keys are the same situation where all fields are equal but
/// `skew`, of which the nearest is taken, and the arithmetic, as far as it has the same kernels
/// (`find_entry`). It has nothing of the parameter space: an entry is found
/// by the same key whatever axes there are.
struct TuneKey {
  Backend backend = Backend::kCpu;
  std::string device;   ///< CPU or GPU model, and the emulated link
  std::string driver;   ///< of a GPU; on the CPU the instruction set
  std::string library;  ///< version of uniep; the lookup falls back to others (ScheduleBook)
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  int num_experts = 0;
  int topk = 0;
  int ranks = 1;
  int hosts = 1;  ///< that they are on
  Pass pass = Pass::kForward;
  Save save = Save::kRows;   ///< Problem::save; what is not kept, backward has more to do for
  bool recompute_h = false;  ///< Problem::recompute_h
  Activation activation = Activation::kSwiglu;  ///< Problem::activation and so on
  Probs probs = Probs::kBefore;
  bool bias = false;
  int combine_groups = 1;
  CombinePartials combine_partials = CombinePartials::kFp32;
  int shared_experts = 0;
  bool shared_gate = true;  ///< of these; true where there are none
  std::int64_t backward_rows = 0;
  int gathered_hosts = 1;  ///< Problem::gathered_hosts: of a token's slots most are of none here
  bool in_waves = false;   ///< their tokens come in waves (Problem::first_host)
  bool slot_rows = false;
  int spare_sms = 0;        ///< SMs of a GPU that passes leave alone (UNIEP_SPARE_SMS)
  std::int64_t tokens = 0;  ///< of a rank, as token_bucket (schedule/open_sizes.h) gives them
  double skew = 0;

  friend bool operator==(const TuneKey&, const TuneKey&) = default;
  friend auto operator<=>(const TuneKey&, const TuneKey&) = default;
};

/// ",save=tokens,bias": what such a layer does otherwise than a plain one that keeps its rows.
/// Empty: nothing.
std::string variant_text(const TuneKey& key);

/// "8 ranks of ...": for reports.
std::string to_string(const TuneKey& key);

struct TunedEntry {
  TuneKey key;
  Schedule schedule;
  double ms = 0;          ///< as measured
  double default_ms = 0;  ///< of the backend's default, in the same run
  std::string date;
};

/// Entries, and what was not understood of a file: a sentence for each reason.
struct TunedEntries {
  std::vector<TunedEntry> entries;
  std::vector<std::string> problems;
};

/// Reads schema "uniep-tuned-1". Never throws: what cannot be used is left out and reported. Axes
/// that an entry lacks have their neutral value (`AxisInfo`); an entry with an axis or value that
/// is unknown here is left out.
TunedEntries parse_tuned(std::string_view text, const std::string& origin);

/// The key of a layer with SwiGLU, probabilities ahead of fc2, no biases and no shared experts;
/// nothing where the key's experts are plain already (with shared ones, too), or have no gate, so
/// that their fc1 is half as wide.
std::optional<TuneKey> key_of_plain_experts(TuneKey key);

/// The entry for a situation: of the arithmetic itself, else of another one with the same kernels,
/// namely one that is not plain either (base/plain_experts.h), and has a gate and biases where this
/// one has; of these the nearest in skew. Null: none.
const TunedEntry* find_entry(const std::vector<TunedEntry>& entries, const TuneKey& key);

/// The tuned schedules of a user on this machine: a file that any number of processes share.
class TuneCache {
 public:
  /// UNIEP_TUNE_CACHE, or uniep/tuned.json in the user's cache folder; empty: there is none.
  static std::string default_path();

  /// Without a path there is nothing to load, and nothing can be stored.
  explicit TuneCache(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  TunedEntries load() const;
  /// Throws Error(kIo) where `store` could not, before the search whose result it is to keep.
  void require_storable() const;
  /// Adds the entry, in the place of one for the same key. Entries that are not understood stay as
  /// they are: another version of uniep may have written them. A damaged file, or another
  /// program's, is moved aside, and the sentence that says so returned. One of another version's
  /// schema, and one that cannot be read, stay as they are, which is an Error(kIo).
  std::vector<std::string> store(const TunedEntry& entry) const;
  /// Removes the file, under its lock, and returns how many entries it had; nothing where there is
  /// no file. What is not a cache of this version stays as it is, which is an Error(kIo).
  std::optional<std::size_t> clear() const;

 private:
  void require_path() const;

  std::string path_;
};

}  // namespace uniep::tune
