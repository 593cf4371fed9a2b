#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/rank_limits.h"
#include "group/bootstrap.h"
#include "group/communicator_impl.h"
#include "group/failure_latch.h"
#include "group/heap.h"
#include "group/link.h"
#include "group/signal_courier.h"
#include "rail/rail.h"
#include "uniep/rank_layout.h"

namespace uniep {

/// How a rank has come to an end, as others have heard.
enum class RankEnd : std::int32_t {
  kNone,
  kLeft,  ///< in good order
  kLost   ///< a rank of another host: its connection ended
};

/// What the ranks of a group have in common besides heaps. Threads have it in the memory of their
/// process, processes in a segment that the first rank of their host made.
struct GroupBoard {
  FailureBoard failure;
  LinkBoard link;
  std::atomic<RankEnd> ended[kMaxGroupRanks] = {};  // whether the rank signals anything any more
};

/// How CPU ranks reach each other: as threads of a process (`ThreadGroup`) or as processes
/// (`ProcessGroup`). `rank` is the rank that calls; a ProcessGroup has only one in its process.
class CpuGroup {
 public:
  virtual ~CpuGroup() = default;
  CpuGroup(const CpuGroup&) = delete;
  CpuGroup& operator=(const CpuGroup&) = delete;

  int size() const { return layout_.ranks(); }
  const RankLayout& layout() const { return layout_; }
  /// Ranks among which the CPUs of this rank's machine are divided. Where hosts are made of one
  /// machine, those of all of them.
  int ranks_of_machine() const { return ranks_of_machine_; }
  FailureLatch& failure() { return failure_; }
  Link& link() { return link_; }
  /// Only with an emulated link.
  SignalCourier* courier() { return courier_ ? &*courier_ : nullptr; }

  /// As Bootstrap has it.
  virtual std::vector<std::string> all_gather(int rank, const std::string& bytes, const char* stage,
                                              int limit_ms) = 0;

  /// Memory that `share` takes.
  virtual std::shared_ptr<Heap> allocate(int rank, std::int64_t bytes) = 0;

  /// What goes from this rank to other hosts; only with several.
  virtual Rail& rail(int rank) = 0;

  /// Collective: each rank brings a heap, all of the same size, and gets access to those of all
  /// ranks of its host, by rank (null: of other hosts), which last as long as anybody holds them.
  /// If a rank cannot, throws the same on all ranks.
  virtual std::vector<std::shared_ptr<Heap>> share(int rank, const std::shared_ptr<Heap>& own,
                                                   int limit_ms) = 0;

  /// Why `rank` will signal nothing that is not there to be seen when this returns; nothing while
  /// it may. Never waits.
  virtual std::optional<std::string> end_of(int rank) = 0;

 protected:
  CpuGroup(const RankLayout& layout, int ranks_of_machine, std::shared_ptr<GroupBoard> board);

  GroupBoard& board() { return *board_; }
  std::optional<SignalCourier> courier_;

 private:
  const RankLayout layout_;
  const int ranks_of_machine_;
  const std::shared_ptr<GroupBoard> board_;
  FailureLatch failure_;
  Link link_;
};

/// One rank of a CpuGroup.
class CpuCommunicator final : public CommunicatorImpl, public Bootstrap {
 public:
  CpuCommunicator(std::shared_ptr<CpuGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  RankLayout layout() const override { return group_->layout(); }
  Backend backend() const override { return Backend::kCpu; }
  CpuGroup& group() const { return *group_; }
  Bootstrap& bootstrap() override { return *this; }
  void fail(const std::string& sentence) override { group_->failure().raise(rank_, sentence); }

  std::vector<std::string> all_gather(const std::string& bytes, const char* stage,
                                      int limit_ms) override {
    return group_->all_gather(rank_, bytes, stage, limit_ms);
  }
  void check() override { group_->failure().check(); }

  /// A number for the layer that is made now, the same on all ranks, as all make them together.
  int number_layer() { return ++layers_; }

 private:
  std::shared_ptr<CpuGroup> group_;
  int rank_;
  std::atomic<int> layers_{0};  // alone in its group, a rank may make layers in several threads
};

}  // namespace uniep
