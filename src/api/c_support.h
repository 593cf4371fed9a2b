#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "api/no_cuda.h"
#include "base/check.h"
#include "base/error_of.h"
#include "group/communicator_impl.h"
#include "layer/backend.h"
#include "layer/weight_sizes.h"
#include "uniep/c_api.h"
#include "uniep/layer.h"

// What the files of the C API share: its handles, how errors leave it, and what its numbers and
// addresses become.

struct uniep_group {
  uniep::Communicator communicator;
  std::string ranks_note{};  // of uniep_group_config
};

struct uniep_row_pool {
  uniep::RowPool pool;
};

struct uniep_saved {
  uniep::Saved saved;
};

namespace uniep::c_api {

using uniep::bf16;
using uniep::CallOptions;
using uniep::Error;
using uniep::ErrorCode;
using uniep::Pass;
using uniep::require;
using uniep::Schedule;

/// Keeps the sentence for uniep_last_error, with the note in brackets if it names a rank, and
/// returns the code.
int failure(const Error& error, const char* ranks_note);

template <class T>
void require_given(const T* argument, const char* name) {
  require(argument != nullptr, ErrorCode::kInvalidArgument, name,
          " is NULL; an address is accepted");
}

/// Runs `body`; what it throws becomes a code and a sentence. `ranks_note`: as `failure` has it, or
/// null.
template <class Body>
int guarded(const char* ranks_note, const Body& body) {
  try {
    body();
    return 0;
  } catch (...) {
    return failure(uniep::current_error(), ranks_note);
  }
}

template <class Body>
int guarded(const Body& body) {
  return guarded(nullptr, body);
}

/// The same for a call of a group or layer, whose caller may have forgotten it.
template <class Handle, class Body>
int guarded_of(const Handle* handle, const char* name, const Body& body) {
  return guarded(handle == nullptr ? nullptr : handle->ranks_note.c_str(), [&] {
    require_given(handle, name);
    body();
  });
}

inline bool truth(std::int64_t value, const char* name) {
  require(value == 0 || value == 1, ErrorCode::kInvalidArgument, name, " is ", value,
          "; 0 and 1 are accepted");
  return value == 1;
}

inline int narrow(std::int64_t value, const char* name) {
  require(value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
          ErrorCode::kInvalidArgument, name, " is ", value, "; a number of 32 bits is accepted");
  return static_cast<int>(value);
}

inline uniep::Backend backend_of(std::int32_t number) {
  require(number == 0 || number == 1, ErrorCode::kInvalidArgument, "backend is ", number,
          "; 0 (cpu) and 1 (cuda) are accepted");
  return number == 0 ? uniep::Backend::kCpu : uniep::Backend::kCuda;
}

inline uniep::Problem problem_of(const uniep_problem* problem) {
  require_given(problem, "problem");
  uniep::Problem p{.hidden = problem->hidden,
                   .intermediate = problem->intermediate,
                   .num_experts = narrow(problem->num_experts, "problem.num_experts"),
                   .topk = narrow(problem->topk, "problem.topk"),
                   .max_tokens = problem->max_tokens,
                   .capacity_rows = problem->capacity_rows};
  p.save = static_cast<uniep::Save>(narrow(problem->save, "problem.save"));  // validated with all
  p.recompute_h = truth(problem->recompute_h, "problem.recompute_h");
  p.activation = static_cast<uniep::Activation>(narrow(problem->activation, "problem.activation"));
  p.probs = static_cast<uniep::Probs>(narrow(problem->probs, "problem.probs"));
  p.bias = truth(problem->bias, "problem.bias");
  p.backward_rows = problem->backward_rows;
  if (problem->combine_groups != 0) {
    p.combine_groups = narrow(problem->combine_groups, "problem.combine_groups");
  }
  p.combine_partials = static_cast<uniep::CombinePartials>(
      narrow(problem->combine_partials, "problem.combine_partials"));
  p.shared_experts = narrow(problem->shared_experts, "problem.shared_experts");
  p.shared_gate = !truth(problem->no_shared_gate, "problem.no_shared_gate");
  p.slot_rows = truth(problem->slot_rows, "problem.slot_rows");
  if (problem->gathered_hosts != 0) {
    p.gathered_hosts = narrow(problem->gathered_hosts, "problem.gathered_hosts");
    p.first_host = narrow(problem->first_host, "problem.first_host");
  }
  if (problem->row_align != 0) p.row_align = narrow(problem->row_align, "problem.row_align");
  return p;
}

/// `count` elements at `data`.
template <class T, class Pointer>
std::span<T> elements(Pointer* data, std::int64_t count, const char* name) {
  if (count == 0) return {};
  require_given(data, name);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  require(address % alignof(T) == 0, ErrorCode::kInvalidArgument, name, " starts at address ",
          address, "; a multiple of ", alignof(T), " is accepted");
  return {static_cast<T*>(data), static_cast<std::size_t>(count)};
}

/// Elements that a call only reads, though the type says otherwise.
template <class T>
std::span<T> read_only(const void* data, std::int64_t count, const char* name) {
  return elements<T>(const_cast<void*>(data), count, name);
}

/// What of a forward pass a layer may be told not to keep.
template <class T>
std::span<T> kept(bool is_kept, const void* data, std::int64_t count, const char* name) {
  if (is_kept) return read_only<T>(data, count, name);
  require(data == nullptr, ErrorCode::kInvalidArgument, name,
          " is given, and this layer does not keep it; NULL is accepted");
  return {};
}

/// What only layers with biases have.
inline void require_no_bias(bool has_bias, const void* data, const char* name) {
  require(has_bias || data == nullptr, ErrorCode::kInvalidArgument, name,
          " is given, and this layer has no biases; NULL is accepted, or problem.bias=1");
}

template <class T>
std::span<T> of_bias(bool has_bias, const void* data, std::int64_t count, const char* name) {
  require_no_bias(has_bias, data, name);
  return elements<T>(data, count, name);
}

/// What only layers with shared experts have.
template <class T>
std::span<T> of_shared(bool has_shared, const void* data, std::int64_t count, const char* name) {
  require(has_shared || data == nullptr, ErrorCode::kInvalidArgument, name,
          " is given, and this layer has no shared experts; NULL is accepted, or "
          "problem.shared_experts of 1 or more");
  return read_only<T>(data, count, name);
}

/// Bytes that a pass works in; empty: uniep's own.
inline std::span<std::byte> scratch(void* memory, std::int64_t bytes) {
  if (memory == nullptr) return {};
  return {static_cast<std::byte*>(memory), static_cast<std::size_t>(bytes)};
}

inline uniep_memory_needs c_needs(const uniep::MemoryNeeds& n) {
  return {.rows = n.rows,
          .rows_of_x = n.rows_of_x,
          .symmetric = n.symmetric,
          .workspace = n.workspace,
          .plan = n.plan,
          .forward_memory = n.forward_memory,
          .backward_memory = n.backward_memory,
          .alignment = n.alignment};
}

}  // namespace uniep::c_api

struct uniep_layer {
  uniep_layer(const uniep::Problem& problem, const uniep_group& group,
              const uniep::LayerOptions& options)
      : ranks_note(group.ranks_note),
        layer(problem, group.communicator, options),
        has_pool(options.row_pool.has_value()),
        needs(uniep::Layer::memory_needs(problem, group.communicator.backend(),
                                         group.communicator.size(), {},
                                         group.communicator.layout().hosts)),
        local_experts(problem.num_experts / group.communicator.size()) {}

  const uniep::Problem& problem() const { return layer.problem(); }
  uniep::WeightSizes sizes() const { return uniep::weight_sizes(problem(), local_experts); }

  /// Texts are parsed once.
  const uniep::Schedule& schedule_of(const char* text) {
    const auto [found, is_new] = schedules.try_emplace(text);
    if (is_new) {
      try {
        found->second =
            uniep::parse_schedule(text, uniep::default_schedule(layer.communicator().backend()));
      } catch (...) {
        schedules.erase(found);
        throw;
      }
    }
    return found->second;
  }

  uniep::CallOptions options(const char* schedule, void* stream) {
    uniep::CallOptions o{.cuda_stream = stream};
    if (schedule != nullptr) o.schedule = schedule_of(schedule);
    return o;
  }

  std::int64_t tokens(std::int64_t count) const {
    uniep::require(count >= 0 && count <= problem().max_tokens, uniep::ErrorCode::kInvalidArgument,
                   "tokens is ", count, "; 0 to max_tokens=", problem().max_tokens, " is accepted");
    return count;
  }

  /// What calls with so many rows need; nothing: the capacity.
  uniep::MemoryNeeds needs_of(std::optional<std::int64_t> rows) const {
    if (!rows || *rows == needs.rows) return needs;
    const uniep::Communicator& group = layer.communicator();
    return uniep::Layer::memory_needs(problem(), group.backend(), group.size(), rows,
                                      group.layout().hosts);
  }

  /// What calls with so many rows need, as callers say it: 0 for the capacity.
  uniep::MemoryNeeds needs_of_call(std::int64_t rows) const {
    return needs_of(rows == 0 ? std::nullopt : std::optional(rows));
  }

  uniep::StepMemory saved_memory(std::int64_t rows, std::int64_t rows_of_x, const void* x_rows,
                                 const void* h, const float* row_probs) const {
    const uniep::Problem& p = problem();
    const bool keeps_x = p.save != uniep::Save::kNone;
    return {
        .x_rows = uniep::c_api::kept<uniep::bf16>(keeps_x, x_rows, rows_of_x * p.hidden, "x_rows"),
        .h = uniep::c_api::kept<uniep::bf16>(!p.recompute_h, h, rows * halves(p) * p.intermediate,
                                             "h"),
        .row_probs = uniep::c_api::read_only<float>(row_probs, rows, "row_probs")};
  }

  /// Who uses the layer: functions of the C API, some of which are several calls of `layer`.
  uniep::Usage usage;
  const std::string ranks_note;  // of the group
  uniep::Layer layer;
  const bool has_pool;
  const uniep::MemoryNeeds needs;
  const std::int64_t local_experts;
  std::map<std::string, uniep::Schedule, std::less<>> schedules;
};

namespace uniep::c_api {

/// A call of a layer, and of its group if all ranks make it.
class GroupTurn {
 public:
  explicit GroupTurn(uniep_layer& l, bool collective = true)
      : of_layer_(l.usage), of_group_(*l.layer.communicator().impl(), collective) {}

 private:
  uniep::Usage::Call of_layer_;
  uniep::CollectiveCall of_group_;
};

/// What is wrong with this rank's `call`, the other ranks hear of, too, whatever it throws.
template <class Call, class Prepare>
auto prepared(uniep_layer& l, const Call* call, bool collective, const Prepare& prepare) {
  try {
    return prepare();
  } catch (...) {
    CallOptions options;
    if (call != nullptr) options.cuda_stream = call->stream;
    if (collective) l.layer.backend().refuse_call(uniep::current_error(), options);
    throw;
  }
}

}  // namespace uniep::c_api
