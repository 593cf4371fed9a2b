#include "profile/device_lab.h"

#include <utility>

namespace uniep::tool {

DeviceLab::DeviceLab(Communicator group, Communicator alone, BenchDevice& device)
    : group_(std::move(group)),
      alone_(std::move(alone)),
      device_(device),
      gatherer_(device.bootstrap(group_)) {}

void DeviceLab::set_up(const std::string& shape, bool together) {
  if (timed_ && bench_->name == shape && together_ == together) return;
  together_ = together;
  const Communicator& members = together ? group_ : alone_;
  busy_.reset();  // their memory may be needed
  timed_.reset();
  bench_ = make_case(shape, members.size(), 0, 0);
  plan_ = RoutingPlan::build(bench_->problem, members.rank(), bench_->tokens_per_rank(),
                             bench_->routing.topk_ids);
  busy_.emplace(*bench_, true, members, device_, false);
  timed_.emplace(*bench_, true, members, device_, true);
  for (BenchLayer* layer : {&*busy_, &*timed_}) {
    layer->prepare_backward(default_schedule(members.backend()));
    layer->layer().synchronize();
  }
}

/// Runs passes. On a GPU all of them are in the stream before the first is done: the pass that is
/// timed begins on a machine at work, and on all ranks at once.
tune::LabPass DeviceLab::run(Pass pass, const Schedule& schedule, int busy_passes) {
  Layer& layer = timed_->layer();
  layer.take_timeline();
  for (int i = 0; i < busy_passes; ++i) busy_->start(pass, schedule);
  timed_->start(pass, schedule);
  layer.synchronize();
  tune::LabPass timed;
  timed.events = layer.take_timeline();
  const PassStats stats = layer.last_pass();
  timed.elapsed_s = stats.elapsed_s;
  timed.enter_s = stats[Stage::kEnter].busy_s;
  timed.workers = stats.workers;
  return timed;
}

}  // namespace uniep::tool
