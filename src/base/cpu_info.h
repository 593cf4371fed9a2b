#pragma once

#include <string>

namespace uniep {

/// Model name of this machine's CPU, as the kernel calls it.
std::string cpu_model();

/// Logical CPUs that this process may use.
int usable_cpus();

}  // namespace uniep
