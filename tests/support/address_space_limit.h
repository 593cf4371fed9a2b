#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace uniep::testing {

/// Lets the address space grow by `more` bytes only while it lives. Sanitizers need address space
/// of their own: tests that use this skip under them.
class AddressSpaceLimit {
 public:
  explicit AddressSpaceLimit(std::int64_t more) {
    getrlimit(RLIMIT_AS, &old_);
    const rlimit low{static_cast<rlim_t>(used() + more), old_.rlim_max};
    setrlimit(RLIMIT_AS, &low);
  }
  ~AddressSpaceLimit() { setrlimit(RLIMIT_AS, &old_); }
  AddressSpaceLimit(const AddressSpaceLimit&) = delete;
  AddressSpaceLimit& operator=(const AddressSpaceLimit&) = delete;

 private:
  static std::int64_t used() {
    std::int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * sysconf(_SC_PAGESIZE);
  }

  rlimit old_{};
};

}  // namespace uniep::testing
