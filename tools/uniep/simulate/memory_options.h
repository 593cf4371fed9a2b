#pragma once

#include <initializer_list>
#include <string>

#include "common/option_names.h"
#include "simulate/memory_plan.h"

namespace uniep::tool {

/// Adds --memory, which does what the sentence says, and what goes with it.
void add_memory_options(CLI::App& sub, MemoryFlags& flags, const std::string& what_it_does);

/// Refuses --save, --recompute-h, --pass and `others`, if one is given with --memory, which looks
/// at both passes for every choice of what a forward keeps.
void require_undecided(const CLI::App& sub, std::initializer_list<const char*> others);

}  // namespace uniep::tool
