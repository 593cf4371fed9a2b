#pragma once

#include <memory>
#include <vector>

#include "base/layer_data.h"
#include "cuda/device_array.h"
#include "cuda/device_memory.h"
#include "cuda/host_visible.h"
#include "cuda/pass.h"
#include "cuda/pass_memory.h"
#include "plan/plan_data.h"
#include "schedule/pass_order.h"
#include "schedule/queue_table.h"
#include "support/expert_forms.h"
#include "workload/split.h"

namespace uniep::cuda::testing {

template <class T>
DeviceArray<T> upload(const std::vector<T>& host) {
  return DeviceArray<T>(std::span<const T>(host));
}
template <class T>
DeviceArray<T> upload(std::span<const T> host) {
  return DeviceArray<T>(host);
}

/// A weight or its gradient in device memory, in one of the forms.
template <class T>
class DeviceMatrices {
 public:
  DeviceMatrices(const uniep::testing::MatrixForm& form, const ExpertShape& shape,
                 const std::vector<T>& values)
      : form_(form), shape_(shape), count_(values.size()) {
    for (const auto& tensor : uniep::testing::scattered(form, shape, std::span(values))) {
      tensors_.push_back(upload(tensor));
      list_.push_back(tensors_.back().span());
    }
  }

  ExpertMatrices<T> matrices() const { return uniep::testing::matrices_of<T>(form_, list_); }
  ExpertMatrices<const T> const_matrices() {
    if (const_list_.empty()) const_list_.assign(list_.begin(), list_.end());
    return uniep::testing::matrices_of<const T>(form_, const_list_);
  }
  std::vector<T> to_host() const {
    std::vector<std::vector<T>> tensors;
    for (const auto& tensor : tensors_) tensors.push_back(tensor.to_host());
    std::vector<T> values(count_);
    uniep::testing::gather(form_, shape_, tensors, std::span(values));
    return values;
  }

 private:
  uniep::testing::MatrixForm form_;
  ExpertShape shape_;
  std::size_t count_;
  std::vector<DeviceArray<T>> tensors_;
  std::vector<std::span<T>> list_;
  std::vector<std::span<const T>> const_list_;
};

/// The arrays behind a host PassView, in device memory.
class UploadedOrder {
 public:
  UploadedOrder(const PlanData& plan, Pass pass, const Schedule& schedule, PassPart part)
      : order_(plan, pass, schedule, part), view_(order_.view()) {
    const PassView& v = order_.view();
    const auto count = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    const auto blocks = count(v.num_blocks() + 1);
    put(view_.segment_begin, count(v.num_local_experts + 1));
    put(view_.tokens_per_expert, count(v.num_local_experts));
    put(view_.topk_ids, count(v.tokens * v.topk));
    put(view_.row_origin, plan.row_origin.size());
    put(view_.pull_rows, plan.pull_rows.size());
    put(view_.pull_of_row, plan.pull_of_row.size());
    put(view_.expert_order, count(v.num_local_experts));
    put(view_.dispatched_per_expert, count(v.num_local_experts));
    put(view_.tiles, count(v.tile_begin[v.num_blocks()]));
    put(view_.tile_begin, blocks);
    put(view_.pulls, count(v.pull_begin[v.num_blocks()]));
    put(view_.pull_begin, blocks);
    put(view_.slots_to_peer, count(v.num_token_blocks() * v.num_ranks));
    for (int i = 0; i < uniep::num_launches(v); ++i) {
      const Launch launch = launch_at(v, i);
      queues_.push_back({.comm = upload_queue(QueueTable(v, launch.comm)),
                         .main = upload_queue(QueueTable(v, launch.main))});
    }
  }

  const PassView& view() const { return view_; }
  const std::vector<LaunchQueues>& queues() const { return queues_; }

 private:
  template <class T>
  void put(const T*& pointer, std::size_t count) {
    const auto* bytes = reinterpret_cast<const std::byte*>(pointer);
    arrays_.push_back(DeviceArray<std::byte>(std::span(bytes, count * sizeof(T))));
    pointer = reinterpret_cast<const T*>(arrays_.back().data());
  }

  QueueView upload_queue(const QueueTable& queue) {
    QueueView q = queue.view();
    const auto blocks = static_cast<std::size_t>(q.count);
    put(q.blocks, blocks);
    put(q.begin, blocks + 1);
    return q;
  }

  PassOrder order_;
  PassView view_;
  std::vector<LaunchQueues> queues_;
  std::vector<DeviceArray<std::byte>> arrays_;
};

/// Ranks of a group, all on one GPU: a stream each, and an equal share of the SMs as their workers,
/// so that launches of all ranks run side by side and may wait for one another.
class EmulatedGroup {
 public:
  EmulatedGroup(const LayerData& data, std::vector<std::int64_t> token_begin, bool main_grad,
                float main_grad_start, std::uint32_t first_count = 0, Save save = Save::kRows,
                bool recompute_h = false, std::int64_t backward_rows = 0,
                const uniep::testing::ExpertForms& forms = {}, int gathered_hosts = 1,
                int first_host = -1, bool slot_rows = false);
  ~EmulatedGroup();
  EmulatedGroup(const EmulatedGroup&) = delete;
  EmulatedGroup& operator=(const EmulatedGroup&) = delete;

  /// Of the passes from now on; `first_count` has no effect here.
  void inject(const FaultInjection& injection) { fault_injection_ = injection; }

  /// Of every wait of the passes from now on.
  void limit_waits(int limit_ms) { limit_ms_ = limit_ms; }

  /// With as many workers a rank as there are SMs for it. Where waits expired, throws the error of
  /// the rank that waited for the earliest counter: the others miss what follows from it.
  void run_pass(Pass pass, Schedule schedule, PassPart part = PassPart::kWhole);

  /// How many passes `rank` has told itself, as all others, that its tokens are there.
  std::uint32_t published(int rank) const;

  const Problem& problem() const { return problem_; }

  /// One step; `result` is gathered in global order, and rows of slots are added up.
  LayerResult step(const Schedule& schedule);

  /// The same with backward in two parts.
  LayerResult deferred_step(const Schedule& schedule, const Schedule& weights_schedule);

 private:
  struct Rank {
    RoutingPlan plan;
    DeviceArray<std::byte> heap, counters, scratch, saved, rows;
    DeviceArray<bf16> x, dy, b1, b2, out, dx, db1, db2;
    DeviceArray<bf16> shared_w1, shared_w2, dshared_w1, dshared_w2;
    DeviceArray<float> probs, dprobs, main_db1, main_db2;
    DeviceArray<float> shared_probs, dshared_probs, main_dshared_w1, main_dshared_w2;
    DeviceMatrices<bf16> w1, w2, dw1, dw2;
    DeviceMatrices<float> main_dw1, main_dw2;
    std::unique_ptr<HostVisible<WaitFailure>> failure =
        std::make_unique<HostVisible<WaitFailure>>();
  };

  void throw_if_failed() const;
  PassMemory memory(int rank) const;
  PassTensors tensors(int rank, Pass pass);
  LayerResult result() const;

  const LayerData& data_;
  workload::Split split_;
  Problem problem_;
  bool main_grad_;
  float main_grad_start_;
  std::vector<Rank> ranks_;
  std::vector<cudaStream_t> streams_;
  FaultInjection fault_injection_;
  int limit_ms_ = 5000;
  int sms_ = 0;
};

}  // namespace uniep::cuda::testing
