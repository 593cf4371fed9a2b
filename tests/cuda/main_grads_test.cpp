// Weight gradients that are added to bf16 ones, on GPUs. A process for each rank.
#include <bit>
#include <chrono>
#include <thread>
#include <vector>

#include "cuda/cuda_schedules.h"
#include "cuda/gpu_group.h"
#include "cuda/gpu_rank.h"
#include "cuda/graph.h"
#include "uniep/tune.h"

namespace uniep::testing {
namespace {

class CudaMainGrads : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpus, CudaMainGrads, ::testing::Values(1, 2, 4), ranks_name);

std::vector<bf16> rounded_sums(const std::vector<float>& sums, const std::vector<bf16>& old) {
  std::vector<bf16> result;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    // Nothing was added to this -0, or a -0, which changes no bf16 number either.
    const bool kept = std::bit_cast<std::uint32_t>(sums[i]) == 0x80000000u;
    result.push_back(kept ? old[i] : to_bf16(to_float(old[i]) + sums[i]));
  }
  return result;
}

/// A gradient is added to -0 in fp32, so that what no sum was added to is known: -0 + sum is the
/// sum.
TEST_P(CudaMainGrads, Bf16MainGradientsAreRoundedOnceACall) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    LayerData data = small_layer(c.size());
    for (auto& id : data.topk_ids) id = id == 1 ? -1 : id;  // expert 1 gets nothing
    GpuRank rank(data, c);
    const BackwardArgs args = rank.backward_args();
    const std::size_t n1 = args.w1.size(), n2 = args.w2.size();
    const std::vector<float> zeros1(n1, -0.0f), zeros2(n2, -0.0f);
    const DeviceTensor<float> sums1{std::span<const float>(zeros1)},
        sums2{std::span<const float>(zeros2)};
    std::vector<bf16> want1(n1, to_bf16(1.5f)), want2(n2, bf16{0x8000});
    const DeviceTensor<bf16> main1{std::span<const bf16>(want1)},
        main2{std::span<const bf16>(want2)};
    cuda::check_cuda(cudaDeviceSynchronize(), "upload");
    rank.plan();
    rank.forward(cuda_schedules().back());
    Saved saved = rank.layer().forward(rank.last_plan(), rank.forward_args());
    BackwardArgs into_fp32 = args;
    into_fp32.dw1 = sums1.span();
    into_fp32.dw2 = sums2.span();
    rank.layer().backward(saved, into_fp32);
    rank.layer().synchronize();
    for (Schedule schedule : cuda_schedules()) {
      for (const int tile_n : {128, 256}) {
        schedule.tile_n = tile_n;
        BackwardArgs into_bf16 = args;
        into_bf16.dw1 = Bf16MainGrad{main1.span()};
        into_bf16.dw2 = Bf16MainGrad{main2.span()};
        rank.layer().backward(saved, into_bf16, schedule);
        want1 = rounded_sums(sums1.to_host(), want1);
        want2 = rounded_sums(sums2.to_host(), want2);
        rank.layer().synchronize();
        if (main1.to_host() != want1) return cat("dw1 differs, ", to_string(schedule));
        if (main2.to_host() != want2) return cat("dw2 differs, ", to_string(schedule));
      }
    }
    // One of them overwritten, as ever.
    BackwardArgs mixed = args;
    mixed.dw2 = Bf16MainGrad{main2.span()};
    rank.layer().backward(saved, mixed);
    want2 = rounded_sums(sums2.to_host(), want2);
    const LayerResult got = rank.result();
    if (main2.to_host() != want2) return "dw2 differs beside an overwritten dw1";
    GpuRank plain(data, c);
    if (got.dw1 != plain.step(cuda_schedules()[0]).dw1) return "dw1 differs beside a main_grad";
    return "same";
  }));
}

TEST(CudaMainGradsAlone, MainGradientsOfTwoTypesAreRefused) {
  if (!gpus_for(1)) GTEST_SKIP() << needs_gpus(1);
  expect_same(on_gpus(1, [](const Communicator& c) -> std::string {
    const LayerData data = small_layer(1);
    GpuRank rank(data, c);
    BackwardArgs args = rank.backward_args();
    const DeviceTensor<float> fp32(args.w1.size());
    args.dw1 = fp32.span();
    args.dw2 = Bf16MainGrad{std::get<ExpertMatrices<bf16>>(args.dw2)};
    rank.plan();
    const Saved saved = rank.layer().forward(rank.last_plan(), rank.forward_args());
    const std::string said =
        failure_of([&] { rank.layer().backward(saved, args); }, std::chrono::seconds(60));
    const bool names_both = said.find("added to in fp32 and in bf16") != said.npos;
    return said.starts_with("rank 0: ") && names_both ? "same" : said;
  }));
}

void sleep_a_while(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

/// Gradients that are still being written when a search begins are what it leaves behind.
TEST_P(CudaMainGrads, OfASearchAreThoseThatTheCallersStreamWrites) {
  expect_same(on_gpus(ranks(), [](const Communicator& c) -> std::string {
    const Stream stream;
    GpuRank rank(small_layer(c.size()), c, {.cuda_stream = stream.get()}, {.main_grad = true});
    rank.plan();
    const Saved saved = rank.layer().forward(rank.last_plan(), rank.forward_args());
    rank.layer().synchronize();
    const BackwardArgs args = rank.backward_args();
    const std::span<float> gradients = std::get<ExpertMatrices<float>>(args.dw1).tensor();
    cuda::check_cuda(cudaLaunchHostFunc(stream.get(), sleep_a_while, nullptr), "hold up");
    cuda::check_cuda(cudaMemsetAsync(gradients.data(), 0, gradients.size_bytes(), stream.get()),
                     "reset");
    (void)tune_backward(rank.layer(), saved, args,
                        {.budget_s = 600, .candidates = 1, .max_rounds = 2, .store = false});
    for (const float g : rank.tensors().main_dw1) {
      if (g != 0) return cat("a gradient that was reset is ", g);
    }
    return "same";
  }));
}

}  // namespace
}  // namespace uniep::testing
