#include "cuda/pass.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "base/check.h"
#include "base/cuda/check.h"
#include "base/cuda/driver.h"
#include "cuda/device/tile_shape.h"
#include "cuda/plan_launch.h"
#include "cuda/profiler_range.h"
#include "cuda/tensor_map.h"
#include "schedule/constraints.h"
#include "schedule/roles.h"

namespace uniep::cuda {
namespace {

/// Boxes are squares of 64, of operands and of outputs, but for weights whose reduction is
/// contiguous: 64 k's by a tile's columns.
constexpr int kBox = 64;
static_assert(kConsumerRows == kBox && kBoxCols == kBox);
static_assert(kTileM == kCudaTileM && std::ranges::equal(kTileColumns, kCudaTileN));

CUtensorMap weight_grad_map(const WeightGrad& grad, std::int64_t cols, std::int64_t rows,
                            std::int64_t experts) {
  const auto* dw = std::get_if<std::span<bf16>>(&grad);
  if (dw == nullptr) return {};  // what is added to is written without a map
  return tensor_map(dw->data(), {cols, rows, experts}, {kBox, kBox, 1});
}

/// Of a weight gradient that is added to.
void* main_grad(const WeightGrad& grad) {
  if (std::holds_alternative<std::span<bf16>>(grad)) return nullptr;
  return std::visit([](const auto& main) -> void* { return main.data(); }, grad);
}

/// Of PassTensors or BackwardWeightsArgs.
template <class T, class Args>
bool either_is(const Args& args) {
  return std::holds_alternative<T>(args.dw1) || std::holds_alternative<T>(args.dw2);
}

constexpr Stage kForwardGemms[] = {Stage::kFc1, Stage::kFc2};
constexpr Stage kBackwardGemms[] = {Stage::kDfc2, Stage::kDfc1, Stage::kWgrad2, Stage::kWgrad1};

/// Whether the pass, or its part at hand, has tiles of this GEMM stage.
bool holds(const PassView& v, Stage stage) {
  const bool weights = stage == Stage::kWgrad2 || stage == Stage::kWgrad1;
  return weights ? v.has_weight_grads() : v.moves_data();
}

LaunchPass launch_function(Pass pass, int tile_n, const PassTensors& tensors) {
  const bool wide = tile_n == 256;
  if (pass == Pass::kForward) return wide ? launch_forward_n256 : launch_forward_n128;
  if (either_is<Bf16MainGrad>(tensors))
    return wide ? launch_backward_bf16_n256 : launch_backward_bf16_n128;
  return wide ? launch_backward_n256 : launch_backward_n128;
}

}  // namespace

std::optional<std::string> unsupported_reason(const Schedule& s, int sms) {
  return backend_reason(s, {.backend = Backend::kCuda, .max_workers = sms});
}

std::optional<std::string> unsupported_reason(const BackwardWeightsArgs& args) {
  const bool both = either_is<std::span<float>>(args) && either_is<Bf16MainGrad>(args);
  if (!both) return std::nullopt;
  return "dw1 and dw2 are added to in fp32 and in bf16; with the cuda backend both in one of these "
         "types are accepted, or one of them overwritten";
}

FaultFill fault_fill(const PassView& v, const PassTensors& t) {
  FaultFill fill;
  if (v.moves_data()) {
    fill.tokens = t.token_out;
    fill.tokens_count = v.tokens * v.hidden;
    fill.dprobs = t.dprobs_out;
    fill.dprobs_count = v.tokens * v.topk;
  }
  if (!v.has_weight_grads()) return fill;
  if (const auto* dw1 = std::get_if<std::span<bf16>>(&t.dw1)) {
    fill.dw1 = dw1->data();
    fill.dw1_count = static_cast<std::int64_t>(dw1->size());
  }
  if (const auto* dw2 = std::get_if<std::span<bf16>>(&t.dw2)) {
    fill.dw2 = dw2->data();
    fill.dw2_count = static_cast<std::int64_t>(dw2->size());
  }
  return fill;
}

void prepare_kernels() {
  constexpr cudaError_t (*kPrepare[])() = {prepare_plan,
                                           prepare_order,
                                           prepare_enter,
                                           prepare_fault_fill,
                                           prepare_refuse,
                                           prepare_forward_n128,
                                           prepare_forward_n256,
                                           prepare_backward_n128,
                                           prepare_backward_n256,
                                           prepare_backward_bf16_n128,
                                           prepare_backward_bf16_n256};
  for (const auto prepare : kPrepare) check_cuda(prepare(), "load the kernels");
  (void)tensor_map_encode_tiled();  // which a first call looks up
}

PassLauncher::PassLauncher(const DeviceContext& ctx, const PassTensors& tensors, std::int64_t rows,
                           std::vector<QueuePair> queues, int sms, cudaStream_t stream)
    : ctx_(ctx),
      tensors_(tensors),
      rows_(rows),
      queues_(std::move(queues)),
      ctas_(ctx.view.schedule.workers > 0 ? ctx.view.schedule.workers : sms),
      enter_ctas_(sms),
      stream_(stream) {
  ctx_.dispatched = ctx.view.pass == Pass::kForward ? tensors.x_rows : tensors.dy_rows;
  ctx_.row_probs = tensors.row_probs;
  ctx_.dprob_groups = tensors.dprob_groups;
  ctx_.token_out = tensors.token_out;
  ctx_.dprobs_out = tensors.dprobs_out;
  ctx_.main_dw1 = main_grad(tensors.dw1);
  ctx_.main_dw2 = main_grad(tensors.dw2);
  StageMaps* next = maps_.stages;
  const auto make_maps = [&](std::span<const Stage> stages) {
    for (const Stage stage : stages) *next++ = holds(ctx.view, stage) ? maps(stage) : StageMaps{};
  };
  ctx.view.pass == Pass::kForward ? make_maps(kForwardGemms) : make_maps(kBackwardGemms);
}

std::optional<Stage> PassLauncher::only_stage(int launch) const {
  const Launch shape = launch_contents(ctx_.view, launch);
  if (shape.comm.count + shape.main.count != 1) return std::nullopt;
  return shape.comm.count == 1 ? shape.comm.tracks[0].stage : shape.main.tracks[0].stage;
}

StageMaps PassLauncher::maps(Stage stage) const {
  const std::int64_t hidden = ctx_.view.hidden;
  const std::int64_t inter = ctx_.view.intermediate;
  const std::int64_t experts = ctx_.view.num_local_experts;
  const int tile_n = ctx_.view.schedule.tile_n;
  const PassTensors& t = tensors_;
  StageMaps m{};
  switch (stage) {
    case Stage::kFc1:
      m.a = tensor_map(t.x_rows, {hidden, rows_, 1}, {kBox, kBox, 1});
      m.b = tensor_map(t.w1, {hidden, inter, 2, experts}, {kBox, tile_n / 2, 1, 1});
      m.out0 = tensor_map(t.h, {inter, 2, rows_}, {kBox, 1, kBox});
      m.out1 = tensor_map(t.a, {inter, rows_, 1}, {kBox, kBox, 1});
      break;
    case Stage::kFc2:
      m.a = tensor_map(t.a, {inter, rows_, 1}, {kBox, kBox, 1});
      m.b = tensor_map(t.w2, {inter, hidden, experts}, {kBox, tile_n, 1});
      break;
    case Stage::kDfc2:
      m.a = tensor_map(t.dy_rows, {hidden, rows_, 1}, {kBox, kBox, 1});
      m.b = tensor_map(t.w2, {inter, hidden, experts}, {kBox, kBox, 1});
      m.aux = tensor_map(t.h, {inter, 2, rows_}, {kBox, 1, kTileM});
      m.out0 = tensor_map(t.dh, {inter, 2, rows_}, {kBox, 1, kBox});
      m.out1 = tensor_map(t.a, {inter, rows_, 1}, {kBox, kBox, 1});
      break;
    case Stage::kDfc1:
      m.a = tensor_map(t.dh, {2 * inter, rows_, 1}, {kBox, kBox, 1});
      m.b = tensor_map(t.w1, {hidden, 2 * inter, experts}, {kBox, kBox, 1});
      break;
    case Stage::kWgrad2:
      m.a = tensor_map(t.dy_rows, {hidden, rows_, 1}, {kBox, kBox, 1});
      m.b = tensor_map(t.a, {inter, rows_, 1}, {kBox, kBox, 1});
      m.out0 = weight_grad_map(t.dw2, inter, hidden, experts);
      break;
    default:  // wgrad1
      m.a = tensor_map(t.dh, {2 * inter, rows_, 1}, {kBox, kBox, 1});
      m.b = tensor_map(t.x_rows, {hidden, rows_, 1}, {kBox, kBox, 1});
      m.out0 = weight_grad_map(t.dw1, hidden, 2 * inter, experts);
      break;
  }
  return m;
}

void PassLauncher::enter(const EnterArgs& args) {
  const ProfilerRange range([&] { return cat("uniep ", name(ctx_.view.pass), ": enter"); });
  tickets_ = args.tickets;
  if (!ctx_.view.moves_data()) {
    const FaultFill& fill = args.fill;
    if (fill.dw1 != nullptr || fill.dw2 != nullptr) {
      check_cuda(launch_fault_fill(args.plan, fill, enter_ctas_, stream_), "launch fault_fill");
    }
    check_cuda(cudaMemsetAsync(tickets_, 0, queues_.size() * sizeof(*tickets_), stream_),
               "zero the tickets");
    return;
  }
  check_cuda(launch_enter(ctx_, args, enter_ctas_, stream_), "launch enter");
}

LaunchQueues PassLauncher::queues(int index) const {
  const QueuePair& pair = queues_[static_cast<std::size_t>(index)];
  return {.comm = pair.comm,
          .main = pair.main,
          .launch = launch_number(ctx_.view, index),
          .ticket = tickets_ + index,
          .even = even_roles(ctx_.view.schedule, launch_contents(ctx_.view, index), ctas_)};
}

void PassLauncher::launch(int index) const {
  const ProfilerRange range([&] { return range_name(ctx_.view, index); });
  const LaunchPass function = launch_function(ctx_.view.pass, ctx_.view.schedule.tile_n, tensors_);
  check_cuda(function(ctx_, queues(index), maps_, ctas_, stream_),
             cat("launch ", index, " of the ", name(ctx_.view.pass), " pass").c_str());
}

}  // namespace uniep::cuda
