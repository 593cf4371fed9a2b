#pragma once

#include "cuda/device/sm90/activation_rows.cuh"
#include "cuda/device/sm90/fragments.cuh"
#include "cuda/device/warp.cuh"

// The derivative of the activation, of a warp's 16 rows by 64 columns that lie in shared memory:
// h_g and h_u become dh, and da becomes a. Without a gate all of h is h_g.

namespace uniep::cuda {

/// Where this lane's rows of the boxes of h_g, h_u and da begin. Without a gate there is nothing in
/// that of h_u.
struct ActivationBoxes {
  std::uint32_t gate, up, da;
};

inline constexpr int kActivationGroups = kBoxCols / 16;  // of 16 columns

/// What the groups of an activation have in common.
template <Activation kActivation>
struct ActivationGradients {
  /// dprobs are added up over the thread's columns. `factors`: what f(h) is multiplied by.
  static __device__ __forceinline__ void run(const ActivationBoxes& boxes, const RowProbs& factors,
                                             const Limits& limits, const ErfCoefficients& erf,
                                             float (&dprobs)[2]) {
    if constexpr (has_sigmoid(kActivation)) {
      run_groups(boxes, factors, limits, dprobs);
    } else {
      run_one_by_one(boxes, factors, erf, dprobs);
    }
  }

 private:
  struct Gradients {
    float gate, up, a, dprob;
  };

  static constexpr bool kGated = is_gated(kActivation);

  static __device__ __forceinline__ Gradients gradients(float factor, float da, ValueSlope g,
                                                        float up, const Limits& limits) {
    const float weighted = factor * da;
    if constexpr (kGated) {
      const ValueSlope u = up_at<kActivation, DeviceMath>(up, limits);
      const float product = g.value * u.value;
      return {(weighted * u.value) * g.slope, (weighted * g.value) * u.slope, factor * product,
              da * product};
    } else {
      return {weighted * g.slope, 0, factor * g.value, da * g.value};
    }
  }

  /// Whether gates are usual is asked once for all: between branches the compiler could not mix the
  /// steps of one group with those of the next.
  static __device__ __forceinline__ void run_groups(const ActivationBoxes& boxes,
                                                    const RowProbs& factors, const Limits& limits,
                                                    float (&dprobs)[2]) {
    MatrixPairs gates[kActivationGroups];
    bool unusual = false;
#pragma unroll
    for (int group = 0; group < kActivationGroups; ++group) {
      load_matrices(group_address(boxes.gate, group), gates[group]);
    }
#pragma unroll
    for (const MatrixPairs& gate : gates) {
      unusual = unusual || has_unusual_gate<kActivation>(gate);
    }
    if (__any_sync(kWholeWarp, unusual)) {
#pragma unroll 1
      for (int group = 0; group < kActivationGroups; ++group) {
        MatrixPairs gate;
        load_matrices(group_address(boxes.gate, group), gate);
        float s[2 * kMatrixPairs];
        sigmoids_of<kActivation, false>(gate, limits, s);
        run_group(boxes, group, load_inputs(boxes, group), gate, s, factors, limits, dprobs);
      }
    } else {
      run_usual(boxes, gates, factors, limits, dprobs);
    }
  }

  /// The sigmoids of a group are begun, and what else it needs is read, before the group ahead of
  /// it is done.
  static __device__ __forceinline__ void run_usual(const ActivationBoxes& boxes,
                                                   const MatrixPairs (&gates)[kActivationGroups],
                                                   const RowProbs& factors, const Limits& limits,
                                                   float (&dprobs)[2]) {
    Inputs inputs = load_inputs(boxes, 0);
    float s[2 * kMatrixPairs];
    sigmoids_of<kActivation, true>(gates[0], limits, s);
#pragma unroll
    for (int group = 0; group < kActivationGroups; ++group) {
      Inputs next_inputs{};
      float next_s[2 * kMatrixPairs]{};
      if (group + 1 < kActivationGroups) {
        next_inputs = load_inputs(boxes, group + 1);
        sigmoids_of<kActivation, true>(gates[group + 1], limits, next_s);
      }
      run_group(boxes, group, inputs, gates[group], s, factors, limits, dprobs);
      inputs = next_inputs;
#pragma unroll
      for (int i = 0; i < 2 * kMatrixPairs; ++i) s[i] = next_s[i];
    }
  }

  /// What a group needs beside its gates.
  struct Inputs {
    MatrixPairs up, da;
  };
  static __device__ __forceinline__ Inputs load_inputs(const ActivationBoxes& boxes, int group) {
    Inputs inputs{};
    if constexpr (kGated) load_matrices(group_address(boxes.up, group), inputs.up);
    load_matrices(group_address(boxes.da, group), inputs.da);
    return inputs;
  }

  static __device__ __forceinline__ void run_group(const ActivationBoxes& boxes, int group,
                                                   const Inputs& inputs, const MatrixPairs& gate,
                                                   const float (&s)[2 * kMatrixPairs],
                                                   const RowProbs& factors, const Limits& limits,
                                                   float (&dprobs)[2]) {
    MatrixPairs dgate, dup, a;
    const auto of = [&limits](float factor, float da, float g, float sigmoid, float u) {
      return gradients(factor, da, gate_with<kActivation>(g, sigmoid, limits), u, limits);
    };
#pragma unroll
    for (int i = 0; i < kMatrixPairs; ++i) {
      const float factor = factors.of[i % 2];
      const std::uint32_t da = inputs.da[i], g = gate[i], u = inputs.up[i];
      const Gradients low = of(factor, low_of(da), low_of(g), s[2 * i], low_of(u));
      const Gradients high = of(factor, high_of(da), high_of(g), s[2 * i + 1], high_of(u));
      dgate[i] = pack_pair(low.gate, high.gate);
      dup[i] = pack_pair(low.up, high.up);
      a[i] = pack_pair(low.a, high.a);
      dprobs[i % 2] = dprobs[i % 2] + low.dprob;
      dprobs[i % 2] = dprobs[i % 2] + high.dprob;
    }
    store_matrices(group_address(boxes.gate, group), dgate);
    if constexpr (kGated) store_matrices(group_address(boxes.up, group), dup);
    store_matrices(group_address(boxes.da, group), a);
  }

  /// Element after element: side by side, they would take registers that the products of this
  /// kernel need.
  static __device__ __forceinline__ void run_one_by_one(const ActivationBoxes& boxes,
                                                        const RowProbs& factors,
                                                        const ErfCoefficients& erf,
                                                        float (&dprobs)[2]) {
#pragma unroll 1
    for (int group = 0; group < kActivationGroups; ++group) {
      MatrixPairs gate;
      load_matrices(group_address(boxes.gate, group), gate);
      Inputs inputs = load_inputs(boxes, group);
#pragma unroll 1
      for (int element = 0; element < 2 * kMatrixPairs; ++element) {
        const int i = element / 2, shift = element % 2 * 16;
        const auto half = [shift](std::uint32_t pair) { return low_of(pair >> shift); };
        const Gradients d = gradients(pick(factors.of, i % 2), half(pick(inputs.da, i)),
                                      gate_at<kActivation, DeviceMath>(half(pick(gate, i)), {erf}),
                                      half(pick(inputs.up, i)), {});
        const auto replace = [&](MatrixPairs& pairs, float value) {
          const std::uint32_t rest = pick(pairs, i) & (0xffff0000u >> shift);
          put(pairs, i, rest | pack_pair(value, 0) << shift);
        };
        replace(gate, d.gate);
        replace(inputs.up, d.up);
        replace(inputs.da, d.a);
        put(dprobs, i % 2, pick(dprobs, i % 2) + d.dprob);
      }
      store_matrices(group_address(boxes.gate, group), gate);
      if constexpr (kGated) store_matrices(group_address(boxes.up, group), inputs.up);
      store_matrices(group_address(boxes.da, group), inputs.da);
    }
  }
};

}  // namespace uniep::cuda
