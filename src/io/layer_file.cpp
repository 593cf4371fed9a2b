#include "io/layer_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "base/check.h"
#include "base/problem_limits.h"
#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "uniep/bf16.h"
#include "uniep/problem.h"

namespace uniep::io {
namespace {

constexpr std::int64_t kUnknown = -1;

/// Values of one tensor that are named one by one.
constexpr std::int64_t kMaxNamed = 10;

bool is_finite(bf16 v) { return (v.bits & 0x7f80u) != 0x7f80u; }

std::string shown(float v) {
  if (std::isnan(v)) return "NaN";
  return v > 0 ? "infinity" : "-infinity";
}

/// One of T, H, I, E, K, S: unknown until a tensor's shape gives it, then the same for all.
struct Dimension {
  const char* symbol;
  std::int64_t value = kUnknown;
  const char* source = "";  // the tensor that gave it
};

/// A tensor's dimension is `factor` times one of the layer's.
struct Axis {
  Dimension* dimension;
  std::int64_t factor = 1;
};

/// Reads the tensors of a file and collects what is wrong with them.
class LayerReader {
 public:
  LayerReader(const TensorFile& file, Activation activation) : file_(file) {
    layer_.activation = activation;
  }

  void run() {
    check_shapes();
    if (!findings_.empty()) return;
    load();
    check_values();
    summarize();
  }

  LayerData take_layer() { return std::move(layer_); }
  LayerCheck take_check() { return {std::move(findings_), std::move(summary_)}; }

 private:
  template <class... Args>
  void add(const Args&... sentence) {
    findings_.push_back(cat(file_.name, ": ", sentence...));
  }

  void check_shapes();
  void check_biases();
  void check_shared();
  bool has_pair(const char* first, const char* second);
  void check_tensor(const char* name, std::vector<DType> dtypes, const std::vector<Axis>& axes);
  void check_axis(const Tensor& tensor, const char* name, std::size_t index, const Axis& axis);
  void check_range(const Dimension& dimension);

  void load();
  void load_ids();
  void check_values();
  void check_finite(const char* name, const std::vector<bf16>& values);
  void check_probs();
  void check_shared_probs();
  template <class Id>
  void check_ids(const std::vector<Id>& ids);
  void add_unnamed(const char* what, std::int64_t bad);
  std::string token_and_slot(std::size_t i) const;
  void summarize();
  bool uses(std::string_view tensor) const;
  std::int64_t halves() const { return is_gated(layer_.activation) ? 2 : 1; }

  const TensorFile& file_;
  Dimension t_{"T"}, h_{"H"}, i_{"I"}, e_{"E"}, k_{"K"}, s_{"S"};
  std::vector<std::string> findings_;
  std::optional<LayerSummary> summary_;
  LayerData layer_;
};

void LayerReader::check_shapes() {
  check_tensor("x", {DType::kBf16}, {{&t_}, {&h_}});
  check_tensor("topk_ids", {DType::kI32, DType::kI64}, {{&t_}, {&k_}});
  check_tensor("topk_probs", {DType::kF32}, {{&t_}, {&k_}});
  check_tensor("w1", {DType::kBf16}, {{&e_}, {&i_, halves()}, {&h_}});
  check_tensor("w2", {DType::kBf16}, {{&e_}, {&h_}, {&i_}});
  if (file_.find("dy")) check_tensor("dy", {DType::kBf16}, {{&t_}, {&h_}});
  if (has_pair("b1", "b2")) check_biases();
  if (has_pair("shared_w1", "shared_w2")) check_shared();
}

/// Whether there is any of two tensors, of which one alone is a finding.
bool LayerReader::has_pair(const char* first, const char* second) {
  if (file_.find(first) == nullptr && file_.find(second) == nullptr) return false;
  for (const char* name : {first, second}) {
    if (file_.find(name) == nullptr) {
      add("has no tensor '", name, "', and one of ", first, " and ", second,
          " alone; both or neither are accepted");
    }
  }
  return true;
}

void LayerReader::check_biases() {
  if (file_.find("b1")) check_tensor("b1", {DType::kBf16}, {{&e_}, {&i_, halves()}});
  if (file_.find("b2")) check_tensor("b2", {DType::kBf16}, {{&e_}, {&h_}});
}

void LayerReader::check_shared() {
  if (file_.find("shared_w1")) {
    check_tensor("shared_w1", {DType::kBf16}, {{&s_}, {&i_, halves()}, {&h_}});
  }
  if (file_.find("shared_w2")) check_tensor("shared_w2", {DType::kBf16}, {{&s_}, {&h_}, {&i_}});
  if (file_.find("shared_probs")) check_tensor("shared_probs", {DType::kF32}, {{&t_}, {&s_}});
  if (k_.value <= kMaxTopk && s_.value <= kMaxTopk && k_.value + s_.value > kMaxTopk) {
    add("K is ", k_.value, " and S is ", s_.value, " in tensor 'shared_w1'; at most ", kMaxTopk,
        " together are accepted");
  }
  if (file_.find("b1") || file_.find("b2")) {
    add("has biases and shared experts; one of them is accepted");
  }
}

void LayerReader::check_tensor(const char* name, std::vector<DType> dtypes,
                               const std::vector<Axis>& axes) {
  const Tensor* tensor = file_.find(name);
  if (!tensor) {
    add("has no tensor '", name, "'; x, topk_ids, topk_probs, w1 and w2 are needed");
    return;
  }
  if (std::find(dtypes.begin(), dtypes.end(), tensor->dtype) == dtypes.end()) {
    add("tensor '", name, "' has dtype ", to_string(tensor->dtype), "; ", to_string(dtypes[0]),
        dtypes.size() > 1 ? cat(" or ", to_string(dtypes[1])) : "", " is needed");
  }
  if (tensor->shape.size() != axes.size()) {
    add("tensor '", name, "' has shape ", shape_string(tensor->shape), "; ", axes.size(),
        " dimensions are needed");
    return;
  }
  for (std::size_t i = 0; i < axes.size(); ++i) check_axis(*tensor, name, i, axes[i]);
}

void LayerReader::check_axis(const Tensor& tensor, const char* name, std::size_t index,
                             const Axis& axis) {
  const std::int64_t size = tensor.shape[index];
  Dimension& dimension = *axis.dimension;
  if (size % axis.factor != 0) {
    add("tensor '", name, "' has shape ", shape_string(tensor.shape), ", but dimension ", index,
        " is 2", dimension.symbol, "; an even number is needed");
  } else if (dimension.value == kUnknown) {
    dimension.value = size / axis.factor;
    dimension.source = name;
    check_range(dimension);
  } else if (dimension.value != size / axis.factor) {
    add("tensor '", name, "' has shape ", shape_string(tensor.shape), ", but ", dimension.symbol,
        " is ", dimension.value, " in tensor '", dimension.source, "'; ",
        dimension.value * axis.factor, " is needed in dimension ", index);
  }
}

void LayerReader::check_range(const Dimension& dimension) {
  const std::int64_t value = dimension.value;
  const auto describe = [&] {
    return cat(dimension.symbol, " is ", value, " in tensor '", dimension.source, "'; ");
  };
  const auto require_range = [&](std::int64_t low, std::int64_t high) {
    if (value < low || value > high) add(describe(), low, " to ", high, " is accepted");
  };
  if (&dimension == &h_ || &dimension == &i_) {
    if (value < kWidthMultiple || value > kMaxWidth || value % kWidthMultiple != 0) {
      add(describe(), "a multiple of ", kWidthMultiple, " from ", kWidthMultiple, " to ", kMaxWidth,
          " is accepted");
    }
  } else if (&dimension == &k_ || &dimension == &s_) {
    require_range(1, kMaxTopk);
  } else if (&dimension == &e_) {
    require_range(1, kMaxNumExperts);
  } else {
    require_range(0, kMaxRankTokens);  // one rank may get all of them
  }
}

void LayerReader::load() {
  layer_.tokens = t_.value;
  layer_.hidden = h_.value;
  layer_.intermediate = i_.value;
  layer_.num_experts = static_cast<int>(e_.value);
  layer_.topk = static_cast<int>(k_.value);
  layer_.x = file_.get("x").as<bf16>();
  load_ids();
  layer_.topk_probs = file_.get("topk_probs").as<float>();
  layer_.w1 = file_.get("w1").as<bf16>();
  layer_.w2 = file_.get("w2").as<bf16>();
  if (const Tensor* dy = file_.find("dy")) layer_.dy = dy->as<bf16>();
  if (const Tensor* b1 = file_.find("b1")) layer_.b1 = b1->as<bf16>();
  if (const Tensor* b2 = file_.find("b2")) layer_.b2 = b2->as<bf16>();
  if (file_.find("shared_w1") == nullptr) return;
  layer_.shared_experts = static_cast<int>(s_.value);
  layer_.shared_w1 = file_.get("shared_w1").as<bf16>();
  layer_.shared_w2 = file_.get("shared_w2").as<bf16>();
  if (const Tensor* probs = file_.find("shared_probs")) layer_.shared_probs = probs->as<float>();
}

void LayerReader::load_ids() {
  const Tensor& tensor = file_.get("topk_ids");
  if (tensor.dtype == DType::kI32) {
    layer_.topk_ids = tensor.as<std::int32_t>();
    check_ids(layer_.topk_ids);
    return;
  }
  // Checked before they are narrowed, so that no id wraps around into the accepted range.
  const auto wide = tensor.as<std::int64_t>();
  check_ids(wide);
  layer_.topk_ids.assign(wide.size(), -1);
  for (std::size_t i = 0; i < wide.size(); ++i) {
    const bool valid = wide[i] >= -1 && wide[i] < e_.value;
    layer_.topk_ids[i] = valid ? static_cast<std::int32_t>(wide[i]) : -2;
  }
}

std::string LayerReader::token_and_slot(std::size_t i) const {
  const auto k = static_cast<std::size_t>(k_.value);
  return cat("token ", i / k, ", slot ", i % k);
}

void LayerReader::add_unnamed(const char* what, std::int64_t bad) {
  if (bad > kMaxNamed) add("there are ", bad - kMaxNamed, " more such values in '", what, "'");
}

template <class Id>
void LayerReader::check_ids(const std::vector<Id>& ids) {
  std::int64_t bad = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= -1 && ids[i] < e_.value) continue;
    if (++bad > kMaxNamed) continue;
    add("topk_ids of ", token_and_slot(i), " is ", ids[i], "; 0 to ", e_.value - 1,
        ", or -1 for a dropped slot, is accepted");
  }
  add_unnamed("topk_ids", bad);
}

void LayerReader::check_probs() {
  std::int64_t bad = 0;
  for (std::size_t i = 0; i < layer_.topk_probs.size(); ++i) {
    const float p = layer_.topk_probs[i];
    if (std::isfinite(p) || layer_.topk_ids[i] < 0) continue;  // nobody reads a dropped slot's
    if (++bad > kMaxNamed) continue;
    add("topk_probs of ", token_and_slot(i), " is ", shown(p), "; a finite number is needed");
  }
  add_unnamed("topk_probs", bad);
}

void LayerReader::check_shared_probs() {
  std::int64_t bad = 0;
  for (std::size_t i = 0; i < layer_.shared_probs.size(); ++i) {
    if (std::isfinite(layer_.shared_probs[i])) continue;
    if (++bad > kMaxNamed) continue;
    const auto s = static_cast<std::size_t>(s_.value);
    add("shared_probs of token ", i / s, ", shared expert ", i % s, " is ",
        shown(layer_.shared_probs[i]), "; a finite number is needed");
  }
  add_unnamed("shared_probs", bad);
}

/// "[3, 17, 5]" for the i-th element.
std::string index_string(const std::vector<std::int64_t>& shape, std::size_t i) {
  std::vector<std::int64_t> index(shape.size());
  auto rest = static_cast<std::int64_t>(i);
  for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) index[d] = rest % shape[d];
  return shape_string(index);
}

void LayerReader::check_finite(const char* name, const std::vector<bf16>& values) {
  std::int64_t bad = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (is_finite(values[i])) continue;
    if (++bad > kMaxNamed) continue;
    add("element ", index_string(file_.get(name).shape, i), " of '", name, "' is ",
        shown(to_float(values[i])), "; a finite number is needed");
  }
  add_unnamed(name, bad);
}

void LayerReader::check_values() {
  check_probs();
  check_finite("x", layer_.x);
  check_finite("w1", layer_.w1);
  check_finite("w2", layer_.w2);
  check_finite("dy", layer_.dy);
  check_finite("b1", layer_.b1);
  check_finite("b2", layer_.b2);
  check_finite("shared_w1", layer_.shared_w1);
  check_finite("shared_w2", layer_.shared_w2);
  check_shared_probs();
}

/// shared_probs without shared experts mean nothing.
bool LayerReader::uses(std::string_view tensor) const {
  constexpr std::array<std::string_view, 10> kUsed = {
      "x", "topk_ids", "topk_probs", "w1", "w2", "dy", "b1", "b2", "shared_w1", "shared_w2"};
  if (tensor == "shared_probs") return layer_.shared_experts > 0;
  return std::find(kUsed.begin(), kUsed.end(), tensor) != kUsed.end();
}

void LayerReader::summarize() {
  LayerSummary s;
  s.tokens = layer_.tokens;
  s.hidden = layer_.hidden;
  s.intermediate = layer_.intermediate;
  s.num_experts = layer_.num_experts;
  s.topk = layer_.topk;
  s.has_dy = file_.find("dy") != nullptr;
  s.has_bias = layer_.has_bias();
  s.shared_experts = layer_.shared_experts;
  s.has_shared_probs = !layer_.shared_probs.empty();
  std::vector<std::int64_t> rows(static_cast<std::size_t>(layer_.num_experts));
  for (const std::int32_t id : layer_.topk_ids) {
    s.dropped_slots += id == -1;
    if (id < 0 || id >= layer_.num_experts) continue;
    ++rows[static_cast<std::size_t>(id)];
    ++s.rows;
  }
  std::sort(rows.begin(), rows.end());
  const std::size_t n = rows.size();
  s.min_rows = rows.front();
  s.median_rows = static_cast<double>(rows[(n - 1) / 2] + rows[n / 2]) / 2;
  s.max_rows = rows.back();
  for (const Tensor& tensor : file_.tensors) {
    if (!uses(tensor.name)) s.other_tensors.push_back(tensor.name);
  }
  summary_ = std::move(s);
}

LayerData layer_of(const TensorFile& file, Activation activation) {
  LayerReader reader(file, activation);
  reader.run();
  LayerCheck check = reader.take_check();
  if (!check.findings.empty()) {
    const std::size_t more = check.findings.size() - 1;
    throw Error(ErrorCode::kIo,
                more == 0 ? check.findings[0]
                          : cat(check.findings[0], " (`uniep validate` lists ", more, " more)"));
  }
  return reader.take_layer();
}

template <class Open>
LayerCheck check_of(const Open& open, Activation activation) {
  try {
    const TensorFile file = open();
    LayerReader reader(file, activation);
    reader.run();
    return reader.take_check();
  } catch (const Error& error) {
    return {{error.what()}, std::nullopt};
  }
}

/// A tensor to be written whose size the caller may have got wrong.
template <class T>
Tensor checked_tensor(const char* name, std::vector<std::int64_t> shape,
                      const std::vector<T>& values) {
  require(byte_size(dtype_of<T>(), shape) == static_cast<std::int64_t>(values.size() * sizeof(T)),
          ErrorCode::kInvalidArgument, "tensor '", name, "' has ", values.size(),
          " elements; its shape ", shape_string(shape), " needs another number");
  return make_tensor<T>(name, std::move(shape), values);
}

/// The gradient of a weight, from whichever of the two forms is there.
Tensor weight_gradient(const char* name, std::vector<std::int64_t> shape,
                       const std::vector<bf16>& rounded, const std::vector<float>& main) {
  require(rounded.empty() || main.empty(), ErrorCode::kInvalidArgument, "the result has both '",
          name, "' and 'main_", name, "'; one of them is accepted");
  return main.empty() ? checked_tensor(name, std::move(shape), rounded)
                      : checked_tensor(name, std::move(shape), main);
}

/// Gradients of shared experts: those of weights are a part for each rank.
void add_shared(std::vector<Tensor>& tensors, const LayerResult& r, const LayerData& d) {
  const std::int64_t shared = d.shared_experts;
  const std::int64_t of_a_rank = shared * d.w1_rows() * d.hidden;
  const auto elements =
      static_cast<std::int64_t>(r.dshared_w1.size() + r.main_dshared_w1.size());  // one is empty
  const std::int64_t ranks = elements / of_a_rank;
  tensors.push_back(checked_tensor("dshared_probs", {d.tokens, shared}, r.dshared_probs));
  tensors.push_back(weight_gradient("dshared_w1", {ranks, shared, d.w1_rows(), d.hidden},
                                    r.dshared_w1, r.main_dshared_w1));
  tensors.push_back(weight_gradient("dshared_w2", {ranks, shared, d.hidden, d.intermediate},
                                    r.dshared_w2, r.main_dshared_w2));
}

}  // namespace

std::string to_string(const LayerSummary& s) {
  std::ostringstream text;
  text << "T=" << s.tokens << " H=" << s.hidden << " I=" << s.intermediate << " E=" << s.num_experts
       << " K=" << s.topk << (s.has_dy ? ", with dy" : ", without dy")
       << (s.has_bias ? ", with biases" : "");
  if (s.shared_experts > 0) {
    text << ", S=" << s.shared_experts << " shared experts"
         << (s.has_shared_probs ? " with probabilities" : "");
  }
  text << "\n"
       << s.rows << " rows, per expert " << s.min_rows << " to " << s.max_rows << ", median "
       << s.median_rows << "; " << s.dropped_slots << " dropped slots";
  if (!s.other_tensors.empty()) text << "\nignored:";
  for (const std::string& name : s.other_tensors) text << " " << quote_name(name);
  return text.str();
}

LayerData load_layer(const std::filesystem::path& path, Activation activation) {
  return layer_of(read_safetensors(path), activation);
}

LayerData parse_layer(std::span<const std::byte> file, std::string_view name,
                      Activation activation) {
  return layer_of(parse_safetensors(file, name), activation);
}

LayerCheck check_layer(const std::filesystem::path& path, Activation activation) {
  return check_of([&] { return read_safetensors(path); }, activation);
}

LayerCheck check_layer(std::span<const std::byte> file, std::string_view name,
                       Activation activation) {
  return check_of([&] { return parse_safetensors(file, name); }, activation);
}

void save_layer(const std::filesystem::path& path, const LayerData& d) {
  const std::int64_t experts = d.num_experts;
  std::vector<Tensor> tensors = {
      checked_tensor("topk_probs", {d.tokens, d.topk}, d.topk_probs),
      checked_tensor("topk_ids", {d.tokens, d.topk}, d.topk_ids),
  };
  if (!d.dy.empty()) tensors.push_back(checked_tensor("dy", {d.tokens, d.hidden}, d.dy));
  tensors.push_back(checked_tensor("w1", {experts, d.w1_rows(), d.hidden}, d.w1));
  tensors.push_back(checked_tensor("w2", {experts, d.hidden, d.intermediate}, d.w2));
  tensors.push_back(checked_tensor("x", {d.tokens, d.hidden}, d.x));
  if (d.has_bias()) {
    tensors.push_back(checked_tensor("b1", {experts, d.w1_rows()}, d.b1));
    tensors.push_back(checked_tensor("b2", {experts, d.hidden}, d.b2));
  }
  if (d.shared_experts > 0) {
    const std::int64_t shared = d.shared_experts;
    tensors.push_back(checked_tensor("shared_w1", {shared, d.w1_rows(), d.hidden}, d.shared_w1));
    tensors.push_back(checked_tensor("shared_w2", {shared, d.hidden, d.intermediate}, d.shared_w2));
    if (!d.shared_probs.empty()) {
      tensors.push_back(checked_tensor("shared_probs", {d.tokens, shared}, d.shared_probs));
    }
  }
  write_safetensors(path, tensors);
}

void save_result(const std::filesystem::path& path, const LayerResult& r, const LayerData& d) {
  const std::int64_t experts = d.num_experts;
  std::vector<Tensor> tensors = {checked_tensor("out", {d.tokens, d.hidden}, r.out)};
  const bool forward_only = r.dx.empty() && r.dprobs.empty() && r.dw1.empty() && r.dw2.empty() &&
                            r.main_dw1.empty() && r.main_dw2.empty();
  if (!forward_only) {
    tensors.push_back(checked_tensor("dx", {d.tokens, d.hidden}, r.dx));
    tensors.push_back(checked_tensor("dprobs", {d.tokens, d.topk}, r.dprobs));
    tensors.push_back(weight_gradient("dw1", {experts, d.w1_rows(), d.hidden}, r.dw1, r.main_dw1));
    tensors.push_back(
        weight_gradient("dw2", {experts, d.hidden, d.intermediate}, r.dw2, r.main_dw2));
  }
  if (!r.db1.empty() || !r.main_db1.empty()) {
    tensors.push_back(weight_gradient("db1", {experts, d.w1_rows()}, r.db1, r.main_db1));
    tensors.push_back(weight_gradient("db2", {experts, d.hidden}, r.db2, r.main_db2));
  }
  if (!forward_only && d.shared_experts > 0) add_shared(tensors, r, d);
  write_safetensors(path, tensors);
}

}  // namespace uniep::io
