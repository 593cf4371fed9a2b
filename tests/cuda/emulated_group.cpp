#include "cuda/emulated_group.h"

#include <limits>

#include "cuda/fault_injection.h"
#include "cuda/wait_failure.h"
#include "support/slot_rows.h"

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

/// From: DeviceArray or DeviceMatrices.
template <class T, class From>
void append(std::vector<T>& to, const From& from) {
  const std::vector<T> part = from.to_host();
  to.insert(to.end(), part.begin(), part.end());
}

}  // namespace

EmulatedGroup::EmulatedGroup(const LayerData& data, std::vector<std::int64_t> token_begin,
                             bool main_grad, float main_grad_start, std::uint32_t first_count,
                             Save save, bool recompute_h, std::int64_t backward_rows,
                             const uniep::testing::ExpertForms& forms, int gathered_hosts,
                             int first_host, bool slot_rows)
    : data_(data),
      split_(data, token_begin),
      problem_(split_.problem()),
      main_grad_(main_grad),
      main_grad_start_(main_grad_start),
      streams_(static_cast<std::size_t>(split_.ranks())) {
  problem_.save = save;
  problem_.recompute_h = recompute_h;
  problem_.backward_rows = backward_rows;
  problem_.gathered_hosts = gathered_hosts;
  problem_.first_host = first_host;
  if (slot_rows) problem_.slot_rows = true, problem_.combine_groups = 1;
  problem_.max_tokens = round_up<std::int64_t>(problem_.max_tokens, gathered_hosts);
  prepare_kernels();
  for (cudaStream_t& stream : streams_) {
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
  }
  check_cuda(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0), "ask for SMs");
  std::vector<std::int64_t> tokens;
  for (int r = 0; r < split_.ranks(); ++r) tokens.push_back(split_.tokens(r).size());
  LayerResult unused = workload::make_result(data, {.ranks = split_.ranks()});
  const Problem& problem = problem_;
  const int num_ranks = split_.ranks();
  const auto rows_of_token = static_cast<std::size_t>(result_rows(problem));
  const ExpertShape first = shape_of_w1(problem, problem.num_experts / num_ranks, halves(problem));
  const ExpertShape second = shape_of_w2(problem, problem.num_experts / num_ranks);
  const auto copy_of = [](const ExpertMatrices<const bf16>& w) {
    return std::vector<bf16>(w.tensor().begin(), w.tensor().end());
  };
  for (int r = 0; r < split_.ranks(); ++r) {
    const RoutingPlan plan = RoutingPlan::build(problem_, r, tokens, data.topk_ids);
    const ForwardArgs f = split_.forward_args(r, unused);
    const BackwardArgs b = split_.backward_args(r, unused);
    const std::int64_t rows = plan.padded_rows();
    ranks_.push_back(
        Rank{.plan = plan,
             .heap = poisoned(SymmetricLayout(problem, num_ranks).bytes),  // but its counters
             .counters = DeviceArray<std::byte>(LocalCounterLayout(problem, num_ranks).bytes),
             .scratch = DeviceArray<std::byte>(PassScratchLayout(problem, num_ranks).bytes),
             .saved = poisoned(SavedLayout(problem_, rows, plan.received_tokens()).bytes),
             .rows = poisoned(std::max(RowLayout(problem_, rows, Pass::kForward).bytes,
                                       RowLayout(problem_, rows, Pass::kBackward).bytes)),
             .x = upload(f.x),
             .dy = upload(b.dy),
             .b1 = upload(f.b1),
             .b2 = upload(f.b2),
             .out = filled(f.out.size() * rows_of_token, kNan),
             .dx = filled(b.dx.size() * rows_of_token, kNan),
             .db1 = filled(f.b1.size(), kNan),
             .db2 = filled(f.b2.size(), kNan),
             .shared_w1 = upload(f.shared_w1),
             .shared_w2 = upload(f.shared_w2),
             .dshared_w1 = filled(f.shared_w1.size(), kNan),
             .dshared_w2 = filled(f.shared_w2.size(), kNan),
             .probs = upload(f.topk_probs),
             .dprobs = filled(b.dprobs.size(), kFloatNan),
             .main_db1 = filled(main_grad ? f.b1.size() : 0, main_grad_start),
             .main_db2 = filled(main_grad ? f.b2.size() : 0, main_grad_start),
             .shared_probs = upload(f.shared_probs),
             .dshared_probs = filled(b.dshared_probs.size(), kFloatNan),
             .main_dshared_w1 = filled(main_grad ? f.shared_w1.size() : 0, main_grad_start),
             .main_dshared_w2 = filled(main_grad ? f.shared_w2.size() : 0, main_grad_start),
             .w1 = {forms.w1, first, copy_of(f.w1)},
             .w2 = {forms.w2, second, copy_of(f.w2)},
             .dw1 = {forms.dw1, first, std::vector(f.w1.size(), kNan)},
             .dw2 = {forms.dw2, second, std::vector(f.w2.size(), kNan)},
             .main_dw1 = {forms.dw1, first, std::vector(f.w1.size(), main_grad_start)},
             .main_dw2 = {forms.dw2, second, std::vector(f.w2.size(), main_grad_start)}});
    const SymmetricLayout symmetric(problem, num_ranks);
    start_counters(ranks_.back().counters.data(), LocalCounterLayout(problem, num_ranks).bytes,
                   first_count);
    start_counters(ranks_.back().heap.data() + symmetric.first_counter,
                   symmetric.bytes - symmetric.first_counter, first_count);
  }
}

EmulatedGroup::~EmulatedGroup() {
  for (const cudaStream_t stream : streams_) cudaStreamDestroy(stream);
}

PassMemory EmulatedGroup::memory(int rank) const {
  const Rank& r = ranks_[static_cast<std::size_t>(rank)];
  PassMemory memory{
      .counters = r.counters.data(), .scratch = r.scratch.data(), .failure = r.failure->get()};
  for (int p = 0; p < split_.ranks(); ++p) {
    memory.heaps[p] = ranks_[static_cast<std::size_t>(p)].heap.data();
  }
  return memory;
}

PassTensors EmulatedGroup::tensors(int rank, Pass pass) {
  Rank& r = ranks_[static_cast<std::size_t>(rank)];
  const std::int64_t rows = r.plan.padded_rows();
  PassTensors t;
  t.table.set(SavedLayout(problem_, rows, r.plan.received_tokens()), r.saved.data());
  t.table.set(RowLayout(problem_, rows, pass), r.rows.data());
  const bool forward = pass == Pass::kForward;
  t.table.set(Tensor::kX, r.x.data());
  if (!forward) t.table.set(Tensor::kDy, r.dy.data());
  if (forward) t.table.set(Tensor::kTopkProbs, r.probs.data());
  t.set_weights(ForwardArgs{.x = {},
                            .topk_probs = {},
                            .w1 = r.w1.const_matrices(),
                            .w2 = r.w2.const_matrices(),
                            .out = {},
                            .shared_w1 = r.shared_w1.span(),
                            .shared_w2 = r.shared_w2.span()});
  if (forward) t.table.set(Tensor::kSharedProbs, r.shared_probs.data());
  t.table.set(Tensor::kDsharedProbs, r.dshared_probs.data());
  t.table.set(Tensor::kB1, r.b1.data());
  t.table.set(Tensor::kB2, r.b2.data());
  t.table.set(forward ? Tensor::kOut : Tensor::kDx, forward ? r.out.data() : r.dx.data());
  t.table.set(Tensor::kDprobs, r.dprobs.data());
  if (main_grad_) {
    t.set_weight_grads({.dw1 = r.main_dw1.matrices(),
                        .dw2 = r.main_dw2.matrices(),
                        .db1 = r.main_db1.span(),
                        .db2 = r.main_db2.span(),
                        .dshared_w1 = r.main_dshared_w1.span(),
                        .dshared_w2 = r.main_dshared_w2.span()});
  } else {
    t.set_weight_grads({.dw1 = r.dw1.matrices(),
                        .dw2 = r.dw2.matrices(),
                        .db1 = r.db1.span(),
                        .db2 = r.db2.span(),
                        .dshared_w1 = r.dshared_w1.span(),
                        .dshared_w2 = r.dshared_w2.span()});
  }
  return t;
}

void EmulatedGroup::run_pass(Pass pass, Schedule schedule, PassPart part) {
  schedule.workers = sms_ / split_.ranks();
  std::vector<std::unique_ptr<UploadedOrder>> orders;
  std::vector<PassLauncher> launchers;
  for (int r = 0; r < split_.ranks(); ++r) {
    const RoutingPlan& plan = ranks_[static_cast<std::size_t>(r)].plan;
    orders.push_back(std::make_unique<UploadedOrder>(plan.data(), pass, schedule, part));
    const PassView& view = orders.back()->view();
    launchers.emplace_back(
        device_context(problem_, view, memory(r), limit_ms_, device_injection(fault_injection_, r),
                       CudaErf::kBefore13_2),
        tensors(r, pass),
        PassLauncher::Rows{rows_at_a_time(problem_, plan.padded_rows(), pass), plan.padded_rows()},
        expert_maps(problem_, split_.ranks(), memory(r)), orders.back()->queues(), sms_,
        streams_[static_cast<std::size_t>(r)]);
  }
  check_cuda(cudaDeviceSynchronize(), "prepare a pass");
  for (int r = 0; r < split_.ranks(); ++r) {
    launchers[static_cast<std::size_t>(r)].write_expert_maps(nullptr);
    launchers[static_cast<std::size_t>(r)].enter(
        enter_args(problem_, split_.ranks(), memory(r), nullptr));
  }
  for (int i = 0; i < launchers[0].num_launches(); ++i) {
    for (const PassLauncher& launcher : launchers) {
      if (i > 0 && i < launcher.num_waves()) launcher.enter_wave(i);
      launcher.launch(i);
    }
  }
  check_cuda(cudaDeviceSynchronize(), name(pass));
  throw_if_failed();
}

std::uint32_t EmulatedGroup::published(int rank) const {
  const SymmetricLayout symmetric(problem_, split_.ranks());
  const auto* counts = reinterpret_cast<const std::uint32_t*>(
      ranks_[static_cast<std::size_t>(rank)].heap.data() + symmetric[CounterKind::kPublished]);
  std::uint32_t count = 0;
  check_cuda(cudaMemcpy(&count, counts + rank, sizeof count, cudaMemcpyDeviceToHost),
             "read a counter");
  return count;
}

void EmulatedGroup::throw_if_failed() const {
  int first = -1;
  const auto failure = [&](int r) -> const WaitFailure& {
    return *ranks_[static_cast<std::size_t>(r)].failure->get();
  };
  for (int r = 0; r < split_.ranks(); ++r) {
    if (failure(r).raised == 0) continue;
    if (first < 0 || failure(r).counter < failure(first).counter) first = r;
  }
  if (first >= 0) throw pass_wait_error(failure(first), first, limit_ms_);
}

LayerResult EmulatedGroup::step(const Schedule& schedule) {
  run_pass(Pass::kForward, schedule);
  run_pass(Pass::kBackward, schedule);
  return result();
}

LayerResult EmulatedGroup::deferred_step(const Schedule& schedule,
                                         const Schedule& weights_schedule) {
  run_pass(Pass::kForward, schedule);
  run_pass(Pass::kBackward, schedule, PassPart::kData);
  run_pass(Pass::kBackward, weights_schedule, PassPart::kWeights);
  return result();
}

LayerResult EmulatedGroup::result() const {
  LayerResult result;
  for (const Rank& r : ranks_) {
    append(result.out, r.out);
    append(result.dx, r.dx);
    append(result.dprobs, r.dprobs);
    append(result.dshared_probs, r.dshared_probs);
    if (main_grad_) {
      append(result.main_dw1, r.main_dw1);
      append(result.main_dw2, r.main_dw2);
      append(result.main_db1, r.main_db1);
      append(result.main_db2, r.main_db2);
      append(result.main_dshared_w1, r.main_dshared_w1);
      append(result.main_dshared_w2, r.main_dshared_w2);
    } else {
      append(result.dw1, r.dw1);
      append(result.dw2, r.dw2);
      append(result.db1, r.db1);
      append(result.db2, r.db2);
      append(result.dshared_w1, r.dshared_w1);
      append(result.dshared_w2, r.dshared_w2);
    }
  }
  if (problem_.slot_rows) {
    result.out = uniep::testing::sums_of(data_, result.out, data_.probs == Probs::kAfter);
    result.dx = uniep::testing::sums_of(data_, result.dx, false);
  }
  return result;
}

}  // namespace uniep::cuda::testing
