#include "tune/book/cache.h"

#include <cstring>
#include <iostream>
#include <memory>
#include <tuple>

#include "base/check.h"
#include "base/quotes.h"
#include "commands.h"
#include "common/options.h"
#include "common/table.h"
#include "schedule/axes.h"
#include "tune/files/shared_files.h"
#include "tune/search/session.h"
#include "tuning/tuner.h"

namespace uniep::tool {
namespace {

using enum Table::Align;

std::string cache_path() {
  const std::string path = tune::TuneCache::default_path();
  require(!path.empty(), ErrorCode::kInvalidArgument,
          "there is no cache: UNIEP_TUNE_CACHE, XDG_CACHE_HOME and HOME are unset; one of them is "
          "needed");
  return path;
}

/// The name of the model, or of the small shape, that the layer is of; empty: of none.
std::string shape_name(const tune::TuneKey& key) {
  for (const std::string& name : workload::shape_names()) {
    if (name == "custom") continue;
    const workload::ShapeSpec spec = workload::parse_shape(name);
    const bool same = spec.hidden == key.hidden && spec.intermediate == key.intermediate &&
                      spec.num_experts == key.num_experts && spec.topk == key.topk;
    if (same) return name;
  }
  return "";
}

/// What one table is about.
std::string place_text(const tune::TuneKey& key) {
  return cat(key.device, "; ", key.driver, "; uniep ", key.library);
}

bool same_place(const tune::TuneKey& a, const tune::TuneKey& b) {
  return std::tie(a.backend, a.device, a.driver, a.library) ==
         std::tie(b.backend, b.device, b.driver, b.library);
}

std::vector<std::string> cells_of(std::size_t number, const tune::TunedEntry& e) {
  const tune::TuneKey& k = e.key;
  return {cat(number),
          cat(k.hidden),
          cat(k.intermediate),
          cat(k.num_experts),
          cat(k.topk),
          cat(k.tokens),
          k.hosts == 1 ? cat(k.ranks) : cat(k.ranks, '/', k.hosts),
          cat(k.skew),
          name(k.pass),
          milliseconds(1e-3 * e.ms),
          milliseconds(1e-3 * e.default_ms),
          e.date.substr(0, 10)};
}

/// The schedule as --schedule takes it, beside the backend's defaults; behind the shape's name, and
/// what else the key says of the layer.
std::string schedule_text(const tune::TunedEntry& e) {
  const std::string pairs = unlike_axes_text(e.schedule, default_schedule(e.key.backend));
  std::string shape = shape_name(e.key) + variant_text(e.key);
  if (shape.starts_with(',')) shape.erase(0, 1);
  return cat(shape, shape.empty() ? "" : ": ", pairs.empty() ? "the default" : pairs);
}

/// The entries of one device, driver and version, from the first that is there.
void print_place(const std::vector<tune::TunedEntry>& entries, std::size_t first,
                 std::size_t& number) {
  Table table({kRight, kRight, kRight, kRight, kRight, kRight, kRight, kRight, kLeft, kRight,
               kRight, kLeft});
  table.header({"", "", "inter-", "", "", "up to", "ranks", "", "", "", "default", ""});
  table.header({"", "hidden", "mediate", "experts", "topk", "tokens", "/hosts", "skew", "pass",
                "ms", "ms", "date"});
  Notes schedules;
  for (std::size_t i = first; i < entries.size(); ++i) {
    if (!same_place(entries[i].key, entries[first].key)) continue;
    table.row(cells_of(++number, entries[i]));
    schedules.add(cat(number), schedule_text(entries[i]));
  }
  std::cout << "#\n# on " << place_text(entries[first].key) << '\n' << table << schedules;
}

void print_entries(const std::vector<tune::TunedEntry>& entries) {
  std::size_t number = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    bool is_first = true;
    for (std::size_t j = 0; j < i; ++j) is_first &= !same_place(entries[i].key, entries[j].key);
    if (is_first) print_place(entries, i, number);
  }
}

/// A session's file says it twice: as a key, and in words for people.
std::string readable_search(const std::string& search) {
  const std::size_t begin = search.find(kSearchFor);
  const std::size_t skipped = begin == search.npos ? 0 : begin + std::strlen(kSearchFor);
  return shortened(std::string_view(search).substr(skipped), 1000);
}

void print_session(const tune::StoredSession& s) {
  Notes notes;
  notes.add("session", s.path);
  if (s.problem.empty()) {
    notes.add("begun", cat(s.date, ", ", counted(s.measured, "pass", "passes"), " of ",
                           counted(s.candidates, "schedule", "schedules"), " measured"));
    notes.add("search", readable_search(s.identity));
  } else {
    notes.add("unknown", shortened(s.problem, 1000));
  }
  std::cout << "#\n" << notes;
}

int list() {
  const std::string path = cache_path();
  const tune::TunedEntries cached = tune::TuneCache(path).load();
  const std::vector<std::string> sessions = tune::session_files(path);
  Notes notes;
  notes.add("cache", path);
  notes.add("holds", cat(counted(cached.entries.size(), "schedule", "schedules"), "; beside it ",
                         counted(sessions.size(), "session", "sessions")));
  for (const std::string& aside : tune::damaged_files(path)) notes.add("aside", aside);
  for (const std::string& problem : cached.problems) notes.add("problem", problem);
  std::cout << notes;
  print_entries(cached.entries);
  for (const std::string& session : sessions) print_session(tune::describe_session(session));
  return kExitOk;
}

int clear() {
  const std::string path = cache_path();
  const auto entries = tune::TuneCache(path).clear();
  if (entries) {
    std::cout << "removed " << path << ", " << counted(*entries, "schedule", "schedules")
              << std::endl;
  }
  const std::vector<std::string> sessions = tune::session_files(path);
  for (const std::string& session : sessions) {
    tune::remove_file(session);
    std::cout << "removed " << session << std::endl;
  }
  if (!entries && sessions.empty()) std::cout << "nothing to remove: no " << path << '\n';
  return kExitOk;
}

}  // namespace

void add_cache(CLI::App& app, Invocation& invocation) {
  CLI::App* sub = add_command(app, "cache", "List, or remove, what uniep tune has stored");
  const auto action = std::make_shared<std::string>();
  OptionGroup(*sub)
      .add("ACTION", *action, "TEXT", "list, or clear")
      ->required()
      ->check(one_of({"list", "clear"}));
  sub->footer(
      "list prints the schedules that were tuned on this machine, and the searches that can be "
      "resumed. clear removes both. The cache is the file of UNIEP_TUNE_CACHE, by default "
      "uniep/tuned.json in the user's folder for caches.\n"
      "\n"
      "Examples:\n  uniep cache list\n  uniep cache clear");
  sub->callback(
      [action, &invocation] { invocation.exit_code = *action == "list" ? list() : clear(); });
}

}  // namespace uniep::tool
