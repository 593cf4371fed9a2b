// Memory that ends on one rank, wherever in a layer's construction or calls: nothing is left
// behind, and the other ranks hear of it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "base/error_of.h"
#include "cpu/cpu_layer.h"
#include "group/cpu_group.h"
#include "support/layer_group.h"

namespace {

/// Allocations of this thread that still succeed before one fails; negative: all do.
thread_local int allocations_left = -1;

void* allocate(std::size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace uniep::testing {
namespace {

/// A rail whose user has little memory from `attach` on.
class RailOfLittleMemory final : public Rail {
 public:
  std::string address() const override { return ""; }
  void connect(const std::vector<std::string>&, RailWatch, int) override {}
  void attach(std::uint64_t number, RailMemory memory) override {
    attached_[number] = std::move(memory);
    allocations_left = allocations_behind_attach;
  }
  void detach(std::uint64_t number) override { attached_.erase(number); }
  void put(int, std::uint64_t, const RailBlock&) override {}

  std::size_t attached() const { return attached_.size(); }
  int allocations_behind_attach = -1;

 private:
  std::map<std::uint64_t, RailMemory> attached_;
};

/// One rank of two, each on a host of its own, of which the other says what this one says.
class HalfAGroup final : public CpuGroup {
 public:
  HalfAGroup() : CpuGroup({.hosts = 2, .local_ranks = 1}, 1, std::make_shared<GroupBoard>()) {}

  std::vector<std::string> all_gather(int, const std::string& bytes, const char*, int) override {
    return {bytes, bytes};
  }
  std::shared_ptr<Heap> allocate(int, std::int64_t bytes) override {
    const auto heap = std::make_shared<Heap>(bytes);
    last_ = heap;
    return heap;
  }
  std::vector<std::shared_ptr<Heap>> share(int, const std::shared_ptr<Heap>& own, int) override {
    return {own, nullptr};
  }
  RailOfLittleMemory& rail(int) override { return rail_; }
  std::optional<std::string> end_of(int) override { return std::nullopt; }

  bool has_memory() const { return !last_.expired(); }

 private:
  std::weak_ptr<Heap> last_;
  RailOfLittleMemory rail_;
};

/// Whether a layer could be built where so many allocations behind `attach` succeed.
bool is_built(HalfAGroup& group, const Communicator& member, const Problem& problem, int allowed) {
  group.rail(0).allocations_behind_attach = allowed;
  try {
    const auto layer = cpu::make_layer(problem, member, {});
    allocations_left = -1;
    EXPECT_EQ(group.rail(0).attached(), 1u);
    return true;
  } catch (const std::bad_alloc&) {
    allocations_left = -1;
    return false;
  }
}

TEST(LayerBuilding, LeavesNothingBehindWhereverMemoryEnds) {
  const LayerData data = plain_layer(2);
  const workload::Split split(data, 2);
  int allowed = 0;
  for (bool built = false; !built; ++allowed) {
    const auto group = std::make_shared<HalfAGroup>();
    const Communicator member(std::make_shared<CpuCommunicator>(group, 0));
    built = is_built(*group, member, split.problem(), allowed);
    ASSERT_EQ(group->rail(0).attached(), 0u) << allowed << " allocations behind attach";
    ASSERT_FALSE(group->has_memory()) << allowed << " allocations behind attach";
  }
  EXPECT_GT(allowed, 2);  // it did fail before it was built
}

/// Where rank 1 has little memory.
enum class Moment { kLayer, kPlan, kForward, kBackward };

/// Two ranks make a layer and run steps until one of them fails, or two steps are done. In `moment`
/// of the first step so many allocations of rank 1 succeed before one fails. Returns the ranks'
/// errors.
std::vector<Outcome> steps_of_little_memory(LayerGroup& group, Moment moment, int allowed) {
  const auto in = [&](int rank, Moment now, bool first, const auto& call) {
    if (rank == 1 && first && now == moment) allocations_left = allowed;
    call();
    allocations_left = -1;
  };
  const auto run = [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::unique_ptr<LayerBackend> layer;
    in(rank, Moment::kLayer, true,
       [&] { layer = cpu::make_layer(group.split().problem(), group.group()[r], {}); });
    for (const bool first : {true, false}) {
      const CallOptions options{.schedule = Schedule{}};
      std::optional<RoutingPlan> plan;
      Saved saved;
      in(rank, Moment::kPlan, first,
         [&] { plan = layer->plan(group.split().topk_ids(rank), options); });
      in(rank, Moment::kForward, first,
         [&] { saved = layer->forward(*plan, group.forward_args(rank), options); });
      in(rank, Moment::kBackward, first,
         [&] { layer->backward(saved, group.backward_args(rank), options); });
    }
  };
  return group.attempt([&](int rank) {
    try {
      run(rank);
    } catch (...) {
      allocations_left = -1;
      throw current_error();
    }
  });
}

TEST(LayerBuilding, TheOtherRankHearsWhereverMemoryEnds) {
  for (const Moment moment : {Moment::kLayer, Moment::kPlan, Moment::kForward, Moment::kBackward}) {
    int allowed = 0;
    for (bool failed = true; failed; ++allowed) {
      LayerGroup group(plain_layer(2), 2);
      const std::vector<Outcome> ends = steps_of_little_memory(group, moment, allowed);
      failed = ends[1].error.has_value();
      ASSERT_EQ(ends[0].error.has_value(), failed) << ends[0].what() << "; " << ends[1].what();
      if (!failed) continue;
      EXPECT_EQ(ends[1].error->code(), ErrorCode::kCapacity) << ends[1].what();
      // Not kTimeout: it did not wait for rank 1 until the limit.
      EXPECT_NE(ends[0].error->code(), ErrorCode::kTimeout) << ends[0].what();
    }
    EXPECT_GT(allowed, 2) << static_cast<int>(moment);
  }
}

}  // namespace
}  // namespace uniep::testing
