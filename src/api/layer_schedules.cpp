#include "api/layer_schedules.h"

#include "base/check.h"
#include "group/communicator_impl.h"
#include "layer/options.h"
#include "tune/book/auto_schedule.h"
#include "tune/book/tune_key.h"

namespace uniep {
namespace {

tune::LayerSchedules given(const Schedule& schedule, const Problem& problem, Backend backend) {
  const auto reason = invalid_reason(schedule, problem, tune::this_place(backend));
  require(!reason, ErrorCode::kInvalidArgument,
          "options.schedule cannot run: ", reason.value_or(""));
  const tune::ScheduleChoice choice{schedule, tune::ChoiceOrigin::kGiven};
  return {choice, choice};
}

}  // namespace

std::array<Schedule, 2> agree_on_layer_schedules(const Problem& problem,
                                                 const Communicator& communicator,
                                                 const LayerOptions& options) {
  const std::string call = options.schedule
                               ? cat("layer with schedule ", to_string(*options.schedule))
                               : std::string("layer without options.schedule");
  const int choice_ms = options.schedule ? 0 : tune::kLongestChoiceMs;
  const auto choose = [&] {
    if (options.schedule) return given(*options.schedule, problem, communicator.backend());
    // How uneven routings will be is not known here.
    constexpr double kSkew = 0;
    return tune::look_up_schedules(communicator.backend(), problem, communicator.layout(), kSkew);
  };
  const auto on_device = communicator.impl()->use_device();  // whose schedules are looked up
  const tune::LayerSchedules agreed =
      tune::agree_on_schedules(communicator.impl()->bootstrap(), communicator.rank(),
                               wait_limit_ms(options), choice_ms, call, choose);
  return {agreed.forward.schedule, agreed.backward.schedule};
}

}  // namespace uniep
