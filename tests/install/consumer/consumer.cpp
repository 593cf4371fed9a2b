// Two ranks, one token each, routed to the other rank's expert; numbers small enough to check by
// hand: x = 1, all weights 1/8, so h = 1 and a = bf16(silu(1)) = 0.73046875, which is out as well.
#include <uniep/uniep.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

void check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

bool all_equal(const std::vector<uniep::bf16>& values, float want) {
  for (const uniep::bf16 v : values) {
    if (uniep::to_float(v) != want) return false;
  }
  return true;
}

void step(uniep::Communicator& communicator) {
  const uniep::Problem problem{
      .hidden = 8, .intermediate = 8, .num_experts = 2, .topk = 1, .max_tokens = 1};
  const auto eighth = uniep::to_bf16(0.125f);
  const auto one = uniep::to_bf16(1.0f);
  const std::vector<uniep::bf16> x(8, one), dy(8, one), w1(16 * 8, eighth), w2(8 * 8, eighth);
  const std::vector<float> probs{1.0f};
  const std::vector<std::int32_t> ids{1 - communicator.rank()};
  std::vector<uniep::bf16> out(8), dx(8), dw1(w1.size()), dw2(w2.size());
  std::vector<float> dprobs(1);

  const auto schedule =
      uniep::parse_schedule("two-kernel", uniep::default_schedule(communicator.backend()));
  uniep::Layer layer(problem, communicator);
  check(layer.schedule(uniep::Pass::kForward) == uniep::default_schedule(communicator.backend()),
        "nothing was tuned for this layer");
  const auto plan = layer.plan(ids);
  check(plan.traffic().remote_rows == 1, "the row comes from the other rank");
  const auto saved =
      layer.forward(plan, {.x = x, .topk_probs = probs, .w1 = w1, .w2 = w2, .out = out});
  layer.backward(saved,
                 {.dy = dy,
                  .w1 = w1,
                  .w2 = w2,
                  .dx = dx,
                  .dprobs = dprobs,
                  .dw1 = std::span<uniep::bf16>(dw1),
                  .dw2 = std::span<uniep::bf16>(dw2)},
                 schedule);
  check(all_equal(out, 0.73046875f), "out");
  check(all_equal(dw2, 0.73046875f), "dw2");  // dy^T a, over one row
  const float silu = 1 / (1 + std::exp(-1.0f));
  check(std::abs(dprobs[0] - 8 * silu) < 1e-5f, "dprobs");
  // dh = bf16(silu'(1)) = 0.92578125 for gate, 0.73046875 for up; dx is their sum.
  check(all_equal(dx, uniep::to_float(uniep::to_bf16(0.92578125f + 0.73046875f))), "dx");
}

}  // namespace

int main() try {
  uniep::run_ranks(uniep::Communicator::cpu_group(2), step);

  // An error thrown inside the library arrives as its own type, also out of a shared library.
  bool caught = false;
  try {
    uniep::parse_schedule("no-such-schedule");
  } catch (const uniep::Error& error) {
    caught = error.code() == uniep::ErrorCode::kInvalidArgument;
  }
  check(caught, "uniep::Error with its code");
  // So does one that a rank's thread rethrows after all have stopped.
  caught = false;
  try {
    uniep::run_ranks(uniep::Communicator::cpu_group(2), [](uniep::Communicator& communicator) {
      const uniep::Layer layer(uniep::Problem{}, communicator);
    });
  } catch (const uniep::Error& error) {
    caught = error.code() == uniep::ErrorCode::kInvalidArgument;
  }
  check(caught, "uniep::Error out of run_ranks");
  std::printf("consumer: uniep %s works\n", UNIEP_VERSION_STRING);
} catch (const std::exception& error) {
  std::fprintf(stderr, "consumer: wrong: %s\n", error.what());
  return 1;
}
