// The ops of torch.ops.uniep, on PyTorch's stable ABI, and the C functions by which Python binds
// layers to key tensors. No transformation of a program may change the order of collective ops: by
// `overflow`, which is marked as changed by every forward, whether or not it is. Those of backward
// have none, as it would be saved, and a tensor that is saved must not change until backward.

#include <torch/csrc/stable/library.h>

#include "backward.h"
#include "forward.h"
#include "layer_registry.h"
#include "rows.h"

namespace {

constexpr const char* kForward =
    "forward(Tensor key, Tensor(a!) overflow, Tensor x, Tensor topk_ids, Tensor topk_probs, "
    "Tensor[] w1, Tensor[] w2, int rows, int rows_of_x, int rows_of_h, int plan_bytes, bool "
    "flag, str? schedule, Tensor? b1=None, Tensor? b2=None, Tensor? shared_w1=None, Tensor? "
    "shared_w2=None, Tensor? shared_probs=None, int layout=0, Tensor? waves=None) -> (Tensor "
    "out, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs)";
constexpr const char* kForwardExact =
    "forward_exact(Tensor key, Tensor(a!) overflow, Tensor x, Tensor topk_ids, Tensor "
    "topk_probs, Tensor[] w1, Tensor[] w2, bool flag, str? schedule, Tensor? b1=None, Tensor? "
    "b2=None, Tensor? shared_w1=None, Tensor? shared_w2=None, Tensor? shared_probs=None, int "
    "layout=0) -> (Tensor out, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs)";
constexpr const char* kBackward =
    "backward(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor dy, "
    "Tensor[] w1, Tensor[] w2, Tensor? x, int topk, bool flag, str? schedule, Tensor? b1=None, "
    "Tensor? b2=None, Tensor? shared_w1=None, Tensor? shared_w2=None, int layout=0) -> "
    "(Tensor dx, Tensor dprobs, Tensor[] dw1, Tensor[] dw2, Tensor db1, Tensor db2, Tensor "
    "dshared_probs, Tensor dshared_w1, Tensor dshared_w2)";
constexpr const char* kBackwardMainGrad =
    "backward_main_grad(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, "
    "Tensor dy, Tensor[] w1, Tensor[] w2, Tensor? x, Tensor(a!)[] dw1, Tensor(b!)[] dw2, int "
    "topk, bool flag, str? schedule, Tensor? b1=None, Tensor? b2=None, Tensor(c!)? db1=None, "
    "Tensor(d!)? db2=None, Tensor? shared_w1=None, Tensor? shared_w2=None, Tensor(e!)? "
    "dshared_w1=None, Tensor(f!)? dshared_w2=None, int layout=0) -> (Tensor dx, Tensor "
    "dprobs, Tensor dshared_probs)";
constexpr const char* kBackwardData =
    "backward_data(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor "
    "dy, Tensor[] w1, Tensor[] w2, Tensor? x, int topk, int backward_bytes, bool flag, str? "
    "schedule, Tensor? b1=None, Tensor? b2=None, Tensor? shared_w1=None, Tensor? shared_w2=None, "
    "int layout=0, Tensor? waves=None) -> (Tensor dx, Tensor dprobs, Tensor dshared_probs, Tensor "
    "backward_memory)";
constexpr const char* kBackwardWeights =
    "backward_weights(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor row_probs, Tensor "
    "backward_memory, int tokens, int local_experts, int intermediate, bool bias, bool flag, str? "
    "schedule, int shared_experts=0, int w1_form=0, int w2_form=0, int layout=0, Tensor? dy=None, "
    "Tensor? x=None) -> (Tensor[] dw1, Tensor[] dw2, Tensor db1, Tensor db2, Tensor dshared_w1, "
    "Tensor dshared_w2)";
constexpr const char* kBackwardWeightsMainGrad =
    "backward_weights_main_grad(Tensor key, Tensor plan, Tensor x_rows, Tensor h, Tensor "
    "row_probs, Tensor backward_memory, Tensor(a!)[] dw1, Tensor(b!)[] dw2, int tokens, bool flag, "
    "str? schedule, Tensor(c!)? db1=None, Tensor(d!)? db2=None, Tensor(e!)? dshared_w1=None, "
    "Tensor(f!)? dshared_w2=None, int layout=0, Tensor? dy=None, Tensor? x=None) -> ()";

constexpr const char* kForwardPages =
    "forward_pages(Tensor key, Tensor(a!) overflow, Tensor x, Tensor topk_ids, Tensor "
    "topk_probs, Tensor[] w1, Tensor[] w2, bool flag, str? schedule, Tensor? b1=None, Tensor? "
    "b2=None, Tensor? shared_w1=None, Tensor? shared_w2=None, Tensor? shared_probs=None, int "
    "layout=0, Tensor? waves=None) -> (Tensor out, int saved)";
constexpr const char* kBackwardPages =
    "backward_pages(Tensor key, int saved, Tensor dy, Tensor[] w1, Tensor[] w2, Tensor? x, "
    "Tensor(a!)[] dw1, Tensor(b!)[] dw2, int topk, bool data_only, bool keep, str? schedule, "
    "Tensor? b1=None, Tensor? b2=None, Tensor(c!)? db1=None, Tensor(d!)? db2=None, Tensor? "
    "shared_w1=None, Tensor? shared_w2=None, Tensor(e!)? dshared_w1=None, Tensor(f!)? "
    "dshared_w2=None, int layout=0, Tensor? waves=None) -> (Tensor dx, Tensor dprobs, Tensor "
    "dshared_probs, Tensor[] new_dw1, Tensor[] new_dw2, Tensor new_db1, Tensor new_db2, Tensor "
    "new_dshared_w1, Tensor new_dshared_w2, Tensor backward_memory)";
constexpr const char* kBackwardWeightsPages =
    "backward_weights_pages(Tensor key, int saved, Tensor backward_memory, Tensor(a!)[] dw1, "
    "Tensor(b!)[] dw2, int tokens, bool keep, str? schedule, Tensor(c!)? db1=None, Tensor(d!)? "
    "db2=None, Tensor(e!)? dshared_w1=None, Tensor(f!)? dshared_w2=None, int w1_form=0, int "
    "w2_form=0, int layout=0, Tensor? dy=None, Tensor? x=None) -> (Tensor[] new_dw1, Tensor[] "
    "new_dw2, Tensor new_db1, Tensor new_db2, Tensor new_dshared_w1, Tensor new_dshared_w2)";

constexpr const char* kAddRows =
    "add_rows(Tensor rows, Tensor more, Tensor row, Tensor ids, Tensor? factors, int num_experts, "
    "int combine_groups, bool bf16_partials) -> Tensor";

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("forward", TORCH_BOX(&uniep::ops::forward));
  library.impl("forward_exact", TORCH_BOX(&uniep::ops::forward_exact));
  library.impl("backward", TORCH_BOX(&uniep::ops::backward));
  library.impl("backward_main_grad", TORCH_BOX(&uniep::ops::backward_main_grad));
  library.impl("backward_data", TORCH_BOX(&uniep::ops::backward_data));
  library.impl("backward_weights", TORCH_BOX(&uniep::ops::backward_weights));
  library.impl("backward_weights_main_grad", TORCH_BOX(&uniep::ops::backward_weights_main_grad));
  library.impl("forward_pages", TORCH_BOX(&uniep::ops::forward_pages));
  library.impl("backward_pages", TORCH_BOX(&uniep::ops::backward_pages));
  library.impl("backward_weights_pages", TORCH_BOX(&uniep::ops::backward_weights_pages));
  library.impl("add_rows", TORCH_BOX(&uniep::ops::add_rows));
}

}  // namespace

STABLE_TORCH_LIBRARY(uniep, library) {
  for (const char* schema :
       {kForward, kForwardExact, kBackward, kBackwardMainGrad, kBackwardData, kBackwardWeights,
        kBackwardWeightsMainGrad, kForwardPages, kBackwardPages, kBackwardWeightsPages, kAddRows}) {
    library.def(schema);
  }
}

STABLE_TORCH_LIBRARY_IMPL(uniep, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(uniep, CUDA, library) { implement(library); }

extern "C" {

/// `shape`: the fifteen figures of LayerShape, in its order.
__attribute__((visibility("default"))) void uniep_torch_bind(std::int64_t id, const void* key,
                                                             uniep_layer* layer,
                                                             const std::int64_t* shape) {
  uniep::ops::bind_layer(
      id, key, layer,
      {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], shape[8],
       shape[9], shape[10], shape[11], shape[12], shape[13], shape[14]});
}

__attribute__((visibility("default"))) void uniep_torch_unbind(std::int64_t id) {
  uniep::ops::unbind_layer(id);
}

/// Begins a turn: calls of other threads wait until uniep_torch_end_turn ends it in the same
/// thread.
__attribute__((visibility("default"))) void* uniep_torch_begin_turn(std::int64_t id) {
  return uniep::ops::Turn::begin(id).release();
}

__attribute__((visibility("default"))) void uniep_torch_end_turn(void* turn) {
  delete static_cast<uniep::ops::Turn*>(turn);
}

/// What the function of the C API returned that failed last in this thread, in an op.
__attribute__((visibility("default"))) int uniep_torch_last_failure() {
  return uniep::ops::Call::last_failure();
}

__attribute__((visibility("default"))) std::int64_t uniep_torch_bound() {
  return uniep::ops::bound_layers();
}
}
