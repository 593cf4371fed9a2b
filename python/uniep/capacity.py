"""Expert capacity: slots that an expert has no room for go nowhere.

uniep's layer needs no capacity, it drops nothing by itself. These functions are for models that
were trained with one: they give slots beyond it expert -1 and probability 0. Such slots have no row
and no gradient, and cost nothing.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ._arguments import check_tensors
from ._plain_values import check_number, check_whole

__all__ = ["drop_over_capacity", "expert_capacity"]

DropPolicy = Literal["probs", "position"]


def expert_capacity(tokens: int, topk: int, num_experts: int, capacity_factor: float) -> int:
    """Slots that an expert has room for: Megatron's ceil(tokens · topk / experts · factor).

    Args:
        tokens: of this rank, padding included.
        topk: K.
        num_experts: E, of all ranks.
        capacity_factor: 1: exactly enough if the load is even.

    Raises:
        TypeError: for numbers that are not whole, and a factor that is none.
        ValueError: for a factor that is not positive, and numbers that are too small.
    """
    check_whole(tokens=tokens, topk=topk, num_experts=num_experts)
    least = {"tokens": 0, "topk": 1, "num_experts": 1}
    for (name, fewest), number in zip(least.items(), (tokens, topk, num_experts), strict=True):
        if number < fewest:
            raise ValueError(f"{name} is {number}; it must be at least {fewest}")
    check_factor(capacity_factor)
    return math.ceil(tokens * topk / num_experts * capacity_factor)


def drop_over_capacity(
    topk_ids: Tensor, topk_probs: Tensor, capacity: int, policy: DropPolicy = "probs"
) -> tuple[Tensor, Tensor]:
    """Drops the slots of each expert beyond its capacity.

    Capacity is counted on each rank for itself, as Megatron-Core's routers do: an expert takes up
    to `capacity` slots of each rank. So what is dropped depends on how tokens are spread over
    ranks. It is deterministic, and does not wait for the device. Weights are not normalised again.

    Args:
        topk_ids: int32 or int64 [..., K]; -1: dropped already, which takes no room.
        topk_probs: floating [..., K]; gradients pass through the slots that stay.
        capacity: of an expert, at least 0.
        policy: which slots stay: ``"probs"``, those with the largest probabilities, of equal ones
            the first; or ``"position"``, the first. Slots are counted by token, then k.

    Returns:
        Ids and probabilities of the same shape; -1 and 0 where a slot was dropped.

    Raises:
        TypeError: for other types than these.
        ValueError: for shapes that differ, a negative capacity, or an unknown policy.
    """
    check_tensors(topk_ids=topk_ids, topk_probs=topk_probs)
    check_whole(capacity=capacity)
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {topk_ids.dtype}; it must be torch.int32 or torch.int64")
    if not topk_probs.is_floating_point():
        raise TypeError(f"topk_probs is {topk_probs.dtype}; it must be of a floating type")
    if topk_ids.shape != topk_probs.shape:
        raise ValueError(
            f"topk_ids has shape {list(topk_ids.shape)} and topk_probs {list(topk_probs.shape)}; "
            "they must be equal"
        )
    if capacity < 0:
        raise ValueError(f"capacity is {capacity}; it must be at least 0")
    check_policy(policy)
    experts = topk_ids.flatten()
    if policy == "probs":
        best = topk_probs.detach().flatten().sort(descending=True, stable=True).indices
        by_expert = experts[best].sort(stable=True)
        order = best[by_expert.indices]
    else:
        by_expert = experts.sort(stable=True)
        order = by_expert.indices
    begin = torch.searchsorted(by_expert.values, by_expert.values)  # of the slot's expert
    place = torch.arange(len(order), device=order.device) - begin
    fits = torch.empty_like(place, dtype=torch.bool).scatter(0, order, place < capacity)
    stays = fits.view(topk_ids.shape) & (topk_ids >= 0)
    return torch.where(stays, topk_ids, -1), torch.where(stays, topk_probs, 0.0)


def check_factor(capacity_factor: float) -> None:
    """Raises TypeError for what is no number, and ValueError for one not positive and finite."""
    check_number(capacity_factor=capacity_factor)
    if not 0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor is {capacity_factor}; it must be positive and finite")


def check_policy(policy: str) -> None:
    """Raises ValueError for an unknown policy."""
    if policy not in ("probs", "position"):
        raise ValueError(f"drop policy is '{policy}'; it must be 'probs' or 'position'")
