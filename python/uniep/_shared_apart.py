"""Shared experts beside the pass of the routed ones: a layer of each rank alone.

As a rule both are one pass. But over hosts the pass of one would compute the shared experts of all
hosts' tokens; and with biases, or with several combine groups, a pass has none. Where gradients of
routed experts wait (deferred.py), those of shared ones do not. Sums over shared experts are rounded
before they join those of routed ones (docs/numerics.md, "Shared experts"), so it makes no other
bits where they are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._between_hosts.host_mesh import HostMesh
from ._between_hosts.place import ROW_ALIGN
from ._forms import Experts
from .arithmetic import Arithmetic

__all__ = ["alone", "are_apart", "for_both", "learning_with", "rows_of", "slots_of"]


def are_apart(arithmetic: Arithmetic, mesh: HostMesh | None, asked: bool) -> bool:
    """Whether there are shared experts that are no part of the pass.

    Args:
        arithmetic: of the layer.
        mesh: of its processes; None: they are one group.
        asked: for that, where they could be.
    """
    return bool(arithmetic.shared_experts) and (
        asked or mesh is not None or arithmetic.bias or arithmetic.combine_groups > 1
    )


def rows_of(experts: int, max_tokens: int) -> int:
    """All rows that so many tokens make, of so many shared experts."""
    return experts * (max_tokens + -max_tokens % ROW_ALIGN)


def alone(weights: Experts) -> Experts:
    """Those of shared experts as the weights of a layer of S experts."""
    assert weights.shared_w1 is not None and weights.shared_w2 is not None
    return Experts((weights.shared_w1,), (weights.shared_w2,))


def slots_of(w1: Tensor, probs: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """The slots of such a layer: int32 numbers of experts and fp32 probabilities, [T, S] each.

    Args:
        w1: [S, ...].
        probs: fp32 [T or more, S]; None: each is 1.
        tokens: T.
    """
    experts = w1.shape[0]
    ids = torch.arange(experts, dtype=torch.int32, device=w1.device)
    if probs is None:
        probs = torch.ones(tokens, experts, dtype=torch.float32, device=w1.device)
    return ids.expand(tokens, -1).contiguous(), probs[:tokens]


def for_both(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of routed and of shared experts, whose gradients are added up ahead of others."""
    routed, shared = _ForBoth.apply(x)
    return routed, shared


class _ForBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, routed: Tensor, shared: Tensor) -> Tensor:
        return routed + shared


def learning_with(learner: Tensor, probs: Tensor) -> Tensor:
    """`probs`, of which there is a backward wherever there is one of `learner`."""
    learning: Tensor = _LearningWith.apply(learner, probs)
    return learning


class _LearningWith(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, learner: Tensor, probs: Tensor) -> Tensor:
        return probs.view_as(probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: Tensor) -> tuple[None, Tensor]:
        return None, dprobs
