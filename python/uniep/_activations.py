"""Activations and their derivatives in plain PyTorch, each rounding as in docs/numerics.md.

On a CPU exp, tanh and erf are uniep's own, step by step: src/base/activation_math.h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .arithmetic import Activation, Arithmetic

__all__ = ["activated", "activated_gradient"]


def _exp(z: Tensor) -> Tensor:
    """On a GPU PyTorch's; on a CPU uniep's own (src/base/activation_math.h), step by step."""
    if z.is_cuda:
        return torch.exp(z)
    return _exp_double(z.clamp(-110, 100).double()).float()


def _exp_double(v: Tensor) -> Tensor:
    """Return exp of a double, on a CPU, as uniep's own functions begin."""
    n = torch.round(v * float.fromhex("0x1.71547652b82fep+0"))
    r = v - n * float.fromhex("0x1.62e42fefa39efp-1")
    r2 = r * r
    p01 = 0.9999999999595618 + 0.999999999995509 * r
    p23 = 0.5000000107729166 + 0.16666666786308587 * r
    p45 = 0.041666218319291945 + 0.008333283538708528 * r
    p67 = 0.0013948578326459795 + 0.0001990756931084829 * r
    return torch.ldexp((p01 + p23 * r2) + (p45 + p67 * r2) * (r2 * r2), n)


def _tanh(z: Tensor) -> Tensor:
    """Likewise."""
    if z.is_cuda:
        return torch.tanh(z)
    v = z.clamp(-10, 10).double()
    e = _exp_double(2 * v)
    v2 = v * v
    series = v * (1 + v2 * (-1 / 3 + v2 * (2 / 15 + v2 * (-17 / 315))))
    return torch.where(z.abs() < 0.0625, series.float(), ((e - 1) / (e + 1)).float())


def _erf(z: Tensor) -> Tensor:
    """Likewise."""
    if z.is_cuda:
        return torch.erf(z)
    v = z.clamp(-4, 4).double()
    m = v.abs()
    t = 1 / (1 + 0.35 * m)
    t2 = t * t
    t4 = t2 * t2
    p01 = -0.00015082892515336376 + 0.2003979794576761 * t
    p23 = 0.17251369025208352 + 0.30811703557822889 * t
    p45 = -0.22508635995003179 + 0.93620981125425262 * t
    p67 = -1.0417088377707995 + 1.0562795575917372 * t
    p89 = -0.48890502231517519 + 0.082332975057798158 * t
    p = (p01 + p23 * t2) + ((p45 + p67 * t2) + p89 * t4) * t4
    return torch.copysign(1 - _exp_double(-m * m) * p, v).float()


def _silu(z: Tensor) -> tuple[Tensor, Tensor]:
    s = 1 / (1 + _exp(-z))
    return z * s, s * (1 + z * (1 - s))


def _gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    above = 1 + _erf(z * _ROOT_HALF)
    density = _exp(-0.5 * z * z) * _DENSITY
    return z * 0.5 * above, 0.5 * above + z * density


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor]:
    square = z * z
    t = _tanh(_BETA * (z + _KAPPA * (square * z)))
    half, above = 0.5 * z, 1 + t
    slope = _BETA * (1 + _KAPPA_3 * square)
    return half * above, 0.5 * above + half * (1 - t * t) * slope


def _relu(z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(z <= 0, 0, z), torch.where(z <= 0, 0.0, 1.0)


def _relu2(z: Tensor) -> tuple[Tensor, Tensor]:
    r = _relu(z)[0]
    return r * r, 2 * r


def _limited_gate(z: Tensor, limit: float, alpha: float) -> tuple[Tensor, Tensor]:
    g = torch.where(z > limit, limit, z)
    scaled = alpha * g
    s = 1 / (1 + _exp(-scaled))
    return g * s, torch.where(z > limit, 0, s * (1 + scaled * (1 - s)))


def _limited_up(z: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    u = torch.where(z < -limit, -limit, torch.where(z > limit, limit, z))
    return u, torch.where(z.abs() > limit, 0.0, 1.0)


def _gpt_oss_up(z: Tensor) -> tuple[Tensor, Tensor]:
    u, slope = _limited_up(z, 7)
    return u + 1, slope


def _softcap(z: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    t = _tanh(z * _fp32(1 / cap))
    return t * cap, 1 - t * t


def _softcapped_gate(z: Tensor) -> tuple[Tensor, Tensor]:
    value, slope = _softcap(z, 4)
    s = 1 / (1 + _exp(-z))
    return value * s, s * (slope + value * (1 - s))


def _fp32(value: float) -> float:
    """The number as fp32 has it, by which a scalar then multiplies."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


_ROOT_HALF = _fp32(0.70710678118654752440)
_DENSITY = _fp32(0.39894228040143267794)  # 1 / sqrt(2 pi)
_BETA = _fp32(0.79788456080286535588)  # sqrt(2 / pi)
_KAPPA = _fp32(0.044715)
_KAPPA_3 = _fp32(3 * _KAPPA)
_ALPHA = _fp32(1.702)

# Value and derivative of the gate half, or of all of h where there is no gate.
_OF_GATE: dict[Activation, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "swiglu": _silu,
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "reglu": _relu,
    "gpt_oss": lambda z: _limited_gate(z, 7, _ALPHA),
    "swiglu_clamped": lambda z: _limited_gate(z, 10, 1),
    "swiglu_softcapped": _softcapped_gate,
    "relu2": _relu2,
    "gelu": _gelu,
    "silu": _silu,
}

# Likewise of an up half that is not taken as it is.
_OF_UP: dict[Activation, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "gpt_oss": _gpt_oss_up,
    "swiglu_clamped": lambda z: _limited_up(z, 10),
    "swiglu_softcapped": lambda z: _softcap(z, 25),
}


def _halves(h: Tensor, activation: Activation) -> tuple[Tensor, Tensor | None]:
    """Gate and up, or all of h and None, in fp32."""
    if Arithmetic(activation).halves() == 1:
        return h.float(), None
    gate, up = h.float().chunk(2, 1)
    return gate, up


def activated(h: Tensor, activation: Activation) -> Tensor:
    """What an activation makes of h, in fp32."""
    gate, up = _halves(h, activation)
    value = _OF_GATE[activation](gate)[0]
    if up is None:
        return value
    return value * (_OF_UP[activation](up)[0] if activation in _OF_UP else up)


def activated_gradient(h: Tensor, df: Tensor, activation: Activation) -> Tensor:
    """The gradient by h, in fp32, of what `df` is the gradient of the product."""
    gate, up = _halves(h, activation)
    value, slope = _OF_GATE[activation](gate)
    if up is None:
        return df * slope
    d_up = df * value
    if activation in _OF_UP:
        up, up_slope = _OF_UP[activation](up)
        d_up = d_up * up_slope
    return torch.cat([(df * up) * slope, d_up], 1)
