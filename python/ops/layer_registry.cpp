#include "layer_registry.h"

#include <map>
#include <unordered_map>
#include <utility>

namespace uniep::ops {
namespace {

struct Entry {
  const void* key = nullptr;
  std::shared_ptr<BoundLayer> bound;
};

struct Registry {
  std::mutex mutex;
  std::map<std::int64_t, Entry> by_id;
  std::unordered_map<const void*, std::shared_ptr<BoundLayer>> by_key;
};

// Never destroyed: threads of autograd may outlive static objects.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

void bind_layer(std::int64_t id, const void* key, uniep_layer* layer, const LayerShape& shape) {
  auto bound = std::make_shared<BoundLayer>();
  bound->layer = layer;
  bound->shape = shape;
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  all.by_key[key] = bound;
  all.by_id[id] = {key, std::move(bound)};
}

void unbind_layer(std::int64_t id) {
  std::shared_ptr<BoundLayer> bound;
  {
    auto& all = registry();
    std::lock_guard lock(all.mutex);
    const auto found = all.by_id.find(id);
    if (found == all.by_id.end()) return;
    bound = found->second.bound;
    all.by_key.erase(found->second.key);
    all.by_id.erase(found);
  }
  std::lock_guard call(bound->mutex);
  bound->layer = nullptr;
}

std::shared_ptr<BoundLayer> layer_at(const void* key) {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  const auto found = all.by_key.find(key);
  return found == all.by_key.end() ? nullptr : found->second;
}

std::shared_ptr<BoundLayer> layer_of(std::int64_t id) {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  const auto found = all.by_id.find(id);
  return found == all.by_id.end() ? nullptr : found->second.bound;
}

std::unique_ptr<Turn> Turn::begin(std::int64_t id) {
  auto bound = layer_of(id);
  if (!bound) return nullptr;
  std::unique_ptr<Turn> turn(new Turn(std::move(bound)));
  return turn->bound_->layer ? std::move(turn) : nullptr;
}

std::int64_t bound_layers() {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  return static_cast<std::int64_t>(all.by_id.size());
}

}  // namespace uniep::ops
