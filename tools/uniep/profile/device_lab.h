#pragma once

#include <optional>

#include "bench/bench_case.h"
#include "bench/bench_layer.h"
#include "group/gatherer.h"
#include "tune/lab/profile_lab.h"

namespace uniep::tool {

/// A rank whose layers run on a device, with all ranks of `group` or by itself, as `alone`.
class DeviceLab final : public tune::ProfileLab {
 public:
  DeviceLab(Communicator group, Communicator alone, BenchDevice& device);

  int ranks() const override { return group_.size(); }
  void set_up(const std::string& shape, bool together) override;
  const PlanData& plan() const override { return plan_->data(); }
  tune::LabPass run(Pass pass, const Schedule& schedule, int busy_passes) override;
  std::vector<double> gather(double own) override { return gatherer_.gather_one(own); }

 private:
  const Communicator group_;
  const Communicator alone_;
  BenchDevice& device_;
  Gatherer gatherer_;
  bool together_ = false;
  std::optional<BenchCase> bench_;
  std::optional<RoutingPlan> plan_;  // on the host
  // Passes of one wait for nothing; a layer that records its timeline begins none before it has
  // fetched that of the last.
  std::optional<BenchLayer> busy_;
  std::optional<BenchLayer> timed_;
};

}  // namespace uniep::tool
