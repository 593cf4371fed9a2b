#include "base/memory_info.h"

#include <fstream>
#include <string>

namespace uniep {

double available_memory() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key; meminfo >> key;) {
    double kilobytes = 0;
    if (key == "MemAvailable:" && meminfo >> kilobytes) return 1024 * kilobytes;
    meminfo.ignore(256, '\n');
  }
  return 0;
}

}  // namespace uniep
