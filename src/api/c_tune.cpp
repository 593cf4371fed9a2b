#include <cstring>

#include "api/c_calls.h"
#include "uniep/tune.h"

using namespace uniep::c_api;

namespace {

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

int uniep_tune_forward(uniep_layer* layer, const uniep_forward_call* call,
                       const uniep_tune_config* config, uniep_tune_result* result) {
  return guarded_of(layer, "layer", [&] {
    const GroupTurn turn(*layer);
    uniep::TuneOptions options;
    Forward f = prepared(*layer, call, true, [&] {
      require_given(result, "result");
      Forward of_call = forward_of(*layer, call);
      options = tune_options(config, of_call.options);
      return of_call;
    });
    const uniep::RoutingPlan plan = plan_of(*layer, call, f);
    options.call.memory = f.options.memory;  // that of `allocate`, too
    *result = c_result(uniep::tune_forward(layer->layer, plan, f.args, options));
  });
}

int uniep_tune_backward(uniep_layer* layer, const uniep_backward_call* call,
                        const uniep_tune_config* config, uniep_tune_result* result) {
  return guarded_of(layer, "layer", [&] {
    const GroupTurn turn(*layer);
    uniep::TuneOptions options;
    Backward b = prepared(*layer, call, true, [&] {
      require_given(result, "result");
      require_given(call, "call");
      require(part_of(call) == Part::kWhole, ErrorCode::kInvalidArgument, "part is ", call->part,
              "; 0 (whole) is accepted by a search");
      Backward of_call = backward_of(*layer, call);
      options = tune_options(config, of_call.options);
      return of_call;
    });
    *result = c_result(uniep::tune_backward(layer->layer, b.saved(), whole(b), options));
  });
}
