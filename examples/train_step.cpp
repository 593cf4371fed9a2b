// One training step of a mixture-of-experts layer over a group of expert-parallel CPU ranks.
//
//   train_step [SCHEDULE]      e.g. train_step pipelined:4      train_step single,tile_m=32
//
// Only the public API is used. Every schedule prints the same checksums: a schedule decides when
// and where work is done, never a bit of the result.
#include <uniep/uniep.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kRanks = 4;
constexpr std::int64_t kTokensPerRank = 256;

const uniep::Problem kProblem{
    .hidden = 256, .intermediate = 128, .num_experts = 16, .topk = 4, .max_tokens = kTokensPerRank};

std::vector<uniep::bf16> random_tensor(std::mt19937& rng, std::int64_t size, float scale) {
  std::vector<uniep::bf16> values(static_cast<std::size_t>(size));
  for (auto& v : values) {
    const float unit = static_cast<float>(rng()) / static_cast<float>(std::mt19937::max());
    v = uniep::to_bf16(scale * (2 * unit - 1));
  }
  return values;
}

/// FNV-1a over the bits, to compare runs at a glance.
std::string checksum(const std::vector<uniep::bf16>& values) {
  std::uint32_t hash = 0x811c9dc5u;
  for (const auto v : values) hash = (hash ^ v.bits) * 0x01000193u;
  char text[9];
  std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(hash));
  return text;
}

/// What each rank does; the ranks run it at the same time, each in a thread of its own. Returns a
/// line about its results.
std::string train_step(uniep::Communicator& communicator, const uniep::Schedule& schedule) {
  const auto& p = kProblem;
  const std::int64_t tokens = kTokensPerRank;
  const std::int64_t local_experts = p.num_experts / communicator.size();

  // This rank's tokens, its experts, and what a router would have chosen: topk experts per token.
  std::mt19937 rng(static_cast<unsigned>(communicator.rank()));
  const auto x = random_tensor(rng, tokens * p.hidden, 1.0f);
  const auto dy = random_tensor(rng, tokens * p.hidden, 1.0f);
  const auto w1 = random_tensor(rng, local_experts * 2 * p.intermediate * p.hidden, 0.1f);
  const auto w2 = random_tensor(rng, local_experts * p.hidden * p.intermediate, 0.1f);
  std::vector<std::int32_t> topk_ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const int first = static_cast<int>(rng() % 16u);
    for (int k = 0; k < p.topk; ++k) topk_ids.push_back((first + 5 * k) % p.num_experts);
  }
  const std::vector<float> topk_probs(topk_ids.size(), 1.0f / static_cast<float>(p.topk));

  std::vector<uniep::bf16> out(x.size()), dx(x.size());
  std::vector<float> dprobs(topk_probs.size());
  std::vector<uniep::bf16> dw1(w1.size()), dw2(w2.size());

  // The step. Each of these calls is collective: all ranks make it.
  uniep::Layer layer(p, communicator);
  const uniep::RoutingPlan plan = layer.plan(topk_ids);
  const uniep::Saved saved = layer.forward(
      plan, {.x = x, .topk_probs = topk_probs, .w1 = w1, .w2 = w2, .out = out}, schedule);
  layer.backward(saved,
                 {.dy = dy,
                  .w1 = w1,
                  .w2 = w2,
                  .dx = dx,
                  .dprobs = dprobs,
                  .dw1 = std::span<uniep::bf16>(dw1),
                  .dw2 = std::span<uniep::bf16>(dw2)},
                 schedule);

  return "rank " + std::to_string(communicator.rank()) + "  received " +
         std::to_string(plan.traffic().rows) + " rows  out " + checksum(out) + "  dx " +
         checksum(dx) + "  dw1 " + checksum(dw1);
}

}  // namespace

int main(int argc, char** argv) try {
  const auto schedule = uniep::parse_schedule(argc > 1 ? argv[1] : "single");
  std::printf("schedule %s\n", uniep::to_string(schedule).c_str());

  std::vector<std::string> lines(kRanks);
  uniep::run_ranks(uniep::Communicator::cpu_group(kRanks), [&](uniep::Communicator& communicator) {
    lines[static_cast<std::size_t>(communicator.rank())] = train_step(communicator, schedule);
  });
  for (const std::string& line : lines) std::printf("%s\n", line.c_str());
} catch (const uniep::Error& error) {
  std::fprintf(stderr, "train_step: %s\n", error.what());
  return 2;
}
