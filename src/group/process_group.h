#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/cpu_group.h"
#include "group/joining.h"
#include "group/shared_segment.h"

namespace uniep {

/// Ranks that are processes, of which this one is one. Heaps and a host's board lie in shared
/// memory; all_gather goes through the member's TcpBootstrap, what crosses between hosts through a
/// rail. docs/architecture.md, "Ranks as processes", says how the end of a process is told from a
/// rank that has left.
class ProcessGroup final : public CpuGroup, private Bootstrap {
 public:
  /// What the ranks have found out about each other when the group is made.
  struct Peers {
    std::uint64_t group = 0;
    std::shared_ptr<GroupBoard> board;
  };

  /// Collective. Where a rank cannot reach another's memory, throws the same Error on all ranks.
  static std::shared_ptr<ProcessGroup> make(GroupMember member);

  ProcessGroup(GroupMember member, Peers peers);
  /// Leaves in good order: all that this rank has signalled is delivered first. Where an exception
  /// is on its way, the rank counts as failed.
  ~ProcessGroup() override;

  std::vector<std::string> all_gather(int rank, const std::string& bytes, const char* stage,
                                      int limit_ms) override;
  std::shared_ptr<Heap> allocate(int rank, std::int64_t bytes) override;
  std::vector<std::shared_ptr<Heap>> share(int rank, const std::shared_ptr<Heap>& own,
                                           int limit_ms) override;
  Rail& rail(int) override { return *rail_; }
  std::optional<std::string> end_of(int rank) override;

 private:
  void connect_rail();
  std::vector<std::string> open_rail();
  RailWatch rail_watch();
  void check_connecting();

  std::vector<std::string> all_gather(const std::string& bytes, const char* stage,
                                      int limit_ms) override {
    return all_gather(member_.rank, bytes, stage, limit_ms);
  }

  std::shared_ptr<SharedSegment> segment_of(const Heap& heap) const;

  const GroupMember member_;
  const Peers peers_;
  std::uint64_t segments_ = 0;  // made so far
  std::vector<std::weak_ptr<SharedSegment>> allocated_;
  std::unique_ptr<Rail> rail_;  // with several hosts
};

}  // namespace uniep
