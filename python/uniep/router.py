"""Routers: which experts a token goes to, with which weights, and how evenly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Router", "RouterConfig", "Routing"]


@dataclass(frozen=True)
class RouterConfig:
    """How a router chooses. The default is Mixtral's.

    ====================  ====================================================================
    Mixtral               ``RouterConfig()``
    Qwen3-MoE             ``RouterConfig(normalize=norm_topk_prob)``
    OLMoE                 ``RouterConfig(normalize=norm_topk_prob)``, which is False there
    DeepSeek-V3           ``RouterConfig("sigmoid", bias=True, n_group=8, topk_group=4,
                          scaling_factor=2.5)``
    ====================  ====================================================================

    Attributes:
        score: of all experts, in fp32: ``"softmax"`` or ``"sigmoid"`` of the logits.
        normalize: the weights of a token's K experts are divided by their sum.
        bias: experts are chosen by score + bias, a buffer that no gradient reaches
            (:meth:`Router.update_bias`); weights are scores without it.
        n_group: experts form this many groups of neighbours, ...
        topk_group: ... of which a token uses this many: those with the largest sums of their two
            best experts.
        scaling_factor: of the weights, at last.
        aux_loss: coefficient of the load-balancing loss, E · sum over experts of (share of slots) ·
            (mean score); 1 without its coefficient where the load is even. Over this rank's tokens.
        z_loss: coefficient of the mean squared logsumexp of the logits.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0
    aux_loss: float = 0.0
    z_loss: float = 0.0


class Routing(NamedTuple):
    """What a router found for T tokens.

    Attributes:
        ids: int64 [..., K].
        probs: fp32 [..., K], with gradients to the router.
        tokens_per_expert: int64 [E], how many of these slots each expert got.
        loss: fp32 scalar, auxiliary loss and z-loss with their coefficients; None where both are 0.
    """

    ids: Tensor
    probs: Tensor
    tokens_per_expert: Tensor
    loss: Tensor | None


class Router(nn.Module):
    """Scores, top-k and load of one layer; computes in fp32, under autocast too.

    Args:
        hidden: H.
        num_experts: E, of all ranks.
        topk: K.
        config: how it chooses.
        dtype: of its weight.
        device: where it lies.

    Attributes:
        weight: [E, H].
        bias: fp32 [E] buffer; None without ``config.bias``.
        load: int64 [E] buffer, not saved: slots per expert in training since
            :meth:`update_bias` or ``load.zero_()``.

    Raises:
        ValueError: for a K or groups that E does not fit.
    """

    weight: Tensor
    bias: Tensor | None
    load: Tensor

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        config: RouterConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        config = RouterConfig() if config is None else config
        _check(config, num_experts, topk)
        self.config = config
        self.num_experts = num_experts
        self.topk = topk
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
        bias = torch.zeros(num_experts, device=device) if config.bias else None
        self.register_buffer("bias", bias)
        load = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("load", load, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from U(-1/sqrt(H), 1/sqrt(H)) and clears bias and load."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            self.bias.zero_()
        self.load.zero_()

    def forward(self, x: Tensor) -> Routing:
        """Routes tokens.

        Args:
            x: [..., H] of any floating dtype.
        """
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
            scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
            ids = self._choose(scores)
            probs = scores.gather(-1, ids)
            if config.normalize:
                probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
            if config.scaling_factor != 1.0:
                probs = probs * config.scaling_factor
            load = _count(ids, self.num_experts)
            loss = self._loss(logits, scores, load)
        if self.training:
            self.load += load
        return Routing(ids, probs, load, loss)

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        choice = scores.detach()
        if self.bias is not None:
            choice = choice + self.bias
        if config.n_group > 1:
            groups = choice.reshape(*choice.shape[:-1], config.n_group, -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
            allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            choice = groups.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
        return choice.topk(self.topk, dim=-1).indices

    def _loss(self, logits: Tensor, scores: Tensor, load: Tensor) -> Tensor | None:
        config = self.config
        loss: Tensor | None = None
        tokens = max(logits.numel() // self.num_experts, 1)
        if config.aux_loss:
            if config.score == "sigmoid":
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            mean = scores.reshape(-1, self.num_experts).sum(0) / tokens
            share = load.float() / (tokens * self.topk)
            loss = config.aux_loss * self.num_experts * (share * mean).sum()
        if config.z_loss:
            z = config.z_loss * logits.logsumexp(-1).square().sum() / tokens
            loss = z if loss is None else loss + z
        return loss

    @torch.no_grad()
    def update_bias(self, rate: float, process_group: dist.ProcessGroup | None = None) -> None:
        """Moves the bias by `rate` towards an even load, and clears the load.

        Args:
            rate: by how much, up for experts with less than the mean, down for those with more.
            process_group: over which loads are summed first: all ranks that share these weights.
                None: this rank's tokens alone.

        Raises:
            ValueError: for a router without bias.
        """
        if self.bias is None:
            raise ValueError("this router has no bias; make it with RouterConfig(bias=True)")
        if process_group is not None:
            dist.all_reduce(self.load, group=process_group)
        load = self.load.float()
        self.bias += rate * torch.sign(load.mean() - load)
        self.load.zero_()

    def extra_repr(self) -> str:
        """Its figures, for printing."""
        return f"num_experts={self.num_experts}, topk={self.topk}, {self.config}"


def _check(config: RouterConfig, num_experts: int, topk: int) -> None:
    if config.score not in ("softmax", "sigmoid"):
        raise ValueError(f"score is '{config.score}'; it must be 'softmax' or 'sigmoid'")
    if not 1 <= topk <= num_experts:
        raise ValueError(
            f"topk is {topk}; with {num_experts} experts it must be 1 to {num_experts}"
        )
    if config.n_group < 1 or num_experts % config.n_group:
        raise ValueError(f"n_group is {config.n_group}; it must divide the {num_experts} experts")
    if config.n_group == 1:
        return
    size = num_experts // config.n_group
    if size < 2:
        raise ValueError(f"n_group is {config.n_group}; a group needs 2 of {num_experts} experts")
    if not 1 <= config.topk_group <= config.n_group:
        raise ValueError(
            f"topk_group is {config.topk_group}; it must be 1 to n_group, {config.n_group}"
        )
    if topk > size * config.topk_group:
        raise ValueError(
            f"topk is {topk}; topk_group={config.topk_group} groups have only "
            f"{size * config.topk_group} experts"
        )


def _count(ids: Tensor, num_experts: int) -> Tensor:
    # Sorting is deterministic on every device, and needs no answer from it.
    order = ids.flatten().sort().values
    edges = torch.arange(-1, num_experts, dtype=order.dtype, device=ids.device)
    return torch.searchsorted(order, edges, right=True).diff()
