#include "layer/memory_arguments.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "layer/memory_of_call.h"
#include "layout/workspace.h"

namespace uniep {
namespace {

template <class Args>
void note_weights(const Args& args, MemoryOfCall& memory) {
  memory.reads("w1", args.w1);
  memory.reads("w2", args.w2);
  memory.reads("b1", args.b1);
  memory.reads("b2", args.b2);
  memory.reads("shared_w1", args.shared_w1);
  memory.reads("shared_w2", args.shared_w2);
}

void note(const Problem& problem, const ForwardArgs& args, MemoryOfCall& memory) {
  // Some are read where the caller has them, until after the first results.
  if (problem.shared_experts > 0) {
    memory.reads("x", args.x);
  } else {
    memory.enters("x", args.x);
  }
  if (problem.probs == Probs::kAfter) {
    memory.reads("topk_probs", args.topk_probs);
    memory.reads("shared_probs", args.shared_probs);
  } else {
    memory.enters("topk_probs", args.topk_probs);
    memory.enters("shared_probs", args.shared_probs);
  }
  note_weights(args, memory);
  memory.writes("out", args.out);
}

void note(const BackwardDataArgs& args, MemoryOfCall& memory) {
  note_weights(args, memory);
  memory.writes("dx", args.dx);
  memory.writes("dprobs", args.dprobs);
  memory.writes("dshared_probs", args.dshared_probs);
}

void note(const BackwardWeightsArgs& args, MemoryOfCall& memory) {
  memory.writes("dw1", args.dw1);
  memory.writes("dw2", args.dw2);
  memory.writes("db1", args.db1);
  memory.writes("db2", args.db2);
  memory.writes("dshared_w1", args.dshared_w1);
  memory.writes("dshared_w2", args.dshared_w2);
}

/// Memory of at least `expected` elements, named for the sentence.
template <class T>
void check_memory(const char* name, std::span<T> memory, std::int64_t expected,
                  std::int64_t alignment) {
  const bool bytes = sizeof(T) == 1;
  require(static_cast<std::int64_t>(memory.size()) >= expected, ErrorCode::kInvalidArgument, name,
          " has ", memory.size(), bytes ? " bytes; " : " elements; ", expected,
          " or more are accepted (Layer::memory_needs)");
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  require(address % static_cast<std::uintptr_t>(alignment) == 0, ErrorCode::kInvalidArgument, name,
          " starts at address ", address, "; a multiple of ", alignment, " is accepted");
}

/// What is needed of memory that may be larger, or empty.
std::span<std::byte> needed_of(std::span<std::byte> memory, std::int64_t bytes) {
  return memory.first(std::min(memory.size(), static_cast<std::size_t>(bytes)));
}

/// Whether these share no byte, of what is needed of each.
bool are_apart_from(const std::byte* a, std::int64_t a_bytes, const std::byte* b,
                    std::int64_t b_bytes) {
  return are_apart({a, static_cast<std::size_t>(a_bytes)}, {b, static_cast<std::size_t>(b_bytes)});
}

void check_workspace_apart(const MemoryNeeds& needs, const LayerMemory& memory) {
  if (memory.workspace.empty()) return;
  const auto is_apart = [&](const std::byte* symmetric) {
    return are_apart_from(memory.workspace.data(), needs.workspace, symmetric, needs.symmetric);
  };
  require(is_apart(memory.symmetric.data()), ErrorCode::kInvalidArgument,
          "memory.workspace shares memory with memory.symmetric; memory of its own is accepted");
  for (std::size_t r = 0; r < memory.peers.size(); ++r) {
    require(is_apart(memory.peers[r]), ErrorCode::kInvalidArgument,
            "memory.workspace shares memory with memory.peers[", r,
            "]; memory of its own is accepted");
  }
}

}  // namespace

void check_layer_memory(const MemoryNeeds& needs, const LayerMemory& memory, int rank,
                        int num_ranks) {
  if (!memory.workspace.empty()) {
    check_memory("memory.workspace", memory.workspace, needs.workspace, needs.alignment);
  }
  if (memory.symmetric.empty()) {
    require(memory.peers.empty() && !memory.release, ErrorCode::kInvalidArgument, "memory.",
            memory.peers.empty() ? "release" : "peers",
            " is given without memory.symmetric; both or neither are accepted");
    return;
  }
  check_memory("memory.symmetric", memory.symmetric, needs.symmetric, needs.alignment);
  const auto peers = static_cast<int>(memory.peers.size());
  require(peers == 0 || peers == num_ranks, ErrorCode::kInvalidArgument, "memory.peers has ", peers,
          " elements; one for each of ", num_ranks, " ranks is accepted, or none");
  for (std::size_t r = 0; r < memory.peers.size(); ++r) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.peers[r]);
    require(address != 0 && address % static_cast<std::uintptr_t>(needs.alignment) == 0,
            ErrorCode::kInvalidArgument, "memory.peers[", r, "] is address ", address,
            "; a multiple of ", needs.alignment, " above 0 is accepted");
    const auto end = memory.peers.begin() + static_cast<std::ptrdiff_t>(r);
    const auto shared = std::find_if(memory.peers.begin(), end, [&](const std::byte* peer) {
      return !are_apart_from(peer, needs.symmetric, memory.peers[r], needs.symmetric);
    });
    require(shared == end, ErrorCode::kInvalidArgument, "memory.peers[", r,
            "] shares memory with that of rank ", shared - memory.peers.begin(),
            "; memory of its own for each rank is accepted");
  }
  require(peers == 0 || memory.peers[static_cast<std::size_t>(rank)] == memory.symmetric.data(),
          ErrorCode::kInvalidArgument, "memory.peers[", rank,
          "] is not memory.symmetric, which is accepted there as this rank's");
  check_workspace_apart(needs, memory);
}

void check_plan_memory(const MemoryNeeds& needs, const StepMemory& memory,
                       std::span<const std::int32_t> topk_ids) {
  if (memory.plan.empty()) return;
  check_memory("memory.plan", memory.plan, needs.plan, needs.alignment);
  MemoryOfCall call;
  call.enters("topk_ids", topk_ids);
  call.works_in("memory.plan", needed_of(memory.plan, needs.plan));
  call.require_apart();
}

namespace {

bool has_saved_memory(const StepMemory& memory) {
  return !memory.x_rows.empty() || !memory.h.empty() || !memory.row_probs.empty();
}

/// Rows that there is memory for, as row_probs says; what is beyond the capacity is of no use.
std::int64_t given_rows(const Problem& problem, const MemoryNeeds& needs,
                        const StepMemory& memory) {
  const auto count = static_cast<std::int64_t>(memory.row_probs.size());
  if (count >= needs.rows) return needs.rows;
  require(count % problem.row_align == 0, ErrorCode::kInvalidArgument, "memory.row_probs has ",
          count, " elements; a multiple of row_align=", problem.row_align, " is accepted, or ",
          needs.rows, " or more");
  return count;
}

/// `rows_of_x`: what is kept of x takes at least so many.
void check_rows(const Problem& problem, const MemoryNeeds& needs, const StepMemory& memory,
                std::int64_t rows, std::int64_t rows_of_x) {
  const GraphChoice choice = choice_of(problem);
  if (!choice.drops_received) {
    check_memory("memory.x_rows", memory.x_rows, rows_of_x * problem.hidden, needs.alignment);
  }
  if (!choice.drops_h) {
    check_memory("memory.h", memory.h, rows * halves(problem) * problem.intermediate,
                 needs.alignment);
  }
  check_memory("memory.row_probs", memory.row_probs, rows, needs.alignment);
}

void check_if_given(const char* name, std::span<std::byte> memory, std::int64_t expected,
                    std::int64_t alignment) {
  if (!memory.empty()) check_memory(name, memory, expected, alignment);
}

std::int64_t backward_bytes(const Problem& problem, std::int64_t rows) {
  return RowLayout(problem, rows, Pass::kBackward).bytes;
}

/// The caller's memory of what is saved, with so many rows of what is kept of x.
struct SavedMemory {
  SavedMemory(const SavedData& saved, std::int64_t rows_of_x) {
    if (!saved.of_caller) return;  // uniep's own, of which nothing of a call can be a part
    const Problem& p = saved.plan.problem();
    bf16* const of_x = p.save == Save::kTokens ? saved.tensors.get<Tensor::kReceived>()
                                               : saved.tensors.get<Tensor::kXRows>();
    x_rows = part(of_x, rows_of_x * p.hidden);
    h = part(saved.h(), saved.rows * halves(p) * p.intermediate);
    row_probs = part(saved.tensors.get<Tensor::kRowProbs>(), saved.rows);
  }

  template <class T>
  static std::span<T> part(T* begin, std::int64_t count) {
    return {begin, begin == nullptr ? 0 : static_cast<std::size_t>(count)};
  }

  std::span<bf16> x_rows{}, h{};
  std::span<float> row_probs{};
};

/// Notes the tokens that a backward pass reads; x may be given where it does not.
void note_tokens(const Problem& problem, const BackwardDataArgs& data,
                 const BackwardWeightsArgs& weights, MemoryOfCall& memory) {
  const bool in_place = problem.shared_experts > 0;
  memory.enters("dy", data.dy);
  if (problem.save == Save::kNone) {
    memory.reads("x", data.x);  // for weight gradients alone, behind which no token's result is
  } else if (in_place) {
    memory.enters("x", data.x);
  }
  if (!in_place) return;
  memory.enters("dy", weights.dy);
  memory.enters("x", weights.x);
}

/// `rows`: what the pass works in; null: uniep's own.
void require_apart_in_backward(const MemoryNeeds& needs, const SavedData& saved,
                               const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                               const StepMemory& memory, std::byte* rows) {
  const Problem& problem = saved.plan.problem();
  // How many tokens were received, only the plan knows, which may be on its way yet: one, or more.
  const SavedMemory kept(saved, problem.save == Save::kTokens ? 1 : saved.rows);
  MemoryOfCall call;
  call.reads("memory.plan", needed_of(memory.plan, needs.plan));
  call.reads("memory.x_rows", kept.x_rows);
  call.reads("memory.h", kept.h);
  call.reads("memory.row_probs", kept.row_probs);
  note_tokens(problem, data, weights, call);
  note(data, call);
  note(weights, call);
  call.works_in("memory.backward_memory",
                SavedMemory::part(rows, backward_bytes(problem, saved.rows)));
  call.require_apart();
}

}  // namespace

bool is_sized_by_routing(const Problem& problem, const MemoryNeeds& needs,
                         const StepMemory& memory) {
  if (!has_saved_memory(memory)) return false;
  const auto rows = static_cast<std::int64_t>(memory.row_probs.size());
  const auto x = static_cast<std::int64_t>(memory.x_rows.size());
  return rows < needs.rows ||
         (problem.save == Save::kTokens && x < needs.rows_of_x * problem.hidden);
}

std::optional<std::int64_t> check_saved_memory(const RoutingPlan& plan, const MemoryNeeds& needs,
                                               const StepMemory& memory) {
  if (!has_saved_memory(memory)) return std::nullopt;
  const std::int64_t rows = given_rows(plan.problem(), needs, memory);
  if (rows < needs.rows) {
    require(rows >= plan.padded_rows(), ErrorCode::kInvalidArgument, "memory.row_probs has ", rows,
            " elements; this routing brings ", plan.padded_rows(),
            " rows (RoutingPlan::padded_rows), and as many or more are accepted");
  }
  const Problem& problem = plan.problem();
  std::int64_t kept = rows_of_x(problem, plan.num_ranks(), rows);
  const auto given = static_cast<std::int64_t>(memory.x_rows.size());
  if (problem.save == Save::kTokens && given < kept * problem.hidden) {
    kept = plan.received_tokens();
  }
  check_rows(problem, needs, memory, rows, kept);
  return rows;
}

void check_forward_memory(const MemoryNeeds& needs, const SavedData& saved, const ForwardArgs& args,
                          const StepMemory& memory) {
  const Problem& problem = saved.plan.problem();
  const std::int64_t bytes = RowLayout(problem, saved.rows, Pass::kForward).bytes;
  check_if_given("memory.forward_memory", memory.forward_memory, bytes, needs.alignment);
  const auto given = static_cast<std::int64_t>(memory.x_rows.size()) / problem.hidden;
  const std::int64_t most = rows_of_x(problem, saved.plan.num_ranks(), saved.rows);
  const SavedMemory kept(saved, std::min(given, most));
  MemoryOfCall call;
  call.reads("memory.plan", needed_of(memory.plan, needs.plan));
  note(problem, args, call);
  call.works_in("memory.x_rows", kept.x_rows);
  call.works_in("memory.h", kept.h);
  call.works_in("memory.row_probs", kept.row_probs);
  call.works_in("memory.forward_memory", needed_of(memory.forward_memory, bytes));
  call.require_apart();
}

void check_backward_memory(const MemoryNeeds& needs, const SavedData& saved,
                           const BackwardDataArgs& data, const BackwardWeightsArgs& weights,
                           const StepMemory& memory) {
  check_if_given("memory.backward_memory", memory.backward_memory,
                 backward_bytes(saved.plan.problem(), saved.rows), needs.alignment);
  require_apart_in_backward(needs, saved, data, weights, memory, memory.backward_memory.data());
}

void check_weights_memory(const MemoryNeeds& needs, const SavedData& saved,
                          const BackwardWeightsArgs& args, const StepMemory& memory) {
  check_if_given("memory.backward_memory", memory.backward_memory,
                 backward_bytes(saved.plan.problem(), saved.rows), needs.alignment);
  require_apart_in_backward(needs, saved, {}, args, memory,
                            saved.rows_of_weights(memory.backward_memory).get());
}

std::int64_t check_restored_memory(const Problem& problem, const MemoryNeeds& needs,
                                   const StepMemory& memory, std::int64_t tokens) {
  require(tokens >= 0 && tokens <= problem.max_tokens, ErrorCode::kInvalidArgument, "tokens is ",
          tokens, "; 0 to max_tokens=", problem.max_tokens, " is accepted");
  check_memory("memory.plan", memory.plan, needs.plan, needs.alignment);
  require(has_saved_memory(memory) || needs.rows == 0, ErrorCode::kInvalidArgument,
          "memory has no x_rows, h and row_probs; what forward was given is accepted");
  const std::int64_t rows = given_rows(problem, needs, memory);
  // Of received tokens there are as many as forward had room for.
  check_rows(problem, needs, memory, rows, problem.save == Save::kRows ? rows : 0);
  check_if_given("memory.backward_memory", memory.backward_memory, backward_bytes(problem, rows),
                 needs.alignment);
  return rows;
}

std::int64_t rows_of_x(const Problem& problem, int num_ranks, std::int64_t rows) {
  switch (problem.save) {
    case Save::kRows:
      return rows;
    case Save::kTokens:
      return most_received(problem, num_ranks, rows);
    case Save::kNone:
      break;
  }
  return 0;
}

std::int64_t checked_rows(const Problem& problem, int num_ranks, std::optional<std::int64_t> rows) {
  const std::int64_t capacity = capacity_rows(problem, num_ranks);
  if (!rows || *rows == capacity) return capacity;
  require(*rows >= 0 && *rows < capacity && *rows % problem.row_align == 0,
          ErrorCode::kInvalidArgument, "rows is ", *rows,
          "; a multiple of row_align=", problem.row_align, " below ", capacity,
          " is accepted, or that capacity");
  return std::min<std::int64_t>(std::max<std::int64_t>(*rows, problem.row_align), capacity);
}

}  // namespace uniep
