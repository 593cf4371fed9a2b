#include "group/cuda/release_words.h"

#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "base/cuda/check_cuda.h"
#include "base/cuda/device_scope.h"

namespace uniep::cuda {
namespace {

constexpr std::int64_t kSlotBytes = 256;  // 64 words, of as many ranks
constexpr std::int64_t kSlotsOfPage = kIpcBlock / kSlotBytes;

/// The memory of all words of a process, by device: pages that are exported and never freed.
class Pages {
 public:
  struct Place {
    std::byte* memory = nullptr;
    IpcPart part;
  };

  static Pages& get() {
    static auto* pages = new Pages;  // outlives static objects that hold memory
    return *pages;
  }

  Place take(int device) {
    const std::scoped_lock lock(mutex_);
    std::vector<Place>& free = free_[device];
    if (free.empty()) add_page(free);
    Place place = std::move(free.back());
    free.pop_back();
    return place;
  }
  void give_back(int device, Place place) {
    const std::scoped_lock lock(mutex_);
    free_[device].push_back(std::move(place));
  }

 private:
  static void add_page(std::vector<Place>& free) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, kIpcBlock), cat("allocate ", kIpcBlock, " bytes"));
    IpcPart whole;
    try {
      whole = export_part(memory, kIpcBlock);
    } catch (...) {
      ignore_cuda(cudaFree(memory));
      throw;
    }
    for (std::int64_t i = kSlotsOfPage - 1; i >= 0; --i) {
      const std::int64_t at = i * kSlotBytes;
      free.push_back(Place{.memory = static_cast<std::byte*>(memory) + at,
                           .part = {.handle = whole.handle, .offset = whole.offset + at}});
    }
  }

  std::mutex mutex_;
  std::map<int, std::vector<Place>> free_;
};

struct Waiting {
  int device;
  std::unique_ptr<ReleaseWords> words;
  std::function<void()> action;
};

std::mutex waiting_mutex;
std::list<Waiting>& waiting() {
  static auto* list = new std::list<Waiting>;  // outlives static objects that hold memory
  return *list;
}

}  // namespace

struct ReleaseWords::Slot {
  int device = current_device();
  Pages::Place place = Pages::get().take(device);
};

ReleaseWords::ReleaseWords(int rank, int size)
    : rank_(rank), size_(size), slot_(std::make_unique<Slot>()) {
  ensure(size * static_cast<int>(sizeof(std::uint32_t)) <= kSlotBytes, "words of ", size, " ranks");
  check_cuda(cudaMemset(slot_->place.memory, 0, kSlotBytes), "clear memory");
  check_cuda(cudaDeviceSynchronize(), "clear memory");
}

ReleaseWords::~ReleaseWords() {
  if (!exported_) Pages::get().give_back(slot_->device, slot_->place);
}

int ReleaseWords::device() const { return slot_->device; }

IpcPart ReleaseWords::exported() {
  exported_ = true;
  return slot_->place.part;
}

void ReleaseWords::open(const std::vector<IpcPart>& of_ranks) {
  for (std::size_t r = 0; r < of_ranks.size(); ++r) {
    peers_.push_back(static_cast<int>(r) == rank_
                         ? MappedPart()
                         : MappedPart(of_ranks[r], cat("words of rank ", r)));
  }
}

void ReleaseWords::close() {
  for (MappedPart& peer : peers_) peer.close();
}

void ReleaseWords::tell_peers() {
  for (const MappedPart& peer : peers_) {
    if (peer.address() == nullptr) continue;
    // An error would say that the context is broken: then nobody can be told.
    ignore_cuda(
        cudaMemset(static_cast<std::uint32_t*>(peer.address()) + rank_, 1, sizeof(std::uint32_t)));
  }
  ignore_cuda(cudaDeviceSynchronize());
  peers_.clear();
}

bool ReleaseWords::told_by_all() const {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(size_));
  if (cudaMemcpy(words.data(), slot_->place.memory, words.size() * sizeof(words[0]),
                 cudaMemcpyDeviceToHost) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  words[static_cast<std::size_t>(rank_)] = 1;
  for (const std::uint32_t word : words) {
    if (word == 0) return false;
  }
  return true;
}

void when_released(std::unique_ptr<ReleaseWords> words, std::function<void()> action) {
  {
    const std::scoped_lock lock(waiting_mutex);
    const int device = words->device();  // not asked for: at exit the runtime may have ended
    waiting().push_back({device, std::move(words), std::move(action)});
  }
  free_released_memory();
}

void free_released_memory() {
  std::list<Waiting> due;
  {
    const std::scoped_lock lock(waiting_mutex);
    std::list<Waiting>& all = waiting();
    for (auto w = all.begin(); w != all.end();) {
      const auto next = std::next(w);
      const DeviceScope scope(w->device);
      if (w->words->told_by_all()) due.splice(due.end(), all, w);
      w = next;
    }
  }
  // Not under the lock: an action may destroy other memory.
  for (Waiting& w : due) {
    const DeviceScope scope(w.device);
    w.words->unshare();
    w.words.reset();
    w.action();
  }
}

}  // namespace uniep::cuda
