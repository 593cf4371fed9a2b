#include "common/parse_errors.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/nearest.h"
#include "base/quotes.h"
#include "common/options.h"

namespace uniep::tool {
namespace {

/// Arguments that are named one by one.
constexpr std::size_t kMostNamed = 8;

/// CLI11's own sentences may have a value in them.
constexpr std::size_t kLongestSentence = 300;

/// What CLI11 says behind the name of a flag that was given a value.
constexpr std::string_view kDisallowed = " was given a disallowed flag override";

std::string without_dashes(std::string_view flag) {
  return std::string(flag.substr(std::min(flag.size(), flag.find_first_not_of('-'))));
}

std::vector<std::string> flag_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  }
  return names;
}

bool is_flag(const std::string& argument) { return argument.size() > 1 && argument[0] == '-'; }

std::string unknown_flag(const CLI::App& app, const std::string& argument) {
  const std::string flag = argument.substr(0, argument.find('='));
  const std::string near = nearest(without_dashes(flag), flag_names(app));
  return cat("there is no ", shortened(flag),
             near.empty() ? "" : cat("; --", near, " is the nearest"));
}

std::string subcommand_list(const CLI::App& app) {
  std::string list;
  for (const CLI::App* sub : app.get_subcommands(nullptr)) {
    list += (list.empty() ? "" : ", ") + sub->get_name();
  }
  return list;
}

/// What has to stand behind a subcommand and does not: "list or clear is needed: uniep cache
/// ACTION". What has no choices is a file.
std::string missing_arguments(CLI::App& sub) {
  std::string choices, names;
  std::size_t files = 0;
  for (CLI::Option* option : sub.get_options()) {
    if (!option->get_positional() || !option->get_required()) continue;
    names += ' ' + option->get_name();
    const std::vector<std::string> words = choices_of(*option);
    for (const std::string& word : words) choices += (choices.empty() ? "" : " or ") + word;
    if (words.empty()) ++files;
  }
  const std::string what = !choices.empty() ? choices + " is"
                           : files == 1     ? "a file is"
                                            : cat(files == 2 ? "two" : cat(files), " files are");
  return cat(what, " needed: uniep ", sub.get_name(), names);
}

/// What CLI11 says in words of its own: "--seed: At Most 1 required but received 2".
std::string own_words(const CLI::App& app, const CLI::ParseError& error) {
  const std::string text = shortened(error.what(), kLongestSentence);
  const std::string option = text.substr(0, text.find(':'));
  const auto has = [&](std::string_view words) { return text.find(words) != text.npos; };
  if (has("A subcommand is required")) {
    return cat("no subcommand; ", subcommand_list(app), " are accepted");
  }
  const bool is_required = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if (is_required && !option.starts_with('-')) {
    return missing_arguments(*app.get_subcommands().front());
  }
  if (has(": At Most 1 required")) return option + " is given more than once; once is accepted";
  if (has(": 1 required") && has("missing")) return option + " has no value; one is needed";
  if (has(kDisallowed)) return cat("--", text.substr(0, text.find(kDisallowed)), " takes no value");
  return text;
}

std::string unexpected(const std::vector<std::string>& arguments) {
  std::string list;
  const std::size_t named = std::min(arguments.size(), kMostNamed);
  for (std::size_t i = 0; i < named; ++i) list += cat(i == 0 ? "" : ", ", in_quotes(arguments[i]));
  if (named < arguments.size()) list += cat(" and ", arguments.size() - named, " more");
  return cat(arguments.size() == 1 ? "unexpected argument " : "unexpected arguments ", list);
}

}  // namespace

const CLI::App& called_app(const CLI::App& app) {
  const auto subcommands = app.get_subcommands();
  return subcommands.empty() || app.remaining_size() > 0 ? app : *subcommands.front();
}

std::string called(const CLI::App& app) {
  const CLI::App& sub = called_app(app);
  return &sub == &app ? "uniep" : "uniep " + sub.get_name();
}

void require_known_subcommand(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands(nullptr)) names.push_back(sub->get_name());
  if (std::ranges::count(names, argv[1]) > 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              cat("there is no subcommand ", in_quotes(argv[1]), "; ",
                  nearest_clause(argv[1], names), subcommand_list(app), " are accepted"));
}

void refuse_values_of_flags(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 0) option->disable_flag_override();
  }
  for (CLI::App* sub : app.get_subcommands(nullptr)) refuse_values_of_flags(*sub);
}

std::string parse_complaint(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& sub = called_app(app);
  const std::vector<std::string> extras = sub.remaining();
  const auto flag = std::ranges::find_if(extras, is_flag);
  const std::string what = flag != extras.end() ? unknown_flag(sub, *flag)
                           : !extras.empty()    ? unexpected(extras)
                                                : own_words(app, error);
  return cat(what, "; see ", called(app), " --help");
}

}  // namespace uniep::tool
