#include "cuda/pass_tensors.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cuda/device/sm90/tile_shape.h"
#include "cuda/tensor_map.h"
#include "graph/extents.h"

namespace uniep::cuda {
namespace {

/// Boxes are squares of 64, of operands and of outputs, but for weights whose reduction is
/// contiguous: 64 k's by a tile's columns.
constexpr int kBox = 64;
static_assert(kConsumerRows == kBox && kBoxCols == kBox && kBoxRows == kBox);

/// A tensor as a stage walks over it: its sizes, innermost first.
struct Walk {
  std::vector<Extent> extents;
  bool by_halves = false;
};

/// A stage whose columns are those of one half of I takes both halves side by side; for any other
/// they are one width of 2I.
Walk walk_over(const TensorRow& tensor, const StageRow& stage) {
  Walk walk;
  for (const Extent e : tensor.shape) {
    if (e != Extent::kOne) walk.extents.insert(walk.extents.begin(), e);
  }
  const auto two = std::ranges::find(walk.extents, Extent::kHalves);
  if (two == walk.extents.end()) return walk;
  walk.by_halves = stage.cols == Extent::kIntermediate;
  if (walk.by_halves) return walk;
  walk.extents.erase(two);
  std::ranges::replace(walk.extents, Extent::kIntermediate, Extent::kBothHalves);
  return walk;
}

class Mapper {
 public:
  Mapper(const StageRow& stage, const PassView& view, const PassTensors& tensors, std::int64_t rows,
         std::int64_t saved_rows)
      : stage_(stage),
        saved_rows_(saved_rows),
        view_(view),
        tensors_(tensors),
        extents_(extents_of_widths(view.topk, view.shared_experts, view.hidden, view.intermediate,
                                   view.halves(), view.choice.has_bias)) {
    extents_[Extent::kTokens] = view.tokens;
    extents_[Extent::kRows] = rows;
    extents_[Extent::kLocalExperts] = view.routed_experts();
  }

  /// Rows of either operand, and what is written: 64 by 64.
  CUtensorMap squares(Tensor tensor) const { return map(tensor, kBox, kBox); }

  /// The right operand.
  CUtensorMap weights(Tensor tensor) const {
    return map(tensor, is_k_major(tensor, false) ? tile_columns() : kBox, kBox);
  }

  /// Whether some of the experts read tokens in place of rows.
  bool has_shared() const { return view_.choice.has_shared; }

  /// Whether the stage has tiles of gate and up columns side by side.
  bool takes_halves(Tensor tensor) const {
    return walk_over(kLayerGraph[tensor], stage_).by_halves;
  }

  /// The map of the first of a tensor's matrices that lie apart.
  CUtensorMap first_of(const MatricesApart& apart, Tensor tensor, Element element) const {
    std::vector<std::int64_t> sizes(takes_halves(tensor) ? 4 : 3, 1);
    std::vector<int> box(sizes.size(), 1);
    sizes[0] = apart.line();
    sizes[1] = apart.lines();
    box[0] = kSwizzleBytes / static_cast<int>(bytes_of(element));
    box[1] = is_k_major(tensor, apart.in_out) ? tile_columns()
             : apart.in_out                   ? kBox
                                              : box_rows(apart.shape);
    return tensor_map(apart.begins.front(), element, sizes, box, apart.line_stride);
  }

  /// Rows of boxes that run over all rows of an expert: none lies in two matrices.
  static int box_rows(const ExpertShape& shape) {
    return shape.parts == 1 ? kBox : static_cast<int>(std::gcd(shape.rows, std::int64_t{kBox}));
  }

  /// What the epilogue reads: a whole tile of rows.
  CUtensorMap tile(Tensor tensor) const { return map(tensor, kTileM, kTileM); }

  /// The map of `data`, a tensor of that one's shape that is added to in its place: one swizzle row
  /// by 64.
  CUtensorMap sums(Tensor tensor, Element element, const void* data) const {
    return map_of(kLayerGraph[tensor], element, data, kBox, kBox);
  }

 private:
  /// Whether the tensor is a weight whose reduction is contiguous.
  bool is_k_major(Tensor tensor, bool in_out) const {
    if (stage_.place == StagePlace::kWeights) return false;
    return (walk_over(kLayerGraph[tensor], stage_).extents[0] == stage_.reduction) != in_out;
  }
  int tile_columns() const { return view_.schedule.tile_n / stage_.halves; }

  CUtensorMap map(Tensor name, int height, int rows) const {
    const TensorRow& tensor = kLayerGraph[name];
    ensure(tensor.element == kOperand, "tensor ", tensor.name, " has no map");
    return map_of(tensor, tensor.element, tensors_.table[name], height, rows);
  }

  /// Boxes of one swizzle row of the innermost size by `height` of the next; of a tensor of rows in
  /// halves, by one half and `rows` rows.
  CUtensorMap map_of(const TensorRow& tensor, Element element, const void* data, int height,
                     int rows) const {
    const Walk walk = walk_over(tensor, stage_);
    std::vector<std::int64_t> sizes;
    const bool saved = is_saved(tensor, view_.choice);
    for (const Extent e : walk.extents) {
      sizes.push_back(saved && e == Extent::kRows ? saved_rows_ : extents_[e]);
    }
    std::vector<int> box(sizes.size(), 1);
    box[0] = kSwizzleBytes / static_cast<int>(bytes_of(element));
    const bool halves_of_rows = walk.by_halves && walk.extents.back() == Extent::kRows;
    box[halves_of_rows ? 2 : 1] = halves_of_rows ? rows : height;
    while (sizes.size() < 3) sizes.push_back(1), box.push_back(1);
    return tensor_map(data, element, sizes, box);
  }

  const StageRow& stage_;
  const std::int64_t saved_rows_;
  const PassView& view_;
  const PassTensors& tensors_;
  Extents extents_;
};

/// Whether the copy engine moves the tensor by a map of its own: what goes to peers is stored, as
/// are single numbers and what biases there are. Those of shared experts are among PassTensors'
/// matrices.
bool is_mapped(Tensor name) {
  const TensorRow& tensor = kLayerGraph[name];
  return tensor.when != When::kHasBias && tensor.when != When::kHasShared &&
         tensor.region != Region::kSymmetric && tensor.element == Element::kBf16;
}

Element element_of(const WeightGrad& grad) {
  const bool fp32 = std::holds_alternative<ExpertMatrices<float>>(grad);
  return fp32 ? Element::kFp32 : Element::kBf16;
}

CUtensorMap map_of_sums(const Mapper& mapper, Tensor tensor, const WeightGrad& grad) {
  const void* data = with_matrices(grad, [](const auto& m) -> const void* { return m.data(); });
  return mapper.sums(tensor, element_of(grad), data);
}

StageMaps make_maps(const Mapper& mapper, const StageRow& stage, const PassTensors& tensors) {
  StageMaps maps{};
  maps.a = mapper.squares(stage.reads[0]);
  maps.b = mapper.weights(stage.reads[1]);
  for (int i = 2; i < stage.reads.size(); ++i) {
    const Tensor tensor = stage.reads[i];
    if (tensor == Tensor::kX || tensor == Tensor::kDy) {
      // Null: the rank has no tokens.
      if (mapper.has_shared() && tensors.table[tensor] != nullptr) {
        maps.tokens = mapper.squares(tensor);
      }
    } else if (is_mapped(tensor)) {
      maps.aux = mapper.tile(tensor);
    }
  }
  CUtensorMap* const outputs[] = {&maps.out0, &maps.out1};
  std::size_t next = 0;
  for (const Tensor t : stage.writes) {
    if (!is_mapped(t)) continue;
    CUtensorMap& output = *outputs[next++];
    // Null: an h that is not kept, or a weight gradient that is added to.
    if (tensors.table[t] != nullptr) {
      output = mapper.squares(t);
    } else if (const WeightGrad* grad = tensors.weight_grad(t)) {
      if (!is_overwritten(*grad)) output = map_of_sums(mapper, t, *grad);
    }
  }
  return maps;
}

/// The weight that the stage reads, or the gradient that it writes.
Tensor weight_of(const StageRow& stage) {
  return stage.place == StagePlace::kWeights ? stage.writes[0] : stage.reads[1];
}

/// Adds the maps of the stage's matrices, if they lie apart, where `room` begins, and moves that
/// on. All have as many parts, and parts as many rows.
void add_expert_maps(const Mapper& mapper, const StageRow& stage, const PassView& view,
                     const PassTensors& tensors, MappedPass& mapped, CUtensorMap*& room) {
  const Tensor tensor = weight_of(stage);
  const std::vector<MatricesApart> apart = tensors.apart(tensor, view, mapper.takes_halves(tensor));
  if (apart.empty() || apart.front().begins.empty()) return;
  const WeightGrad* grad = tensors.weight_grad(tensor);
  const Element element = grad == nullptr ? Element::kBf16 : element_of(*grad);
  const ExpertShape& shape = apart.front().shape;
  mapped.maps.stages[product_number(stage.stage)].experts = {.maps = room,
                                                             .parts = static_cast<int>(shape.parts),
                                                             .rows = static_cast<int>(shape.rows),
                                                             .box_rows = Mapper::box_rows(shape)};
  for (const MatricesApart& matrices : apart) {
    mapped.experts.push_back({mapper.first_of(matrices, tensor, element), room, matrices});
    room += matrices.begins.size();
  }
}

/// The matrices of a rank's experts and of the shared ones, a map each; none if one map has them
/// all.
template <class T>
std::vector<MatricesApart> apart_of(const ExpertMatrices<T>& matrices, const ExpertShape& shape,
                                    const ExpertMatrices<T>& shared,
                                    const ExpertShape& shape_of_shared) {
  if (shape_of_shared.experts > 0) {
    return {matrices_apart(matrices, shape), matrices_apart(shared, shape_of_shared)};
  }
  if (are_one_tensor(matrices)) return {};
  return {matrices_apart(matrices, shape)};
}

/// Whether a plan that has a fault clears the gradient where its maps are written. Otherwise it is
/// one tensor, which `enter` fills.
bool is_cleared_with_maps(const WeightGrad& grad) {
  const ExpertForm form = with_matrices(grad, [](const auto& m) { return m.form(); });
  return is_overwritten(grad) && (form == ExpertForm::kGateAndUp || form == ExpertForm::kOneEach);
}

}  // namespace

void PassTensors::set_weight_grads(const BackwardWeightsArgs& args) {
  dw1 = args.dw1;
  dw2 = args.dw2;
  db1 = args.db1;
  db2 = args.db2;
  dshared_w1 = args.dshared_w1;
  dshared_w2 = args.dshared_w2;
  const auto overwritten = [](const WeightGrad& grad) -> const bf16* {
    const auto* dw = std::get_if<ExpertMatrices<bf16>>(&grad);
    return dw != nullptr ? dw->data() : nullptr;
  };
  table.set(Tensor::kDw1, overwritten(dw1));
  table.set(Tensor::kDw2, overwritten(dw2));
  table.set(Tensor::kDb1, overwritten(db1));
  table.set(Tensor::kDb2, overwritten(db2));
}

const WeightGrad* PassTensors::weight_grad(Tensor tensor) const {
  if (tensor == Tensor::kDw1) return &dw1;
  if (tensor == Tensor::kDw2) return &dw2;
  return nullptr;
}

std::vector<MatricesApart> PassTensors::apart(Tensor tensor, const PassView& view,
                                              bool by_halves) const {
  const bool first = tensor == Tensor::kW1 || tensor == Tensor::kDw1;
  // Parts that follow one another are one matrix of all rows, wherever these are one width.
  const bool joins =
      !by_halves && with_matrices_of(tensor, [](const auto& m) { return is_joined(m); });
  const auto shape_of = [&](int experts) {
    ExpertShape shape =
        first ? shape_of_w1(view, experts, view.halves()) : shape_of_w2(view, experts);
    if (joins) shape.rows *= std::exchange(shape.parts, 1);
    return shape;
  };
  const ExpertShape shape = shape_of(view.routed_experts());
  const ExpertShape shared_shape = shape_of(view.shared_experts);
  const WeightGrad* grad = weight_grad(tensor);
  if (grad == nullptr) {
    return first ? apart_of(w1, shape, shared_w1, shared_shape)
                 : apart_of(w2, shape, shared_w2, shared_shape);
  }
  const WeightGrad& shared = first ? dshared_w1 : dshared_w2;
  return with_matrices(*grad, [&](const auto& matrices) {
    using Matrices = std::decay_t<decltype(matrices)>;
    auto apart = with_matrices(shared, [&](const auto& of_shared) {
      if constexpr (std::is_same_v<std::decay_t<decltype(of_shared)>, Matrices>) {
        return apart_of(matrices, shape, of_shared, shared_shape);
      } else {  // there are none
        return apart_of(matrices, shape, Matrices{}, shape_of(0));
      }
    });
    if (!apart.empty()) apart.front().is_cleared = is_cleared_with_maps(*grad);
    return apart;
  });
}

std::uint32_t PassTensors::in_out_stages() const {
  static_assert(kLayerGraph.num_stages <= 32);
  std::uint32_t bits = 0;
  for (int i = 0; i < kLayerGraph.num_stages; ++i) {
    const StageRow& stage = kLayerGraph.stages[i];
    if (stage.kind != StageKind::kProduct) continue;
    const bool in_out =
        with_matrices_of(weight_of(stage), [](const auto& m) { return m.is_in_out(); });
    if (in_out) bits |= std::uint32_t{1} << static_cast<int>(stage.stage);
  }
  return bits;
}

MappedPass map_pass(const PassView& view, const PassTensors& tensors, std::int64_t rows,
                    std::int64_t saved_rows, CUtensorMap* room) {
  MappedPass mapped{};
  kLayerGraph.for_each_stage(view.pass, [&](const StageRow& stage) {
    const bool in_part = view.stage(stage.stage).grid != TileGrid::kNone;
    if (stage.kind != StageKind::kProduct || !in_part) return;
    const Mapper mapper(stage, view, tensors, rows, saved_rows);
    mapped.maps.stages[product_number(stage.stage)] = make_maps(mapper, stage, tensors);
    add_expert_maps(mapper, stage, view, tensors, mapped, room);
  });
  return mapped;
}

}  // namespace uniep::cuda
