#include <algorithm>
#include <iostream>
#include <memory>

#include "base/check.h"
#include "commands.h"
#include "common/options.h"
#include "common/table.h"
#include "completion/completion_scripts.h"
#include "tune/files/shipped_files.h"
#include "uniep/schedule.h"

namespace uniep::tool {
namespace {

constexpr std::size_t kWidestMeaning = 72;

/// The first clause of a description, as far as it fits a line.
std::string short_meaning(const std::string& description) {
  std::string text = description;
  std::ranges::replace(text, '\n', ' ');
  text = text.substr(0, std::min(text.find(". "), text.find("; ")));
  const auto lines = folded(text, kWidestMeaning);
  return lines.size() > 1 ? lines.front() + " ..." : text;
}

/// "pipelined:", behind which a number stands.
std::vector<std::string> preset_words() {
  std::vector<std::string> words;
  for (const PresetInfo& preset : schedule_presets()) {
    const std::size_t colon = preset.name.find(':');
    words.emplace_back(colon == preset.name.npos ? preset.name : preset.name.substr(0, colon + 1));
  }
  return words;
}

std::vector<std::string> profile_words() {
  std::vector<std::string> words;
  for (const tune::ShippedFile& file : tune::shipped_profiles()) words.emplace_back(file.name);
  return words;
}

void add_words(std::vector<std::string>& words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
}

/// What the name of a type promises: "FILE.json", "FILE|NAME|auto", "PRESET|key=value,...",
/// "NAME[,key=value...]".
ProposedValues values_of_type(const std::string& type) {
  ProposedValues values;
  if (type.starts_with("NAME[")) return {.words = workload::shape_names()};
  for (const std::string& part : CLI::detail::split(type, '|')) {
    const bool literal =
        !part.empty() && part.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == part.npos;
    if (part.starts_with("FILE")) values.files = true;
    if (part == "NAME" && values.files) add_words(values.words, profile_words());
    if (part == "PRESET") add_words(values.words, preset_words());
    if (literal) values.words.push_back(part);
  }
  return values;
}

CompletedOption completed(CLI::Option& option) {
  CompletedOption c;
  for (const std::string& name : option.get_lnames()) c.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) c.names.push_back("-" + name);
  if (c.names.empty()) c.names.push_back(option.get_name());
  c.meaning = short_meaning(option.get_description());
  if (option.get_items_expected_max() == 0) return c;
  c.type = option.get_type_name();
  c.many = option.get_items_expected_max() > 1;
  c.values = values_of_type(c.type);
  if (const auto choices = choices_of(option); !choices.empty()) c.values = {.words = choices};
  return c;
}

CompletedCommand completed(CLI::App& app) {
  CompletedCommand c{.name = app.get_name(), .meaning = short_meaning(app.get_description())};
  for (CLI::Option* option : app.get_options()) {
    (option->get_positional() ? c.positionals : c.options).push_back(completed(*option));
  }
  return c;
}

std::string script(CLI::App& app, const std::string& shell) {
  std::vector<CompletedCommand> subcommands;
  for (CLI::App* sub : app.get_subcommands(nullptr)) subcommands.push_back(completed(*sub));
  const auto write = shell == "bash" ? bash_completion : zsh_completion;
  return write(app.get_name(), completed(app), subcommands);
}

}  // namespace

void add_completion(CLI::App& app, Invocation& invocation) {
  (void)invocation;
  CLI::App* sub = add_command(app, "completion",
                              "Print what makes a shell complete this program's "
                              "commands");
  const auto shell = std::make_shared<std::string>();
  OptionGroup(*sub)
      .add("SHELL", *shell, "TEXT", "bash, or zsh")
      ->required()
      ->check(one_of({"bash", "zsh"}));
  sub->footer(
      "For this session:\n  source <(uniep completion bash)\n"
      "\n"
      "An installed uniep has both scripts where the shells look for them.");
  sub->callback([&app, shell] { std::cout << script(app, *shell); });
}

}  // namespace uniep::tool
