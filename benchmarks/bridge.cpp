// The public API as C functions, for compare_torch.py, which calls them by ctypes
// (compare/bridge.py declares them again). A function that can fail returns 0, or 1 after which
// uniep_bridge_error() says why in one sentence; no exception leaves this file.
#include <uniep/uniep.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "commit.h"
#include "trace/time_use.h"

namespace {

using namespace uniep;

thread_local std::string last_error;

template <class Body>
int guarded(const Body& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an exception of unknown type was thrown";
  }
  return 1;
}

/// Made by the first layer and kept: ranks meet once a process.
const Communicator& group() {
  static const Communicator communicator = Communicator::cuda_from_environment();
  return communicator;
}

Schedule parsed(const std::string& text) {
  return parse_schedule(text, default_schedule(Backend::kCuda));
}

/// Parsed once a text: the host's work before the first launch counts in what Python times.
const Schedule& schedule_of(const std::string& text) {
  static std::map<std::string, Schedule> known;
  const auto it = known.find(text);
  return it != known.end() ? it->second : known.emplace(text, parsed(text)).first->second;
}

template <class T>
std::span<T> tensor(T* data, std::int64_t elements) {
  return {data, static_cast<std::size_t>(elements)};
}

}  // namespace

/// A layer with the plan and the saved tensors of its last plan and forward. Pointers to tensors
/// are device memory, of the shapes in uniep/layer.h.
struct UniepBridgeLayer {
  UniepBridgeLayer(const Problem& problem, const LayerOptions& options)
      : layer(problem, group(), options) {}

  const RoutingPlan& planned() const {
    if (!plan) throw Error(ErrorCode::kInvalidArgument, "a pass was asked for before any plan");
    return *plan;
  }
  std::int64_t token_elements() const { return planned().tokens() * layer.problem().hidden; }
  std::int64_t slots() const { return planned().tokens() * layer.problem().topk; }
  std::int64_t w2_elements() const {
    return planned().num_local_experts() * layer.problem().hidden * layer.problem().intermediate;
  }
  std::int64_t w1_elements() const { return 2 * w2_elements(); }

  Layer layer;
  std::optional<RoutingPlan> plan;
  Saved saved;
};

#define UNIEP_BRIDGE extern "C" __attribute__((visibility("default")))

/// The sentence of this thread's last failure.
UNIEP_BRIDGE const char* uniep_bridge_error() { return last_error.c_str(); }

/// The commit this was built from, with "+" behind it where files had changed.
UNIEP_BRIDGE const char* uniep_bridge_commit() { return UNIEP_COMMIT; }

/// Name of stage number `stage`, or null behind the last.
UNIEP_BRIDGE const char* uniep_bridge_stage(std::int32_t stage) {
  return stage >= 0 && stage < kNumStages ? name(static_cast<Stage>(stage)) : nullptr;
}

/// The schedule with every axis, until the next call.
UNIEP_BRIDGE int uniep_bridge_schedule(const char* text, const char** full) {
  static thread_local std::string kept;
  return guarded([&] {
    kept = to_string(parsed(text));
    *full = kept.c_str();
  });
}

/// Collective. `stream` is a cudaStream_t; a layer with `trace` records timelines, and one that
/// `looks_up` has schedules of its own (uniep_bridge_layer_schedule), which may take a second.
UNIEP_BRIDGE int uniep_bridge_create(std::int64_t hidden, std::int64_t intermediate,
                                     std::int32_t num_experts, std::int32_t topk,
                                     std::int64_t max_tokens, std::int64_t capacity_rows,
                                     void* stream, std::int32_t trace, std::int32_t looks_up,
                                     UniepBridgeLayer** layer) {
  return guarded([&] {
    const Problem problem{.hidden = hidden,
                          .intermediate = intermediate,
                          .num_experts = num_experts,
                          .topk = topk,
                          .max_tokens = max_tokens,
                          .capacity_rows = capacity_rows};
    LayerOptions options{.record_timeline = trace != 0, .cuda_stream = stream};
    if (looks_up == 0) options.schedule = default_schedule(Backend::kCuda);
    *layer = std::make_unique<UniepBridgeLayer>(problem, options).release();
  });
}

/// Layer::schedule in full, until the next call.
UNIEP_BRIDGE int uniep_bridge_layer_schedule(UniepBridgeLayer* l, std::int32_t backward,
                                             const char** full) {
  static thread_local std::string kept;
  return guarded([&] {
    kept = to_string(l->layer.schedule(backward != 0 ? Pass::kBackward : Pass::kForward));
    *full = kept.c_str();
  });
}

/// Collective: no rank's memory may go while a peer still reads it.
UNIEP_BRIDGE void uniep_bridge_destroy(UniepBridgeLayer* layer) { delete layer; }

UNIEP_BRIDGE int uniep_bridge_plan(UniepBridgeLayer* l, const std::int32_t* topk_ids,
                                   std::int64_t tokens) {
  return guarded(
      [&] { l->plan = l->layer.plan(tensor(topk_ids, tokens * l->layer.problem().topk)); });
}

UNIEP_BRIDGE int uniep_bridge_forward(UniepBridgeLayer* l, const bf16* x, const float* probs,
                                      const bf16* w1, const bf16* w2, bf16* out,
                                      const char* schedule) {
  return guarded([&] {
    l->saved = {};  // so that its memory serves again
    l->saved = l->layer.forward(l->planned(),
                                {.x = tensor(x, l->token_elements()),
                                 .topk_probs = tensor(probs, l->slots()),
                                 .w1 = tensor(w1, l->w1_elements()),
                                 .w2 = tensor(w2, l->w2_elements()),
                                 .out = tensor(out, l->token_elements())},
                                schedule_of(schedule));
  });
}

/// The backward pass of the last forward; may be repeated.
UNIEP_BRIDGE int uniep_bridge_backward(UniepBridgeLayer* l, const bf16* dy, const bf16* w1,
                                       const bf16* w2, bf16* dx, float* dprobs, bf16* dw1,
                                       bf16* dw2, const char* schedule) {
  return guarded([&] {
    l->layer.backward(l->saved,
                      {.dy = tensor(dy, l->token_elements()),
                       .w1 = tensor(w1, l->w1_elements()),
                       .w2 = tensor(w2, l->w2_elements()),
                       .dx = tensor(dx, l->token_elements()),
                       .dprobs = tensor(dprobs, l->slots()),
                       .dw1 = tensor(dw1, l->w1_elements()),
                       .dw2 = tensor(dw2, l->w2_elements())},
                      schedule_of(schedule));
  });
}

/// Drops the timelines of the passes so far, which would pile up in host memory.
UNIEP_BRIDGE int uniep_bridge_synchronize(UniepBridgeLayer* l) {
  return guarded([&] {
    l->layer.synchronize();
    (void)l->layer.take_timeline();
  });
}

/// Milliseconds of the last pass, and of each of its stages; 0: the pass has no such stage.
UNIEP_BRIDGE int uniep_bridge_last_pass(UniepBridgeLayer* l, double* elapsed_ms, double* stage_ms) {
  return guarded([&] {
    const PassStats& stats = l->layer.last_pass();
    *elapsed_ms = 1e3 * stats.elapsed_s;
    for (int i = 0; i < kNumStages; ++i) stage_ms[i] = 1e3 * stats[static_cast<Stage>(i)].busy_s;
  });
}

/// Waits for all passes, and writes how this rank's SMs spent the last one, the only one since
/// timelines were dropped (trace/time_use.h): their number, then seconds: span, exposed, tail,
/// waiting, idle; the clock in Hz; and seconds of each stage. Drops the timeline.
UNIEP_BRIDGE int uniep_bridge_time_use(UniepBridgeLayer* l, double* figures) {
  return guarded([&] {
    l->layer.synchronize();
    const Pass pass = l->layer.last_pass().pass;
    const trace::TimeUse use = trace::time_use(l->layer.take_timeline(), pass);
    for (const double figure : {static_cast<double>(use.processors), use.span_s, use.exposed_s,
                                use.tail_s, use.waiting_s, use.idle_s, use.clock_hz}) {
      *figures++ = figure;
    }
    std::ranges::copy(use.stage_s, figures);
  });
}

/// h of the last forward, bf16 [segment_begin[local experts], 2I]. Writes local experts + 1 numbers
/// to `segment_begin`, in host memory.
UNIEP_BRIDGE int uniep_bridge_saved_h(UniepBridgeLayer* l, const bf16** h,
                                      std::int64_t* segment_begin) {
  return guarded([&] {
    *h = l->saved.h().data();
    std::ranges::copy(l->saved.plan().segment_begin(), segment_begin);
  });
}
