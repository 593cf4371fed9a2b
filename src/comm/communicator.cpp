#include "uniep/communicator.h"

#include <exception>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "comm/cpu_group.h"

namespace uniep {

std::vector<Communicator> Communicator::cpu_group(int size) {
  require(size >= 1 && size <= 64, ErrorCode::kInvalidArgument, "group size is ", size,
          "; 1 to 64 is accepted");
  const auto group = std::make_shared<CpuGroup>(size);
  std::vector<Communicator> members;
  for (int r = 0; r < size; ++r) {
    members.push_back(Communicator(std::make_shared<CpuCommunicator>(group, r)));
  }
  return members;
}

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
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

}  // namespace

void run_ranks(const std::vector<Communicator>& group,
               const std::function<void(Communicator&)>& body) {
  std::mutex mutex;
  std::exception_ptr first;  // first error, an original one preferred
  std::vector<std::thread> threads;
  for (Communicator member : group) {
    threads.emplace_back([&, member]() mutable {
      try {
        body(member);
      } catch (...) {
        const std::scoped_lock lock(mutex);
        const std::exception_ptr error = std::current_exception();
        if (!first || (only_reports_a_peer(first) && !only_reports_a_peer(error))) first = error;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace uniep
