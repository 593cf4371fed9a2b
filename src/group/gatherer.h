#pragma once

#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/env.h"
#include "group/bootstrap.h"

namespace uniep {

/// Exchange of what ranks measured and computed. Every call is collective.
class Gatherer {
 public:
  explicit Gatherer(Bootstrap& bootstrap, int limit_ms = env_timeout_ms())
      : bootstrap_(bootstrap), limit_ms_(limit_ms) {}

  Bootstrap& bootstrap() { return bootstrap_; }

  /// Waits until all ranks are here.
  void meet() { bootstrap_.all_gather("", "all ranks", limit_ms_); }

  /// Every rank's elements, rank after rank.
  template <class T>
  std::vector<std::vector<T>> gather(std::span<const T> own) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::string bytes(reinterpret_cast<const char*>(own.data()), own.size_bytes());
    std::vector<std::vector<T>> all;
    for (const std::string& part : bootstrap_.all_gather(bytes, "results", limit_ms_)) {
      all.emplace_back(part.size() / sizeof(T));
      if (!part.empty()) std::memcpy(all.back().data(), part.data(), part.size());
    }
    return all;
  }
  /// One element a rank.
  template <class T>
  std::vector<T> gather_one(const T& own) {
    std::vector<T> all;
    for (const std::vector<T>& part : gather(std::span<const T>(&own, 1))) all.push_back(part[0]);
    return all;
  }

  /// Replaces every rank's part of a tensor in global order by what that rank computed; parts are
  /// contiguous, and `own` is this rank's.
  template <class T>
  void complete(std::vector<T>& tensor, std::span<const T> own) {
    std::vector<T> whole;
    for (const auto& part : gather(own)) whole.insert(whole.end(), part.begin(), part.end());
    if (!tensor.empty()) tensor = std::move(whole);
  }

 private:
  Bootstrap& bootstrap_;
  int limit_ms_;
};

}  // namespace uniep
