#include "uniep/tune.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "api/compared_results.h"
#include "base/bytes.h"
#include "base/check.h"
#include "base/quantile.h"
#include "group/agreement.h"
#include "group/communicator_impl.h"
#include "group/gatherer.h"
#include "layer/arguments.h"
#include "layer/backend.h"
#include "plan/plan_data.h"
#include "tune/book/auto_schedule.h"
#include "tune/book/tune_key.h"
#include "tune/search/tuner.h"

namespace uniep {
namespace {

using Run = std::function<void(const Schedule&)>;
using PlanOf = std::function<RoutingPlan()>;

CallOptions with(CallOptions call, const Schedule& schedule) {
  call.schedule = schedule;
  return call;
}

/// One rank's part in measuring schedules. Rank 0 leads: it names a schedule, all run it together,
/// and it learns the times of all.
class GroupPasses {
 public:
  GroupPasses(Layer& layer, Run run, ComparedResults& results)
      : layer_(layer),
        run_(std::move(run)),
        results_(results),
        gatherer_(
            layer.communicator().impl()->bootstrap(),
            tune::limit_of_search_ms(layer.backend().limit_ms(), layer.communicator().rank())) {
    const Place place = tune::this_place(layer.communicator().backend());
    const Schedule baseline =
        parse_schedule("sequential", default_schedule_for(layer.problem(), place));
    // The layer refuses arguments before it writes any, and so before anything is overwritten here.
    run_(baseline);
    layer_.synchronize();
    run_pass(baseline);
    results_.expect_this();
  }

  /// Measures the schedule on all ranks. Called on rank 0.
  tune::Measurement measure(const Schedule& schedule) {
    under_way_ = true;
    tune::Measurement m = run_together(agree_on({.stop = false, .schedule = schedule}).schedule);
    under_way_ = false;
    return m;
  }
  /// Whether `measure` failed, which it does on all ranks. Called on rank 0.
  bool failed() const { return under_way_; }
  /// Lets the other ranks go. Called on rank 0.
  void finish() { agree_on({.stop = true, .schedule = {}}); }
  /// Does what rank 0 says until it lets this rank go. Called on all other ranks.
  void follow() {
    for (;;) {
      const Order order = agree_on({});
      if (order.stop) return;
      run_together(order.schedule);
    }
  }

 private:
  struct Order {
    bool stop = false;
    Schedule schedule;
  };
  Order agree_on(const Order& own) { return gatherer_.gather_one(own)[0]; }

  PassStats run_pass(const Schedule& schedule) {
    results_.prepare();
    // On a GPU the pass that is measured follows another one, which takes up what the ranks' hosts
    // are apart: it is timed as within a step of training.
    if (layer_.communicator().backend() == Backend::kCuda) run_(schedule);
    run_(schedule);
    layer_.synchronize();
    layer_.take_timeline();  // the figures are in the statistics
    return layer_.last_pass();
  }

  tune::Measurement run_together(const Schedule& schedule) {
    struct OfRank {
      PassStats stats;
      std::int64_t differing;
    };
    OfRank own{run_pass(schedule), 0};
    own.differing = results_.count_differing();
    tune::Measurement all;
    for (const OfRank& of_rank : gatherer_.gather_one(own)) {
      all.seconds = std::max(all.seconds, of_rank.stats.elapsed_s);
      all.differing += of_rank.differing;
      all.by_rank.push_back(of_rank.stats);
    }
    return all;
  }

  Layer& layer_;
  const Run run_;
  ComparedResults& results_;
  Gatherer gatherer_;
  bool under_way_ = false;
};

template <class T>
void require_in(const char* name, T value, T low, T high) {
  require(value >= low && value <= high, ErrorCode::kInvalidArgument, "options.", name, " is ",
          value, "; ", low, " to ", high, " is accepted");
}

std::optional<tune::MachineProfile> profile_of(const std::string& name, const tune::TuneKey& key) {
  if (name == "none") return std::nullopt;
  if (name == "auto") return tune::profile_of_passes(key.backend, key.device);
  tune::MachineProfile profile = tune::shipped_profile(name);
  require(profile.backend == key.backend, ErrorCode::kInvalidArgument, "options.profile ", name,
          " is of backend ", uniep::name(profile.backend), "; one of backend ",
          uniep::name(key.backend), " is accepted");
  return profile;
}

std::string cache_of(const TuneOptions& o) {
  if (!o.store) return "";
  return o.cache.empty() ? tune::TuneCache::default_path() : o.cache;
}

/// Throws where an option cannot be used.
tune::TuneSettings settings_of(const TuneOptions& o, const Problem& problem,
                               const tune::TuneKey& key, bool leads) {
  require_in("budget_s", o.budget_s, 0.1, 86400.0);
  require_in("candidates", o.candidates, 1, 1000);
  require_in("max_rounds", o.max_rounds, 1, 10000);
  require_in("skew", o.skew, 0.0, 100.0);
  Space(problem, key.pass, tune::this_place(key.backend)).restrict_to(o.space);
  tune::TuneSettings s;
  s.budget_s = o.budget_s;
  s.candidates = static_cast<std::size_t>(o.candidates);
  s.restriction = o.space;
  s.profile = profile_of(o.profile, key);
  s.max_rounds = o.max_rounds;
  s.seed = o.seed;
  s.cache = cache_of(o);
  s.keep_session = false;
  if (o.stop) s.watch.stop = o.stop;
  if (o.store && leads) tune::TuneCache(s.cache).require_storable();
  return s;
}

/// What a result is, but for its texts: it goes to all ranks as bytes.
struct Figures {
  Schedule schedule;
  double seconds = 0, default_seconds = 0, speedup = 1;
  bool faster = false, decided = false, stopped = false, stored = false;
  int rounds = 0, candidates = 0, rejected = 0;
};

std::string message_of(const tune::TuneOutcome& out) {
  const tune::TunedCandidate& chosen = *out.chosen;
  const Figures f{.schedule = chosen.schedule,
                  .seconds = median(chosen.seconds),
                  .default_seconds = out.default_s,
                  .speedup = chosen.speedup,
                  .faster = chosen.faster,
                  .decided = out.end == tune::TuneEnd::kDecided,
                  .stopped = out.end == tune::TuneEnd::kInterrupted,
                  .stored = out.stored,
                  .rounds = out.rounds,
                  .candidates = static_cast<int>(out.ranking.size() + out.rejected.size()),
                  .rejected = static_cast<int>(out.rejected.size())};
  std::string problems;
  for (const std::string& p : out.problems) problems += (problems.empty() ? "" : "; ") + p;
  return to_bytes(f) + chosen.why + '\0' + problems;
}

TuneResult result_of(const std::string& message) {
  const auto figures = from_bytes<Figures>(message);
  ensure(figures.has_value(), "rank 0 sent ", message.size(), " bytes of what it found");
  const Figures& f = *figures;
  const std::string texts = message.substr(sizeof f);
  const std::size_t end = texts.find('\0');
  return {.schedule = f.schedule,
          .seconds = f.seconds,
          .default_seconds = f.default_seconds,
          .speedup = f.speedup,
          .faster = f.faster,
          .decided = f.decided,
          .stopped = f.stopped,
          .stored = f.stored,
          .rounds = f.rounds,
          .candidates = f.candidates,
          .rejected = f.rejected,
          .why = texts.substr(0, end),
          .problem = texts.substr(end + 1)};
}

/// The whole search. Called on rank 0.
tune::TuneOutcome search(const tune::TuneSubject& subject, const tune::TuneSettings& settings,
                         GroupPasses& passes) {
  tune::Tuner tuner(subject, settings);
  const auto measure = [&](const Schedule& s) { return passes.measure(s); };
  const tune::TuneEnd end = tuner.search(measure);
  tuner.explain_best(measure, tuner.explaining_rounds(0));
  tune::TuneOutcome out = tuner.finish();
  require(end != tune::TuneEnd::kTooSmall, ErrorCode::kInvalidArgument, "options.budget_s is ",
          settings.budget_s, ", and one round of measurements takes longer; ", out.least_budget_s,
          " would do");
  require(out.chosen || out.rejected.empty(), ErrorCode::kInternal, "all of ", out.rejected.size(),
          " schedules gave other bits than sequential");
  // Ended before a round: the default, of which no time is known.
  if (!out.chosen) out.chosen = tune::TunedCandidate{.schedule = tuner.base(), .seconds = {0}};
  if (out.stored) tune::read_caches_again();
  return out;
}

std::string call_text(Pass pass, const TuneOptions& o) {
  return cat("tune ", name(pass), " with budget_s ", o.budget_s, ", candidates ", o.candidates,
             ", max_rounds ", o.max_rounds, ", space '", o.space, "', seed ", o.seed, ", profile '",
             o.profile, "', store ", o.store, ", skew ", o.skew);
}

/// Every rank's ids, one after another.
std::vector<std::int32_t> ids_of_all(Gatherer gatherer, const RoutingPlan& plan) {
  std::vector<std::int32_t> all;
  for (const auto& part : gatherer.gather(plan.topk_ids())) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// `note`: checks the arguments of the pass, and names its results.
TuneResult tune_pass(Layer& layer, Pass pass, const PlanOf& plan_of, const TuneOptions& options,
                     const std::function<void(ComparedResults&)>& note, const Run& run) {
  const Communicator& member = layer.communicator();
  member.impl()->usage.require_own_process();
  const CollectiveCall call(*member.impl());
  const auto on_device = member.impl()->use_device();
  Bootstrap& bootstrap = member.impl()->bootstrap();
  const int limit_ms = layer.backend().limit_ms();
  const Problem& problem = layer.problem();
  const bool leads = member.rank() == 0;
  tune::TuneKey key;
  tune::TuneSettings settings;
  std::optional<RoutingPlan> plan;
  ComparedResults results(member.backend());
  agree(bootstrap, limit_ms, Stage::kPlan, call_text(pass, options), [&] {
    key = tune::tune_key(member.backend(), problem, member.layout(), problem.max_tokens,
                         options.skew, pass);
    settings = settings_of(options, problem, key, leads);
    plan = plan_of();
    throw_if_any(plan->data().on_host().fault, problem,
                 member.size());  // of a flagged one: passes do nothing
    note(results);
    results.hold();
  });

  const std::vector<std::int32_t> ids = ids_of_all(Gatherer(bootstrap, limit_ms), *plan);
  const auto tokens = plan->tokens_per_rank();
  const tune::TuneSubject subject{.problem = problem,
                                  .key = key,
                                  .tokens_per_rank = {tokens.begin(), tokens.end()},
                                  .topk_ids = ids,
                                  .identity = ""};
  GroupPasses passes(layer, run, results);
  std::string found;
  std::exception_ptr error;
  if (leads) {
    try {
      found = message_of(search(subject, settings, passes));
    } catch (...) {
      if (passes.failed()) throw;
      error = std::current_exception();
    }
    passes.finish();
  } else {
    passes.follow();
  }
  results.restore();
  const auto report = [&] {
    if (error) std::rethrow_exception(error);
  };
  return result_of(agree(bootstrap, tune::limit_of_search_ms(limit_ms, member.rank()), Stage::kPlan,
                         "tune", report, found)[0]);
}

}  // namespace

TuneResult tune_forward(Layer& layer, const RoutingPlan& plan, const ForwardArgs& args,
                        const TuneOptions& options) {
  require(
      plan.data().lease == nullptr, ErrorCode::kInvalidArgument,
      "plan has pages of a row pool, which serve one forward pass, and a search runs many; a "
      "plan of a layer without a pool is accepted, and what is found holds for layers with one");
  const auto note = [&](ComparedResults& results) {
    check_forward(layer.problem(), layer.communicator(), plan, args,
                  layer.schedule(Pass::kForward));
    results.add(args.out);
  };
  Saved saved;  // held from pass to pass, so that its memory is used again
  return tune_pass(
      layer, Pass::kForward, [&] { return plan; }, options, note,
      [&](const Schedule& s) { saved = layer.forward(plan, args, with(options.call, s)); });
}

TuneResult tune_backward(Layer& layer, const Saved& saved, const BackwardArgs& args,
                         const TuneOptions& options) {
  CallOptions call = options.call;
  call.keep_pages = true;  // from pass to pass
  const auto note = [&](ComparedResults& results) {
    check_backward(layer.problem(), layer.communicator(), saved, args,
                   layer.schedule(Pass::kBackward));
    results.add(args.dx);
    results.add(args.dprobs);
    results.add(args.dw1);
    results.add(args.dw2);
    results.add(args.db1);
    results.add(args.db2);
    results.add(args.dshared_probs);
    results.add(args.dshared_w1);
    results.add(args.dshared_w2);
  };
  return tune_pass(
      layer, Pass::kBackward, [&] { return saved.plan(); }, options, note,
      [&](const Schedule& s) { layer.backward(saved, args, with(call, s)); });
}

}  // namespace uniep
