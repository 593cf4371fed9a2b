#include "options.h"

#include <limits>

#include "base/env.h"
#include "machine.h"
#include "table.h"

namespace uniep::tool {

std::string described(std::string_view text) {
  constexpr std::size_t kWidth = 66;
  std::string description;
  for (const std::string& line : folded(text, kWidth)) {
    description += description.empty() ? line : '\n' + line;
  }
  return description;
}

CLI::Validator one_of(std::vector<std::string> names) {
  return CLI::IsMember(std::move(names)).description("");
}

CLI::Validator a_seed() { return range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()); }

CLI::Validator a_skew() { return range(0.0, 100.0); }

std::string shapes_and_keys() {
  std::string names;
  for (const std::string& name : workload::shape_names())
    names += (names.empty() ? "" : ", ") + name;
  return names + ". Keys: tokens (per rank), hidden, intermediate, experts, topk";
}

Backend backend_choice(const std::string& text) {
  return text == name(Backend::kCuda) ? Backend::kCuda : Backend::kCpu;
}

PassChoice pass_choice(const std::string& text) {
  if (text == "forward") return PassChoice::kForward;
  return text == "backward" ? PassChoice::kBackward : PassChoice::kBoth;
}

std::string link_text() {
  const auto gbps = env_link_gbps();
  return gbps ? cat("emulated, ", *gbps, " GB/s and ", env_link_latency_us(), " us") : "";
}

void require_memory(const workload::ShapeSpec& spec, int ranks, int copies) {
  const double needed = copies * static_cast<double>(workload::layer_bytes(spec, ranks));
  const double available = available_memory();
  require(available == 0 || needed <= available, ErrorCode::kCapacity, "--shape ",
          workload::to_string(spec), " at ", ranks, " rank(s) needs at least ", bytes_text(needed),
          " of memory, and ", bytes_text(available),
          " are free; a smaller shape, or fewer tokens or experts (key=value) are accepted");
}

}  // namespace uniep::tool
