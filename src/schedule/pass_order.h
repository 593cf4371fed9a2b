#pragma once

#include <optional>
#include <vector>

#include "plan/plan_data.h"
#include "schedule/crossings.h"
#include "schedule/pass_stages.h"
#include "schedule/returns.h"

namespace uniep {

/// Owns the arrays behind a PassView: the plan's tiles and pulls in the order that the schedule
/// takes them. `plan` must outlive it.
class PassOrder {
 public:
  PassOrder(const PlanData& plan, Pass pass, const Schedule& schedule,
            PassPart part = PassPart::kWhole, const Graph& graph = kLayerGraph);
  PassOrder(const PassOrder&) = delete;
  PassOrder& operator=(const PassOrder&) = delete;

  const PassView& view() const { return view_; }

 private:
  void order_experts();
  void count_dispatched();
  void order_tiles();
  void order_pulls();
  void count_slots();
  void set_hosts();
  void order_crossings();

  const PlanData& plan_;
  PassView view_;
  std::vector<std::int32_t> expert_order_;
  std::vector<std::int64_t> dispatched_per_expert_;
  std::vector<Tile> tiles_;
  std::vector<std::int64_t> tile_begin_;
  std::vector<std::int32_t> position_of_tile_;  // [first row / tile_m]
  std::vector<Pull> pulls_;
  std::vector<std::int64_t> pull_begin_;
  std::vector<std::int64_t> slots_to_peer_;
  std::vector<std::int64_t> first_token_;
  std::vector<std::int32_t> crossing_;
  std::optional<Crossings> crossings_;
  std::optional<Returns> returns_;
  HostTables across_;
};

}  // namespace uniep
