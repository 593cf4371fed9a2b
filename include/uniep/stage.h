#pragma once

#include "uniep/macros.h"

namespace uniep {

/// The stages of a layer pass. The same names stand for file names, trace slices, error texts and
/// benchmark rows. Forward: dispatch (x), fc1 (with SwiGLU), fc2 (with the push to the source
/// rank), reduce. Backward: dispatch (dy), dfc2 (with dSwiGLU), dfc1 (with push), reduce; wgrad2,
/// wgrad1; of what forward did not keep, redispatch (x) or expand (x, from the tokens that it
/// kept), and refc1 (h). Ahead of them: plan (the exchange of the routing), and enter (ranks agree
/// on a pass; a GPU puts tokens where peers pull them). Between hosts: send (tokens to the hosts
/// that need them) and relay (rows back to the host that their tokens are from).
enum class Stage : int {
  kPlan,
  kEnter,
  kSend,
  kDispatch,
  kRedispatch,
  kExpand,
  kFc1,
  kFc2,
  kRefc1,
  kDfc2,
  kDfc1,
  kWgrad2,
  kWgrad1,
  kRelay,
  kReduce
};
inline constexpr int kNumStages = 15;
/// Places in tables by stage: some more than there are.
inline constexpr int kMaxStages = 18;

enum class Pass : int { kForward, kBackward };

constexpr const char* name(Stage stage) {
  constexpr const char* kNames[kNumStages] = {
      "plan",  "enter", "send", "dispatch", "redispatch", "expand", "fc1",   "fc2",
      "refc1", "dfc2",  "dfc1", "wgrad2",   "wgrad1",     "relay",  "reduce"};
  return kNames[static_cast<int>(stage)];
}

constexpr const char* name(Pass pass) { return pass == Pass::kForward ? "forward" : "backward"; }

}  // namespace uniep
