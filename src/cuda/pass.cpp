#include "cuda/pass.h"

#include "base/check.h"
#include "cuda/check.h"
#include "cuda/device/tile_shape.h"
#include "cuda/tensor_map.h"

namespace uniep::cuda {
namespace {

/// Boxes of operands: 64 k's by a tile's rows or columns where the reduction is contiguous, squares
/// of 64 where it is not. Output boxes are a warp's 16 rows.
constexpr int kBox = 64;
constexpr int kOutRows = kWarpRows;

CUtensorMap weight_grad_map(const WeightGrad& grad, std::int64_t cols, std::int64_t rows,
                            std::int64_t experts) {
  const auto* dw = std::get_if<std::span<bf16>>(&grad);
  if (dw == nullptr) return {};  // fp32 is written without a map
  return tensor_map(dw->data(), {cols, rows, experts}, {kBox, kOutRows, 1});
}

float* main_grad(const WeightGrad& grad) {
  const auto* main = std::get_if<std::span<float>>(&grad);
  return main == nullptr ? nullptr : main->data();
}

}  // namespace

std::optional<std::string> unsupported_reason(const Schedule& s) {
  if (s.launch != LaunchGrouping::kSeparate || s.wgrad != WgradPlacement::kSeparate) {
    return "the CUDA backend runs launch=separate with wgrad=separate (preset sequential) only";
  }
  if (s.tile_m != kTileM || s.tile_n != kTileN) {
    return cat("the CUDA backend has tiles of tile_m=", kTileM, " and tile_n=", kTileN, " only");
  }
  return std::nullopt;
}

PassLauncher::PassLauncher(const DeviceContext& ctx, const PassTensors& tensors, std::int64_t rows,
                           std::vector<QueueView> queues, int sms, cudaStream_t stream)
    : ctx_(ctx),
      tensors_(tensors),
      rows_(rows),
      queues_(std::move(queues)),
      sms_(sms),
      stream_(stream) {
  ctx_.dispatched = ctx.view.pass == Pass::kForward ? tensors.x_rows : tensors.dy_rows;
  ctx_.row_probs = tensors.row_probs;
  ctx_.dprob_groups = tensors.dprob_groups;
  ctx_.token_out = tensors.token_out;
  ctx_.dprobs_out = tensors.dprobs_out;
}

Stage PassLauncher::stage_of(int launch) const {
  const Launch shape = launch_at(ctx_.view, launch);
  ensure(shape.comm.count + shape.main.count == 1, "a launch of the CUDA backend holds one stage");
  return shape.comm.count == 1 ? shape.comm.tracks[0].stage : shape.main.tracks[0].stage;
}

StageMaps PassLauncher::maps(Stage stage) const {
  const std::int64_t hidden = ctx_.view.hidden;
  const std::int64_t inter = ctx_.view.intermediate;
  const std::int64_t experts = ctx_.view.num_local_experts;
  const PassTensors& t = tensors_;
  StageMaps m{};
  switch (stage) {
    case Stage::kFc1:
      m.a = tensor_map(t.x_rows, {hidden, rows_, 1}, {kBox, kTileM, 1});
      m.b = tensor_map(t.w1, {hidden, inter, 2, experts}, {kBox, kTileN / 2, 1, 1});
      m.out0 = tensor_map(t.h, {inter, 2, rows_}, {kBox, 1, kOutRows});
      m.out1 = tensor_map(t.a, {inter, rows_, 1}, {kBox, kOutRows, 1});
      break;
    case Stage::kFc2:
      m.a = tensor_map(t.a, {inter, rows_, 1}, {kBox, kTileM, 1});
      m.b = tensor_map(t.w2, {inter, hidden, experts}, {kBox, kTileN, 1});
      break;
    case Stage::kDfc2:
      m.a = tensor_map(t.dy_rows, {hidden, rows_, 1}, {kBox, kTileM, 1});
      m.b = tensor_map(t.w2, {inter, hidden, experts}, {kBox, kBox, 1});
      m.aux = tensor_map(t.h, {inter, 2, rows_}, {kBox, 1, kTileM});
      m.out0 = tensor_map(t.dh, {inter, 2, rows_}, {kBox, 1, kOutRows});
      m.out1 = tensor_map(t.a, {inter, rows_, 1}, {kBox, kOutRows, 1});
      break;
    case Stage::kDfc1:
      m.a = tensor_map(t.dh, {2 * inter, rows_, 1}, {kBox, kTileM, 1});
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

void PassLauncher::enter(const EnterArgs& args) const {
  check_cuda(launch_enter(ctx_, args, 4 * sms_, stream_), "launch enter");
}

void PassLauncher::launch(int index) const {
  const Stage stage = stage_of(index);
  DeviceContext ctx = ctx_;
  ctx.queue = queues_[static_cast<std::size_t>(index)];
  switch (stage) {
    case Stage::kDispatch:
      return check_cuda(launch_dispatch(ctx, sms_, stream_), "launch dispatch");
    case Stage::kReduce:
      return check_cuda(launch_reduce(ctx, 8 * sms_, stream_), "launch reduce");
    case Stage::kFc1:
      return check_cuda(launch_fc1(ctx, maps(stage), sms_, stream_), "launch fc1");
    case Stage::kFc2:
      return check_cuda(launch_fc2(ctx, maps(stage), sms_, stream_), "launch fc2");
    case Stage::kDfc2:
      return check_cuda(launch_dfc2(ctx, maps(stage), sms_, stream_), "launch dfc2");
    case Stage::kDfc1:
      return check_cuda(launch_dfc1(ctx, maps(stage), sms_, stream_), "launch dfc1");
    case Stage::kWgrad2:
      ctx.main_grad = main_grad(tensors_.dw2);
      return check_cuda(launch_wgrad2(ctx, maps(stage), sms_, stream_), "launch wgrad2");
    case Stage::kWgrad1:
      ctx.main_grad = main_grad(tensors_.dw1);
      return check_cuda(launch_wgrad1(ctx, maps(stage), sms_, stream_), "launch wgrad1");
    default:
      ensure(false, "stage ", name(stage), " has no launch");
  }
}

}  // namespace uniep::cuda
