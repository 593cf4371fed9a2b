#include "workload/synthetic.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/nearest.h"
#include "base/problem_limits.h"
#include "base/quotes.h"
#include "base/rank_limits.h"
#include "uniep/problem.h"
#include "workload/random.h"

namespace uniep::workload {
namespace {

// The largest skew that a made-up routing may have.
constexpr double kMaxSkew = 100;

struct Shape {
  const char* name;
  std::int64_t tokens, hidden, intermediate;
  int num_experts, topk;
  // As the model's own code has it (docs/models.md); of no importance to small shapes.
  Activation activation = Activation::kSwiglu;
  Probs probs = Probs::kAfter;
  bool bias = false;
};

constexpr std::array kModels = {
    Shape{"deepseek-v3", 8192, 7168, 2048, 256, 8},
    Shape{"qwen3-235b", 8192, 4096, 1536, 128, 8},
    Shape{"qwen3-30b", 16384, 2048, 768, 128, 8},
    Shape{"mixtral-8x7b", 8192, 4096, 14336, 8, 2},
    Shape{"gpt-oss-120b", 8192, 2880, 2880, 128, 4, Activation::kGptOss, Probs::kAfter, true},
};
constexpr std::array kSmallShapes = {
    Shape{"tiny", 64, 64, 32, 8, 2},
    Shape{"small", 512, 256, 128, 16, 4},
};

// The numbers of streams; a new one must not change what the old ones give.
enum Stream : std::uint64_t {
  kX,
  kDy,
  kW1,
  kW2,
  kRouter,
  kB1,
  kB2,
  kDropped,
  kSharedW1,
  kSharedW2,
  kSharedGate
};

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += cat(text.empty() ? "" : ", ", word);
  return text;
}

struct Key {
  const char* name;
  std::int64_t min, max, multiple;
  void (*set)(ShapeSpec&, std::int64_t);
};

constexpr std::array kKeys = {
    Key{"tokens", 0, kMaxRankTokens, 1, [](ShapeSpec& s, std::int64_t v) { s.tokens = v; }},
    Key{"hidden", kWidthMultiple, kMaxWidth, kWidthMultiple,
        [](ShapeSpec& s, std::int64_t v) { s.hidden = v; }},
    Key{"intermediate", kWidthMultiple, kMaxWidth, kWidthMultiple,
        [](ShapeSpec& s, std::int64_t v) { s.intermediate = v; }},
    Key{"experts", 1, kMaxNumExperts, 1,
        [](ShapeSpec& s, std::int64_t v) { s.num_experts = static_cast<int>(v); }},
    Key{"topk", 1, kMaxTopk, 1, [](ShapeSpec& s, std::int64_t v) { s.topk = static_cast<int>(v); }},
    Key{"n_group", 1, kMaxNumExperts, 1,
        [](ShapeSpec& s, std::int64_t v) { s.n_group = static_cast<int>(v); }},
    Key{"topk_group", 1, kMaxNumExperts, 1,
        [](ShapeSpec& s, std::int64_t v) { s.topk_group = static_cast<int>(v); }},
};
constexpr std::size_t kOwnKeys = 5;  // the first, which every shape has

std::vector<std::string> key_names() {
  std::vector<std::string> names;
  for (const Key& key : kKeys) names.emplace_back(key.name);
  return names;
}

template <class... Args>
[[noreturn]] void fail(const Args&... sentence) {
  throw Error(ErrorCode::kInvalidArgument, cat(sentence...));
}

const Key& key_named(std::string_view name, std::string_view text) {
  for (const Key& key : kKeys) {
    if (key.name == name) return key;
  }
  fail("shape ", in_quotes(text), ": unknown key ", in_quotes(name), "; ",
       nearest_clause(name, key_names()), joined(key_names()), " are accepted");
}

void set_key(ShapeSpec& spec, const Key& key, std::string_view value, std::string_view text) {
  std::int64_t number = 0;
  const char* end = value.data() + value.size();
  const auto parsed = std::from_chars(value.data(), end, number);
  const bool ok = parsed.ec == std::errc{} && parsed.ptr == end && number >= key.min &&
                  number <= key.max && number % key.multiple == 0;
  if (!ok) {
    fail("shape ", in_quotes(text), ": ", key.name, " is ", in_quotes(value), "; ",
         key.multiple > 1 ? cat("a multiple of ", key.multiple) : "an integer", " from ", key.min,
         " to ", key.max, " is accepted");
  }
  key.set(spec, number);
}

/// Null where no shape has this name.
const Shape* find_shape(std::string_view name) {
  for (const Shape& s : kModels) {
    if (s.name == name) return &s;
  }
  for (const Shape& s : kSmallShapes) {
    if (s.name == name) return &s;
  }
  return nullptr;
}

ShapeSpec base_shape(std::string_view name) {
  if (const Shape* s = find_shape(name)) {
    ShapeSpec spec;
    spec.name = s->name;
    spec.tokens = s->tokens;
    spec.hidden = s->hidden;
    spec.intermediate = s->intermediate;
    spec.num_experts = s->num_experts;
    spec.topk = s->topk;
    return spec;
  }
  if (name != "custom") {
    fail("there is no shape ", in_quotes(name), "; ", nearest_clause(name, shape_names()),
         joined(shape_names()), " are accepted");
  }
  ShapeSpec spec;
  spec.name = name;
  return spec;
}

/// Takes the text before the next comma off `rest`.
std::string_view next_item(std::string_view& rest) {
  const std::size_t comma = rest.find(',');
  const std::string_view item = rest.substr(0, comma);
  rest = comma == rest.npos ? std::string_view{} : rest.substr(comma + 1);
  return item;
}

/// What is wrong with the limit of groups; empty: nothing.
std::string fault_of_groups(const ShapeSpec& s) {
  if (s.n_group == 1 && s.topk_group == 1) return "";
  if (s.num_experts % s.n_group != 0) {
    return cat("n_group is ", s.n_group, "; a divisor of the ", s.num_experts,
               " experts is accepted");
  }
  if (s.topk_group > s.n_group) {
    return cat("topk_group is ", s.topk_group, "; 1 to n_group=", s.n_group, " is accepted");
  }
  // If slots are more than experts, the rest is dropped, with groups and without.
  if (s.num_experts / s.n_group * s.topk_group < std::min(s.topk, s.num_experts)) {
    return cat("topk_group is ", s.topk_group, "; so many of the ", s.n_group,
               " groups are accepted that they have topk=", s.topk, " experts");
  }
  return "";
}

void check_spec(const ShapeSpec& s) {
  const auto in = [](std::int64_t v, const Key& key) {
    return v >= key.min && v <= key.max && v % key.multiple == 0;
  };
  const bool ok = in(s.tokens, kKeys[0]) && in(s.hidden, kKeys[1]) &&
                  in(s.intermediate, kKeys[2]) && in(s.num_experts, kKeys[3]) &&
                  in(s.topk, kKeys[4]) && fault_of_groups(s).empty();
  require(ok, ErrorCode::kInvalidArgument, "shape '", to_string(s),
          "' is out of range; one that parse_shape accepts is needed");
}

/// The chosen experts of one token, best first.
class TopK {
 public:
  /// The logit of an expert that cannot be chosen.
  static constexpr double kHidden = -std::numeric_limits<double>::infinity();

  explicit TopK(int k) : k_(static_cast<std::size_t>(k)) {}

  void clear() { count_ = 0; }

  /// Experts must come in ascending order: of equal logits the earlier stays ahead.
  void offer(std::int32_t expert, double logit) {
    if (logit == kHidden) return;
    std::size_t place = count_;
    while (place > 0 && best_[place - 1].logit < logit) --place;
    if (place == k_) return;
    if (count_ < k_) ++count_;
    for (std::size_t i = count_ - 1; i > place; --i) best_[i] = best_[i - 1];
    best_[place] = {expert, logit};
  }

  /// Writes the best K. If experts are fewer than K, the slots behind the last are dropped.
  void store(std::int32_t* ids, float* probs) const {
    std::array<double, kMaxTopk> weight{};
    double sum = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      weight[i] = portable_exp(best_[i].logit - best_[0].logit);
      sum += weight[i];
    }
    for (std::size_t i = 0; i < k_; ++i) {
      ids[i] = i < count_ ? best_[i].expert : -1;
      probs[i] = i < count_ ? static_cast<float>(weight[i] / sum) : 0;
    }
  }

 private:
  struct Choice {
    std::int32_t expert;
    double logit;
  };
  std::size_t k_;
  std::size_t count_ = 0;
  std::array<Choice, kMaxTopk> best_{};
};

/// Hides the logits of a token's experts outside its groups.
class GroupLimit {
 public:
  explicit GroupLimit(const ShapeSpec& spec)
      : groups_(static_cast<std::size_t>(spec.n_group)),
        chosen_(static_cast<std::size_t>(spec.topk_group)),
        scores_(groups_),
        order_(groups_) {}

  void apply(std::span<double> logits) {
    if (groups_ == 1) return;
    const std::size_t size = logits.size() / groups_;
    for (std::size_t g = 0; g < groups_; ++g) scores_[g] = score(logits.subspan(g * size, size));
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    // If scores are equal, the earlier group stays first.
    std::ranges::stable_sort(order_, std::greater<>{}, [&](std::size_t g) { return scores_[g]; });
    for (const std::size_t g : std::span(order_).subspan(chosen_)) {
      std::ranges::fill(logits.subspan(g * size, size), TopK::kHidden);
    }
  }

 private:
  /// The sum of the two largest, or the only one.
  static double score(std::span<const double> logits) {
    double best = TopK::kHidden, second = TopK::kHidden;
    for (const double logit : logits) {
      second = std::max(second, std::min(best, logit));
      best = std::max(best, logit);
    }
    return logits.size() == 1 ? best : best + second;
  }

  std::size_t groups_, chosen_;
  std::vector<double> scores_;
  std::vector<std::size_t> order_;
};

void check_made_up(const ShapeSpec& spec, int ranks, double skew) {
  check_spec(spec);
  require(ranks >= 1 && ranks <= kMaxMadeUpRanks, ErrorCode::kInvalidArgument, "ranks is ", ranks,
          "; 1 to ", kMaxMadeUpRanks, " is accepted");
  require(skew >= 0 && skew <= kMaxSkew, ErrorCode::kInvalidArgument, "skew is ", skew, "; 0 to ",
          kMaxSkew, " is accepted");
  require(spec.dropped >= 0 && spec.dropped <= 1, ErrorCode::kInvalidArgument, "dropped is ",
          spec.dropped, "; 0 to 1 is accepted");
}

/// Linux hands out more memory than there is and kills the process that uses it: say so before.
void check_memory(const ShapeSpec& spec, int ranks) {
  const std::int64_t memory =
      static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  const std::int64_t needed = layer_bytes(spec, ranks);
  if (needed > memory) {
    fail("shape '", to_string(spec), "' for ", ranks, ranks == 1 ? " rank" : " ranks", " needs ",
         needed, " bytes; up to ", memory, ", the memory of this machine, are accepted");
  }
}

void drop_slots(const ShapeSpec& spec, std::uint64_t seed, Routing& routing) {
  if (spec.dropped == 0) return;
  const UniformStream uniform(seed, kDropped);
  for (std::size_t slot = 0; slot < routing.topk_ids.size(); ++slot) {
    if (uniform[slot] >= spec.dropped) continue;
    routing.topk_ids[slot] = -1;
    routing.topk_probs[slot] = 0;
  }
}

void allocate(LayerData& layer, bool has_bias) {
  const auto size = [](std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); };
  const std::int64_t weights = layer.num_experts * layer.hidden;
  layer.x.resize(size(layer.tokens, layer.hidden));
  layer.dy.resize(size(layer.tokens, layer.hidden));
  layer.w1.resize(size(layer.num_experts * layer.w1_rows(), layer.hidden));
  layer.w2.resize(size(weights, layer.intermediate));
  layer.shared_w1.resize(size(layer.shared_experts * layer.w1_rows(), layer.hidden));
  layer.shared_w2.resize(size(layer.shared_experts * layer.hidden, layer.intermediate));
  if (!has_bias) return;
  layer.b1.resize(size(layer.num_experts, layer.w1_rows()));
  layer.b2.resize(size(layer.num_experts, layer.hidden));
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Shape& shape : kModels) names.emplace_back(shape.name);
  return names;
}

void set_model_arithmetic(ShapeSpec& spec) {
  const auto* model = std::ranges::find(kModels, spec.name, &Shape::name);
  if (model == kModels.end()) {
    fail("shape ", in_quotes(spec.name), " is of no model, whose arithmetic is asked for; ",
         joined(model_names()), " are accepted");
  }
  spec.activation = model->activation;
  spec.probs = model->probs;
  spec.bias = model->bias;
}

std::vector<std::string> shape_names() {
  std::vector<std::string> names = model_names();
  for (const Shape& shape : kSmallShapes) names.emplace_back(shape.name);
  names.emplace_back("custom");
  return names;
}

ShapeSpec parse_shape(std::string_view text) {
  std::string_view rest = text;
  ShapeSpec spec = base_shape(next_item(rest));
  if (text.ends_with(','))
    fail("shape ", in_quotes(text), ": ends with ','; key=value is needed after it");
  std::set<std::string_view> given;
  while (!rest.empty()) {
    const std::string_view item = next_item(rest);
    const std::size_t equals = item.find('=');
    if (equals == item.npos) {
      fail("shape ", in_quotes(text), ": ", in_quotes(item), " is not key=value; the keys ",
           joined(key_names()), " are accepted");
    }
    const Key& key = key_named(item.substr(0, equals), text);
    if (!given.insert(key.name).second) {
      fail("shape ", in_quotes(text), ": ", key.name, " is given twice; once is accepted");
    }
    set_key(spec, key, item.substr(equals + 1), text);
  }
  if (spec.name == "custom") {
    for (const Key& key : std::span(kKeys).first<kOwnKeys>()) {
      if (!given.contains(key.name)) {
        std::vector<std::string> own = key_names();
        own.resize(kOwnKeys);
        fail("shape ", in_quotes(text), ": custom has no ", key.name, "; it needs all of ",
             joined(own));
      }
    }
  }
  const std::string fault = fault_of_groups(spec);
  if (!fault.empty()) fail("shape ", in_quotes(text), ": ", fault);
  return spec;
}

std::string to_string(const ShapeSpec& s) {
  return cat(s.name, ",tokens=", s.tokens, ",hidden=", s.hidden, ",intermediate=", s.intermediate,
             ",experts=", s.num_experts, ",topk=", s.topk,
             s.n_group == 1 ? "" : cat(",n_group=", s.n_group, ",topk_group=", s.topk_group));
}

std::int64_t layer_bytes(const ShapeSpec& s, int ranks) {
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(bf16));
  constexpr auto kSlot = static_cast<std::int64_t>(sizeof(std::int32_t) + sizeof(float));
  const std::int64_t gate = s.shared_gate ? s.shared_experts * sizeof(float) : 0;
  // x, dy; the routing
  const std::int64_t per_token = 2 * s.hidden * kElement + s.topk * kSlot + gate;
  const std::int64_t w1_rows = (is_gated(s.activation) ? 2 : 1) * s.intermediate;
  const std::int64_t experts = s.num_experts + s.shared_experts;
  const std::int64_t weights = experts * s.hidden * (w1_rows + s.intermediate);
  const std::int64_t biases = s.bias ? s.num_experts * (w1_rows + s.hidden) : 0;
  return s.tokens * ranks * per_token + (weights + biases) * kElement;
}

Numbers numbers_of(Tensor tensor, const ShapeSpec& spec, std::uint64_t seed) {
  constexpr double kBiasScale = 0.5;
  const auto weight_scale = [](std::int64_t width) {
    return 1 / std::sqrt(static_cast<double>(width));
  };
  switch (tensor) {
    case Tensor::kX:
      return {NormalStream(seed, kX), 1};
    case Tensor::kDy:
      return {NormalStream(seed, kDy), 1};
    case Tensor::kW1:
      return {NormalStream(seed, kW1), weight_scale(spec.hidden)};
    case Tensor::kSharedW1:
      return {NormalStream(seed, kSharedW1), weight_scale(spec.hidden)};
    case Tensor::kSharedW2:
      return {NormalStream(seed, kSharedW2), weight_scale(spec.intermediate)};
    case Tensor::kB1:
      return {NormalStream(seed, kB1), kBiasScale};
    case Tensor::kB2:
      return {NormalStream(seed, kB2), kBiasScale};
    case Tensor::kW2:
      break;
  }
  return {NormalStream(seed, kW2), weight_scale(spec.intermediate)};
}

std::vector<float> make_shared_probs(const ShapeSpec& spec, std::uint64_t seed, std::int64_t first,
                                     std::int64_t tokens) {
  if (!spec.shared_gate) return {};
  const auto begin = static_cast<std::uint64_t>(first * spec.shared_experts);
  const std::uint64_t odd = begin % 2;  // a stream is filled from an even index
  std::vector<double> logits(static_cast<std::size_t>(tokens * spec.shared_experts) + odd);
  NormalStream(seed, kSharedGate).fill(begin - odd, logits);
  std::vector<float> probs;
  for (const double z : std::span(logits).subspan(odd)) {
    probs.push_back(static_cast<float>(1 / (1 + portable_exp(-z))));
  }
  return probs;
}

Routing make_routing(const ShapeSpec& spec, int ranks, std::uint64_t seed, double skew) {
  check_made_up(spec, ranks, skew);
  const auto tokens = static_cast<std::size_t>(spec.tokens * ranks);
  const auto topk = static_cast<std::size_t>(spec.topk);
  const auto experts = static_cast<std::size_t>(spec.num_experts);
  std::vector<double> bias(experts);
  for (std::size_t e = 0; e < experts; ++e) {
    bias[e] = -skew * portable_log(1 + static_cast<double>(e));
  }
  const NormalStream normal(seed, kRouter);
  const std::size_t stride = experts + experts % 2;  // a token's logits start at an even index
  std::vector<double> logits(experts);
  GroupLimit limit(spec);
  TopK top(spec.topk);
  Routing routing{std::vector<std::int32_t>(tokens * topk), std::vector<float>(tokens * topk)};
  for (std::size_t t = 0; t < tokens; ++t) {
    normal.fill(t * stride, logits);
    top.clear();
    for (std::size_t e = 0; e < experts; ++e) logits[e] += bias[e];
    limit.apply(logits);
    for (std::size_t e = 0; e < experts; ++e) {
      top.offer(static_cast<std::int32_t>(e), logits[e]);
    }
    top.store(&routing.topk_ids[t * topk], &routing.topk_probs[t * topk]);
  }
  drop_slots(spec, seed, routing);
  return routing;
}

Problem problem_of(const ShapeSpec& spec, std::int64_t capacity_rows) {
  return {.hidden = spec.hidden,
          .intermediate = spec.intermediate,
          .num_experts = spec.num_experts,
          .topk = spec.topk,
          .max_tokens = spec.tokens,
          .capacity_rows = capacity_rows,
          .activation = spec.activation,
          .probs = spec.probs,
          .bias = spec.bias,
          .combine_groups = spec.combine_groups,
          .combine_partials = spec.combine_partials,
          .shared_experts = spec.shared_experts,
          .shared_gate = spec.shared_experts == 0 || spec.shared_gate};
}

LayerData make_layer(const ShapeSpec& spec, int ranks, std::uint64_t seed, double skew) {
  check_made_up(spec, ranks, skew);
  check_memory(spec, ranks);
  LayerData layer;
  layer.tokens = spec.tokens * ranks;
  layer.hidden = spec.hidden;
  layer.intermediate = spec.intermediate;
  layer.num_experts = spec.num_experts;
  layer.topk = spec.topk;
  layer.activation = spec.activation;
  layer.probs = spec.probs;
  layer.combine_groups = spec.combine_groups;
  layer.combine_partials = spec.combine_partials;
  layer.shared_experts = spec.shared_experts;
  allocate(layer, spec.bias);
  const auto fill = [&](Tensor tensor, std::vector<bf16>& to) {
    const Numbers numbers = numbers_of(tensor, spec, seed);
    numbers.stream.fill(0, to, numbers.scale);
  };
  fill(Tensor::kX, layer.x);
  fill(Tensor::kDy, layer.dy);
  fill(Tensor::kW1, layer.w1);
  fill(Tensor::kW2, layer.w2);
  fill(Tensor::kB1, layer.b1);
  fill(Tensor::kB2, layer.b2);
  fill(Tensor::kSharedW1, layer.shared_w1);
  fill(Tensor::kSharedW2, layer.shared_w2);
  layer.shared_probs = make_shared_probs(spec, seed, 0, layer.tokens);
  Routing routing = make_routing(spec, ranks, seed, skew);
  layer.topk_ids = std::move(routing.topk_ids);
  layer.topk_probs = std::move(routing.topk_probs);
  return layer;
}

}  // namespace uniep::workload
