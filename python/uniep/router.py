"""Routers: which experts a token goes to, with which weights, and how evenly."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _fp32_linear
from ._arguments import check_tensors
from ._plain_values import check_bool, check_finite, check_whole
from .capacity import (
    DropPolicy,
    check_factor,
    check_policy,
    drop_over_capacity,
    expert_capacity,
)
from .group import GroupLike, all_gathered

__all__ = ["Router", "RouterConfig", "Routing"]


@dataclass(frozen=True)
class RouterConfig:
    """How a router chooses. The default is Mixtral's; docs/python.md has those of other models.

    Of equal scores the expert with the lower number comes first, and so does the lower group.

    Attributes:
        score: of all experts, in fp32, from the logits: ``"softmax"``, ``"sigmoid"``, or
            ``"sqrtsoftplus"``, sqrt(log(1 + exp(z))).
        normalize: the weights of a token's K experts are divided by their sum, so with K = 1 each
            is 1, whatever the score.
        bias: experts are chosen by score + bias, a buffer that no gradient reaches
            (:meth:`Router.update_bias`); weights are scores without it.
        n_group: experts form this many groups of neighbours, ...
        topk_group: ... of which a token uses this many: those with the largest ...
        group_score: ... sum of their two best experts, ``"top2"``, or best expert, ``"max"``.
        scaling_factor: of the weights, at last.
        logit_bias: the logits have a bias, a parameter.
        aux_loss: coefficient of the load-balancing loss, E · sum over experts of (share of slots) ·
            (mean score); 1 without its coefficient where the load is even. Over this rank's tokens.
        z_loss: coefficient of the mean squared logsumexp of the logits.
        capacity_factor: slots beyond :func:`uniep.expert_capacity` are dropped; None: none are.
        drop_policy: which slots stay; see :func:`uniep.drop_over_capacity`.
    """

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalize: bool = True
    bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["top2", "max"] = "top2"
    scaling_factor: float = 1.0
    logit_bias: bool = False
    aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None
    drop_policy: DropPolicy = "probs"


class Routing(NamedTuple):
    """What a router found for T tokens.

    Attributes:
        ids: int64 [..., K], the best expert first; -1 in dropped slots, which those of padding are.
        probs: fp32 [..., K], with gradients to the router; 0 in dropped slots.
        tokens_per_expert: int64 [E], how many slots chose each expert, those that were dropped for
            lack of room included, padding not.
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
        logit_bias: [E]; None without ``config.logit_bias``.
        bias: fp32 [E] buffer, also of a module that is cast; None without ``config.bias``.
        load: int64 [E] buffer, not saved: sum of ``tokens_per_expert`` in training since
            :meth:`update_bias` or ``load.zero_()``.

    Raises:
        TypeError: for a configuration that is no :class:`RouterConfig`, and what is of another
            type than its fields and these are.
        ValueError: for a K or groups that E does not fit, and figures that are out of range.

    Warns:
        UserWarning: for K = 1 of several experts with ``config.normalize``, where no gradient of
            what experts give reaches the router.
    """

    weight: Tensor
    logit_bias: Tensor | None
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
        check_whole(hidden=hidden)
        _check(config, num_experts, topk)
        if topk == 1 and config.normalize and num_experts > 1:
            _warn_of_constant_weights()
        self.config = config
        self.num_experts = num_experts
        self.topk = topk
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
        self.logit_bias = None
        if config.logit_bias:
            self.logit_bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device))
        bias = None
        if config.bias:
            bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("bias", bias)
        load = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("load", load, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from U(-1/sqrt(H), 1/sqrt(H)) and clears biases and load."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.logit_bias is not None:
            nn.init.zeros_(self.logit_bias)
        if self.bias is not None:
            self.bias.zero_()
        self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # A model that is cast to bf16 keeps its bias: steps of an update would round to nothing.
        bias, was_meta = self.bias, self.load.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta or _copies_nothing(fn):  # no file has it
            self.load.zero_()
        if bias is not None and self.bias is not None and self.bias.dtype != bias.dtype:
            moved = self.bias.float() if bias.is_meta else bias.to(self.bias.device)
            self.bias = moved
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.bias is not None and self.bias.dtype != torch.float32:  # with assign=True
            self.bias = self.bias.float()
        if self.load.is_meta and not self.weight.is_meta:  # likewise; no file has it
            self.load = torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        """Routes tokens.

        Args:
            x: [..., H] of any floating dtype.
            token_mask: bool [...]; False: padding, which may hold anything. Its slots are dropped,
                and it counts nowhere but in the capacity, which does not depend on data. None:
                there is no padding.

        Raises:
            ValueError: for x of another hidden size or on the meta device, and a mask of another
                shape.
            TypeError: for x or a mask that is no tensor, and a mask of another dtype.
        """
        config = self.config
        _check_x(x, self.weight.shape[1])
        if token_mask is not None:
            _check_mask(token_mask, x)
            x = torch.where(token_mask.unsqueeze(-1), x, 0.0)  # 0 times NaN would be NaN
        device = x.device.type
        in_graph = torch.compiler.is_compiling() and torch.is_autocast_enabled(device)
        product = _fp32_linear.linear if in_graph else F.linear
        with torch.autocast(device, enabled=False):
            bias = None if self.logit_bias is None else self.logit_bias.float()
            logits = product(x.float(), self.weight.float(), bias)
            scores = _SCORES[config.score](logits)
            ids = self._choose(scores)
            probs = self._weigh(scores, ids)
            if token_mask is not None:
                ids = torch.where(token_mask.unsqueeze(-1), ids, -1)
                probs = torch.where(token_mask.unsqueeze(-1), probs, 0.0)
            load = _count(ids, self.num_experts)
            loss = self._loss(logits, scores, load, token_mask)
            if config.capacity_factor is not None:
                tokens = logits.numel() // self.num_experts
                ids, probs = drop_over_capacity(
                    ids,
                    probs,
                    expert_capacity(tokens, self.topk, self.num_experts, config.capacity_factor),
                    config.drop_policy,
                )
        if self.training:
            self.load.add_(load)  # += would be an attribute set, which no checkpoint compiles
        return Routing(ids, probs, load, loss)

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        choice = scores.detach()
        if self.bias is not None:
            choice = choice + self.bias
        if config.n_group > 1:
            size = self.num_experts // config.n_group
            groups = choice.reshape(*choice.shape[:-1], config.n_group, size)
            if config.group_score == "top2":
                of_group = groups.topk(2, dim=-1).values.sum(-1)
            else:
                of_group = groups.amax(-1)
            best = _top(of_group, config.topk_group)
            allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            choice = groups.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
        return _top(choice, self.topk)

    def _weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        probs = scores.gather(-1, ids)
        if self.config.normalize:
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
        return probs * self.config.scaling_factor

    def _loss(
        self, logits: Tensor, scores: Tensor, load: Tensor, token_mask: Tensor | None
    ) -> Tensor | None:
        config = self.config
        loss: Tensor | None = None
        tokens: int | Tensor = max(logits.numel() // self.num_experts, 1)
        if token_mask is not None:
            tokens = token_mask.sum().clamp(min=1)
        if config.aux_loss:
            if config.score != "softmax":
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            if token_mask is not None:
                scores = torch.where(token_mask.unsqueeze(-1), scores, 0.0)
            mean = scores.reshape(-1, self.num_experts).sum(0) / tokens
            share = load.float() / (tokens * self.topk)
            loss = config.aux_loss * self.num_experts * (share * mean).sum()
        if config.z_loss:
            squares = logits.logsumexp(-1).square()
            if token_mask is not None:
                squares = torch.where(token_mask, squares, 0.0)
            z = config.z_loss * squares.sum() / tokens
            loss = z if loss is None else loss + z
        return loss

    @torch.no_grad()
    def update_bias(self, rate: float, process_group: GroupLike = None) -> None:
        """Moves the bias by `rate` towards an even load, and clears the load.

        Args:
            rate: by how much, up for experts with less than the mean, down for those with more.
            process_group: over which loads are summed first: all ranks that share these weights,
                as :func:`uniep.moe` takes them. None: this rank's tokens alone. Right for one
                rank; of several each then moves the bias its own way, and their routers part.

        Raises:
            ValueError: for a router without bias, or on the meta device, where nothing is counted.
        """
        if self.bias is None:
            raise ValueError("this router has no bias; make it with RouterConfig(bias=True)")
        if self.load.is_meta:
            raise ValueError(
                "load is on the meta device, where nothing is counted; a router with memory is "
                "accepted, by to_empty(device=...) or load_state_dict(..., assign=True)"
            )
        loads = all_gathered(self.load, process_group)
        self.load.copy_(loads.view(-1, self.num_experts).sum(0))
        # In whole numbers, so that an expert with exactly the mean stays where it is.
        below_mean = self.load.sum() - self.load * self.num_experts
        self.bias += rate * torch.sign(below_mean)
        self.load.zero_()

    def extra_repr(self) -> str:
        """Its figures, for printing."""
        return f"num_experts={self.num_experts}, topk={self.topk}, {self.config}"


def _check(config: RouterConfig, num_experts: int, topk: int) -> None:
    if not isinstance(config, RouterConfig):
        raise TypeError(
            f"the router's configuration is a {type(config).__name__}; it must be a "
            "uniep.RouterConfig"
        )
    check_bool(normalize=config.normalize, bias=config.bias, logit_bias=config.logit_bias)
    check_finite(
        scaling_factor=config.scaling_factor, aux_loss=config.aux_loss, z_loss=config.z_loss
    )
    check_whole(
        num_experts=num_experts, topk=topk, n_group=config.n_group, topk_group=config.topk_group
    )
    if config.score not in tuple(_SCORES):
        raise ValueError(
            f"score is '{config.score}'; it must be 'softmax', 'sigmoid' or 'sqrtsoftplus'"
        )
    if config.group_score not in ("top2", "max"):
        raise ValueError(f"group_score is '{config.group_score}'; it must be 'top2' or 'max'")
    if config.capacity_factor is not None:
        check_factor(config.capacity_factor)
    check_policy(config.drop_policy)
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; 1 or more is accepted")
    if not 1 <= topk <= num_experts:
        raise ValueError(
            f"topk is {topk}; with {num_experts} experts it must be 1 to {num_experts}"
        )
    if config.n_group < 1 or num_experts % config.n_group:
        raise ValueError(f"n_group is {config.n_group}; it must divide the {num_experts} experts")
    if config.n_group == 1:
        return
    size = num_experts // config.n_group
    if size < 2 and config.group_score == "top2":
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


def _warn_of_constant_weights() -> None:
    warnings.warn(
        "topk is 1 and normalize is True, so the weight of a token's only expert is always its "
        "score divided by itself, and the router learns nothing from what experts give; "
        "RouterConfig(normalize=False) has the score as weight",
        stacklevel=3,
    )


def _copies_nothing(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether fn makes memory that holds anything, as that of to_empty."""
    try:
        return not fn(torch.empty(1, dtype=torch.int64, device="meta")).is_meta
    except Exception:  # of a copy: there is nothing to take one of
        return False


def _check_x(x: Tensor, hidden: int) -> None:
    check_tensors(x=x)
    if x.is_meta:
        raise ValueError("x is on 'meta', where nothing is computed; pass x on another device")
    if x.dim() < 1 or x.shape[-1] != hidden:
        raise ValueError(
            f"x has shape {list(x.shape)}; its last dimension must be hidden, which is {hidden}"
        )


def _check_mask(token_mask: Tensor, x: Tensor) -> None:
    check_tensors(token_mask=token_mask)
    if token_mask.dtype != torch.bool:
        raise TypeError(f"token_mask is {token_mask.dtype}; it must be torch.bool")
    if token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"token_mask has shape {list(token_mask.shape)}; with x of shape {list(x.shape)} it "
            f"must be {list(x.shape[:-1])}"
        )


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    # Far below 0 softplus(z) is exp(z). Its square root is taken there in another way: softplus
    # becomes 0 from -104 on, where the gradient of a square root is infinite.
    low = -20.0
    far = (0.5 * logits.clamp(max=low)).exp()
    near = F.softplus(logits.clamp(min=low)).sqrt()
    return torch.where(logits < low, far, near)


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


def _top(values: Tensor, count: int) -> Tensor:
    """[..., n] -> [..., count]: where the largest are, of equal ones the first ahead.

    PyTorch's topk says nothing of equal ones, and devices differ.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _count(ids: Tensor, num_experts: int) -> Tensor:
    # Sorting is deterministic on every device, and needs no answer from it.
    order = ids.flatten().sort().values
    edges = torch.arange(-1, num_experts, dtype=order.dtype, device=ids.device)
    return torch.searchsorted(order, edges, right=True).diff()
