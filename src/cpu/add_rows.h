#pragma once

#include "base/row_sums.h"

namespace uniep::cpu {

/// On this thread.
void add_rows(const RowSums& sums);

}  // namespace uniep::cpu
