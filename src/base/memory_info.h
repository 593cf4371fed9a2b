#pragma once

namespace uniep {

/// Bytes that programs can still get; 0: unknown.
double available_memory();

}  // namespace uniep
