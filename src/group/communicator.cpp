#include "uniep/communicator.h"

#include <exception>
#include <future>
#include <mutex>
#include <new>
#include <thread>

#include "base/check.h"
#include "base/error_of.h"
#include "base/rank_limits.h"
#include "base/threads.h"
#include "group/thread_group.h"

namespace uniep {

void require_group_size(int size) {
  require(size >= 1 && size <= kMaxGroupRanks, ErrorCode::kInvalidArgument, "group size is ", size,
          "; 1 to ", kMaxGroupRanks, " is accepted");
}

std::shared_ptr<CommunicatorImpl> ended_by_its_process(std::shared_ptr<CommunicatorImpl> impl) {
  CommunicatorImpl* const address = impl.get();
  return {address, [impl = std::move(impl)](CommunicatorImpl*) mutable {
            if (impl->usage.in_own_process()) return;
            // Never destroyed here.
            (void)new std::shared_ptr<CommunicatorImpl>(std::move(impl));
          }};
}

std::vector<Communicator> Communicator::cpu_group(int size, int hosts) {
  require_group_size(size);
  const auto group = std::make_shared<ThreadGroup>(size, hosts);
  std::vector<Communicator> members;
  for (int r = 0; r < size; ++r) {
    members.push_back(
        Communicator(ended_by_its_process(std::make_shared<CpuCommunicator>(group, r))));
  }
  return members;
}

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
RankLayout Communicator::layout() const { return impl_->layout(); }
Backend Communicator::backend() const { return impl_->backend(); }

namespace {

bool only_reports_a_peer(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.code() == ErrorCode::kPeerFailed;
  } catch (...) {
    return false;
  }
}

std::string sentence_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (...) {
    return current_error().what();
  }
}

/// Tells the group. Has no sentence if memory is exhausted: nothing may leave a rank's thread.
void fail(const Communicator& member, const std::exception_ptr& error) {
  try {
    member.impl()->fail(sentence_of(error));
  } catch (const std::bad_alloc&) {
    member.impl()->fail("out of memory");
  }
}

}  // namespace

void run_ranks(const std::vector<Communicator>& group,
               const std::function<void(Communicator&)>& body) {
  for (const Communicator& member : group) member.impl()->usage.require_own_process();
  std::mutex mutex;
  std::exception_ptr first;  // first error, an original one preferred
  // Nobody begins before all can: a rank without a thread would leave the others waiting for it.
  std::promise<bool> all_there;
  const std::shared_future<bool> begin = all_there.get_future().share();
  const auto run = [&, begin](Communicator member) {
    if (!begin.get()) return;
    try {
      body(member);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      // Others may be about to wait for this rank, or wait already.
      fail(member, error);
      const std::scoped_lock lock(mutex);
      if (!first || (only_reports_a_peer(first) && !only_reports_a_peer(error))) first = error;
    }
  };
  std::vector<std::jthread> threads;
  try {
    threads.reserve(group.size());  // a thread that finds no room would be waited for in vain
    for (const Communicator& member : group) {
      threads.push_back(start_thread<std::jthread>(run, member));
    }
  } catch (...) {
    all_there.set_value(false);
    throw;
  }
  all_there.set_value(true);
  threads.clear();  // joins them
  if (first) std::rethrow_exception(first);
}

}  // namespace uniep
