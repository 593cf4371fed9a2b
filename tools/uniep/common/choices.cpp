#include "common/choices.h"

#include "base/check.h"
#include "base/rank_limits.h"
#include "workload/synthetic.h"

namespace uniep::tool {

std::string ranks_accepted() { return cat("1 to ", kMaxGroupRanks); }

std::string shapes_and_keys() {
  std::string names;
  for (const std::string& name : workload::shape_names())
    names += (names.empty() ? "" : ", ") + name;
  return names +
         ". Keys: tokens (per rank), hidden, intermediate, experts, topk, n_group, topk_group";
}

Backend backend_choice(const std::string& text) {
  return text == name(Backend::kCuda) ? Backend::kCuda : Backend::kCpu;
}

std::optional<Schedule> schedule_choice(const std::string& text, Backend backend) {
  if (text == kAutoSchedule) return std::nullopt;
  return parse_schedule(text, default_schedule(backend));
}

PassChoice pass_choice(const std::string& text) {
  if (text == "forward") return PassChoice::kForward;
  return text == "backward" ? PassChoice::kBackward : PassChoice::kBoth;
}

}  // namespace uniep::tool
