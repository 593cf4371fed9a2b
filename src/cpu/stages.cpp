#include "cpu/stages.h"

#include "base/check.h"

namespace uniep::cpu {

void run_stage(const PassContext& ctx, const Task& task, Scratch& scratch) {
  switch (task.stage) {
    case Stage::kDispatch:
      return dispatch(ctx, task);
    case Stage::kRedispatch:
      return redispatch(ctx, task);
    case Stage::kExpand:
      return expand(ctx, task);
    case Stage::kRefc1:
      return refc1(ctx, task, scratch);
    case Stage::kFc1:
      return fc1(ctx, task, scratch);
    case Stage::kFc2:
      return fc2(ctx, task, scratch);
    case Stage::kDfc2:
      return dfc2(ctx, task, scratch);
    case Stage::kDfc1:
      return dfc1(ctx, task, scratch);
    case Stage::kWgrad2:
      return wgrad2(ctx, task, scratch);
    case Stage::kWgrad1:
      return wgrad1(ctx, task, scratch);
    case Stage::kReduce:
      return reduce(ctx, task, scratch);
    case Stage::kSend:
      return send(ctx, task, scratch);
    case Stage::kRelay:
      return relay(ctx, task, scratch);
    case Stage::kPlan:
    case Stage::kEnter:
      break;
  }
  ensure(false, "stage ", name(task.stage), " has no tile routine");
}

}  // namespace uniep::cpu
