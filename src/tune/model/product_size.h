#pragma once

#include "schedule/block_tasks.h"

namespace uniep::tune {

/// What a product's cost depends on.
struct ProductSize {
  std::int64_t m = 0;
  std::int64_t n = 0;  // both halves of an fc1 tile
  std::int64_t k = 0;
};
bool is_product(Stage stage);
ProductSize product_size(const PassView& v, const Task& task);

}  // namespace uniep::tune
