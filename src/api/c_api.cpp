#include "uniep/c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>

#include "api/no_cuda.h"
#include "base/check.h"
#include "base/error_of.h"
#include "layer/backend.h"
#include "uniep/layer.h"
#include "uniep/tune.h"
#include "uniep/version.h"

struct uniep_group {
  uniep::Communicator communicator;
};

struct uniep_row_pool {
  uniep::RowPool pool;
};

struct uniep_saved {
  uniep::Saved saved;
};

namespace {

using uniep::CallOptions;
using uniep::Error;
using uniep::ErrorCode;
using uniep::Pass;
using uniep::require;
using uniep::Schedule;

thread_local std::string last_error;

int failure(const Error& error) {
  last_error = error.what();
  return 1 + static_cast<int>(error.code());
}

/// Runs `body`; what it throws becomes a code and a sentence.
template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    return failure(uniep::error_of(e));
  } catch (...) {
    return failure({ErrorCode::kInternal, "an exception of an unknown type"});
  }
}

template <class T>
void require_given(const T* argument, const char* name) {
  require(argument != nullptr, ErrorCode::kInvalidArgument, name,
          " is NULL; an address is accepted");
}

bool truth(std::int64_t value, const char* name) {
  require(value == 0 || value == 1, ErrorCode::kInvalidArgument, name, " is ", value,
          "; 0 and 1 are accepted");
  return value == 1;
}

int narrow(std::int64_t value, const char* name) {
  require(value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
          ErrorCode::kInvalidArgument, name, " is ", value, "; a number of 32 bits is accepted");
  return static_cast<int>(value);
}

uniep::Backend backend_of(std::int32_t number) {
  require(number == 0 || number == 1, ErrorCode::kInvalidArgument, "backend is ", number,
          "; 0 (cpu) and 1 (cuda) are accepted");
  return number == 0 ? uniep::Backend::kCpu : uniep::Backend::kCuda;
}

uniep::Problem problem_of(const uniep_problem* problem) {
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
  if (problem->row_align != 0) p.row_align = narrow(problem->row_align, "problem.row_align");
  return p;
}

/// `count` elements at `data`.
template <class T, class Pointer>
std::span<T> elements(Pointer* data, std::int64_t count, const char* name) {
  if (count == 0) return {};
  require_given(data, name);
  return {static_cast<T*>(data), static_cast<std::size_t>(count)};
}

/// Of what a call reads only, though the type says otherwise.
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
void require_no_bias(bool has_bias, const void* data, const char* name) {
  require(has_bias || data == nullptr, ErrorCode::kInvalidArgument, name,
          " is given, and this layer has no biases; NULL is accepted, or problem.bias=1");
}

template <class T>
std::span<T> of_bias(bool has_bias, const void* data, std::int64_t count, const char* name) {
  require_no_bias(has_bias, data, name);
  return elements<T>(data, count, name);
}

using uniep::bf16;

}  // namespace

struct uniep_layer {
  uniep_layer(const uniep::Problem& problem, const uniep::Communicator& communicator,
              const uniep::LayerOptions& options)
      : layer(problem, communicator, options),
        has_pool(options.row_pool.has_value()),
        needs(uniep::Layer::memory_needs(problem, communicator.backend(), communicator.size())),
        local_experts(problem.num_experts / communicator.size()) {}

  const uniep::Problem& problem() const { return layer.problem(); }
  /// Elements of each of a layer's weights; of biases 0, where there are none.
  struct Sizes {
    std::int64_t w1, w2, b1, b2;
  };
  Sizes sizes() const {
    const uniep::Problem& p = problem();
    const std::int64_t w1_rows = local_experts * halves(p) * p.intermediate;
    const std::int64_t w2_rows = local_experts * p.hidden;
    return {w1_rows * p.hidden, w2_rows * p.intermediate, p.bias ? w1_rows : 0,
            p.bias ? w2_rows : 0};
  }

  /// Texts are parsed once.
  const Schedule& schedule_of(const char* text) {
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

  CallOptions options(const char* schedule, void* stream) {
    CallOptions o{.cuda_stream = stream};
    if (schedule != nullptr) o.schedule = schedule_of(schedule);
    return o;
  }

  std::int64_t tokens(std::int64_t count) const {
    require(count >= 0 && count <= problem().max_tokens, ErrorCode::kInvalidArgument, "tokens is ",
            count, "; 0 to max_tokens=", problem().max_tokens, " is accepted");
    return count;
  }

  /// Of calls with `rows` rows; 0: the capacity.
  uniep::MemoryNeeds needs_of(std::int64_t rows) const {
    if (rows == 0 || rows == needs.rows) return needs;
    const uniep::Communicator& group = layer.communicator();
    return uniep::Layer::memory_needs(problem(), group.backend(), group.size(), rows);
  }

  uniep::StepMemory saved_memory(std::int64_t rows, std::int64_t rows_of_x, const void* x_rows,
                                 const void* h, const float* row_probs) const {
    const uniep::Problem& p = problem();
    return {.x_rows = kept<bf16>(rows_of_x > 0, x_rows, rows_of_x * p.hidden, "x_rows"),
            .h = kept<bf16>(!p.recompute_h, h, rows * halves(p) * p.intermediate, "h"),
            .row_probs = read_only<float>(row_probs, rows, "row_probs")};
  }

  uniep::Layer layer;
  const bool has_pool;
  const uniep::MemoryNeeds needs;
  const std::int64_t local_experts;
  std::map<std::string, Schedule, std::less<>> schedules;
};

namespace {

/// What is wrong with this rank's call, the other ranks hear of, too.
template <class Prepare>
auto prepared(uniep_layer& l, bool collective, const Prepare& prepare) {
  try {
    return prepare();
  } catch (const Error& error) {
    if (collective) l.layer.backend().refuse_call(error);
    throw;
  }
}

struct Forward {
  std::span<const std::int32_t> topk_ids;
  uniep::ForwardArgs args;
  CallOptions plan_options, options;
};

/// Bytes that a pass works in; empty: uniep's own.
std::span<std::byte> scratch(void* memory, std::int64_t bytes) {
  if (memory == nullptr) return {};
  return {static_cast<std::byte*>(memory), static_cast<std::size_t>(bytes)};
}

/// What forward writes besides the plan.
uniep::StepMemory forward_memory(const uniep_layer& l, const uniep::MemoryNeeds& needs,
                                 const uniep_row_memory& memory) {
  uniep::StepMemory m =
      l.saved_memory(needs.rows, needs.rows_of_x, memory.x_rows, memory.h, memory.row_probs);
  m.forward_rows = scratch(memory.forward_rows, needs.forward_rows);
  return m;
}

/// Whether what forward saves is in a handle, as it must be where the layer has a row pool;
/// `memory` are the fields that have it elsewhere.
bool is_pooled(const uniep_layer& l, const void* saved, std::initializer_list<const void*> memory) {
  if (!l.has_pool) {
    require(saved == nullptr, ErrorCode::kInvalidArgument,
            "saved is given, and the layer has no row pool; NULL is accepted");
    return false;
  }
  require_given(saved, "saved");
  for (const void* given : memory) {
    require(
        given == nullptr, ErrorCode::kInvalidArgument,
        "plan, x_rows, h, row_probs or allocate is given, and the layer has a row pool; NULL is "
        "accepted");
  }
  return true;
}

Forward forward_of(uniep_layer& l, const uniep_forward_call* call) {
  require_given(call, "call");
  const std::int64_t t = l.tokens(call->tokens);
  const uniep::Problem& p = l.problem();
  const uniep_layer::Sizes n = l.sizes();
  Forward f;
  f.topk_ids = elements<const std::int32_t>(call->topk_ids, t * p.topk, "topk_ids");
  f.args = {.x = elements<const bf16>(call->x, t * p.hidden, "x"),
            .topk_probs = elements<const float>(call->topk_probs, t * p.topk, "topk_probs"),
            .w1 = elements<const bf16>(call->w1, n.w1, "w1"),
            .w2 = elements<const bf16>(call->w2, n.w2, "w2"),
            .out = elements<bf16>(call->out, t * p.hidden, "out"),
            .b1 = of_bias<const bf16>(p.bias, call->b1, n.b1, "b1"),
            .b2 = of_bias<const bf16>(p.bias, call->b2, n.b2, "b2")};
  f.options = l.options(call->schedule, call->stream);
  f.plan_options = f.options;
  f.plan_options.overflow = call->overflow;
  const uniep_row_memory& m = call->memory;
  const auto* allocate = reinterpret_cast<const void*>(call->allocate);
  if (is_pooled(l, call->saved, {call->plan, m.x_rows, m.h, m.row_probs, allocate})) {
    f.options.memory.forward_rows = scratch(m.forward_rows, l.needs.forward_rows);
    return f;
  }
  f.plan_options.memory.plan = read_only<std::byte>(call->plan, l.needs.plan, "plan");
  if (call->allocate == nullptr) f.options.memory = forward_memory(l, l.needs, m);
  return f;
}

uniep_memory_needs c_needs(const uniep::MemoryNeeds& n) {
  return {.rows = n.rows,
          .rows_of_x = n.rows_of_x,
          .symmetric = n.symmetric,
          .workspace = n.workspace,
          .plan = n.plan,
          .forward_rows = n.forward_rows,
          .backward_rows = n.backward_rows,
          .alignment = n.alignment};
}

/// Plans the routing. Where the call wants memory of the rows that came, waits until they are known
/// and asks for it.
uniep::RoutingPlan plan_of(uniep_layer& l, const uniep_forward_call* call, Forward& f) {
  uniep::RoutingPlan plan = l.layer.plan(f.topk_ids, f.plan_options);
  if (call->allocate == nullptr) return plan;
  // Throws what is wrong with the routing, as a pass would: on all ranks, and once.
  if (call->overflow == nullptr) l.layer.synchronize();
  // Each rank has rows of its own; without any, it asks for a few, so that there is memory to give.
  const std::int64_t rows =
      std::min(std::max<std::int64_t>(plan.padded_rows(), l.problem().row_align), l.needs.rows);
  f.options.memory = prepared(l, true, [&] {
    uniep::MemoryNeeds needs = l.needs_of(rows);
    if (l.problem().save == uniep::Save::kTokens) {
      needs.rows_of_x = std::max<std::int64_t>(plan.received_tokens(), 1);
    }
    const uniep_memory_needs wanted = c_needs(needs);
    uniep_row_memory memory{};
    const int code = call->allocate(call->allocate_context, &wanted, &memory);
    require(code == 0, ErrorCode::kInvalidArgument, "allocate returned ", code, " for ", rows,
            " rows; 0 means that it worked");
    return forward_memory(l, needs, memory);
  });
  return plan;
}

uniep::WeightGrad weight_grad(std::int32_t kind, void* data, std::int64_t count, const char* name) {
  switch (kind) {
    case 0:
      return elements<bf16>(data, count, name);
    case 1:
      return elements<float>(data, count, name);
    case 2:
      return uniep::Bf16MainGrad{elements<bf16>(data, count, name)};
    default:
      throw Error(ErrorCode::kInvalidArgument,
                  uniep::cat("weight_grad is ", kind,
                             "; 0 (bf16, overwritten), 1 (fp32, added to) "
                             "and 2 (bf16, added to) are accepted"));
  }
}

enum class Part : std::int32_t { kWhole, kData, kWeights };

struct Backward {
  Part part;
  uniep::Saved restored;           // of the caller's memory
  uniep::Saved* pooled = nullptr;  // of a layer with a row pool
  uniep::BackwardDataArgs data;
  uniep::BackwardWeightsArgs weights;
  CallOptions options;

  uniep::Saved& saved() { return pooled != nullptr ? *pooled : restored; }
};

Part part_of(const uniep_backward_call* call) {
  require_given(call, "call");
  require(call->part >= 0 && call->part <= 2, ErrorCode::kInvalidArgument, "part is ", call->part,
          "; 0 (whole), 1 (data) and 2 (weights) are accepted");
  return static_cast<Part>(call->part);
}

/// What forward saved, where it is the caller's memory; sets what the pass works in.
uniep::StepMemory restored_memory(const uniep_layer& l, const uniep_backward_call* call,
                                  Backward& b) {
  const uniep::MemoryNeeds needs = l.needs_of(call->rows);
  uniep::StepMemory memory =
      l.saved_memory(needs.rows, needs.rows_of_x, call->x_rows, call->h, call->row_probs);
  memory.plan = read_only<std::byte>(call->plan, needs.plan, "plan");
  const auto rows =
      b.part == Part::kWhole
          ? scratch(call->backward_rows, needs.backward_rows)
          : elements<std::byte>(call->backward_rows, needs.backward_rows, "backward_rows");
  (b.part == Part::kWeights ? memory : b.options.memory).backward_rows = rows;
  return memory;
}

/// What forward saved, where it is in pages of a row pool; sets what the pass works in.
void set_pooled(const uniep_layer& l, const uniep_backward_call* call, Backward& b) {
  require(call->rows == 0, ErrorCode::kInvalidArgument, "rows is ", call->rows,
          ", and the layer has a row pool; 0 is accepted");
  require(b.part != Part::kWeights || call->backward_rows == nullptr, ErrorCode::kInvalidArgument,
          "backward_rows is given to part 2, which takes those of part 1 where the layer has a row "
          "pool; NULL is accepted");
  b.pooled = &call->saved->saved;
  b.options.keep_pages = truth(call->keep_pages, "keep_pages");
  b.options.memory.backward_rows = scratch(call->backward_rows, l.needs.backward_rows);
}

Backward backward_of(uniep_layer& l, const uniep_backward_call* call) {
  const std::int64_t t = l.tokens(call->tokens);
  const uniep::Problem& p = l.problem();
  const uniep_layer::Sizes n = l.sizes();
  Backward b{.part = part_of(call),
             .restored = {},
             .data = {},
             .weights = {},
             .options = l.options(call->schedule, call->stream)};
  const bool pooled =
      is_pooled(l, call->saved, {call->plan, call->x_rows, call->h, call->row_probs});
  uniep::StepMemory memory;
  if (pooled) {
    set_pooled(l, call, b);
  } else {
    memory = restored_memory(l, call, b);
  }
  if (b.part != Part::kWeights) {
    b.data = {.dy = elements<const bf16>(call->dy, t * p.hidden, "dy"),
              .w1 = elements<const bf16>(call->w1, n.w1, "w1"),
              .w2 = elements<const bf16>(call->w2, n.w2, "w2"),
              .dx = elements<bf16>(call->dx, t * p.hidden, "dx"),
              .dprobs = elements<float>(call->dprobs, t * p.topk, "dprobs"),
              .b1 = of_bias<const bf16>(p.bias, call->b1, n.b1, "b1"),
              .b2 = of_bias<const bf16>(p.bias, call->b2, n.b2, "b2")};
    if (p.save == uniep::Save::kNone) {
      b.data.x = elements<const bf16>(call->x, t * p.hidden, "x");
    }
  }
  if (b.part != Part::kData) {
    require_no_bias(p.bias, call->db1, "db1");
    require_no_bias(p.bias, call->db2, "db2");
    b.weights = {.dw1 = weight_grad(call->weight_grad, call->dw1, n.w1, "dw1"),
                 .dw2 = weight_grad(call->weight_grad, call->dw2, n.w2, "dw2"),
                 .db1 = weight_grad(call->weight_grad, call->db1, n.b1, "db1"),
                 .db2 = weight_grad(call->weight_grad, call->db2, n.b2, "db2")};
  }
  const bool flagged = truth(call->ignore_overflow, "ignore_overflow");
  if (!pooled) b.restored = l.layer.restore(memory, t, flagged);
  return b;
}

uniep::BackwardArgs whole(const Backward& b) {
  return {.dy = b.data.dy,
          .w1 = b.data.w1,
          .w2 = b.data.w2,
          .dx = b.data.dx,
          .dprobs = b.data.dprobs,
          .dw1 = b.weights.dw1,
          .dw2 = b.weights.dw2,
          .x = b.data.x,
          .b1 = b.data.b1,
          .b2 = b.data.b2,
          .db1 = b.weights.db1,
          .db2 = b.weights.db2};
}

uniep::TuneOptions tune_options(const uniep_tune_config* config, const CallOptions& call) {
  const uniep_tune_config c = config != nullptr ? *config : uniep_tune_config{};
  uniep::TuneOptions o;
  if (c.budget_s != 0) o.budget_s = c.budget_s;
  if (c.candidates != 0) o.candidates = c.candidates;
  if (c.max_rounds != 0) o.max_rounds = c.max_rounds;
  if (c.space != nullptr) o.space = c.space;
  if (c.profile != nullptr) o.profile = c.profile;
  if (c.cache != nullptr) o.cache = c.cache;
  o.store = !truth(c.not_stored, "not_stored");
  if (c.stop != nullptr) {
    o.stop = [stop = c.stop, context = c.stop_context] { return stop(context) != 0; };
  }
  o.call = call;
  return o;
}

template <std::size_t size>
void copy_text(char (&to)[size], const std::string& text) {
  const std::size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

uniep_tune_result c_result(const uniep::TuneResult& found) {
  uniep_tune_result r{};
  const std::string schedule = to_string(found.schedule);
  uniep::ensure(schedule.size() < sizeof r.schedule, "a schedule of ", schedule.size(), " letters");
  copy_text(r.schedule, schedule);
  copy_text(r.why, found.why);
  copy_text(r.problem, found.problem);
  r.seconds = found.seconds;
  r.default_seconds = found.default_seconds;
  r.speedup = found.speedup;
  r.faster = found.faster ? 1 : 0;
  r.decided = found.decided ? 1 : 0;
  r.stopped = found.stopped ? 1 : 0;
  r.stored = found.stored ? 1 : 0;
  r.rounds = found.rounds;
  r.candidates = found.candidates;
  r.rejected = found.rejected;
  return r;
}

}  // namespace

const char* uniep_version(void) { return UNIEP_VERSION_STRING; }

const char* uniep_last_error(void) { return last_error.c_str(); }

int uniep_has_cuda(void) {
#ifdef UNIEP_HAS_CUDA
  return 1;
#else
  return 0;
#endif
}

int uniep_group_create(const uniep_group_config* config, uniep_group** group) {
  return guarded([&] {
    require_given(config, "config");
    require_given(group, "group");
    uniep::GroupOptions options{.rank = config->rank,
                                .size = config->size,
                                .backend = backend_of(config->backend),
                                .device = config->device,
                                .all_gather = {},
                                .share_device = truth(config->share_device, "share_device"),
                                .timeout_ms = config->timeout_ms};
    if (config->all_gather != nullptr) {
      options.all_gather = [config](std::span<const std::byte> own, std::span<std::byte> all) {
        const int code = config->all_gather(config->context, own.data(), own.size(), all.data());
        require(code == 0, ErrorCode::kPeerFailed, "all_gather returned ", code,
                "; 0 means that it worked");
      };
    }
    *group = new uniep_group{uniep::Communicator::from_callbacks(options)};
  });
}

void uniep_group_destroy(uniep_group* group) { delete group; }

int uniep_needs(const uniep_problem* problem, int32_t backend, int32_t ranks,
                uniep_memory_needs* needs) {
  return guarded([&] {
    require_given(needs, "needs");
    *needs = c_needs(uniep::Layer::memory_needs(problem_of(problem), backend_of(backend), ranks));
  });
}

int uniep_row_pool_create(uniep_group* group, const uniep_problem* problem, int64_t bytes,
                          void* memory, uniep_row_pool** pool) {
  return guarded([&] {
    require_given(group, "group");
    require_given(pool, "pool");
    require(memory == nullptr || bytes > 0, ErrorCode::kInvalidArgument, "bytes is ", bytes,
            ", and memory is given; as many bytes as that has are accepted");
    const uniep::RowPoolOptions options{.bytes = bytes, .memory = scratch(memory, bytes)};
    *pool = new uniep_row_pool{uniep::RowPool(problem_of(problem), group->communicator, options)};
  });
}

void uniep_row_pool_destroy(uniep_row_pool* pool) { delete pool; }

int uniep_row_pool_ask(uniep_row_pool* pool, uniep_row_pool_state* state) {
  return guarded([&] {
    require_given(pool, "pool");
    require_given(state, "state");
    const uniep::RowPool& p = pool->pool;
    *state = {.pages = p.pages(),
              .page_bytes = p.page_bytes(),
              .bytes = p.bytes(),
              .free_pages = p.free_pages(),
              .fewest_free_pages = p.fewest_free_pages()};
  });
}

int uniep_layer_create(uniep_group* group, const uniep_problem* problem,
                       const uniep_layer_config* config, uniep_layer** layer) {
  return guarded([&] {
    require_given(group, "group");
    require_given(layer, "layer");
    const uniep_layer_config c = config != nullptr ? *config : uniep_layer_config{};
    const uniep::Problem p = problem_of(problem);
    const uniep::Communicator& communicator = group->communicator;
    const int ranks = communicator.size();
    const uniep::MemoryNeeds needs = uniep::Layer::memory_needs(p, communicator.backend(), ranks);
    uniep::LayerOptions options{.record_timeline = truth(c.record_timeline, "record_timeline"),
                                .timeout_ms = c.timeout_ms};
    if (c.schedule != nullptr) {
      options.schedule =
          uniep::parse_schedule(c.schedule, uniep::default_schedule(communicator.backend()));
    }
    if (c.workspace != nullptr) {
      options.memory.workspace = elements<std::byte>(c.workspace, needs.workspace, "workspace");
    }
    if (c.symmetric != nullptr) {
      options.memory.symmetric = elements<std::byte>(c.symmetric, needs.symmetric, "symmetric");
    }
    for (int r = 0; c.peers != nullptr && r < ranks; ++r) {
      options.memory.peers.push_back(static_cast<std::byte*>(c.peers[r]));
    }
    if (c.row_pool != nullptr) options.row_pool = c.row_pool->pool;
    if (c.release != nullptr) {
      options.memory.release = [release = c.release, context = c.release_context] {
        release(context);
      };
    }
    *layer = new uniep_layer(p, communicator, options);
  });
}

int uniep_layer_needs(uniep_layer* layer, int64_t rows, uniep_memory_needs* needs) {
  return guarded([&] {
    require_given(layer, "layer");
    require_given(needs, "needs");
    *needs = c_needs(layer->needs_of(rows));
  });
}

void uniep_layer_destroy(uniep_layer* layer) { delete layer; }

int uniep_layer_schedule(uniep_layer* layer, int32_t pass, char* text, size_t size) {
  return guarded([&] {
    require_given(layer, "layer");
    require_given(text, "text");
    require(pass == 0 || pass == 1, ErrorCode::kInvalidArgument, "pass is ", pass,
            "; 0 (forward) and 1 (backward) are accepted");
    const std::string all =
        to_string(layer->layer.schedule(pass == 0 ? Pass::kForward : Pass::kBackward));
    require(all.size() < size, ErrorCode::kInvalidArgument, "size is ", size, "; ", all.size() + 1,
            " or more are accepted");
    std::memcpy(text, all.c_str(), all.size() + 1);
  });
}

int uniep_layer_synchronize(uniep_layer* layer) {
  return guarded([&] {
    require_given(layer, "layer");
    layer->layer.synchronize();
  });
}

int uniep_forward(uniep_layer* layer, const uniep_forward_call* call) {
  return guarded([&] {
    require_given(layer, "layer");
    Forward f = prepared(*layer, true, [&] { return forward_of(*layer, call); });
    const uniep::RoutingPlan plan = plan_of(*layer, call, f);
    uniep::Saved saved = layer->layer.forward(plan, f.args, f.options);
    if (call->saved != nullptr) *call->saved = new uniep_saved{std::move(saved)};
  });
}

void uniep_saved_destroy(uniep_saved* saved) { delete saved; }

int uniep_backward(uniep_layer* layer, const uniep_backward_call* call) {
  return guarded([&] {
    require_given(layer, "layer");
    const bool collective = call == nullptr || call->part != 2;
    Backward b = prepared(*layer, collective, [&] {
      require_given(call, "call");
      return backward_of(*layer, call);
    });
    switch (b.part) {
      case Part::kWhole:
        layer->layer.backward(b.saved(), whole(b), b.options);
        break;
      case Part::kData:
        layer->layer.backward_data(b.saved(), b.data, b.options);
        break;
      case Part::kWeights:
        layer->layer.backward_weights(b.saved(), b.weights, b.options);
        break;
    }
  });
}

int uniep_tune_forward(uniep_layer* layer, const uniep_forward_call* call,
                       const uniep_tune_config* config, uniep_tune_result* result) {
  return guarded([&] {
    require_given(layer, "layer");
    uniep::TuneOptions options;
    Forward f = prepared(*layer, true, [&] {
      require_given(result, "result");
      Forward of_call = forward_of(*layer, call);
      options = tune_options(config, of_call.options);
      return of_call;
    });
    const uniep::RoutingPlan plan = plan_of(*layer, call, f);
    *result = c_result(uniep::tune_forward(layer->layer, plan, f.args, options));
  });
}

int uniep_tune_backward(uniep_layer* layer, const uniep_backward_call* call,
                        const uniep_tune_config* config, uniep_tune_result* result) {
  return guarded([&] {
    require_given(layer, "layer");
    uniep::TuneOptions options;
    Backward b = prepared(*layer, true, [&] {
      require_given(result, "result");
      require(part_of(call) == Part::kWhole, ErrorCode::kInvalidArgument, "part is ", call->part,
              "; 0 (whole) is accepted by a search");
      Backward of_call = backward_of(*layer, call);
      options = tune_options(config, of_call.options);
      return of_call;
    });
    *result = c_result(uniep::tune_backward(layer->layer, b.saved(), whole(b), options));
  });
}
