"""From Megatron's dense routing to the ids and probabilities that uniep takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["routes", "too_many_routes"]


def routes(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The routes of every token as ids and probabilities, by expert, ascending.

    The map alone says which experts a token goes to: a probability may be 0 there, and a token that
    the router dropped has fewer routes. Such slots have id -1 and probability 0.

    Args:
        probs: [T, E], any floating type.
        routing_map: bool [T, E].
        topk: K, the most routes of a token.

    Returns:
        int32 [T, K] and fp32 [T, K]; the latter is differentiable by ``probs``.
    """
    ids, weights = _Routes.apply(probs, routing_map, topk)
    return ids, weights


class _Routes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        experts = routing_map.shape[1]
        numbers = torch.arange(experts, dtype=torch.int32, device=routing_map.device)
        routed = torch.where(routing_map.bool(), numbers, experts)
        slots = routed.topk(topk, dim=1, largest=False, sorted=True).values
        dropped = slots == experts
        index = slots.long()
        weights = probs.gather(1, index.clamp(max=experts - 1)).float().masked_fill_(dropped, 0)
        ids = slots.masked_fill(dropped, -1)
        ctx.save_for_backward(index)
        ctx.experts, ctx.dtype = experts, probs.dtype
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor | None, dweights: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        # Dropped slots write to a column of their own, so no two slots write one element.
        dprobs = dweights.new_zeros(index.shape[0], ctx.experts + 1).scatter_(1, index, dweights)
        return dprobs[:, : ctx.experts].to(ctx.dtype), None, None


def too_many_routes(routing_map: Tensor, topk: int) -> str | None:
    """What is wrong with a map that sends a token to more than K experts; waits for the device."""
    most = int(routing_map.bool().sum(1).max()) if routing_map.numel() else 0
    if most <= topk:
        return None
    return f"a token has {most} routes in routing_map; there may be moe_router_topk = {topk}"
