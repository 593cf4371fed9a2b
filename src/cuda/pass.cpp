#include "cuda/pass.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "base/check.h"
#include "base/cuda/check_cuda.h"
#include "base/cuda/driver.h"
#include "base/plain_experts.h"
#include "cuda/device/sm90/tile_shape.h"
#include "cuda/pass_variant.h"
#include "cuda/plan_kernels.h"
#include "cuda/profiler_range.h"
#include "layer/expert_places.h"
#include "schedule/constraints.h"
#include "schedule/roles.h"

namespace uniep::cuda {
namespace {

static_assert(kTileM == kCudaTileM && std::ranges::equal(kTileColumns, kCudaTileN));

/// The main gradient; null if the weight gradient is not added to.
void* main_grad(const WeightGrad& grad) {
  if (is_overwritten(grad)) return nullptr;
  return with_matrices(grad, [](const auto& main) -> void* { return main.data(); });
}

/// Whether any weight gradient of PassTensors or BackwardWeightsArgs is of that type.
template <class T, class Args>
bool any_is(const Args& args) {
  const auto is = [](const WeightGrad& grad) { return std::holds_alternative<T>(grad); };
  return is(args.dw1) || is(args.dw2) || is(args.db1) || is(args.db2);
}

PassVariant variant_of(const DeviceContext& ctx, const PassTensors& tensors) {
  const PassView& v = ctx.view;
  const bool general =
      ctx.in_out != 0 || !are_plain_experts(v.activation, v.probs, v.choice.has_bias,
                                            v.group_experts > 0 || v.slot_rows);
  if (v.pass == Pass::kForward) {
    return {.pass = v.pass, .tile_n = v.schedule.tile_n, .general = general};
  }
  return {.pass = v.pass,
          .recomputes = v.choice.drops_x_rows || v.choice.drops_h || v.ring_rows > 0,
          .bf16_main = any_is<Bf16MainGrad>(tensors),
          .tile_n = v.schedule.tile_n,
          .general = general};
}

}  // namespace

std::optional<std::string> unsupported_reason(const Schedule& s, int sms) {
  return backend_reason(s, {.backend = Backend::kCuda, .max_workers = sms});
}

std::optional<std::string> unsupported_ring_reason(const Schedule& s, const Problem& p, int sms) {
  if (p.backward_rows == 0 || num_ctas(s, sms) > 1) return std::nullopt;
  return cat("the schedule has workers=", s.workers, ", and with backward_rows=", p.backward_rows,
             " one dispatches while others compute; 0, or 2 or more are accepted");
}

namespace {

/// A box of a tensor map has neighbouring elements: no columns by turns, and of a pair no columns
/// of both.
template <class T>
std::optional<std::string> order_reason(const char* name, const ExpertMatrices<T>& matrices,
                                        const Problem& p) {
  if (!matrices.is_in_out()) return std::nullopt;
  if (matrices.form() == ExpertForm::kInterleaved) {
    return cat(name,
               " has [in, out] matrices with columns of gate and up by turns, which no tensor map "
               "tells apart; with the cuda backend all of the gate ahead of up, or [out, in] "
               "matrices, are accepted");
  }
  if (matrices.form() == ExpertForm::kGateAndUp && p.intermediate % kBoxRows != 0) {
    return cat(name, " is a pair of [in, out] matrices, and intermediate=", p.intermediate,
               "; with the cuda backend multiples of ", kBoxRows,
               " are accepted, or gate and up in one tensor");
  }
  return std::nullopt;
}
std::optional<std::string> order_reason(const char* name, const WeightGrad& grad,
                                        const Problem& p) {
  return with_matrices(grad, [&](const auto& matrices) { return order_reason(name, matrices, p); });
}

}  // namespace

std::optional<std::string> unsupported_reason(const ForwardArgs& args, const Problem& p) {
  return order_reason("w1", args.w1, p);
}

std::optional<std::string> unsupported_reason(const BackwardDataArgs& args, const Problem& p) {
  return order_reason("w1", args.w1, p);
}

std::optional<std::string> unsupported_reason(const BackwardWeightsArgs& args, const Problem& p) {
  if (const auto reason = order_reason("dw1", args.dw1, p)) return reason;
  const bool both = any_is<ExpertMatrices<float>>(args) && any_is<Bf16MainGrad>(args);
  if (!both) return std::nullopt;
  return "weight gradients are added to in fp32 and in bf16; with the cuda backend one of these "
         "types is accepted in a call, and others overwritten";
}

int num_ctas(const Schedule& schedule, int sms) {
  return schedule.workers > 0 ? schedule.workers : sms;
}

FaultFill fault_fill(const PassView& v, const PassTensors& t) {
  FaultFill fill;
  if (v.moves_data()) {
    const bool forward = v.pass == Pass::kForward;
    fill.tokens = forward ? t.table.get<Tensor::kOut>() : t.table.get<Tensor::kDx>();
    fill.tokens_count = v.tokens * v.result_rows() * v.hidden;
    if (!forward) {
      fill.dprobs[0] = {t.table.get<Tensor::kDprobs>(), v.tokens * v.topk};
      fill.dprobs[1] = {t.table.get<Tensor::kDsharedProbs>(), v.tokens * v.shared_experts};
    }
  }
  if (!v.has_weight_grads()) return fill;
  const WeightGrad* const grads[] = {&t.dw1, &t.dw2, &t.db1, &t.db2, &t.dshared_w1, &t.dshared_w2};
  static_assert(std::size(grads) == std::size(FaultFill{}.weight_grads));
  for (std::size_t i = 0; i < std::size(grads); ++i) {
    const auto* overwritten = std::get_if<ExpertMatrices<bf16>>(grads[i]);
    if (overwritten == nullptr || overwritten->empty()) continue;
    // Gradients of several tensors are cleared where their maps are written.
    const bool is_one_tensor = overwritten->tensor().size() == overwritten->size();
    if (!is_one_tensor) continue;
    fill.weight_grads[i] = {overwritten->data(), static_cast<std::int64_t>(overwritten->size())};
  }
  return fill;
}

void prepare_kernels() {
  const auto load = [](cudaError_t error) { check_cuda(error, "load the kernels"); };
  for (const auto prepare : {prepare_plan, prepare_return_pages, prepare_order, prepare_enter,
                             prepare_expert_maps, prepare_fault_fill, prepare_refuse}) {
    load(prepare());
  }
  load(prepare_passes());
  (void)tensor_map_encode_tiled();  // which a first call looks up
}

PassLauncher::PassLauncher(const DeviceContext& ctx, const PassTensors& tensors, const Rows& rows,
                           CUtensorMap* expert_maps, std::vector<LaunchQueues> queues, int sms,
                           cudaStream_t stream)
    : ctx_(ctx),
      tensors_(tensors),
      queues_(std::move(queues)),
      mapped_(map_pass(ctx.view, tensors, rows.of_call, rows.saved, expert_maps)),
      ctas_(num_ctas(ctx.view.schedule, sms)),
      enter_ctas_(sms),
      stream_(stream) {
  ctx_.tensors = tensors.table;
  ctx_.main_dw1 = main_grad(tensors.dw1);
  ctx_.main_dw2 = main_grad(tensors.dw2);
  ctx_.main_db1 = main_grad(tensors.db1);
  ctx_.main_db2 = main_grad(tensors.db2);
  ctx_.in_out = tensors.in_out_stages();
  for (int i = 0; i < num_launches(); ++i) {
    LaunchQueues& launch = queues_[static_cast<std::size_t>(i)];
    launch.launch = launch_number(ctx.view, i);
    launch.even = even_roles(ctx.view, launch_contents(ctx.view, i), ctas_);
  }
}

std::optional<Stage> PassLauncher::only_stage(int launch) const {
  const Launch shape = launch_contents(ctx_.view, launch);
  if (shape.comm.count + shape.main.count != 1) return std::nullopt;
  return shape.comm.count == 1 ? shape.comm.tracks[0].stage : shape.main.tracks[0].stage;
}

void PassLauncher::write_expert_maps(const PlanStatus* flagged) const {
  for (const ExpertMaps& maps : mapped_.experts) {
    const MatricesApart& matrices = maps.matrices;
    ExpertMapsArgs args{.first = maps.first,
                        .cleared = matrices.is_cleared ? flagged : nullptr,
                        .elements = matrices.shape.rows * matrices.shape.cols};
    const std::span<void* const> begins(matrices.begins);
    for (std::size_t done = 0; done < begins.size(); done += ExpertMapsArgs::kMost) {
      const auto batch = begins.subspan(done).first(
          std::min<std::size_t>(begins.size() - done, ExpertMapsArgs::kMost));
      std::ranges::copy(batch, args.begins);
      args.to = maps.to + done;
      args.count = static_cast<int>(batch.size());
      check_cuda(launch_expert_maps(args, stream_), "launch expert_maps");
    }
  }
}

void PassLauncher::enter(const EnterArgs& args) {
  const ProfilerRange range([&] { return cat("uniep ", name(ctx_.view.pass), ": enter"); });
  for (int i = 0; i < num_launches(); ++i) {
    queues_[static_cast<std::size_t>(i)].drawn = args.drawn + i;
  }
  if (!ctx_.view.moves_data()) {
    const FaultFill& fill = args.fill;
    if (fill.any_weight_grad()) {
      check_cuda(launch_fault_fill(args.plan, fill, enter_ctas_, stream_), "launch fault_fill");
    }
    const auto bytes = static_cast<std::size_t>(num_launches()) * sizeof(*args.drawn);
    check_cuda(cudaMemsetAsync(args.drawn, 0, bytes, stream_), "zero the counts of draws");
    return;
  }
  check_cuda(launch_enter(ctx_, args, enter_ctas_, stream_), "launch enter");
  enter_ = args;
}

int PassLauncher::num_waves() const {
  const PassView& v = ctx_.view;
  return v.comes_in_waves() && v.moves_data() ? v.schedule.waves : 0;
}

void PassLauncher::enter_wave(int wave) const {
  const ProfilerRange range([&] { return cat("uniep ", name(ctx_.view.pass), ": wave ", wave); });
  EnterArgs args = enter_;
  args.wave = wave;
  args.fill = {};  // is done
  check_cuda(launch_enter(ctx_, args, enter_ctas_, stream_), "launch enter");
}

void PassLauncher::launch(int index) const {
  const ProfilerRange range([&] { return range_name(ctx_.view, index); });
  const PassFunctions& functions = functions_for(variant_of(ctx_, tensors_));
  DeviceContext ctx = ctx_;
  if (index < num_waves()) ctx.view.published = static_cast<std::uint32_t>(index) + 1;
  check_cuda(
      functions.launch(ctx, queues_[static_cast<std::size_t>(index)], mapped_.maps, ctas_, stream_),
      cat("launch ", index, " of the ", name(ctx_.view.pass), " pass").c_str());
}

}  // namespace uniep::cuda
