#pragma once

#include <optional>
#include <string>

#include "common/step_choices.h"
#include "uniep/backend.h"
#include "uniep/schedule.h"

// What the options of several subcommands accept, and what the words given to them mean.

namespace uniep::tool {

/// What --ranks accepts: "1 to 64".
std::string ranks_accepted();

/// "deepseek-v3, ..., custom. Keys: tokens (per rank), ..."
std::string shapes_and_keys();

/// What --backend asks for.
Backend backend_choice(const std::string& text);

/// The word that stands for looking a schedule up.
inline constexpr const char* kAutoSchedule = "auto";

/// What --schedule asks for; nothing: auto. What the text leaves alone is the backend's default.
std::optional<Schedule> schedule_choice(const std::string& text, Backend backend);

/// The choice that "forward", "backward" or "both" names.
PassChoice pass_choice(const std::string& text);

}  // namespace uniep::tool
