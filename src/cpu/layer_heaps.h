#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "group/cpu_group.h"
#include "layout/workspace.h"
#include "uniep/layer.h"

namespace uniep::cpu {

/// Memory in reach of other hosts while this lives.
class AttachedMemory {
 public:
  AttachedMemory(Rail& rail, std::uint64_t number, RailMemory memory)
      : rail_(rail), number_(number) {
    rail_.attach(number_, std::move(memory));
  }
  ~AttachedMemory() { rail_.detach(number_); }
  AttachedMemory(const AttachedMemory&) = delete;
  AttachedMemory& operator=(const AttachedMemory&) = delete;

 private:
  Rail& rail_;
  const std::uint64_t number_;
};

/// The symmetric memory of a layer: each rank's, in reach of all ranks of its host. On several
/// hosts a rank's has a part for each rank of its rail, itself included: it stands in on its host
/// for the others of the rail, whose tokens and rows pass through it.
class LayerHeaps {
 public:
  /// This rank's own: the caller's, if `memory` has some, which has been checked. Throws if that
  /// cannot be used in this group. No peer looks at it before `map`.
  LayerHeaps(CpuCommunicator& comm, const Problem& problem, const LayerMemory& memory);

  /// Collective: maps those of the other ranks. `number`: the layer's among the communicator's.
  void map(const LayerMemory& memory, int number, int timeout_ms);

  /// The layout of one rank's.
  const SymmetricLayout& layout() const { return layout_; }
  /// [ranks of all hosts].
  const std::vector<std::shared_ptr<Heap>>& of_ranks() const { return of_ranks_; }

 private:
  std::shared_ptr<Heap> make_own(const LayerMemory& memory) const;
  std::vector<std::shared_ptr<Heap>> of_this_host(const LayerMemory& memory, int timeout_ms) const;
  void stand_in_for_rail(const std::vector<std::shared_ptr<Heap>>& heaps, int number);

  CpuCommunicator& comm_;
  const SymmetricLayout layout_;
  const std::shared_ptr<Heap> own_;
  std::optional<AttachedMemory> attached_;  // of of_ranks_, if there are other hosts
  std::vector<std::shared_ptr<Heap>> of_ranks_;
};

}  // namespace uniep::cpu
