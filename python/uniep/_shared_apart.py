"""Shared experts beside the pass of the routed ones: a layer of each rank alone.

As a rule both are one pass. But over hosts the pass of one would compute the shared experts of all
hosts' tokens; and with biases, or with several combine groups, a pass has none. Sums over shared
experts are rounded before they join those of routed ones (docs/numerics.md, "Shared experts"), so
it makes no other bits where they are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._forms import Experts
from .arithmetic import Arithmetic
from .hosts import ROW_ALIGN, HostMesh

__all__ = ["SharedApart", "are_apart", "for_both", "rows_of"]


def are_apart(arithmetic: Arithmetic, mesh: HostMesh | None) -> bool:
    """Whether there are shared experts that are no part of the pass.

    Args:
        arithmetic: of the layer.
        mesh: of its processes; None: they are one group.
    """
    return bool(arithmetic.shared_experts) and (
        mesh is not None or arithmetic.bias or arithmetic.combine_groups > 1
    )


def rows_of(experts: int, max_tokens: int) -> int:
    """All rows that so many tokens make, of so many shared experts."""
    return experts * (max_tokens + -max_tokens % ROW_ALIGN)


class SharedApart(NamedTuple):
    """The shared experts of a call as a layer: S experts, and S slots a token.

    Attributes:
        weights: w1 of S experts, and w2.
        main: what their gradients are added to; None: they are new.
        probs: fp32 [T, S]; None: each is 1.
    """

    weights: Experts
    main: Experts | None
    probs: Tensor | None

    @classmethod
    def of(cls, weights: Experts, main: Experts | None, probs: Tensor | None) -> SharedApart:
        """Of what a call with shared experts is given."""
        return cls(_alone(weights), None if main is None else _alone(main), probs)

    def slots(self, tokens: int) -> tuple[Tensor, Tensor]:
        """int32 numbers of experts and fp32 probabilities, [T, S] each."""
        w1, probs = self.weights.w1[0], self.probs
        experts = w1.shape[0]
        ids = torch.arange(experts, dtype=torch.int32, device=w1.device)
        if probs is None:
            probs = torch.ones(tokens, experts, device=w1.device)
        return ids.expand(tokens, -1).contiguous(), probs[:tokens]


def _alone(weights: Experts) -> Experts:
    assert weights.shared_w1 is not None and weights.shared_w2 is not None
    return Experts((weights.shared_w1,), (weights.shared_w2,))


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
