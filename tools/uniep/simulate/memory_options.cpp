#include "simulate/memory_options.h"

#include <vector>

#include "base/check.h"
#include "common/options.h"

namespace uniep::tool {

void add_memory_options(CLI::App& sub, MemoryFlags& flags, const std::string& what_it_does) {
  OptionGroup group(sub, "What fits");
  group.add("--memory", flags.memory_gb, "GB", what_it_does)->check(range(1e-6, 1e6));
  group.add("--layers", flags.layers, "L", "MoE layers of a rank, 1 to 10000; with --memory")
      ->check(range(1, 10000));
  group
      .add("--in-flight", flags.in_flight, "M",
           "Microbatches whose forward waits for its backward (default 1; the first stage of a "
           "pipeline has as many as there are stages), 1 to 10000; with --memory")
      ->check(range(1, 10000));
  group
      .add("--weight-bytes", flags.weight_bytes, "B",
           "Bytes for each parameter of the experts, 0 to 1000 (default 2: weights in bf16 alone; "
           "18: with a main_grad and Adam's master weights and two moments in fp32); with --memory")
      ->check(range(0.0, 1000.0));
}

void require_undecided(const CLI::App& sub, std::initializer_list<const char*> others) {
  std::vector<const char*> flags{"--save", "--recompute-h", "--pass"};
  flags.insert(flags.end(), others);
  for (const char* flag : flags) {
    require(sub.get_option(flag)->count() == 0, ErrorCode::kInvalidArgument, flag,
            " is given beside --memory, which tries every choice in both passes and prints a "
            "table; one of the two is accepted");
  }
}

}  // namespace uniep::tool
