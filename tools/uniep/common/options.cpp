#include "common/options.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "base/nearest.h"
#include "base/problem_limits.h"
#include "base/rank_limits.h"
#include "common/machine.h"
#include "common/table.h"

namespace uniep::tool {
namespace {

/// What the name of a validator of choices begins with.
constexpr const char* kChoices = "one of ";

}  // namespace

std::string described(std::string_view text) {
  constexpr std::size_t kWidth = 66;
  std::string description;
  for (const std::string& line : folded(text, kWidth)) {
    description += description.empty() ? line : '\n' + line;
  }
  return description;
}

CLI::Validator not_empty(const char* type) {
  return {[type](const std::string& text) -> std::string {
            return text.empty() ? cat("the value is empty; ", type, " is accepted") : "";
          },
          ""};
}

CLI::App* add_command(CLI::App& app, const char* name, const char* description) {
  return app.add_subcommand(name, description);
}

OptionGroup::OptionGroup(CLI::App& sub) : OptionGroup(sub, sub.option_defaults()->get_group()) {}

template <class T>
CLI::Option* OptionGroup::add(const char* option, T& value, const char* type,
                              std::string_view meaning) {
  return sub_.add_option(option, value, described(meaning))
      ->type_name(type)
      ->group(name_)
      ->check(not_empty(type));
}

#define UNIEP_ADDS_OPTIONS_OF(...) \
  template CLI::Option* OptionGroup::add(const char*, __VA_ARGS__&, const char*, std::string_view)
UNIEP_ADDS_OPTIONS_OF(std::string);
UNIEP_ADDS_OPTIONS_OF(int);
UNIEP_ADDS_OPTIONS_OF(std::int64_t);
UNIEP_ADDS_OPTIONS_OF(std::uint64_t);
UNIEP_ADDS_OPTIONS_OF(double);
UNIEP_ADDS_OPTIONS_OF(std::optional<int>);
UNIEP_ADDS_OPTIONS_OF(std::optional<double>);
UNIEP_ADDS_OPTIONS_OF(std::vector<std::string>);
#undef UNIEP_ADDS_OPTIONS_OF

CLI::Option* OptionGroup::add_flag(const char* option, bool& value, std::string_view meaning) {
  return sub_.add_flag(option, value, described(meaning))->group(name_);
}

CLI::Validator one_of(std::vector<std::string> names) {
  std::string list;
  std::string bars;
  for (const std::string& name : names) {
    list += (list.empty() ? "" : ", ") + name;
    bars += (bars.empty() ? kChoices : "|") + name;
  }
  const auto check = [names = std::move(names), list](const std::string& text) -> std::string {
    if (std::ranges::count(names, text) > 0) return "";
    const std::string near = nearest(text, names);
    return cat(in_quotes(text), " is not one of ", list,
               near.empty() ? "" : cat("; ", near, " is the nearest"));
  };
  return CLI::Validator(check, "").name(bars);
}

std::vector<std::string> choices_of(CLI::Option& option) {
  try {
    for (int i = 0;; ++i) {
      const std::string name = option.get_validator(i)->get_name();
      if (!name.starts_with(kChoices)) continue;
      return CLI::detail::split(name.substr(std::string_view(kChoices).size()), '|');
    }
  } catch (const CLI::OptionNotFound&) {  // behind the last one
    return {};
  }
}

CLI::Validator a_number_of_ranks() { return range(1, kMaxGroupRanks); }

CLI::Validator a_seed() { return range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()); }

CLI::Validator a_skew() { return range(0.0, 100.0); }

CLI::Option* add_seed(OptionGroup& group, std::uint64_t& seed) {
  return group.add("--seed", seed, "S", "Seed of a synthetic layer (default 0)")->check(a_seed());
}

CLI::Option* add_skew(OptionGroup& group, double& skew) {
  return group
      .add("--skew", skew, "Z",
           "How unevenly a synthetic layer loads its experts, 0 to 100: 0 (default) evenly, 1 "
           "like Zipf's law")
      ->check(a_skew());
}

CLI::Option* add_dropped(OptionGroup& group, double& share) {
  return group
      .add("--dropped", share, "SHARE",
           "Share of a synthetic layer's slots that are dropped, 0 (default) to 1: they go to no "
           "expert")
      ->check(range(0.0, 1.0));
}

void add_pass(OptionGroup& group, std::string& pass) {
  group
      .add(
          "--pass", pass, "DIRECTION",
          "What to measure: forward, backward (its forward pass runs unmeasured) or both (default)")
      ->check(one_of({"forward", "backward", "both"}));
}

void add_backend(OptionGroup& group, std::string& backend) {
  group
      .add("--backend", backend, "NAME",
           "auto (default: cpu), cpu, or cuda: a process for each GPU, started here or, with RANK, "
           "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set, by torchrun and the like")
      ->check(one_of({"auto", "cpu", "cuda"}));
}

void add_kept(OptionGroup& group, KeptFlags& kept) {
  group
      .add("--save", kept.save, "WHAT",
           "What forward keeps of x for backward: rows (default); tokens, each that came once, so "
           "that backward makes its rows again; or none, so that backward dispatches x again. The "
           "same bits for less memory")
      ->check(one_of({name(Save::kRows), name(Save::kTokens), name(Save::kNone)}));
  group.add_flag("--recompute-h", kept.recompute_h,
                 "Forward does not keep h; backward runs fc1 again, with the same bits");
  group
      .add("--backward-rows", kept.backward_rows, "ROWS",
           "Rows that backward works in at a time, a multiple of 128 (default 0: all). With fewer, "
           "experts take turns in less memory, with the same bits")
      ->check(range<std::int64_t>(0, 2147483647));
}

void add_hosts(OptionGroup& group, int& hosts, std::string_view without) {
  group
      .add(
          "--hosts", hosts, "N",
          cat("Hosts that the CPU ranks are taken to be on, in equal runs of ranks: these share no "
              "memory, and tokens and rows cross between them over the network (libfabric). ",
              without, "; results are the same"))
      ->check(range(1, kMaxGroupRanks));
}

void add_json(OptionGroup& group, std::string& path) {
  group.add("--json", path, "FILE.json", "Write the figures; docs/results.md describes the file");
}

}  // namespace uniep::tool
