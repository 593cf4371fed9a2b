#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
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
  const auto i = static_cast<std::size_t>(save);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

/// What an expert computes between its two products: a(h) of the rows h = w1 x. The first seven are
/// gated: w1 has 2I rows, h = [gate; up]. The others have no gate: w1 has I rows.
/// docs/numerics.md has every formula and rounding.
enum class Activation : int {
  kSwiglu,            ///< silu(gate) up
  kGeglu,             ///< gelu(gate) up, by erf
  kGegluTanh,         ///< gelu(gate) up, approximated by tanh
  kReglu,             ///< relu(gate) up
  kGptOss,            ///< gate sigmoid(1.702 gate) (up + 1); gate at most 7, up within -7 and 7
  kSwigluClamped,     ///< silu(gate) up; gate at most 10, up within -10 and 10
  kSwigluSoftcapped,  ///< 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25)
  kRelu2,             ///< relu(h)^2
  kGelu,              ///< gelu(h), by erf
  kSilu               ///< silu(h)
};
inline constexpr int kNumActivations = 10;

constexpr const char* name(Activation activation) {
  constexpr const char* kNames[] = {
      "swiglu", "geglu", "geglu_tanh", "reglu", "gpt_oss", "swiglu_clamped", "swiglu_softcapped",
      "relu2",  "gelu",  "silu"};
  const auto i = static_cast<std::size_t>(activation);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}
constexpr bool is_gated(Activation activation) {
  return activation <= Activation::kSwigluSoftcapped;
}

/// Which erf kGeglu and kGelu have on a GPU: CUDA's erff, whose polynomials changed with CUDA 13.2.
/// PyTorch's operators have that of the CUDA that they were built with.
enum class CudaErf : int { kBefore13_2, kSince13_2 };

/// Where the routing probability of a row enters.
enum class Probs : int {
  kBefore,  ///< fc2: its input is multiplied, p a(h)
  kAfter    ///< fc2: its output is multiplied, as the rows of a token are added up
};

constexpr const char* name(Probs probs) { return probs == Probs::kBefore ? "before" : "after"; }

/// The type in which the sums of combine groups come from where they were made, to be added up.
enum class CombinePartials : int {
  kFp32,  ///< as they are
  kBf16   ///< each is rounded once, so that half the bytes travel
};

constexpr const char* name(CombinePartials partials) {
  return partials == CombinePartials::kFp32 ? "fp32" : "bf16";
}

/// The shape of one MoE layer under expert parallelism. The same on every rank.
struct Problem {
  std::int64_t hidden = 0;        ///< H, a multiple of 8
  std::int64_t intermediate = 0;  ///< I, a multiple of 8; w1 has 2I rows: I of gate, then I of up;
                                  ///< without a gate (Activation), I rows
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
  /// Rows that `Layer::backward` has room for at a time, a multiple of row_align; 0: all of the
  /// rank's, as `backward_data` needs it. With fewer, experts take turns in a ring of so many rows:
  /// an expert begins when those before it that had its rows are done with them, weight gradients
  /// included. Time is had for memory, and the bits stay the same. A routing that brings an expert
  /// more rows is refused as one beyond the capacity is, with the number that would do.
  std::int64_t backward_rows = 0;
  // The arithmetic of an expert.
  Activation activation = Activation::kSwiglu;
  Probs probs = Probs::kBefore;
  bool bias = false;  ///< experts have biases: b1 of w1's rows, b2 [H]
  // How a token's rows become out and dx. More than one group is other arithmetic, so other bits:
  // experts are cut into equal runs, the rows of a run are added up, and then the runs' sums.
  int combine_groups = 1;  ///< G, a divisor of num_experts
  /// The type of the runs' sums. With one group there are none, and this says nothing.
  CombinePartials combine_partials = CombinePartials::kFp32;
  /// S: experts that every rank has and every token goes to, besides its K; topk + S is at most
  /// kMaxTopk. Not with biases, nor with more than one combine group.
  int shared_experts = 0;
  /// ForwardArgs::shared_probs may be given. Without, each is 1, and with Probs::kAfter backward
  /// reads dy in place for shared experts, where it else makes rows of dy times these.
  bool shared_gate = true;
  /// out and dx have a row for each slot, [T, K, H], instead of the sum of a token's rows: what the
  /// slot's expert has made of the token, not times its probability, and 0 where it is dropped. The
  /// caller adds them up. With one combine group, and without shared experts.
  bool slot_rows = false;
  // Tokens of several hosts that are gathered before a pass.
  /// N: each rank's tokens are those of one rank of each of N hosts, max_tokens / N of each, in the
  /// order of the hosts. In the canonical order, in which weight gradients are summed, tokens of a
  /// host stand ahead of those of the next: that of one group of all hosts' ranks.
  int gathered_hosts = 1;
  /// A host whose tokens are there when a pass begins, while those of the next come, and so on. It
  /// then takes them in waves (Layer, "Tokens that come in waves"): under other launches, and with
  /// the same bits. Of at most 14 hosts. -1: all are there.
  int first_host = -1;

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// Slots of a token: those of its K experts, then one for each shared expert.
constexpr UNIEP_HD int slots(const Problem& problem) {
  return problem.topk + problem.shared_experts;
}

/// Rows of out, and of dx, that a token has.
constexpr int result_rows(const Problem& problem) { return problem.slot_rows ? problem.topk : 1; }

/// The parts of h and of w1's rows: gate and up, or one.
constexpr int halves(const Problem& problem) { return is_gated(problem.activation) ? 2 : 1; }

/// Throws Error(kInvalidArgument) with a sentence that names the first field that is out of range.
UNIEP_API void validate(const Problem& problem, int num_ranks);

/// Bytes of rows up to which the default capacity holds any routing.
inline constexpr std::int64_t kSmallLayerBytes = std::int64_t{1} << 30;
/// Times a rank's share of a balanced routing that the default capacity holds elsewhere.
inline constexpr int kDefaultLoad = 2;

/// Rows that a rank needs room for if any routing is to fit, padding included. Throws as
/// `validate`.
UNIEP_API std::int64_t rows_of_any_routing(const Problem& problem, int num_ranks);

/// `problem.capacity_rows`, or its default. That is enough for any routing, ranks * max_tokens * K
/// rows plus padding, where the tensors of a step that have rows take at most kSmallLayerBytes in
/// this way (some 2 (2H + 5I) bytes a row). In larger layers it is kDefaultLoad * max_tokens * K
/// rows plus padding, however many ranks there are: routers that are kept balanced stay well below
/// twice a rank's balanced load, and memory must not grow with the ranks. Throws as `validate`.
UNIEP_API std::int64_t capacity_rows(const Problem& problem, int num_ranks);

/// "hidden=256,intermediate=128,...": every field, for logs and error texts; those of gathered
/// hosts where there are some.
UNIEP_API std::string to_string(const Problem& problem);

}  // namespace uniep
