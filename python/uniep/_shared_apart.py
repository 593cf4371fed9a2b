"""Shared experts over hosts: a layer of each rank alone, beside that of the routed experts.

In one group both are one pass. The pass of a host that gathers tokens would compute the shared
experts of all hosts' tokens. Their sums are rounded before they join those of routed experts
(docs/numerics.md, "Shared experts"), so it makes no other bits where they are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._forms import Experts, ExpertWeight
from .group import GroupLike
from .hosts import ROW_ALIGN, host_mesh

__all__ = ["SharedApart", "for_both", "is_over_hosts"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_over_hosts(group: GroupLike, device: str) -> bool:
    """Whether collectives bring tokens of this group to other hosts; of process groups, collective.

    Args:
        group: as :func:`uniep.moe` takes it.
        device: by name, which compilers hand on.
    """
    return host_mesh(group, torch.device(device)) is not None


class SharedApart(NamedTuple):
    """The shared experts of a call as a layer: S experts, and S slots a token.

    Attributes:
        w1: bf16 [S, 2I, H], or [S, I, H].
        w2: bf16 [S, H, I].
        probs: fp32 [T, S]; None: each is 1.
        main_grads: of w1 and w2; None: there are none.
    """

    w1: Tensor
    w2: Tensor
    probs: Tensor | None
    main_grads: tuple[ExpertWeight, ...] | None

    @classmethod
    def of(
        cls,
        weights: Experts,
        probs: Tensor | None,
        main_grads: tuple[ExpertWeight, ...] | None,
    ) -> SharedApart:
        """Of what a call with shared experts is given."""
        assert weights.shared_w1 is not None and weights.shared_w2 is not None
        main = None if main_grads is None else main_grads[2:]
        return cls(weights.shared_w1, weights.shared_w2, probs, main)

    def slots(self, tokens: int) -> tuple[Tensor, Tensor]:
        """int32 numbers of experts and fp32 probabilities, [T, S] each."""
        experts = self.w1.shape[0]
        ids = torch.arange(experts, dtype=torch.int32, device=self.w1.device)
        probs = self.probs
        if probs is None:
            probs = torch.ones(tokens, experts, device=self.w1.device)
        return ids.expand(tokens, -1).contiguous(), probs

    def capacity_rows(self, max_tokens: int) -> int:
        """All rows that so many tokens make."""
        return self.w1.shape[0] * (max_tokens + -max_tokens % ROW_ALIGN)


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
