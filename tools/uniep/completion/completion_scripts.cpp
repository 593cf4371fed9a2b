#include "completion/completion_scripts.h"

#include <string_view>
#include <utility>

#include "base/check.h"

namespace uniep::tool {
namespace {

// In templates, @NAME@ stands for what differs.

constexpr std::string_view kBash = R"(# Completion for bash: source <(@PROGRAM@ completion bash)

# Each sets words, and files where files may follow.

# What can follow option $2 of subcommand $1.
_@PROGRAM@_values() {
  case "$1 $2" in
@VALUES@  esac
  return 1
}

# What can follow the first value of option $2, which takes several.
_@PROGRAM@_more_values() {
  case "$1 $2" in
@MORE_VALUES@  esac
  return 1
}

_@PROGRAM@_positionals() {
  case $1 in
@POSITIONALS@  esac
  return 1
}

_@PROGRAM@_options() {
  case $1 in
@OPTIONS@  esac
}

_@PROGRAM@() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
  local sub=${COMP_WORDS[1]} words= files= flag= i
  # Bash takes --flag=value for three words.
  if [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD - 2]}; fi
  if [[ $cur == = ]]; then cur=; fi
  for ((i = COMP_CWORD - 1; i > 1; --i)); do
    if [[ ${COMP_WORDS[i]} == -* ]]; then
      flag=${COMP_WORDS[i]}
      break
    fi
  done
  if ((COMP_CWORD == 1)); then
    words=@FIRST@
  elif ! _@PROGRAM@_values "$sub" "$prev"; then
    [[ $cur != -* ]] &&
      { _@PROGRAM@_more_values "$sub" "$flag" || _@PROGRAM@_positionals "$sub"; } ||
      _@PROGRAM@_options "$sub"
  fi
  mapfile -t COMPREPLY < <(
    compgen -W "$words" -- "$cur"
    if [[ $files ]]; then compgen -f -- "$cur"; fi
  )
  if [[ $files ]]; then compopt -o filenames 2>/dev/null; fi
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *: ]]; then compopt -o nospace 2>/dev/null; fi
}

complete -F _@PROGRAM@ @PROGRAM@
)";

constexpr std::string_view kZsh = R"(#compdef @PROGRAM@
# Completion for zsh: source <(@PROGRAM@ completion zsh), or this file as _@PROGRAM@ in $fpath.

_@PROGRAM@() {
  local curcontext="$curcontext" state line
  typeset -A opt_args
  local -a subcommands=(
@SUBCOMMANDS@  )
  @FIRST@ \
    '1:subcommand:->subcommand' '*::argument:->argument'
  case $state in
  subcommand)
    _describe -t subcommands subcommand subcommands
    ;;
  argument)
    case $words[1] in
@ARGUMENTS@    esac
    ;;
  esac
}

if [[ $funcstack[1] == _@PROGRAM@ ]]; then
  _@PROGRAM@ "$@"
else
  compdef _@PROGRAM@ @PROGRAM@
fi
)";

/// The template with each name replaced by its text.
std::string filled(std::string_view text,
                   const std::vector<std::pair<std::string_view, std::string>>& replacements) {
  std::string result(text);
  for (const auto& [name, replacement] : replacements) {
    for (std::size_t at = 0; (at = result.find(name, at)) != result.npos;) {
      result.replace(at, name.size(), replacement);
      at += replacement.size();
    }
  }
  return result;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

/// One word for either shell, whatever it holds.
std::string shell_word(std::string_view text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string option_names(const CompletedCommand& command) {
  std::vector<std::string> names;
  for (const CompletedOption& o : command.options) {
    names.insert(names.end(), o.names.begin(), o.names.end());
  }
  return joined(names);
}

std::string bash_case(const std::string& pattern, const ProposedValues& values) {
  return cat("    ", shell_word(pattern), ") ", values.files ? "files=1 " : "",
             "words=", shell_word(joined(values.words)), " && return ;;\n");
}

/// What can follow an option, of all that take a value or of those that take several.
std::string bash_value_cases(const std::vector<CompletedCommand>& subcommands, bool only_many) {
  std::string cases;
  for (const CompletedCommand& sub : subcommands) {
    for (const CompletedOption& o : sub.options) {
      if (o.type.empty() || (only_many && !o.many)) continue;
      cases += bash_case(cat(sub.name, ' ', o.names.front()), o.values);
    }
  }
  return cases;
}

/// The positional arguments of one subcommand are all of a kind.
std::string bash_positional_cases(const std::vector<CompletedCommand>& subcommands) {
  std::string cases;
  for (const CompletedCommand& sub : subcommands) {
    if (!sub.positionals.empty()) cases += bash_case(sub.name, sub.positionals.front().values);
  }
  return cases;
}

std::string bash_option_cases(const std::vector<CompletedCommand>& subcommands) {
  std::string cases;
  for (const CompletedCommand& sub : subcommands) {
    cases += cat("    ", sub.name, ") words=", shell_word(option_names(sub)), " ;;\n");
  }
  return cases;
}

/// The text as it stands within a specification of _arguments.
std::string zsh_escaped(std::string_view text, std::string_view special) {
  std::string escaped;
  for (const char c : text) {
    if (special.find(c) != special.npos) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string zsh_action(const ProposedValues& values) {
  const std::string words = cat('(', joined(values.words), ')');
  if (!values.files) return values.words.empty() ? " " : zsh_escaped(words, ":");
  if (values.words.empty()) return "_files";
  // The space keeps _arguments from adding options of compadd to the call.
  return zsh_escaped(cat(" _alternative \"files:file:_files\" \"names:name:", words, "\""), ":");
}

std::string zsh_option(const CompletedOption& option, const std::string& name) {
  const std::string meaning = cat('[', zsh_escaped(option.meaning, "[]:"), ']');
  if (option.type.empty()) return shell_word(name + meaning);
  // Several values follow as words of their own, up to the next option.
  return shell_word(cat(name, option.many ? "" : "=", meaning, option.many ? ":*-*:" : ":",
                        zsh_escaped(option.type, ":"), ':', zsh_action(option.values)));
}

std::string zsh_arguments(const CompletedCommand& command, const std::string& indent) {
  std::string text = "_arguments -C";
  for (const CompletedOption& o : command.options) {
    for (const std::string& name : o.names) {
      text += cat(" \\\n", indent, "  ", zsh_option(o, name));
    }
  }
  for (const CompletedOption& p : command.positionals) {
    text += cat(" \\\n", indent, "  ",
                shell_word(cat(':', p.names.front(), ':', zsh_action(p.values))));
  }
  return text;
}

}  // namespace

std::string bash_completion(const std::string& program, const CompletedCommand& main,
                            const std::vector<CompletedCommand>& subcommands) {
  std::vector<std::string> first;
  for (const CompletedCommand& sub : subcommands) first.push_back(sub.name);
  first.push_back(option_names(main));
  return filled(kBash, {{"@VALUES@", bash_value_cases(subcommands, false)},
                        {"@MORE_VALUES@", bash_value_cases(subcommands, true)},
                        {"@POSITIONALS@", bash_positional_cases(subcommands)},
                        {"@OPTIONS@", bash_option_cases(subcommands)},
                        {"@FIRST@", shell_word(joined(first))},
                        {"@PROGRAM@", program}});
}

std::string zsh_completion(const std::string& program, const CompletedCommand& main,
                           const std::vector<CompletedCommand>& subcommands) {
  std::string names, cases;
  for (const CompletedCommand& sub : subcommands) {
    names += cat("    ", shell_word(cat(sub.name, ':', sub.meaning)), '\n');
    cases += cat("    ", sub.name, ")\n      ", zsh_arguments(sub, "      "), "\n      ;;\n");
  }
  return filled(kZsh, {{"@SUBCOMMANDS@", names},
                       {"@ARGUMENTS@", cases},
                       {"@FIRST@", zsh_arguments(main, "  ")},
                       {"@PROGRAM@", program}});
}

}  // namespace uniep::tool
