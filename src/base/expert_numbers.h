#pragma once

#include <cstdint>

#include "uniep/problem.h"

namespace uniep {

/// How the experts of all ranks are numbered where each rank has the shared ones, too: rank after
/// rank, each rank's part of E first and the shared ones behind it. Without shared experts these
/// are the numbers that topk_ids has.
struct ExpertNumbers {
  int routed = 0;  ///< of a rank: E / ranks
  int shared = 0;  ///< S

  constexpr UNIEP_HD int of_rank() const { return routed + shared; }
  /// The number of expert `id` of topk_ids.
  constexpr UNIEP_HD std::int32_t of_id(std::int32_t id) const {
    return shared == 0 ? id : id + id / routed * shared;
  }
  constexpr UNIEP_HD std::int32_t of_shared(int rank, int s) const {
    return rank * of_rank() + routed + s;
  }

  /// Whether the expert with that number is a shared one.
  constexpr UNIEP_HD bool is_shared(std::int32_t number) const {
    return number % of_rank() >= routed;
  }
  /// What traces call an expert of a rank: its number in topk_ids, or E + s.
  constexpr UNIEP_HD std::int32_t global(int rank, int num_ranks, int expert) const {
    return (expert < routed ? rank : num_ranks - 1) * routed + expert;
  }

  /// The expert's number among the shared experts, or in topk_ids.
  constexpr UNIEP_HD std::int32_t index(std::int32_t number) const {
    const std::int32_t local = number % of_rank();
    return local >= routed ? local - routed : number / of_rank() * routed + local;
  }
};

constexpr UNIEP_HD ExpertNumbers expert_numbers(const Problem& problem, int num_ranks) {
  return {problem.num_experts / num_ranks, problem.shared_experts};
}

}  // namespace uniep
