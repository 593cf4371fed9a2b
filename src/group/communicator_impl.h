#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/usage.h"
#include "group/bootstrap.h"
#include "uniep/backend.h"
#include "uniep/rank_layout.h"

namespace uniep {

/// What a Communicator refers to; each backend has its own.
class CommunicatorImpl {
 public:
  virtual ~CommunicatorImpl() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// The hosts that its ranks are on.
  virtual RankLayout layout() const = 0;
  virtual Backend backend() const = 0;
  virtual Bootstrap& bootstrap() = 0;
  /// While what this returns lives, the device of this rank, if it has one, is this thread's.
  virtual std::shared_ptr<void> use_device() const { return nullptr; }

  /// This rank takes no further part: ends the waits of all others, with this sentence.
  virtual void fail(const std::string& sentence) = 0;

  const Usage usage{};
  CollectiveUse collective_use;
};

/// A collective call of a group, for as long as this lives; nothing if it is not `collective`.
/// Alone a rank meets nobody: then any thread may call.
class CollectiveCall {
 public:
  explicit CollectiveCall(CommunicatorImpl& impl, bool collective = true) {
    if (collective && impl.size() > 1) call_.emplace(impl.collective_use);
  }

 private:
  std::optional<CollectiveUse::Call> call_;
};

/// Refuses a number of ranks that no group can have.
void require_group_size(int size);

/// What a Communicator holds. In a process that was forked off its end does nothing: there are no
/// threads to wait for, and others must not hear that this rank leaves.
std::shared_ptr<CommunicatorImpl> ended_by_its_process(std::shared_ptr<CommunicatorImpl> impl);

}  // namespace uniep
