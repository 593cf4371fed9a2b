#include "reference/contract.h"

#include <span>
#include <utility>

#include "base/check.h"
#include "reference/arithmetic.h"
#include "reference/layer.h"

namespace uniep::reference {
namespace {

std::vector<bf16> narrow(std::span<const float> values) {
  std::vector<bf16> narrowed;
  narrowed.reserve(values.size());
  for (const float v : values) narrowed.push_back(to_bf16(v));
  return narrowed;
}

// All but the weight gradients. out and dx hold bf16 values already, so narrowing loses nothing.
LayerResult without_wgrad(Outputs<float>& sums) {
  LayerResult result;
  result.out = narrow(sums.out);
  result.dx = narrow(sums.dx);
  result.dprobs = std::move(sums.dprobs);
  result.dshared_probs = std::move(sums.dshared_probs);
  return result;
}

float sum(float main, float added) { return main + added; }
bf16 sum(bf16 main, float added) { return to_bf16(to_float(main) + added); }

template <class T>
void add_expert(std::span<const float> sums, std::size_t e, std::size_t num_experts,
                std::span<T> main) {
  const std::size_t size = main.size() / num_experts;
  for (std::size_t i = e * size; i < (e + 1) * size; ++i) main[i] = sum(main[i], sums[i]);
}

template <class T>
struct MainGrads {
  std::vector<T> dw1, dw2, db1, db2;
};

/// All but the weight gradients, which are added to `main`.
template <class T>
LayerResult add_to_main_grad(const LayerData& layer, MainGrads<T>& main) {
  const Inputs<float> inputs = widen<float>(layer);
  require(main.dw1.size() == layer.w1.size() && main.dw2.size() == layer.w2.size(),
          ErrorCode::kInvalidArgument, "main gradients of ", main.dw1.size(), " and ",
          main.dw2.size(), " elements; those of w1 and w2 have ", layer.w1.size(), " and ",
          layer.w2.size());
  require(main.db1.size() == layer.b1.size() && main.db2.size() == layer.b2.size(),
          ErrorCode::kInvalidArgument, "main gradients of biases of ", main.db1.size(), " and ",
          main.db2.size(), " elements; b1 and b2 have ", layer.b1.size(), " and ", layer.b2.size());
  require(inputs.backward(), ErrorCode::kInvalidArgument,
          "a layer without dy has no gradients to add to the main gradients");
  Outputs<float> sums = run_layer<ContractArithmetic>(inputs);
  LayerResult result = without_wgrad(sums);
  const auto plan = expert_rows(layer.topk_ids, layer.num_experts, layer.topk);
  for (std::size_t e = 0; e < plan.size(); ++e) {
    if (plan[e].empty()) continue;
    add_expert<T>(sums.dw1, e, plan.size(), main.dw1);
    add_expert<T>(sums.dw2, e, plan.size(), main.dw2);
    add_expert<T>(sums.db1, e, plan.size(), main.db1);
    add_expert<T>(sums.db2, e, plan.size(), main.db2);
  }
  return result;
}

}  // namespace

LayerResult contract(const LayerData& layer) {
  Outputs<float> sums = run_layer<ContractArithmetic>(widen<float>(layer));
  LayerResult result = without_wgrad(sums);
  result.dw1 = narrow(sums.dw1);
  result.dw2 = narrow(sums.dw2);
  result.db1 = narrow(sums.db1);
  result.db2 = narrow(sums.db2);
  result.dshared_w1 = narrow(sums.dshared_w1);
  result.dshared_w2 = narrow(sums.dshared_w2);
  return result;
}

LayerResult contract_into_main_grad(const LayerData& layer, std::vector<float> main_dw1,
                                    std::vector<float> main_dw2, std::vector<float> main_db1,
                                    std::vector<float> main_db2) {
  MainGrads<float> main{std::move(main_dw1), std::move(main_dw2), std::move(main_db1),
                        std::move(main_db2)};
  LayerResult result = add_to_main_grad(layer, main);
  result.main_dw1 = std::move(main.dw1);
  result.main_dw2 = std::move(main.dw2);
  result.main_db1 = std::move(main.db1);
  result.main_db2 = std::move(main.db2);
  return result;
}

LayerResult contract_into_bf16_main_grad(const LayerData& layer, std::vector<bf16> main_dw1,
                                         std::vector<bf16> main_dw2, std::vector<bf16> main_db1,
                                         std::vector<bf16> main_db2) {
  MainGrads<bf16> main{std::move(main_dw1), std::move(main_dw2), std::move(main_db1),
                       std::move(main_db2)};
  LayerResult result = add_to_main_grad(layer, main);
  result.dw1 = std::move(main.dw1);
  result.dw2 = std::move(main.dw2);
  result.db1 = std::move(main.db1);
  result.db2 = std::move(main.db2);
  return result;
}

}  // namespace uniep::reference
