#include "cuda/emulated_group.h"

#include <limits>

#include "cuda/fault_injection.h"
#include "cuda/wait_failure.h"

namespace uniep::cuda::testing {
namespace {

template <class T>
DeviceArray<T> filled(std::size_t count, T value) {
  return upload(std::vector<T>(count, value));
}

constexpr bf16 kNan{0x7fff};
constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

/// Bytes that are NaN as bf16 and as fp32: what a kernel reads without anyone having written it.
DeviceArray<std::byte> poisoned(std::int64_t bytes) {
  DeviceArray<std::byte> memory(bytes);
  if (bytes > 0) {
    check_cuda(cudaMemset(memory.data(), 0xff, static_cast<std::size_t>(bytes)), "poison memory");
  }
  return memory;
}

template <class T>
void append(std::vector<T>& to, const DeviceArray<T>& from) {
  const std::vector<T> part = from.to_host();
  to.insert(to.end(), part.begin(), part.end());
}

}  // namespace

EmulatedGroup::EmulatedGroup(const LayerData& data, std::vector<std::int64_t> token_begin,
                             bool main_grad, float main_grad_start, std::uint32_t first_count)
    : data_(data),
      split_(data, token_begin),
      main_grad_(main_grad),
      main_grad_start_(main_grad_start),
      symmetric_(split_.problem(), split_.ranks()),
      local_(split_.problem(), split_.ranks()),
      passes_(first_count) {
  check_cuda(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0), "ask for SMs");
  std::vector<std::int64_t> tokens;
  for (int r = 0; r < split_.ranks(); ++r) tokens.push_back(split_.tokens(r).size());
  LayerResult unused = workload::make_result(data, {});
  for (int r = 0; r < split_.ranks(); ++r) {
    const RoutingPlan plan = RoutingPlan::build(split_.problem(), r, tokens, data.topk_ids);
    const ForwardArgs f = split_.forward_args(r, unused);
    const BackwardArgs b = split_.backward_args(r, unused);
    const std::int64_t rows = plan.padded_rows();
    const PassView v = PassOrder(plan.data(), Pass::kBackward, Schedule{}).view();
    const std::int64_t bases = 2 * (rows / kMinTileM) + v.num_local_experts +
                               SymmetricLayout::num_token_blocks(split_.problem()) * split_.ranks();
    ranks_.push_back(
        Rank{.plan = plan,
             .heap = DeviceArray<std::byte>(symmetric_.bytes),
             .local_counters = DeviceArray<std::byte>(local_.bytes),
             .saved = poisoned(SavedLayout(split_.problem(), rows).bytes),
             .rows = poisoned(RowLayout(split_.problem(), rows, Pass::kBackward).bytes),
             .bases = DeviceArray<std::uint32_t>(bases + 4),
             .ctas_done = DeviceArray<std::uint32_t>(1),
             .x = upload(f.x),
             .dy = upload(b.dy),
             .w1 = upload(f.w1),
             .w2 = upload(f.w2),
             .out = filled(f.out.size(), kNan),
             .dx = filled(b.dx.size(), kNan),
             .dw1 = filled(f.w1.size(), kNan),
             .dw2 = filled(f.w2.size(), kNan),
             .probs = upload(f.topk_probs),
             .dprobs = filled(b.dprobs.size(), kFloatNan),
             .main_dw1 = filled(main_grad ? f.w1.size() : 0, main_grad_start),
             .main_dw2 = filled(main_grad ? f.w2.size() : 0, main_grad_start)});
    start_counters(ranks_.back().local_counters.data(), local_.bytes, first_count);
    start_counters(ranks_.back().heap.data() + symmetric_.published,
                   symmetric_.bytes - symmetric_.published, first_count);
  }
}

DeviceContext EmulatedGroup::context(int rank, const PassView& view) const {
  const Rank& r = ranks_[static_cast<std::size_t>(rank)];
  const auto counters = [&](std::int64_t offset) {
    return reinterpret_cast<std::uint32_t*>(r.local_counters.data() + offset);
  };
  const EnterArgs bases = enter_args(rank, view.pass);
  DeviceContext ctx{.view = view, .symmetric = symmetric_};
  for (int p = 0; p < split_.ranks(); ++p) {
    ctx.heaps[p] = ranks_[static_cast<std::size_t>(p)].heap.data();
  }
  ctx.counters = {.rows_ready = counters(local_.rows_ready),
                  .tile_done = counters(local_.tile_done),
                  .expert_done = counters(local_.expert_done),
                  .rows_ready_base = bases.rows_ready_base,
                  .tile_done_base = bases.tile_done_base,
                  .expert_done_base = bases.expert_done_base,
                  .arrived_base = bases.arrived_base,
                  .published_base = passes_ - 1};
  ctx.failure = r.failure->get();
  ctx.limit_ns = std::uint64_t{kLimitMs} * 1'000'000;
  ctx.faults = device_faults(faults_, rank, passes_);
  return ctx;
}

EnterArgs EmulatedGroup::enter_args(int rank, Pass pass) const {
  const Rank& r = ranks_[static_cast<std::size_t>(rank)];
  std::uint32_t* base = r.bases.data();
  const std::int64_t tiles = r.plan.padded_rows() / kMinTileM;
  return {.tokens = pass == Pass::kForward ? r.x.data() : r.dy.data(),
          .probs = pass == Pass::kForward ? r.probs.data() : nullptr,
          .rows_ready_base = base,
          .tile_done_base = base + tiles,
          .expert_done_base = base + 2 * tiles,
          .arrived_base = base + 2 * tiles + r.plan.num_local_experts(),
          .ctas_done = r.ctas_done.data()};
}

PassTensors EmulatedGroup::tensors(int rank, Pass pass) const {
  const Rank& r = ranks_[static_cast<std::size_t>(rank)];
  const SavedLayout saved(split_.problem(), r.plan.padded_rows());
  const RowLayout rows(split_.problem(), r.plan.padded_rows(), Pass::kBackward);
  PassTensors t;
  t.w1 = r.w1.data();
  t.w2 = r.w2.data();
  t.x_rows = reinterpret_cast<bf16*>(r.saved.data() + saved.x_rows);
  t.h = reinterpret_cast<bf16*>(r.saved.data() + saved.h);
  t.row_probs = reinterpret_cast<float*>(r.saved.data() + saved.row_probs);
  t.a = reinterpret_cast<bf16*>(r.rows.data() + rows.a);
  t.dy_rows = reinterpret_cast<bf16*>(r.rows.data() + rows.dy_rows);
  t.dh = reinterpret_cast<bf16*>(r.rows.data() + rows.dh);
  t.dprob_groups = reinterpret_cast<float*>(r.rows.data() + rows.dprob_groups);
  t.token_out = pass == Pass::kForward ? r.out.data() : r.dx.data();
  t.dprobs_out = r.dprobs.data();
  if (main_grad_) {
    t.dw1 = r.main_dw1.span();
    t.dw2 = r.main_dw2.span();
  } else {
    t.dw1 = r.dw1.span();
    t.dw2 = r.dw2.span();
  }
  return t;
}

void EmulatedGroup::run_pass(Pass pass, const Schedule& schedule) {
  ++passes_;
  std::vector<std::unique_ptr<UploadedOrder>> orders;
  std::vector<PassLauncher> launchers;
  for (int r = 0; r < split_.ranks(); ++r) {
    const RoutingPlan& plan = ranks_[static_cast<std::size_t>(r)].plan;
    orders.push_back(std::make_unique<UploadedOrder>(plan.data(), pass, schedule));
    launchers.emplace_back(context(r, orders.back()->view()), tensors(r, pass), plan.padded_rows(),
                           orders.back()->queues(), sms_, nullptr);
    launchers.back().enter(enter_args(r, pass));
  }
  for (int i = 0; i < launchers[0].num_launches(); ++i) {
    for (const PassLauncher& launcher : launchers) launcher.launch(i);
    check_cuda(cudaDeviceSynchronize(), name(launchers[0].stage_of(i)));
    for (int r = 0; r < split_.ranks(); ++r) {
      const WaitFailure& failure = *ranks_[static_cast<std::size_t>(r)].failure->get();
      if (failure.raised != 0) throw pass_wait_error(failure, r, kLimitMs);
    }
  }
}

LayerResult EmulatedGroup::step(const Schedule& schedule) {
  run_pass(Pass::kForward, schedule);
  run_pass(Pass::kBackward, schedule);
  LayerResult result;
  for (const Rank& r : ranks_) {
    append(result.out, r.out);
    append(result.dx, r.dx);
    append(result.dprobs, r.dprobs);
    if (main_grad_) {
      append(result.main_dw1, r.main_dw1);
      append(result.main_dw2, r.main_dw2);
    } else {
      append(result.dw1, r.dw1);
      append(result.dw2, r.dw2);
    }
  }
  return result;
}

}  // namespace uniep::cuda::testing
