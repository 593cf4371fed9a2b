#include "backward.h"

#include <algorithm>

#include "biases.h"
#include "call.h"
#include "shared_experts.h"
#include "waves.h"
#include "weights.h"

namespace uniep::ops {
namespace {

enum Part : std::int32_t { kWhole = 0, kData = 1, kWeights = 2 };
enum WeightGrad : std::int32_t { kOverwritten = 0, kAddedFp32 = 1, kAddedBf16 = 2 };

// The rows that x_rows has. Of tokens after forward_exact those that came, which only it knew:
// fewer than there is room for even where their rows take all of it.
std::int64_t kept_of_x(const LayerShape& shape, const Tensor& x_rows, std::int64_t rows) {
  if (shape.rows_of_x == 0) return 0;
  if (shape.keeps_tokens == 0 || x_rows.dim() == 0) {
    return rows == shape.rows ? shape.rows_of_x : rows;
  }
  return std::min(x_rows.size(0), std::min(rows, shape.rows_of_x));
}

// What every part of a backward pass is given, checked.
uniep_backward_call call_of(const Call& call, const Tensor& key, const Tensor& plan,
                            const Tensor& x_rows, const Tensor& h, const Tensor& row_probs,
                            Part part, std::int64_t tokens, bool flag,
                            const std::optional<std::string>& schedule) {
  const LayerShape& shape = call.shape();
  // As many as there is room for, or after forward_exact those that came.
  const std::int64_t rows = row_probs.dim() == 1 ? row_probs.size(0) : -1;
  require(row_probs, "row_probs", ScalarType::Float, {rows}, key);
  require(plan, "plan", ScalarType::Byte, {shape.plan_bytes}, key);
  require(x_rows, "x_rows", ScalarType::BFloat16, {kept_of_x(shape, x_rows, rows), shape.hidden},
          key);
  require(h, "h", ScalarType::BFloat16, {shape.rows_of_h > 0 ? rows : 0, shape.h_width}, key);
  uniep_backward_call arguments{};
  arguments.rows = rows;
  arguments.part = part;
  arguments.tokens = tokens;
  arguments.plan = plan.const_data_ptr();
  if (shape.rows_of_x > 0) arguments.x_rows = x_rows.const_data_ptr();
  if (shape.rows_of_h > 0) arguments.h = h.const_data_ptr();
  arguments.row_probs = static_cast<const float*>(row_probs.const_data_ptr());
  arguments.ignore_overflow = flag;
  arguments.schedule = text_of(schedule);
  arguments.stream = current_stream(key);
  return arguments;
}

// What the pass works in, at most as much as the workspace's rows take.
std::int64_t backward_bytes(const Call& call, const uniep_backward_call& arguments) {
  const LayerShape& shape = call.shape();
  if (arguments.rows == shape.rows) return shape.backward_bytes;
  return call.needs(arguments.rows).backward_memory;
}

Tensor scratch(const Call& call, const Tensor& key, uniep_backward_call& arguments) {
  Tensor rows = empty(key, ScalarType::Byte, {backward_bytes(call, arguments)});
  arguments.backward_memory = rows.mutable_data_ptr();
  return rows;
}

void set_x(const LayerShape& shape, const Tensor& key, const std::optional<Tensor>& x,
           uniep_backward_call& arguments) {
  if (!x) {
    refuse(
        "x is None; a layer that keeps no rows of x, or has shared experts, is given x in "
        "backward");
  }
  require(*x, "x", ScalarType::BFloat16, {arguments.tokens, shape.hidden}, key);
  arguments.x = x->const_data_ptr();
}

// Tokens that weight gradients of shared experts are computed of, in a part of their own.
void set_tokens(const LayerShape& shape, const Tensor& key, const std::optional<Tensor>& dy,
                const std::optional<Tensor>& x, uniep_backward_call& arguments) {
  if (shape.shared_experts == 0) return;
  if (!dy) refuse("dy is None; weight gradients of a layer with shared experts are given dy and x");
  require(*dy, "dy", ScalarType::BFloat16, {arguments.tokens, shape.hidden}, key);
  arguments.dy = dy->const_data_ptr();
  set_x(shape, key, x, arguments);
}

// What other ranks wait for: dx, dprobs and dshared_probs, which this allocates.
struct DataGradients {
  Tensor dx;
  Tensor dprobs;
  Tensor dshared_probs;  // [T, S]; without shared experts it has no elements

  DataGradients(const Call& call, const Tensor& key, const Tensor& dy, const Weights& weights,
                const std::optional<Tensor>& x, std::int64_t topk, const Biases& biases,
                const SharedExperts& shared, uniep_backward_call& arguments) {
    const LayerShape& shape = call.shape();
    if (topk != shape.topk) {
      refuse("topk is " + std::to_string(topk) + "; the workspace is for " +
             std::to_string(shape.topk));
    }
    require(dy, "dy", ScalarType::BFloat16, {arguments.tokens, shape.hidden}, key);
    biases.check(shape, key);
    biases.set(arguments);
    shared.check(shape, key);
    shared.set(arguments);
    dx = empty_results(shape, key, arguments.tokens);
    dprobs = empty(key, ScalarType::Float, {arguments.tokens, topk});
    dshared_probs = empty(key, ScalarType::Float, {arguments.tokens, shape.shared_experts});
    if (shape.shared_experts > 0) {
      arguments.dshared_probs = static_cast<float*>(dshared_probs.mutable_data_ptr());
    }
    arguments.dy = dy.const_data_ptr();
    weights.set(arguments);
    arguments.dx = dx.mutable_data_ptr();
    arguments.dprobs = static_cast<float*>(dprobs.mutable_data_ptr());
    if ((shape.rows > 0 && shape.rows_of_x == 0) || shape.shared_experts > 0) {
      set_x(shape, key, x, arguments);
    }
  }
};

/// Weight gradients of a call, and where they lie.
struct WeightGradients {
  std::vector<Tensor> dw1;
  std::vector<Tensor> dw2;
  Tensor db1;  // of what a layer has not, of no elements; so the next
  Tensor db2;
  Tensor dshared_w1;
  Tensor dshared_w2;
  std::optional<Gradients> places;

  std::tuple<std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor> result()
      const {
    return {dw1, dw2, db1, db2, dshared_w1, dshared_w2};
  }
};

/// The forms and the layout of new gradients.
struct Forms {
  Form w1;
  Form w2;
  Layout layout;
};

WeightGradients new_weight_gradients(const Call& call, const Tensor& key, const Forms& forms,
                                     uniep_backward_call& arguments) {
  const LayerShape& shape = call.shape();
  const std::int64_t biased = shape.has_bias != 0 ? shape.local_experts : 0;
  const std::int64_t shared = shape.shared_experts;
  const auto make = [&](void*& address, std::initializer_list<std::int64_t> sizes) {
    Tensor tensor = empty(key, ScalarType::BFloat16, sizes);
    if (*sizes.begin() > 0) address = tensor.mutable_data_ptr();
    return tensor;
  };
  WeightGradients made{
      .dw1 = empty_like_experts(forms.w1, forms.layout, shape, size_of_w1(shape), key),
      .dw2 = empty_like_experts(forms.w2, forms.layout, shape, size_of_w2(shape), key),
      .db1 = make(arguments.db1, {biased, shape.h_width}),
      .db2 = make(arguments.db2, {biased, shape.hidden}),
      .dshared_w1 = make(arguments.dshared_w1, {shared, shape.h_width, shape.hidden}),
      .dshared_w2 = make(arguments.dshared_w2, {shared, shape.hidden, shape.intermediate}),
      .places = std::nullopt};
  made.places.emplace(made.dw1, made.dw2, ScalarType::BFloat16, shape, forms.layout, key);
  made.places->set(arguments);
  arguments.weight_grad = kOverwritten;
  return made;
}

/// What weight gradients are added to.
struct MainGradients {
  const std::vector<Tensor>& dw1;
  const std::vector<Tensor>& dw2;
  Layout layout;
  Biases db;
  SharedExperts dshared;
};

Gradients main_gradients(const Call& call, const Tensor& key, const MainGradients& main,
                         uniep_backward_call& arguments) {
  const LayerShape& shape = call.shape();
  const ScalarType type = main.dw1.empty() ? ScalarType::Float : main.dw1[0].scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16) {
    refuse(
        "the main_grad of w1 is neither torch.float32 nor torch.bfloat16; it must be one of them");
  }
  const Gradients places(main.dw1, main.dw2, type, shape, main.layout, key);
  places.set(arguments);
  const Biases& db = main.db;
  const SharedExperts& dshared = main.dshared;
  db.check(shape, key, type, "the main_grad of b1", "the main_grad of b2");
  dshared.check(shape, key, type, "the main_grad of shared_w1", "the main_grad of shared_w2");
  arguments.weight_grad = type == ScalarType::Float ? kAddedFp32 : kAddedBf16;
  if (db.b1) arguments.db1 = db.b1->mutable_data_ptr();
  if (db.b2) arguments.db2 = db.b2->mutable_data_ptr();
  if (dshared.w1) arguments.dshared_w1 = dshared.w1->mutable_data_ptr();
  if (dshared.w2) arguments.dshared_w2 = dshared.w2->mutable_data_ptr();
  return places;
}

std::int64_t tokens_of(const Tensor& dy) { return dy.dim() == 2 ? dy.size(0) : -1; }

}  // namespace

std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor,
           Tensor>
backward(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy,
         std::vector<Tensor> w1, std::vector<Tensor> w2, std::optional<Tensor> x, std::int64_t topk,
         bool flag, std::optional<std::string> schedule, std::optional<Tensor> b1,
         std::optional<Tensor> b2, std::optional<Tensor> shared_w1, std::optional<Tensor> shared_w2,
         std::int64_t layout) {
  align(dy);
  align(x);
  const Call call(key);
  auto arguments =
      call_of(call, key, plan, x_rows, h, row_probs, kWhole, tokens_of(dy), flag, schedule);
  const Weights weights(w1, w2, call.shape(), layout_of(layout), key);
  const DataGradients data(call, key, dy, weights, x, topk, {b1, b2}, {shared_w1, shared_w2},
                           arguments);
  const WeightGradients made =
      new_weight_gradients(call, key, {form_of(w1), form_of(w2), layout_of(layout)}, arguments);
  const Tensor rows = scratch(call, key, arguments);
  Call::check(uniep_backward(call.layer(), &arguments));
  return {data.dx,  data.dprobs,        made.dw1,        made.dw2,       made.db1,
          made.db2, data.dshared_probs, made.dshared_w1, made.dshared_w2};
}

std::tuple<Tensor, Tensor, Tensor> backward_main_grad(
    Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy,
    std::vector<Tensor> w1, std::vector<Tensor> w2, std::optional<Tensor> x,
    std::vector<Tensor> dw1, std::vector<Tensor> dw2, std::int64_t topk, bool flag,
    std::optional<std::string> schedule, std::optional<Tensor> b1, std::optional<Tensor> b2,
    std::optional<Tensor> db1, std::optional<Tensor> db2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::optional<Tensor> dshared_w1,
    std::optional<Tensor> dshared_w2, std::int64_t layout) {
  align(dy);
  align(x);
  const Call call(key);
  auto arguments =
      call_of(call, key, plan, x_rows, h, row_probs, kWhole, tokens_of(dy), flag, schedule);
  const Weights weights(w1, w2, call.shape(), layout_of(layout), key);
  const DataGradients data(call, key, dy, weights, x, topk, {b1, b2}, {shared_w1, shared_w2},
                           arguments);
  const Gradients places = main_gradients(
      call, key, {dw1, dw2, layout_of(layout), {db1, db2}, {dshared_w1, dshared_w2}}, arguments);
  const Tensor rows = scratch(call, key, arguments);
  Call::check(uniep_backward(call.layer(), &arguments));
  return {data.dx, data.dprobs, data.dshared_probs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_data(
    Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy,
    std::vector<Tensor> w1, std::vector<Tensor> w2, std::optional<Tensor> x, std::int64_t topk,
    std::int64_t most_bytes, bool flag, std::optional<std::string> schedule,
    std::optional<Tensor> b1, std::optional<Tensor> b2, std::optional<Tensor> shared_w1,
    std::optional<Tensor> shared_w2, std::int64_t layout, std::optional<Tensor> waves) {
  align(dy);
  align(x);
  const Call call(key);
  if (most_bytes != call.shape().backward_bytes) {
    refuse("the workspace has grown since its figures were read; read backward_bytes again");
  }
  auto arguments =
      call_of(call, key, plan, x_rows, h, row_probs, kData, tokens_of(dy), flag, schedule);
  const Weights weights(w1, w2, call.shape(), layout_of(layout), key);
  const DataGradients data(call, key, dy, weights, x, topk, {b1, b2}, {shared_w1, shared_w2},
                           arguments);
  Tensor rows = scratch(call, key, arguments);
  const Waves events(waves);
  events.set(arguments);
  Call::check(uniep_backward(call.layer(), &arguments));
  return {data.dx, data.dprobs, data.dshared_probs, rows};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor>
backward_weights(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs,
                 Tensor backward_memory, std::int64_t tokens, std::int64_t local_experts,
                 std::int64_t intermediate, bool bias, bool flag,
                 std::optional<std::string> schedule, std::int64_t shared_experts,
                 std::int64_t w1_form, std::int64_t w2_form, std::int64_t layout,
                 std::optional<Tensor> dy, std::optional<Tensor> x) {
  align(dy);
  align(x);
  const Call call(key);
  if (local_experts != call.shape().local_experts) {
    refuse("local_experts is " + std::to_string(local_experts) + "; the workspace has " +
           std::to_string(call.shape().local_experts));
  }
  if (intermediate != call.shape().intermediate || bias != (call.shape().has_bias != 0)) {
    refuse("intermediate is " + std::to_string(intermediate) + " with bias " +
           (bias ? "True" : "False") + "; the workspace has " +
           std::to_string(call.shape().intermediate) + " with bias " +
           (call.shape().has_bias != 0 ? "True" : "False"));
  }
  if (shared_experts != call.shape().shared_experts) {
    refuse("shared_experts is " + std::to_string(shared_experts) + "; the workspace has " +
           std::to_string(call.shape().shared_experts));
  }
  auto arguments = call_of(call, key, plan, x_rows, h, row_probs, kWeights, tokens, flag, schedule);
  require(backward_memory, "backward_memory", ScalarType::Byte, {backward_bytes(call, arguments)},
          key);
  arguments.backward_memory = backward_memory.mutable_data_ptr();
  set_tokens(call.shape(), key, dy, x, arguments);
  const bool has_up = call.shape().h_width != call.shape().intermediate;
  const Forms forms{form_of(w1_form, "w1", has_up), form_of(w2_form, "w2", false),
                    layout_of(layout)};
  const WeightGradients made = new_weight_gradients(call, key, forms, arguments);
  Call::check(uniep_backward(call.layer(), &arguments));
  return made.result();
}

void backward_weights_main_grad(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs,
                                Tensor backward_memory, std::vector<Tensor> dw1,
                                std::vector<Tensor> dw2, std::int64_t tokens, bool flag,
                                std::optional<std::string> schedule, std::optional<Tensor> db1,
                                std::optional<Tensor> db2, std::optional<Tensor> dshared_w1,
                                std::optional<Tensor> dshared_w2, std::int64_t layout,
                                std::optional<Tensor> dy, std::optional<Tensor> x) {
  align(dy);
  align(x);
  const Call call(key);
  auto arguments = call_of(call, key, plan, x_rows, h, row_probs, kWeights, tokens, flag, schedule);
  require(backward_memory, "backward_memory", ScalarType::Byte, {backward_bytes(call, arguments)},
          key);
  arguments.backward_memory = backward_memory.mutable_data_ptr();
  set_tokens(call.shape(), key, dy, x, arguments);
  const Gradients places = main_gradients(
      call, key, {dw1, dw2, layout_of(layout), {db1, db2}, {dshared_w1, dshared_w2}}, arguments);
  Call::check(uniep_backward(call.layer(), &arguments));
}

namespace {

// What every part is given of a layer with a row pool.
uniep_backward_call call_of_pages(const Tensor& key, std::int64_t saved, Part part,
                                  std::int64_t tokens, bool keep,
                                  const std::optional<std::string>& schedule) {
  uniep_backward_call arguments{};
  arguments.saved = reinterpret_cast<uniep_saved*>(static_cast<std::intptr_t>(saved));
  arguments.part = part;
  arguments.tokens = tokens;
  arguments.keep_pages = keep;
  arguments.schedule = text_of(schedule);
  arguments.stream = current_stream(key);
  return arguments;
}

Tensor none(const Tensor& key) { return empty(key, ScalarType::BFloat16, {0}); }

WeightGradients no_weight_gradients(const Tensor& key) {
  return {.dw1 = {},
          .dw2 = {},
          .db1 = none(key),
          .db2 = none(key),
          .dshared_w1 = none(key),
          .dshared_w2 = none(key),
          .places = std::nullopt};
}

// New ones, or none where there are some to be added to.
WeightGradients weight_gradients(const Call& call, const Tensor& key, const MainGradients& main,
                                 const Forms& forms, uniep_backward_call& arguments) {
  if (main.dw1.empty() || main.dw2.empty()) {
    return new_weight_gradients(call, key, forms, arguments);
  }
  WeightGradients none = no_weight_gradients(key);
  none.places = main_gradients(call, key, main, arguments);
  return none;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor,
           Tensor, Tensor>
backward_pages(Tensor key, std::int64_t saved, Tensor dy, std::vector<Tensor> w1,
               std::vector<Tensor> w2, std::optional<Tensor> x, std::vector<Tensor> dw1,
               std::vector<Tensor> dw2, std::int64_t topk, bool data_only, bool keep,
               std::optional<std::string> schedule, std::optional<Tensor> b1,
               std::optional<Tensor> b2, std::optional<Tensor> db1, std::optional<Tensor> db2,
               std::optional<Tensor> shared_w1, std::optional<Tensor> shared_w2,
               std::optional<Tensor> dshared_w1, std::optional<Tensor> dshared_w2,
               std::int64_t layout, std::optional<Tensor> waves) {
  align(dy);
  align(x);
  const Call call(key);
  auto arguments =
      call_of_pages(key, saved, data_only ? kData : kWhole, tokens_of(dy), keep, schedule);
  const Weights weights(w1, w2, call.shape(), layout_of(layout), key);
  const DataGradients data(call, key, dy, weights, x, topk, {b1, b2}, {shared_w1, shared_w2},
                           arguments);
  const MainGradients main{dw1, dw2, layout_of(layout), {db1, db2}, {dshared_w1, dshared_w2}};
  const Forms forms{form_of(w1), form_of(w2), main.layout};
  const WeightGradients made =
      data_only ? no_weight_gradients(key) : weight_gradients(call, key, main, forms, arguments);
  Tensor rows = empty(key, ScalarType::Byte, {call.shape().backward_bytes});
  arguments.backward_memory = rows.mutable_data_ptr();
  const Waves events(waves);
  events.set(arguments);
  Call::check(uniep_backward(call.layer(), &arguments));
  return {data.dx,  data.dprobs, data.dshared_probs, made.dw1,        made.dw2,
          made.db1, made.db2,    made.dshared_w1,    made.dshared_w2, data_only ? rows : none(key)};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor>
backward_weights_pages(Tensor key, std::int64_t saved, Tensor backward_memory,
                       std::vector<Tensor> dw1, std::vector<Tensor> dw2, std::int64_t tokens,
                       bool keep, std::optional<std::string> schedule, std::optional<Tensor> db1,
                       std::optional<Tensor> db2, std::optional<Tensor> dshared_w1,
                       std::optional<Tensor> dshared_w2, std::int64_t w1_form, std::int64_t w2_form,
                       std::int64_t layout, std::optional<Tensor> dy, std::optional<Tensor> x) {
  align(dy);
  align(x);
  const Call call(key);
  auto arguments = call_of_pages(key, saved, kWeights, tokens, keep, schedule);
  // As many as the workspace had when it made them: it may have grown.
  require(backward_memory, "backward_memory", ScalarType::Byte, {backward_memory.numel()}, key);
  arguments.backward_memory = backward_memory.mutable_data_ptr();
  set_tokens(call.shape(), key, dy, x, arguments);
  const bool has_up = call.shape().h_width != call.shape().intermediate;
  const Forms forms{form_of(w1_form, "w1", has_up), form_of(w2_form, "w2", false),
                    layout_of(layout)};
  const MainGradients main{dw1, dw2, forms.layout, {db1, db2}, {dshared_w1, dshared_w2}};
  const WeightGradients made = weight_gradients(call, key, main, forms, arguments);
  Call::check(uniep_backward(call.layer(), &arguments));
  return made.result();
}

}  // namespace uniep::ops
