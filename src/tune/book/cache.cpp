#include "tune/book/cache.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <utility>

#include "base/activation_names.h"
#include "base/check.h"
#include "base/env.h"
#include "base/files.h"
#include "base/plain_experts.h"
#include "base/problem_limits.h"
#include "base/quotes.h"
#include "base/rank_limits.h"
#include "schedule/axes.h"
#include "tune/files/json_fields.h"
#include "tune/files/shared_files.h"

namespace uniep::tune {
namespace {

constexpr const char* kSchema = "uniep-tuned-1";
constexpr const char* kSchemas = "uniep-tuned-";  // of all versions
constexpr const char* kEmptyFile = R"({"schema": "uniep-tuned-1", "entries": []})";

Json axes_json(const Schedule& schedule) {
  Json json = Json::object();
  for (const Axis& axis : axes()) {
    json[std::string(axis.info.name)] = axis_value_text(axis.info, axis.get(schedule));
  }
  return json;
}

/// An entry that lacks an axis is older than it, and was measured at its neutral value. One that
/// names an axis which is unknown here is of a newer program, and is not guessed.
Schedule schedule_from(Fields fields, Backend backend) {
  Schedule schedule = neutral_schedule(backend);
  for (std::size_t i = 0; i < axes().size(); ++i) {
    const AxisInfo& info = axes()[i].info;
    const std::string neutral = axis_value_text(info, axis_value(schedule, i));
    const std::string text = fields.text_or(std::string(info.name), neutral);
    set_axis(schedule, i, parse_axis_value(info, text));
  }
  fields.refuse_others();
  return schedule;
}

Json entry_json(const TunedEntry& e) {
  return {{"backend", name(e.key.backend)},
          {"device", e.key.device},
          {"driver", e.key.driver},
          {"library", e.key.library},
          {"hidden", e.key.hidden},
          {"intermediate", e.key.intermediate},
          {"experts", e.key.num_experts},
          {"topk", e.key.topk},
          {"ranks", e.key.ranks},
          {"hosts", e.key.hosts},
          {"pass", name(e.key.pass)},
          {"save", name(e.key.save)},
          {"recompute_h", e.key.recompute_h ? "yes" : "no"},
          {"activation", name(e.key.activation)},
          {"probs", name(e.key.probs)},
          {"bias", e.key.bias ? "yes" : "no"},
          {"combine_groups", e.key.combine_groups},
          {"combine_partials", name(e.key.combine_partials)},
          {"shared", e.key.shared_experts},
          {"shared_gate", e.key.shared_gate ? "yes" : "no"},
          {"backward_rows", e.key.backward_rows},
          {"gathered_hosts", e.key.gathered_hosts},
          {"in_waves", e.key.in_waves ? "yes" : "no"},
          {"slot_rows", e.key.slot_rows ? "yes" : "no"},
          {"spare_sms", e.key.spare_sms},
          {"tokens", e.key.tokens},
          {"skew", e.key.skew},
          {"schedule", axes_json(e.schedule)},
          {"ms", e.ms},
          {"default_ms", e.default_ms},
          {"date", e.date}};
}

template <class T>
T one_of(const std::string& text, const char* key, T a, T b) {
  require(text == name(a) || text == name(b), ErrorCode::kIo, key, " is ", in_quotes(text), "; ",
          name(a), " and ", name(b), " are accepted");
  return text == name(a) ? a : b;
}

Save save_from(const std::string& text) {
  for (const Save save : kSaves) {
    if (text == name(save)) return save;
  }
  throw Error(ErrorCode::kIo,
              cat("save is ", in_quotes(text), "; rows, tokens and none are accepted"));
}

/// Whether a field says yes; `missing`: what an entry that lacks it says.
bool truth_or(Fields& fields, const char* key, const char* missing) {
  const std::string text = fields.text_or(key, missing);
  require(text == "yes" || text == "no", ErrorCode::kIo, key, " is ", in_quotes(text),
          "; yes and no are accepted");
  return text == "yes";
}

constexpr Accepted kShared{[](double v) { return v >= 0 && v < kMaxTopk && v == std::floor(v); },
                           "a whole number from 0 to 15 is accepted"};
constexpr Accepted kHosts{
    [](double v) { return v >= 1 && v <= kMaxGroupRanks && v == std::floor(v); },
    "a whole number from 1 to 64 is accepted"};
static_assert(kMaxGroupRanks == 64);
constexpr Accepted kGroups{
    [](double v) { return v >= 1 && v <= kMaxNumExperts && v == std::floor(v); },
    "a whole number from 1 to 65536 is accepted"};
static_assert(kMaxNumExperts == 65536);
constexpr Accepted kGatheredHosts{
    [](double v) { return v >= 1 && v <= kMaxGatheredHosts && v == std::floor(v); },
    "a whole number from 1 to 4096 is accepted"};
static_assert(kMaxGatheredHosts == 4096);

constexpr Accepted kRows{[](double v) {
                           return v >= 0 && v <= static_cast<double>(kMaxCapacityRows) &&
                                  v == std::floor(v);
                         },
                         "a whole number from 0 to 2147483647 is accepted"};

/// What came later than the schema: entries that lack them are of layers that keep everything, ...
void read_kept(Fields& fields, TuneKey& key) {
  key.save = save_from(fields.text_or("save", name(Save::kRows)));
  key.recompute_h = truth_or(fields, "recompute_h", "no");
  key.backward_rows = static_cast<std::int64_t>(fields.number_or("backward_rows", kRows, 0));
}

/// ... and of the arithmetic that there was.
void read_arithmetic(Fields& fields, TuneKey& key) {
  const std::string activation = fields.text_or("activation", name(Activation::kSwiglu));
  const auto known = activation_named(activation);
  require(known.has_value(), ErrorCode::kIo, "activation is ", in_quotes(activation), "; ",
          activation_names(), " are accepted");
  key.activation = *known;
  const std::string probs = fields.text_or("probs", name(Probs::kBefore));
  key.probs = one_of(probs, "probs", Probs::kBefore, Probs::kAfter);
  key.bias = truth_or(fields, "bias", "no");
  key.combine_groups = static_cast<int>(fields.number_or("combine_groups", kGroups, 1));
  const std::string partials = fields.text_or("combine_partials", name(CombinePartials::kFp32));
  key.combine_partials =
      one_of(partials, "combine_partials", CombinePartials::kFp32, CombinePartials::kBf16);
  key.shared_experts = static_cast<int>(fields.number_or("shared", kShared, 0));
  key.shared_gate = truth_or(fields, "shared_gate", "yes");
}

constexpr Accepted kSms{[](double v) { return v >= 0 && v <= 1024 && v == std::floor(v); },
                        "a whole number from 0 to 1024 is accepted"};

/// ... and of layers whose tokens are those of its ranks alone, on all SMs.
void read_place(Fields& fields, TuneKey& key) {
  key.gathered_hosts = static_cast<int>(fields.number_or("gathered_hosts", kGatheredHosts, 1));
  key.in_waves = truth_or(fields, "in_waves", "no");
  key.slot_rows = truth_or(fields, "slot_rows", "no");
  key.spare_sms = static_cast<int>(fields.number_or("spare_sms", kSms, 0));
}

constexpr Accepted kTime{[](double v) { return v >= 0 && v <= 1e9; }, "0 to 1e9 is accepted"};
constexpr Accepted kSkew{[](double v) { return v >= 0 && v <= 100; }, "0 to 100 is accepted"};

template <class T>
T count_from(Fields& fields, const char* key, T least) {
  return fields.integer(key, least, std::numeric_limits<T>::max());
}

TunedEntry entry_from(const Json& json) {
  Fields fields(json, "");
  TunedEntry e;
  e.key.backend = one_of(fields.text("backend"), "backend", Backend::kCpu, Backend::kCuda);
  e.key.device = fields.text("device");
  e.key.driver = fields.text("driver");
  e.key.library = fields.text("library");
  e.key.hidden = count_from<std::int64_t>(fields, "hidden", 1);
  e.key.intermediate = count_from<std::int64_t>(fields, "intermediate", 1);
  e.key.num_experts = count_from<int>(fields, "experts", 1);
  e.key.topk = count_from<int>(fields, "topk", 1);
  e.key.ranks = count_from<int>(fields, "ranks", 1);
  e.key.hosts = static_cast<int>(fields.number_or("hosts", kHosts, 1));
  e.key.pass = one_of(fields.text("pass"), "pass", Pass::kForward, Pass::kBackward);
  read_kept(fields, e.key);
  read_arithmetic(fields, e.key);
  read_place(fields, e.key);
  e.key.tokens = count_from<std::int64_t>(fields, "tokens", 0);
  e.key.skew = fields.number("skew", kSkew);
  e.schedule = schedule_from(fields.object("schedule"), e.key.backend);
  e.ms = fields.number("ms", kTime);
  e.default_ms = fields.number("default_ms", kTime);
  e.date = fields.text("date");
  return e;
}

/// A file of this schema; throws where it is anything else.
Json file_from(std::string_view text) {
  Json file = parse_json(text);
  Fields fields(file, "");
  const std::string schema = fields.text("schema");
  require(schema == kSchema, ErrorCode::kIo, "its schema is ", in_quotes(schema), "; ", kSchema,
          " is accepted");
  fields.list("entries");
  return file;
}

/// Another version of uniep has what it found there: it is not replaced.
void require_own_version(std::string_view text, const std::string& origin) {
  require_memory_for_json(text);
  const Json file = Json::parse(text, nullptr, false);
  if (!file.is_object() || !file.contains("schema") || !file["schema"].is_string()) return;
  const auto schema = file["schema"].get<std::string>();
  require(schema == kSchema || !schema.starts_with(kSchemas), ErrorCode::kIo, origin,
          " is of schema ", schema, ", which another version of uniep wrote, and is left alone; ",
          kSchema, " is accepted, or another file in UNIEP_TUNE_CACHE");
}

/// A file as it is, where that is one of this schema; else an empty one, and the reason.
Json file_or_empty(std::string_view text, const std::string& origin,
                   std::vector<std::string>& problems) {
  try {
    return file_from(text);
  } catch (const Error& e) {
    problems.push_back(cat(origin, " is ignored: ", e.what()));
    return Json::parse(kEmptyFile);
  }
}

/// How many entries a file has that is to be removed. Throws for another program's, which stays.
std::size_t num_entries(std::string_view text, const std::string& origin) {
  try {
    return file_from(text).at("entries").size();
  } catch (const Error& e) {
    throw Error(ErrorCode::kIo, cat(origin, " is no cache that `uniep tune` wrote (", e.what(),
                                    ") and is not removed; such a cache is accepted"));
  }
}

/// The entry; nothing, and `reason`, where it is not understood.
std::optional<TunedEntry> understood(const Json& entry, std::string& reason) {
  try {
    return entry_from(entry);
  } catch (const Error& e) {
    reason = e.what();
    return std::nullopt;
  }
}

/// One note for all entries that are ignored for this reason: a newer program may leave many.
std::string note(const std::string& origin, const std::string& reason,
                 const std::vector<std::size_t>& numbers) {
  const std::size_t others = numbers.size() - 1;
  const std::string which = others == 0 ? " is" : cat(" and ", others, " like it are");
  return cat(origin, ": entry ", numbers[0], which, " ignored: ", reason);
}

/// Puts an entry in the place of the one that has its key, else behind all others.
void put_entry(Json& entries, const TunedEntry& entry) {
  std::string ignored;  // what is not understood stays, and is said where it is used
  for (Json& old : entries) {
    const auto known = understood(old, ignored);
    if (known && known->key == entry.key) {
      old = entry_json(entry);
      return;
    }
  }
  entries.push_back(entry_json(entry));
}

bool has_plain_experts(const TuneKey& k) {
  return are_plain_experts(k.activation, k.probs, k.bias, k.combine_groups > 1 || k.slot_rows);
}

bool same_kernels(const TuneKey& a, const TuneKey& b) {
  return has_plain_experts(a) == has_plain_experts(b) &&
         is_gated(a.activation) == is_gated(b.activation);
}

bool same_arithmetic(const TuneKey& a, const TuneKey& b) {
  return a.activation == b.activation && a.probs == b.probs && a.bias == b.bias &&
         a.combine_groups == b.combine_groups && a.combine_partials == b.combine_partials;
}

bool same_situation(TuneKey a, const TuneKey& b) {
  if (!same_kernels(a, b)) return false;
  a.activation = b.activation;
  a.probs = b.probs;
  a.combine_groups = b.combine_groups;
  a.combine_partials = b.combine_partials;
  a.skew = b.skew;
  return a == b;
}

}  // namespace

std::string variant_text(const TuneKey& k) {
  return cat(k.save == Save::kRows ? "" : cat(",save=", name(k.save)),
             k.recompute_h ? ",recompute_h" : "",
             k.activation == Activation::kSwiglu ? "" : cat(",activation=", name(k.activation)),
             k.probs == Probs::kAfter ? ",probs=after" : "", k.bias ? ",bias" : "",
             k.combine_groups == 1 ? ""
                                   : cat(",combine_groups=", k.combine_groups,
                                         ",combine_partials=", name(k.combine_partials)),
             k.shared_experts == 0 ? "" : cat(",shared=", k.shared_experts),
             k.shared_gate ? "" : ",no_shared_gate",
             k.backward_rows == 0 ? "" : cat(",backward_rows=", k.backward_rows),
             k.gathered_hosts == 1 ? "" : cat(",gathered_hosts=", k.gathered_hosts),
             k.in_waves ? ",in_waves" : "", k.slot_rows ? ",slot_rows" : "");
}

std::string to_string(const TuneKey& k) {
  return cat(name(k.pass), " of hidden=", k.hidden, ",intermediate=", k.intermediate,
             ",experts=", k.num_experts, ",topk=", k.topk, variant_text(k), " with up to ",
             k.tokens, " tokens on each of ", k.ranks, " ranks",
             k.hosts == 1 ? "" : cat(" on ", k.hosts, " hosts"), ", skew ", k.skew, ", on ",
             k.device, k.spare_sms == 0 ? "" : cat(" but for ", k.spare_sms, " SMs"));
}

TunedEntries parse_tuned(std::string_view text, const std::string& origin) {
  TunedEntries all;
  const Json file = file_or_empty(text, origin, all.problems);
  const Json& entries = file.at("entries");
  std::map<std::string, std::vector<std::size_t>> ignored;  // by the reason
  for (std::size_t i = 0; i < entries.size(); ++i) {
    std::string reason;
    auto entry = understood(entries[i], reason);
    if (entry) {
      all.entries.push_back(std::move(*entry));
    } else {
      ignored[reason].push_back(i);
    }
  }
  for (const auto& [reason, numbers] : ignored) {
    all.problems.push_back(note(origin, reason, numbers));
  }
  return all;
}

std::optional<TuneKey> key_of_plain_experts(TuneKey key) {
  if (has_plain_experts(key) || !is_gated(key.activation)) return std::nullopt;
  key.activation = Activation::kSwiglu;
  key.probs = Probs::kBefore;
  key.bias = false;
  key.combine_groups = 1;
  key.combine_partials = CombinePartials::kFp32;
  key.shared_experts = 0;
  key.shared_gate = true;
  key.slot_rows = false;
  return key;
}

const TunedEntry* find_entry(const std::vector<TunedEntry>& entries, const TuneKey& key) {
  const TunedEntry* nearest = nullptr;
  for (const TunedEntry& e : entries) {
    if (!same_situation(e.key, key)) continue;
    const auto distance = [&](const TunedEntry& to) {
      return std::pair(!same_arithmetic(to.key, key), std::abs(to.key.skew - key.skew));
    };
    if (nearest == nullptr || distance(e) < distance(*nearest)) nearest = &e;
  }
  return nearest;
}

std::string TuneCache::default_path() { return env_tune_cache(); }

TunedEntries TuneCache::load() const {
  if (path_.empty()) return {};
  try {
    const auto text = read_text(path_);
    return text ? parse_tuned(*text, path_) : TunedEntries{};
  } catch (const Error& e) {
    return {{}, {cat("tuned schedules are ignored: ", e.what())}};
  }
}

void TuneCache::require_path() const {
  require(!path_.empty(), ErrorCode::kIo,
          "there is nowhere to store what is found: UNIEP_TUNE_CACHE, XDG_CACHE_HOME and HOME are "
          "unset; one of them is needed");
}

void TuneCache::require_storable() const {
  require_path();
  require_replaceable(path_);  // before there is a lock beside what can be no cache
  const FileLock lock(lock_of(path_));
  require_own_version(read_text(path_).value_or(kEmptyFile), path_);
}

std::vector<std::string> TuneCache::store(const TunedEntry& entry) const {
  require_path();
  const FileLock lock(lock_of(path_));
  std::vector<std::string> problems;
  const auto text = read_text(path_);
  require_own_version(text.value_or(kEmptyFile), path_);
  Json file = file_or_empty(text ? *text : kEmptyFile, path_, problems);
  if (!problems.empty()) problems.push_back(cat("it was moved to ", move_aside(path_)));
  put_entry(file.at("entries"), entry);
  replace_text(path_, file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  return problems;
}

std::optional<std::size_t> TuneCache::clear() const {
  require_path();
  if (!read_text(path_)) return std::nullopt;  // and no lock is left where nothing was
  const FileLock lock(lock_of(path_));
  const auto text = read_text(path_);
  if (!text) return std::nullopt;
  require_own_version(*text, path_);
  const std::size_t entries = num_entries(*text, path_);
  // A link stays: the file that it leads to goes, which is what `store` replaces.
  remove_file(std::filesystem::canonical(path_).string());
  return entries;
}

}  // namespace uniep::tune
