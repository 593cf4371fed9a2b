#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "layout/page_pool.h"

namespace uniep::cpu {

/// What a rank tells the others before a plan: how full the row pool is, then the routing.
inline std::string plan_message(std::span<const std::int32_t> topk_ids, const PageCount& pool) {
  return to_bytes(pool).append(reinterpret_cast<const char*>(topk_ids.data()),
                               topk_ids.size_bytes());
}

/// What all ranks have told, one after another.
struct GatheredPlan {
  std::vector<PageCount> pools;
  std::vector<std::int64_t> tokens;
  std::vector<std::int32_t> ids;

  GatheredPlan(const std::vector<std::string>& parts, int topk) {
    for (const std::string& part : parts) {
      std::memcpy(&pools.emplace_back(), part.data(), sizeof(PageCount));
      const std::size_t count = (part.size() - sizeof(PageCount)) / sizeof(std::int32_t);
      const std::size_t before = ids.size();
      ids.resize(before + count);
      if (count > 0) {
        std::memcpy(ids.data() + before, part.data() + sizeof(PageCount),
                    count * sizeof(std::int32_t));
      }
      tokens.push_back(static_cast<std::int64_t>(count) / topk);
    }
  }
};

}  // namespace uniep::cpu
