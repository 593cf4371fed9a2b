"""The router's product under autocast, in a graph.

PyTorch traces the backward of a graph under the autocast around its call, whatever forward has
turned off. An operator of its own computes in fp32 in both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of fp32 tensors, its gradients in fp32, too, with the bits of one not compiled.

    Args:
        x: [..., H].
        weight: [E, H].
        bias: [E].
    """
    out: Tensor = torch.ops.uniep.linear_in_fp32(x, weight, bias)
    return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        if x.dim() <= 2 or x.is_contiguous():
            return F.linear(x, weight, bias)
        # As F.linear does it where gradients are needed, which nobody sees in here.
        out = F.linear(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
        return out if bias is None else out + bias


def _like_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    d_rows = d_out.reshape(-1, d_out.shape[-1])
    # Transposed as by PyTorch's autograd, for its bits.
    dx = linear(d_rows, weight.t(), None).reshape(x.shape) if needs_x else None
    d_weight = linear(d_rows.t(), x.reshape(-1, x.shape[-1]).t(), None) if needs_weight else None
    return dx, d_weight, d_rows.sum(0) if needs_bias else None


# Not by torch.library.custom_op: see zero_experts.py.
_LIBRARY = torch.library.Library("uniep", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear_in_fp32(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "linear_in_fp32", _linear, "CompositeExplicitAutograd"
)
torch.library.register_fake("uniep::linear_in_fp32", _like_linear, lib=_LIBRARY)
torch.library.register_autograd(
    "uniep::linear_in_fp32", _gradients, setup_context=_save, lib=_LIBRARY
)
