// The row functions, included by kernels_<isa>.cpp after gemm_impl.h; see there why nothing has
// external linkage. Plain loops over blocks of a fixed size: basic IEEE operations give the same
// bits at any vector width, and the compiler vectorises a loop of known length.
#include "base/activation_math.h"
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

void swiglu_block(const float* gate_acc, const float* up_acc, float prob, bf16* h_gate, bf16* h_up,
                  bf16* a) {
  float g[kBlock], u[kBlock], act[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    g[i] = round_to_bf16(gate_acc[i]);
    u[i] = round_to_bf16(up_acc[i]);
  }
  store_block(g, h_gate);
  store_block(u, h_up);
  for (int i = 0; i < kBlock; ++i) act[i] = silu(g[i]);
  for (int i = 0; i < kBlock; ++i) act[i] = round_to_bf16(prob * (act[i] * u[i]));
  store_block(act, a);
}

void swiglu(Index n, const float* gate_acc, const float* up_acc, float prob, bf16* h_gate,
            bf16* h_up, bf16* a) {
  Index i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    swiglu_block(gate_acc + i, up_acc + i, prob, h_gate + i, h_up + i, a + i);
  }
  if (i == n) return;
  float gate[kBlock] = {}, up[kBlock] = {};
  bf16 out[3][kBlock];
  copy(n - i, gate_acc + i, gate);
  copy(n - i, up_acc + i, up);
  swiglu_block(gate, up, prob, out[0], out[1], out[2]);
  copy(n - i, out[0], h_gate + i);
  copy(n - i, out[1], h_up + i);
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

float dswiglu_block(const float* da_acc, const bf16* h_gate, const bf16* h_up, float prob,
                    bf16* dh_gate, bf16* dh_up, bf16* a) {
  float da[kBlock], g[kBlock], u[kBlock], s[kBlock];
  for (int i = 0; i < kBlock; ++i) da[i] = round_to_bf16(da_acc[i]);
  load_block(h_gate, g);
  load_block(h_up, u);
  for (int i = 0; i < kBlock; ++i) s[i] = sigmoid(g[i]);

  float act[kBlock], dg[kBlock], du[kBlock], dprob[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const float silu_g = silu(g[i], s[i]);
    const float product = silu_g * u[i];
    const float scaled = prob * da[i];
    act[i] = round_to_bf16(prob * product);
    dprob[i] = da[i] * product;
    dg[i] = round_to_bf16((scaled * u[i]) * silu_grad(g[i], s[i]));
    du[i] = round_to_bf16(scaled * silu_g);
  }
  store_block(act, a);
  store_block(dg, dh_gate);
  store_block(du, dh_up);
  return sum_group(dprob);
}

void dswiglu(Index n, const float* da_acc, const bf16* h_gate, const bf16* h_up, float prob,
             bf16* dh_gate, bf16* dh_up, bf16* a, float* dprob_groups) {
  Index i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    *dprob_groups++ =
        dswiglu_block(da_acc + i, h_gate + i, h_up + i, prob, dh_gate + i, dh_up + i, a + i);
  }
  if (i == n) return;
  // Zeros past the end add products of +0 * (0 * 0) to the group's sum.
  float da[kBlock] = {};
  bf16 in[2][kBlock] = {}, out[3][kBlock];
  copy(n - i, da_acc + i, da);
  copy(n - i, h_gate + i, in[0]);
  copy(n - i, h_up + i, in[1]);
  *dprob_groups = dswiglu_block(da, in[0], in[1], prob, out[0], out[1], out[2]);
  copy(n - i, out[0], dh_gate + i);
  copy(n - i, out[1], dh_up + i);
  copy(n - i, out[2], a + i);
}

void round_row(Index n, const float* __restrict acc, bf16* __restrict dst) {
  for (Index i = 0; i < n; ++i) dst[i].bits = static_cast<std::uint16_t>(round_bits(acc[i]) >> 16);
}

void add_row(Index n, float* __restrict acc, const bf16* __restrict y) {
  for (Index i = 0; i < n; ++i) acc[i] += widen(y[i]);
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
