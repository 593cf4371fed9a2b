#include "group/cpu_group.h"

#include "base/env.h"

namespace uniep {

CpuGroup::CpuGroup(const RankLayout& layout, int ranks_of_machine,
                   std::shared_ptr<GroupBoard> board)
    : layout_(layout),
      ranks_of_machine_(ranks_of_machine),
      board_(std::move(board)),
      failure_(board_->failure),
      link_(std::shared_ptr<LinkBoard>(board_, &board_->link), env_link_gbps().value_or(0),
            env_link_latency_us()) {
  if (link_.enabled()) courier_.emplace();
}

}  // namespace uniep
