#pragma once

#include <cstdint>
#include <string>

#include "uniep/macros.h"

namespace uniep {

/// Largest number of experts per token.
inline constexpr int kMaxTopk = 16;

/// What forward keeps of the rows of x that it dispatched.
enum class Save : int {
  kRows,    ///< all of them
  kTokens,  ///< each token that came, once: backward makes its rows again, from memory of the rank
  kNone     ///< none: backward is given x once more, and dispatches it again
};
inline constexpr Save kSaves[] = {Save::kRows, Save::kTokens, Save::kNone};

constexpr const char* name(Save save) {
  constexpr const char* kNames[] = {"rows", "tokens", "none"};
  return kNames[static_cast<int>(save)];
}

/// The shape of one MoE layer under expert parallelism. The same on every rank.
struct Problem {
  std::int64_t hidden = 0;        ///< H, a multiple of 8
  std::int64_t intermediate = 0;  ///< I, a multiple of 8; w1 has 2I rows: I of gate, then I of up
  int num_experts = 0;            ///< E, divisible by the number of ranks
  int topk = 0;                   ///< K, 1 to kMaxTopk
  std::int64_t max_tokens = 0;    ///< most tokens that a rank may hold; ranks may hold fewer, or 0
  /// Rows (copies of tokens, pad rows included) that one rank can receive. A routing that brings
  /// more to any rank is refused on all ranks (`Layer::plan`), with the capacity that would do.
  /// 0: the default, see `capacity_rows`.
  std::int64_t capacity_rows = 0;
  /// Alignment of each expert's first row. A power of two, 16 to 256; a schedule's tile_m divides
  /// it, so that the CUDA backend, whose tiles have 128 rows, needs 128 or 256.
  int row_align = 128;
  // What forward keeps for backward, beside the plan and the rows' probabilities. What it does not
  // keep, backward makes once more: memory is had for time, and the bits stay the same.
  Save save = Save::kRows;   ///< of x: 2H bytes a row, or token
  bool recompute_h = false;  ///< h (4I bytes a row) is not kept: backward runs fc1 once more

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// Throws Error(kInvalidArgument) with a sentence that names the first field that is out of range.
UNIEP_API void validate(const Problem& problem, int num_ranks);

/// Bytes of rows up to which the default capacity holds any routing.
inline constexpr std::int64_t kSmallLayerBytes = std::int64_t{1} << 30;
/// Times a rank's share of a balanced routing that the default capacity holds elsewhere.
inline constexpr int kDefaultLoad = 2;

/// Rows that a rank needs room for if any routing is to fit, padding included.
UNIEP_API std::int64_t rows_of_any_routing(const Problem& problem, int num_ranks);

/// `problem.capacity_rows`, or its default. That is enough for any routing, ranks * max_tokens * K
/// rows plus padding, where the tensors of a step that have rows take at most kSmallLayerBytes in
/// this way (some 2 (2H + 5I) bytes a row). In larger layers it is kDefaultLoad * max_tokens * K
/// rows plus padding, however many ranks there are: routers that are kept balanced stay well below
/// twice the balanced load of a rank, and memory must not grow with the number of ranks.
UNIEP_API std::int64_t capacity_rows(const Problem& problem, int num_ranks);

/// "hidden=256,intermediate=128,...": every field, for logs and error texts.
UNIEP_API std::string to_string(const Problem& problem);

}  // namespace uniep
