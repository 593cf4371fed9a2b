#include "cuda/pass_variant.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/check.h"
#include "cuda/device/sm90/tile_shape.h"

namespace uniep::cuda {
namespace {

template <PassVariant kVariant>
constexpr PassFunctions functions_of() {
  return {kVariant, PassKernel<kVariant>::prepare, PassKernel<kVariant>::launch};
}

/// The kernels that differ in tile_n and `general` alone.
template <PassVariant v>
constexpr std::array<PassFunctions, 4> of_tiles() {
  constexpr auto with = [](int tile_n, bool general) {
    PassVariant variant = v;
    variant.tile_n = tile_n;
    variant.general = general;
    return variant;
  };
  static_assert(std::size(kTileColumns) == 2);
  return {functions_of<with(kTileColumns[0], false)>(),
          functions_of<with(kTileColumns[1], false)>(), functions_of<with(kTileColumns[0], true)>(),
          functions_of<with(kTileColumns[1], true)>()};
}
constexpr std::array<PassFunctions, 4> kPassKernels[] = {
    of_tiles<PassVariant{.pass = Pass::kForward}>(),
    of_tiles<PassVariant{.pass = Pass::kBackward}>(),
    of_tiles<PassVariant{.pass = Pass::kBackward, .bf16_main = true}>(),
    of_tiles<PassVariant{.pass = Pass::kBackward, .recomputes = true}>(),
    of_tiles<PassVariant{.pass = Pass::kBackward, .recomputes = true, .bf16_main = true}>(),
};

}  // namespace

const PassFunctions& functions_for(const PassVariant& variant) {
  const PassFunctions* found = nullptr;
  for (const auto& tiles : kPassKernels) {
    const auto* at = std::ranges::find(tiles, variant, &PassFunctions::variant);
    if (at != tiles.end()) found = at;
  }
  ensure(found != nullptr, "no kernel of the ", name(variant.pass),
         " pass has tile_n=", variant.tile_n);
  return *found;
}

cudaError_t prepare_passes() {
  for (const auto& tiles : kPassKernels) {
    for (const PassFunctions& functions : tiles) {
      if (const cudaError_t error = functions.prepare(); error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace uniep::cuda
