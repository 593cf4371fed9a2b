"""Experts that compute nothing, as LongCat-Flash and MoE++ have them.

Their numbers stand behind those of the real experts: E to E + Z - 1. The fused layer sees dropped
slots in their place. What identity experts give a token is added behind it, with the same bits on
every device, for every number of ranks, and whether compiled or not:

    q[t]    = sum over k ascending of p[t,k], where the slot's expert is an identity, in fp32
    out[t]  = bf16(routed[t] + q[t] x[t])                     the product is rounded to fp32
    dx[t]   = bf16(q[t] dout[t])                              autograd adds it to the routed one
    dp[t,k] = sum over columns of dout[t] x[t]

The last sum is in fp32, in stripes of 1024 columns: column c of all stripes, ascending, then sums
of columns c and c + n for n = 512, 256, ..., 1. Tokens without such slots are left as they are.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._differentiable import ONCE
from ._plain_values import check_whole

__all__ = ["ZeroExpertType", "add_identity", "check", "split"]

ZeroExpertType = Literal["identity", "zero"]

_STRIPE = 1024
_MOST = 2**30  # with as many real ones, numbers of experts are still int32


class ZeroSlots(NamedTuple):
    """What a routing says of experts that compute nothing.

    Attributes:
        ids: [..., K], the routing without them: -1 in their place.
        share: fp32 [...], the sum q of the weights of their slots.
        has: bool [...], whether there are any.
    """

    ids: Tensor
    share: Tensor
    has: Tensor

    def unless(self, fault: Tensor) -> ZeroSlots:
        """The same, but that probabilities have gradient 0 where fault[0] is not 0."""
        return ZeroSlots(self.ids, torch.where(fault[0] == 0, self.share, 0.0), self.has)


def check(zero_experts: int, zero_expert_type: str) -> None:
    """Raises TypeError for no whole number, ValueError for one too small or large, and a type."""
    if type(zero_experts) is not int:  # nearly every call has one
        check_whole(zero_experts=zero_experts)
    if not 0 <= zero_experts <= _MOST:
        raise ValueError(f"zero_experts is {zero_experts}; it must be 0 to {_MOST}")
    if zero_expert_type not in ("identity", "zero"):
        raise ValueError(
            f"zero_expert_type is '{zero_expert_type}'; it must be 'identity' or 'zero'"
        )


def split(topk_ids: Tensor, topk_probs: Tensor, experts: int, zero_experts: int) -> ZeroSlots:
    """Tells slots of real experts from those of others.

    Args:
        topk_ids: [..., K]. What is neither stays as it is, for the layer to refuse.
        topk_probs: fp32 [..., K].
        experts: E, the real ones of all ranks.
        zero_experts: Z.
    """
    zero = (topk_ids >= experts) & (topk_ids < experts + zero_experts)
    weights = torch.where(zero, topk_probs, 0.0)
    share = torch.zeros_like(weights[..., 0])
    for k in range(weights.shape[-1]):
        share = share + weights[..., k]
    return ZeroSlots(torch.where(zero, -1, topk_ids), share, zero.any(-1))


def add_identity(routed: Tensor, x: Tensor, slots: ZeroSlots) -> Tensor:
    """Adds what identity experts give.

    Args:
        routed: bf16 [..., H], of the real experts.
        x: bf16 [..., H].
        slots: of the routing.

    Returns:
        bf16 [..., H].
    """
    # An operator of its own, so that no compiler fuses its products and sums.
    out: Tensor = torch.ops.uniep.add_share(routed, x, slots.share, slots.has)
    return out


def _add_share(routed: Tensor, x: Tensor, share: Tensor, has: Tensor) -> Tensor:
    added = share.unsqueeze(-1) * x.float()
    total = (routed.float() + added).to(routed.dtype)
    return torch.where(has.unsqueeze(-1), total, routed).contiguous()


def _like_share(routed: Tensor, x: Tensor, share: Tensor, has: Tensor) -> Tensor:
    return routed.new_empty(routed.shape)


def _add_share_backward(
    d_out: Tensor, x: Tensor, share: Tensor, has: Tensor
) -> tuple[Tensor, Tensor]:
    dx = (share.unsqueeze(-1) * d_out.float()).to(x.dtype)
    sums = x.new_zeros((*x.shape[:-1], _STRIPE), dtype=torch.float32)
    for first in range(0, x.shape[-1], _STRIPE):
        stripe = (
            d_out[..., first : first + _STRIPE].float() * x[..., first : first + _STRIPE].float()
        )
        sums[..., : stripe.shape[-1]] += stripe
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    return torch.where(has.unsqueeze(-1), dx, 0.0).contiguous(), sums.squeeze(-1).contiguous()


def _like_gradients(d_out: Tensor, x: Tensor, share: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), share.new_empty(share.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    dx, d_share = torch.ops.uniep.add_share_backward(d_out, *ctx.saved_tensors)
    return d_out, dx, d_share, None


def _no_gradients(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(ONCE)


# Not by torch.library.custom_op, whose operators import the compiler in their first call.
_LIBRARY = torch.library.Library("uniep", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _run, _shapes in (
    (
        "add_share(Tensor routed, Tensor x, Tensor share, Tensor has) -> Tensor",
        _add_share,
        _like_share,
    ),
    (
        "add_share_backward(Tensor d_out, Tensor x, Tensor share, Tensor has) -> (Tensor, Tensor)",
        _add_share_backward,
        _like_gradients,
    ),
):
    _LIBRARY.define(_schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
    _name = _schema.partition("(")[0]
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"uniep::{_name}", _shapes, lib=_LIBRARY)
torch.library.register_autograd("uniep::add_share", _gradients, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("uniep::add_share_backward", _no_gradients, lib=_LIBRARY)
