// The row functions, included by kernels_<isa>.cpp after gemm_impl.h; see there why nothing has
// external linkage. Plain loops over blocks of a fixed size: basic IEEE operations give the same
// bits at any vector width, and the compiler vectorises a loop of known length.
#include "base/activation.h"
#include "base/contract.h"

namespace uniep::cpu {
namespace {

constexpr int kBlock = static_cast<int>(kDprobGroup);
constexpr int kLanes = static_cast<int>(kDprobLanes);

/// The bits of to_float(to_bf16(v)): rounded to nearest even, a NaN made quiet.
inline std::uint32_t round_bits(float v) {
  const std::uint32_t u = __builtin_bit_cast(std::uint32_t, v);
  const std::uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const bool nan = static_cast<std::int32_t>(u & 0x7fffffffu) > 0x7f800000;
  return (nan ? u | 0x00400000u : rounded) & 0xffff0000u;
}

inline float round_to_bf16(float v) { return __builtin_bit_cast(float, round_bits(v)); }

/// v holds bf16 values.
inline void store_block(const float* __restrict v, bf16* __restrict dst) {
  for (int i = 0; i < kBlock; ++i) {
    dst[i].bits = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, v[i]) >> 16);
  }
}

inline void load_block(const bf16* __restrict src, float* __restrict v) {
  for (int i = 0; i < kBlock; ++i) v[i] = widen(src[i]);
}

template <class T>
inline void copy(Index n, const T* src, T* dst) {
  for (Index i = 0; i < n; ++i) dst[i] = src[i];
}

/// Without a gate, `up` and what is made of it are not touched.
template <Activation activation>
void activate_block(const float* gate_acc, const float* up_acc, float prob, bf16* h_gate,
                    bf16* h_up, bf16* a) {
  float g[kBlock], u[kBlock], act[kBlock];
  for (int i = 0; i < kBlock; ++i) g[i] = round_to_bf16(gate_acc[i]);
  store_block(g, h_gate);
  for (int i = 0; i < kBlock; ++i) act[i] = gate_at<activation>(g[i]).value;
  if constexpr (is_gated(activation)) {
    for (int i = 0; i < kBlock; ++i) u[i] = round_to_bf16(up_acc[i]);
    store_block(u, h_up);
    for (int i = 0; i < kBlock; ++i) act[i] = act[i] * up_at<activation>(u[i]).value;
  }
  for (int i = 0; i < kBlock; ++i) act[i] = round_to_bf16(prob * act[i]);
  store_block(act, a);
}

template <Activation activation>
void activate(Index n, const float* gate_acc, const float* up_acc, float prob, bf16* h_gate,
              bf16* h_up, bf16* a) {
  constexpr bool gated = is_gated(activation);
  Index i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    activate_block<activation>(gate_acc + i, gated ? up_acc + i : nullptr, prob, h_gate + i,
                               gated ? h_up + i : nullptr, a + i);
  }
  if (i == n) return;
  float gate[kBlock] = {}, up[kBlock] = {};
  bf16 out[3][kBlock];
  copy(n - i, gate_acc + i, gate);
  if constexpr (gated) copy(n - i, up_acc + i, up);
  activate_block<activation>(gate, up, prob, out[0], out[1], out[2]);
  copy(n - i, out[0], h_gate + i);
  if constexpr (gated) copy(n - i, out[1], h_up + i);
  copy(n - i, out[2], a + i);
}

/// The sum of one group in the order of base/contract.h.
inline float sum_group(const float* v) {
  float lane[kLanes] = {};
  for (int c = 0; c < kBlock; c += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] += v[c + l];
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

/// Returns the block's part of dprobs. Without a gate, as above.
template <Activation activation>
float differentiate_block(const float* da_acc, const bf16* h_gate, const bf16* h_up, float prob,
                          bf16* dh_gate, bf16* dh_up, bf16* a) {
  float da[kBlock], g[kBlock], u[kBlock], value[kBlock], slope[kBlock];
  for (int i = 0; i < kBlock; ++i) da[i] = round_to_bf16(da_acc[i]);
  load_block(h_gate, g);
  for (int i = 0; i < kBlock; ++i) {
    const ValueSlope gate = gate_at<activation>(g[i]);
    value[i] = gate.value;
    slope[i] = gate.slope;
  }

  float act[kBlock], dg[kBlock], du[kBlock], dprob[kBlock];
  if constexpr (is_gated(activation)) {
    load_block(h_up, u);
    for (int i = 0; i < kBlock; ++i) {
      const ValueSlope up = up_at<activation>(u[i]);
      const float product = value[i] * up.value;
      const float scaled = prob * da[i];
      act[i] = round_to_bf16(prob * product);
      dprob[i] = da[i] * product;
      dg[i] = round_to_bf16((scaled * up.value) * slope[i]);
      du[i] = round_to_bf16((scaled * value[i]) * up.slope);
    }
    store_block(du, dh_up);
  } else {
    for (int i = 0; i < kBlock; ++i) {
      act[i] = round_to_bf16(prob * value[i]);
      dprob[i] = da[i] * value[i];
      dg[i] = round_to_bf16((prob * da[i]) * slope[i]);
    }
  }
  store_block(act, a);
  store_block(dg, dh_gate);
  return sum_group(dprob);
}

template <Activation activation>
void differentiate(Index n, const float* da_acc, const bf16* h_gate, const bf16* h_up, float prob,
                   bf16* dh_gate, bf16* dh_up, bf16* a, float* dprob_groups) {
  constexpr bool gated = is_gated(activation);
  Index i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    *dprob_groups++ =
        differentiate_block<activation>(da_acc + i, h_gate + i, gated ? h_up + i : nullptr, prob,
                                        dh_gate + i, gated ? dh_up + i : nullptr, a + i);
  }
  if (i == n) return;
  // Zeros past the end add products of +0 and a finite number to the group's sum.
  float da[kBlock] = {};
  bf16 in[2][kBlock] = {}, out[3][kBlock];
  copy(n - i, da_acc + i, da);
  copy(n - i, h_gate + i, in[0]);
  if constexpr (gated) copy(n - i, h_up + i, in[1]);
  *dprob_groups = differentiate_block<activation>(da, in[0], in[1], prob, out[0], out[1], out[2]);
  copy(n - i, out[0], dh_gate + i);
  if constexpr (gated) copy(n - i, out[1], dh_up + i);
  copy(n - i, out[2], a + i);
}

/// Both, of every activation, in the order of the enum.
constexpr ActivationRows kActivationRows[kNumActivations] = {
    {activate<Activation::kSwiglu>, differentiate<Activation::kSwiglu>},
    {activate<Activation::kGeglu>, differentiate<Activation::kGeglu>},
    {activate<Activation::kGegluTanh>, differentiate<Activation::kGegluTanh>},
    {activate<Activation::kReglu>, differentiate<Activation::kReglu>},
    {activate<Activation::kGptOss>, differentiate<Activation::kGptOss>},
    {activate<Activation::kSwigluClamped>, differentiate<Activation::kSwigluClamped>},
    {activate<Activation::kSwigluSoftcapped>, differentiate<Activation::kSwigluSoftcapped>},
    {activate<Activation::kRelu2>, differentiate<Activation::kRelu2>},
    {activate<Activation::kGelu>, differentiate<Activation::kGelu>},
    {activate<Activation::kSilu>, differentiate<Activation::kSilu>}};

void round_row(Index n, const float* __restrict acc, bf16* __restrict dst) {
  for (Index i = 0; i < n; ++i) dst[i].bits = static_cast<std::uint16_t>(round_bits(acc[i]) >> 16);
}

void add_row(Index n, float* __restrict acc, const bf16* __restrict y) {
  for (Index i = 0; i < n; ++i) acc[i] += widen(y[i]);
}

void add_scaled_row(Index n, float* __restrict acc, const bf16* __restrict y, float factor) {
  for (Index i = 0; i < n; ++i) acc[i] += factor * widen(y[i]);
}

void add_bias_row(Index n, float* __restrict acc, const bf16* __restrict bias, float factor) {
  for (Index i = 0; i < n; ++i) acc[i] = round_to_bf16(acc[i]) + factor * widen(bias[i]);
}

void scale_row(Index n, const bf16* __restrict x, float factor, bf16* __restrict dst) {
  for (Index i = 0; i < n; ++i) {
    dst[i].bits = static_cast<std::uint16_t>(round_bits(factor * widen(x[i])) >> 16);
  }
}

float dot_row(Index n, const bf16* x, const bf16* y) {
  float sum = 0;
  for (Index first = 0; first < n; first += kBlock) {
    float terms[kBlock] = {};
    const Index count = n - first < kBlock ? n - first : kBlock;
    for (Index i = 0; i < count; ++i) terms[i] = widen(x[first + i]) * widen(y[first + i]);
    sum += sum_group(terms);
  }
  return sum;
}

void add_f32_row(Index n, float* __restrict main_grad, const float* __restrict acc) {
  for (Index i = 0; i < n; ++i) main_grad[i] += acc[i];
}

void add_bf16_row(Index n, bf16* __restrict main_grad, const float* __restrict acc) {
  for (Index i = 0; i < n; ++i) {
    const float sum = widen(main_grad[i]) + acc[i];
    main_grad[i].bits = static_cast<std::uint16_t>(round_bits(sum) >> 16);
  }
}

}  // namespace
}  // namespace uniep::cpu
