"""Routed experts of torchtitan's layers, computed by uniep."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import spmd_types
import torch
from torch import Tensor, nn
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module

import uniep

from .._choices import Choices
from .._forms import W1Layout
from .._save_choice import Save
from ..arithmetic import Activation, CombinePartials, ProbsPlace
from .local_part import local_part
from .shared import UniepSharedExperts


class _Weights(NamedTuple):
    """What :func:`uniep.moe` takes."""

    w1: Tensor | tuple[Tensor, Tensor]
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None


class UniepExperts(GroupedExperts):
    """The weights of the experts, which are torchtitan's own, and :func:`uniep.moe` on them.

    Attributes:
        w1_EFD: [E, F, D], the gate's.
        w3_EFD: [E, F, D], those of up.
        w2_EDF: [E, D, F].
        num_experts: E of all ranks.
        group: the expert-parallel process group, or None: this process has all experts.
        shared: the module of the layer's shared experts, if they are part of the pass, in a tuple:
            it is the layer's.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's, and what every :func:`uniep.moe` is given."""

        probs: ProbsPlace = "after"
        max_tokens: int | None = None
        capacity_rows: int | None = None
        save: Save | None = None
        recompute_h: bool | None = None
        backward_rows: int | None = None
        exact_rows: bool | None = None
        exact_hosts: bool | None = None
        schedule: str | None = None
        row_pool: int | None = None
        combine_groups: int | None = None
        combine_partials: CombinePartials | None = None

    activation: Activation = "swiglu"
    w1_layout: W1Layout = "halves"

    def __init__(self, config: Config) -> None:
        # Not GroupedExperts.__init__: gpt-oss has other parameters.
        nn.Module.__init__(self)
        self.num_experts = config.num_experts
        self.group: torch.distributed.ProcessGroup | None = None
        self.shared: tuple[UniepSharedExperts, ...] = ()
        self._choices = Choices(
            activation=self.activation,
            **{name: getattr(config, name) for name in Choices._fields if name != "activation"},
        )
        self._add_parameters(config)

    def _add_parameters(self, config: Config) -> None:
        experts, inner, outer = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD = nn.Parameter(torch.empty(experts, inner, outer))
        self.w2_EDF = nn.Parameter(torch.empty(experts, outer, inner))
        self.w3_EFD = nn.Parameter(torch.empty(experts, inner, outer))

    def _weights(self) -> _Weights:
        return _Weights((self.w1_EFD, self.w3_EFD), self.w2_EDF)

    def forward(self, x: Tensor, scores: Tensor, expert_ids: Tensor) -> Tensor:
        """Dispatches, computes and combines; collective over the expert-parallel group.

        Args:
            x: [..., D] of any float type; products are of bf16, as torchtitan's are.
            scores: [..., K].
            expert_ids: int32 or int64 [..., K], among the experts of all ranks.

        Returns:
            [..., D], of the type of x.

        Raises:
            ValueError, RuntimeError: see :func:`uniep.moe`.
        """
        weights = self._weights()
        b1, b2 = (None if bias is None else local_part(bias).bfloat16() for bias in weights[2:])
        w1 = (
            local_part(weights.w1).bfloat16()
            if isinstance(weights.w1, Tensor)
            else [local_part(weight).bfloat16() for weight in weights.w1]
        )
        tokens = x.bfloat16()
        shared = {}
        for module in self.shared:
            shared = module.weights(tokens, weights.w2.shape[2])._asdict()
        out = uniep.moe(
            tokens,
            expert_ids,
            scores.float(),
            w1,
            local_part(weights.w2).bfloat16(),
            w1_layout=self.w1_layout,
            b1=b1,
            b2=b2,
            group=self.group,
            **self._choices._asdict(),
            **shared,
        )
        return out.to(x.dtype)


class UniepGptOssExperts(UniepExperts):
    """The weights of gpt-oss' experts, which are torchtitan's own, and :func:`uniep.moe` on them.

    Attributes:
        mlp1_weight_EGD: [E, 2F, D]: rows of gate and up alternate.
        mlp1_bias_EG: [E, 2F], likewise.
        mlp2_weight_EDF: [E, D, F].
        mlp2_bias_ED: [E, D].
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(UniepExperts.Config):
        """As for other experts, and torchtitan's limit of the gate, which is 7."""

        swiglu_limit: float = 7.0

    activation: Activation = "gpt_oss"
    w1_layout: W1Layout = "interleaved"

    def _add_parameters(self, config: UniepExperts.Config) -> None:
        experts, inner, outer = config.num_experts, config.hidden_dim, config.dim
        self.mlp1_weight_EGD = nn.Parameter(torch.empty(experts, 2 * inner, outer))
        self.mlp1_bias_EG = nn.Parameter(torch.empty(experts, 2 * inner))
        self.mlp2_weight_EDF = nn.Parameter(torch.empty(experts, outer, inner))
        self.mlp2_bias_ED = nn.Parameter(torch.empty(experts, outer))

    def _weights(self) -> _Weights:
        # uniep has the gate's biases first; they are few, unlike weights.
        bias = local_part(self.mlp1_bias_EG)
        b1 = torch.cat([bias[:, ::2], bias[:, 1::2]], 1)
        return _Weights(self.mlp1_weight_EGD, self.mlp2_weight_EDF, b1, self.mlp2_bias_ED)


class UniepRoutedExperts(RoutedExperts):
    """Takes the place of torchtitan's routed experts; the dispatcher in its config is not built."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """torchtitan's, with ``inner_experts`` a :class:`UniepExperts.Config`."""

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.inner_experts: UniepExperts = config.inner_experts.build()

    def forward(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, tokens_per_expert: Tensor
    ) -> Tensor:
        """Runs the experts on this rank's tokens.

        Args:
            x: [T, D], or [B, L, D] as torchtitan 0.3.0 passes it.
            scores: fp32 [T, K] or [B, L, K].
            expert_ids: int64 of the same shape.
            tokens_per_expert: [E]; not needed.

        Returns:
            What x is: shape and type.
        """
        # torchtitan knows no types of uniep's ops; the sharding config states those of the result.
        with spmd_types.no_typecheck():
            out: Tensor = self.inner_experts(x, scores, expert_ids)
        return out

    def parallelize(self, parallel_dims: Any) -> None:
        """Shards the weights, and takes the expert-parallel group of torchtitan's mesh.

        Raises:
            NotImplementedError: for tensor parallelism inside of experts.
        """
        if parallel_dims.tp > 1 and parallel_dims.ep == 1:
            raise NotImplementedError(
                "uniep does not split an expert over ranks, as tensor_parallel_degree="
                f"{parallel_dims.tp} does where expert_parallel_degree is 1; set "
                "parallelism.expert_parallel_degree to a multiple of "
                "parallelism.tensor_parallel_degree, so that experts stay whole"
            )
        Module.parallelize(self, parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        self.inner_experts.group = None if mesh is None else mesh.get_group()


# torchtitan finds placements of inputs by the names of arguments, which differ by its version.
UniepRoutedExperts.forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    RoutedExperts.forward
)
