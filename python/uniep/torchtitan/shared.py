"""Shared experts of torchtitan's layers, in the pass of the routed ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE

from .. import _shared_experts
from .._shared_experts import Shared
from .local_part import local_part


class UniepSharedExperts(FeedForward):
    """The weights of shared experts, torchtitan's own; they run with the routed ones.

    A module as wide as S routed experts is S shared ones.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """torchtitan's."""

    def forward(self, x: Tensor) -> None:
        """Nothing is to be added: what they give is in the routed experts' output."""

    def weights(self, x: Tensor, intermediate: int) -> Shared:
        """What :func:`uniep.moe` takes.

        Args:
            x: bf16 [..., D].
            intermediate: I of a routed expert.
        """
        first, second, third = (
            local_part(linear.weight).bfloat16() for linear in (self.w1, self.w2, self.w3)
        )
        return Shared(*_shared_experts.weights([first, third], second, intermediate))


class UniepGatedSharedExperts(UniepSharedExperts, SigmoidGatedFeedForward):
    """Shared experts with a gate: what they give a token counts sigmoid(gate(x)) times."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SigmoidGatedFeedForward.Config):
        """torchtitan's."""

    def __init__(self, config: Config) -> None:
        SigmoidGatedFeedForward.__init__(self, config)

    def weights(self, x: Tensor, intermediate: int) -> Shared:
        """What :func:`uniep.moe` takes; see :class:`UniepSharedExperts`."""
        w1, w2, _ = super().weights(x, intermediate)
        logits = nn.functional.linear(x, local_part(self.gate.weight).bfloat16())
        probs = torch.sigmoid(logits).float()
        return Shared(w1, w2, probs.expand(*probs.shape[:-1], w1.shape[0]))


class UniepMoE(MoE):
    """torchtitan's MoE layer, whose shared experts run in the pass of the routed ones."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """torchtitan's, with experts of uniep's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.shared_experts is not None:
            _refuse_other_linears(self.shared_experts)
            self.routed_experts.inner_experts.shared = (self.shared_experts,)

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan does.

        Raises:
            NotImplementedError: for tensor parallelism, which splits shared experts.
        """
        if self.shared_experts is not None and parallel_dims.tp > 1:
            raise NotImplementedError(
                f"tensor_parallel_degree is {parallel_dims.tp}, which splits shared experts over "
                "ranks; in uniep's pass they stay whole: set it to 1, or use uniep_routed_experts"
            )
        super().parallelize(parallel_dims)


def _refuse_other_linears(shared: nn.Module) -> None:
    """Raises one sentence if a converter has come after the override: the pass reads weights."""
    for name, linear in shared.named_children():
        if type(linear) is not Linear:
            raise NotImplementedError(
                f"{name} of the shared experts is a {type(linear).__qualname__}, of which uniep's "
                "pass would read the weight alone, without an adapter (LoRA) or whatever else it "
                "computes; torchtitan's Linear is accepted (uniep_routed_experts takes any)"
            )
