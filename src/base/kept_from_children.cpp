#include "base/kept_from_children.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>

namespace uniep {
namespace {

/// The number of a descriptor may have come to mean another file, where its owner has closed it.
struct OpenFile {
  std::uint64_t id;
  int descriptor;
  dev_t device;
  ino_t inode;

  bool is_still_open() const {
    struct stat now {};
    return fstat(descriptor, &now) == 0 && now.st_dev == device && now.st_ino == inode;
  }
};

/// What all of this process keep. A child may only make system calls before it returns from fork:
/// all that needs memory is done here.
struct Kept {
  std::mutex mutex;
  std::vector<OpenFile> files;
  std::uint64_t last_id = 0;
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
};

/// Never destroyed: processes fork until they end.
Kept& kept() {
  static Kept& all = *new Kept;
  return all;
}

// While a process forks, no thread of it changes the list.
void before_fork() { kept().mutex.lock(); }
void in_parent() { kept().mutex.unlock(); }
void in_child() {
  Kept& all = kept();
  for (const OpenFile& file : all.files) {
    if (all.nothing >= 0 && file.is_still_open()) dup3(all.nothing, file.descriptor, O_CLOEXEC);
  }
  all.mutex.unlock();
}

}  // namespace

KeptFromChildren::KeptFromChildren(const std::vector<int>& descriptors) {
  Kept& all = kept();
  [[maybe_unused]] static const int known = pthread_atfork(before_fork, in_parent, in_child);
  const std::scoped_lock lock(all.mutex);
  for (const int descriptor : descriptors) {
    struct stat now {};
    if (fstat(descriptor, &now) != 0) continue;
    ids_.push_back(++all.last_id);
    all.files.push_back({all.last_id, descriptor, now.st_dev, now.st_ino});
  }
}

void KeptFromChildren::release() noexcept {
  if (ids_.empty()) return;
  Kept& all = kept();
  const std::scoped_lock lock(all.mutex);
  for (const std::uint64_t id : std::exchange(ids_, {})) {
    std::erase_if(all.files, [&](const OpenFile& file) { return file.id == id; });
  }
}

}  // namespace uniep
