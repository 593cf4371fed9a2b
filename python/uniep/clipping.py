"""The norm of all gradients of a model whose ranks have different experts, and what it limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .group import GroupLike, all_gathered
from .layer import MoELayer, expert_parameters

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients of `module` down to a norm of at most `max_norm`; collective.

    As ``torch.nn.utils.clip_grad_norm_`` with the 2-norm. That one sees the experts of its rank
    only, so that ranks would clip by different norms. Here those of every :class:`uniep.MoELayer`
    count once, in the order of their numbers: all ranks find the same norm, to the bit, and it does
    not depend on how many share the experts. All other gradients have to be alike on all ranks, as
    behind DDP or ``all_reduce``, or DTensors, as behind FSDP2. Main gradients are clipped, too.

    Args:
        module: all ranks of its layers' groups call this alike. A rank may lack gradients of its
            experts that others have.
        max_norm: more than 0.

    Returns:
        The norm ahead of it, fp32, on the device of the gradients.

    Raises:
        TypeError: for what is no module, as its parameters are, and a `max_norm` that is no number.
        ValueError: for another `max_norm`, and for experts that ranks share and that are no
            parameters of their layer, as where they are parametrized.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is a {type(module).__name__}; it must be a torch.nn.Module, not its "
            "parameters: those of experts are found by their layers"
        )
    if not hasattr(type(max_norm), "__float__"):
        raise TypeError(
            f"max_norm is {max_norm!r}, a {type(max_norm).__name__}; it must be a float"
        )
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; more than 0 is accepted")
    squares: list[Tensor] = []
    gradients: list[Tensor] = []
    of_experts: set[int] = set()
    for prefix, layer in module.named_modules():
        if not isinstance(layer, MoELayer):
            continue
        own = [
            weight
            for weight in expert_parameters(layer, prefix).values()
            if id(weight) not in of_experts  # layers may share weights
        ]
        of_experts |= {id(weight) for weight in own}
        found = [_gradient(weight) for weight in own]
        gradients += [gradient for gradient in found if gradient is not None]
        if own:
            squares += _of_all(own, found, layer.group)
    for weight in module.parameters():
        if id(weight) not in of_experts and (gradient := _gradient(weight)) is not None:
            gradients.append(gradient)
            squares.append(_whole(_squares(gradient)))
    if not squares:
        return torch.zeros((), dtype=torch.float32)
    device = squares[0].device
    norm = torch.stack([square.to(device) for square in squares]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch has it
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


def _gradient(weight: Tensor) -> Tensor | None:
    if not weight.requires_grad:
        return None
    main: Tensor | None = getattr(weight, "main_grad", None)
    return weight.grad if main is None else main


def _squares(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm.square()


def _whole(value: Tensor) -> Tensor:
    """Of a DTensor what all ranks have together."""
    whole: Tensor = getattr(value, "full_tensor", lambda: value)()
    return whole


def _of_all(
    weights: Sequence[Tensor], gradients: Sequence[Tensor | None], group: GroupLike
) -> list[Tensor]:
    """The sum of squares of each expert of all ranks, weight after weight.

    A weight without a gradient has zeros: it may have one on other ranks.
    """
    own = torch.stack(
        [
            torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
            if gradient is None
            else _of_experts(gradient)
            for weight, gradient in zip(weights, gradients, strict=True)
        ]
    )
    of_ranks = all_gathered(own, group).view(-1, *own.shape)  # [ranks, weights, experts]
    return list(of_ranks.transpose(0, 1).flatten())


def _of_experts(gradient: Tensor) -> Tensor:
    """The sum of squares of each expert of this rank, or of those that share it by FSDP2."""
    if isinstance(gradient, DTensor):
        if any(placement not in (Shard(0), Replicate()) for placement in gradient.placements):
            return _of_experts(gradient.full_tensor())
        own = _of_experts(gradient.to_local())
        every: Tensor = DTensor.from_local(
            own,
            gradient.device_mesh,
            gradient.placements,
            run_check=False,
            shape=gradient.shape[:1],
            stride=(1,),
        ).full_tensor()
        return every
    columns = math.prod(gradient.shape[1:])
    flat = gradient.reshape(gradient.shape[0], columns)
    # One by one: how PyTorch sums a row may depend on how many there are.
    squares = [_squares(row) for row in flat]
    return torch.stack(squares) if squares else flat.new_empty(0, dtype=torch.float32)
