"""Placement of experts: which experts share a host and a rank, by what tokens use together.

A token crosses to a host once, however many of its experts are there. So experts that tokens use
together belong on one host. A :class:`Placement` says which expert lies at which place; the router
keeps its numbers, and its ids are looked up::

    counts = placement.coactivation(ids, E)                    # of some batches
    placed = placement.place_experts(counts, hosts=2, ranks=8)
    w1, w2 = placed.permute(w1), placed.permute(w2)            # of all experts
    out = uniep.moe(x, placed.ids(ids), probs, w1[own], w2[own], group=group)

The slots of a token keep their order, so with one combine group outputs keep their bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._arguments import check_tensors
from ._partition import partition
from ._plain_values import check_number, check_whole

__all__ = [
    "Placement",
    "Traffic",
    "coactivation",
    "hosts_needed",
    "place_experts",
    "predict_traffic",
]

#: Parameters of a :class:`uniep.MoELayer` whose first dimension is the expert.
EXPERT_TENSORS = ("w1", "w2", "b1", "b2")

_NUMBERED = re.compile(r"(^|\.)experts\.(\d+)\.")
_OF_EXPERTS = re.compile(r"(^|\.)experts\.")
_STACKED = re.compile(r"(^|\.)experts\.[^.]+$")

#: Co-activation counts may sum up to this: what is computed of them stays far from 2^63.
_MOST_COUNTED = 1 << 60


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert lies where.

    Places are counted over all ranks: rank r of N has E / N of them from r E / N on, and hosts have
    equal runs of ranks.

    Attributes:
        experts: int64 [E], the expert at each place.
        places: int64 [E], the place of each expert: the inverse.
    """

    experts: Tensor
    places: Tensor

    def __eq__(self, other: object) -> bool:
        """Whether the same experts are at the same places, on whatever device."""
        if not isinstance(other, Placement):
            return NotImplemented
        return torch.equal(self.experts.cpu(), other.experts.cpu())

    def __hash__(self) -> int:
        return hash(tuple(self.experts.tolist()))

    @staticmethod
    def of(experts: Tensor | Sequence[int]) -> Placement:
        """The placement with these experts at places 0, 1, ...

        Raises:
            TypeError: for numbers that are not whole.
            ValueError: where they are no permutation of 0 to E - 1.
        """
        # Numbers lie on the CPU, whatever PyTorch's default device.
        device = experts.device if isinstance(experts, Tensor) else torch.device("cpu")
        given = torch.as_tensor(experts, device=device)
        if given.numel() and given.is_floating_point():
            raise TypeError(f"experts are {given.dtype}; whole numbers are accepted")
        order = given.long()
        numbers = torch.arange(order.numel(), device=order.device)
        if order.dim() != 1 or not torch.equal(order.sort().values, numbers):
            raise ValueError(
                f"experts has shape {list(order.shape)} and is no permutation; each expert from 0 "
                "to E - 1 must be there once"
            )
        return Placement(order, order.argsort())

    @staticmethod
    def identity(num_experts: int) -> Placement:
        """Every expert at the place of its number.

        Raises:
            TypeError: for what is no whole number.
            ValueError: for a negative one.
        """
        check_whole(num_experts=num_experts)
        if num_experts < 0:
            raise ValueError(f"num_experts is {num_experts}; 0 or more is accepted")
        return Placement.of(torch.arange(num_experts, device="cpu"))

    def to(self, device: torch.device | str) -> Placement:
        """The same with its tables on `device`, where :meth:`ids` then waits for nothing."""
        return Placement(self.experts.to(device), self.places.to(device))

    def inverse(self) -> Placement:
        """What undoes this one: its :meth:`permute` brings experts back into their order."""
        return Placement(self.places, self.experts)

    def ids(self, topk_ids: Tensor) -> Tensor:
        """Places in place of experts, slot by slot: what :func:`uniep.moe` takes.

        Args:
            topk_ids: int32 or int64 [..., K] as a router gives them. Dropped slots, and ids from E
                on of experts that compute nothing, stay what they are.

        Returns:
            A tensor of the same shape and dtype.

        Raises:
            TypeError: for ids of another type.
        """
        _check_ids(topk_ids)
        table = self.places.to(topk_ids.device)
        is_placed = (topk_ids >= 0) & (topk_ids < table.numel())
        found = table[torch.where(is_placed, topk_ids, 0).long()].to(topk_ids.dtype)
        return torch.where(is_placed, found, topk_ids)

    def permute(self, stacked: Tensor) -> Tensor:
        """Experts by place: weights, biases, or an optimizer's state of them.

        Args:
            stacked: [E, ...], of all experts in the order of their numbers.

        Raises:
            ValueError: for another first dimension.
        """
        count = self.experts.numel()
        if stacked.dim() == 0 or stacked.shape[0] != count:
            raise ValueError(
                f"a tensor of experts has shape {list(stacked.shape)}; its first dimension must be "
                f"all {count} experts"
            )
        return stacked[self.experts.to(stacked.device)]

    def state_dict(
        self, state: Mapping[str, Tensor], tensors: Iterable[str] = EXPERT_TENSORS
    ) -> dict[str, Tensor]:
        """The state dict of a layer, or of a model, with experts by place.

        Args:
            state: of all experts. Tensors whose last name is one of `tensors` are permuted, and
                those that a module named ``experts`` has itself, as in transformers and torchtitan.
                In names with ``experts.{number}.``, as Hugging Face has them, the number becomes
                the place. All else stays, the router included.
            tensors: names of what has experts as its first dimension.

        Raises:
            ValueError: for such a tensor of another number of experts, a number from E on, and
                other tensors within ``experts``, of which nothing says whose they are.
        """
        stacked = set(tensors)
        placed = {}
        for name, value in state.items():
            is_tensor = isinstance(value, Tensor)  # trainers put other things there, too
            if _NUMBERED.search(name):
                placed[self._renamed(name)] = value
            elif is_tensor and (name.rpartition(".")[2] in stacked or _STACKED.search(name)):
                placed[name] = self.permute(value)
            elif is_tensor and _OF_EXPERTS.search(name):
                raise ValueError(
                    f"{name} is within experts, and nothing says of which; a tensor of all experts "
                    "named in tensors is accepted, or names with experts.NUMBER."
                )
            else:
                placed[name] = value
        return placed

    def _renamed(self, name: str) -> str:
        def place(match: re.Match[str]) -> str:
            expert = int(match[2])
            if expert >= self.places.numel():
                raise ValueError(
                    f"{name} is of expert {expert}; there are {self.places.numel()} experts"
                )
            return f"{match[1]}experts.{int(self.places[expert])}."

        return _NUMBERED.sub(place, name)


@dataclass(frozen=True)
class Traffic:
    """What a routing moves under a placement.

    Attributes:
        tokens: int64 [hosts, hosts], tokens of host i that host j needs, each once. Those off the
            diagonal cross the network.
        rows: int64 [hosts, hosts], rows that experts of host j make for host i. With one combine
            group those off the diagonal cross on their way back.
        rows_of_rank: int64 [ranks], rows that experts of each rank get: its load.
    """

    tokens: Tensor
    rows: Tensor
    rows_of_rank: Tensor

    @property
    def crossing_tokens(self) -> int:
        """Of all pairs of hosts."""
        return _off_diagonal(self.tokens)

    @property
    def crossing_rows(self) -> int:
        """Likewise."""
        return _off_diagonal(self.rows)

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over their mean; 1 where there are none."""
        total = int(self.rows_of_rank.sum())
        return int(self.rows_of_rank.max()) * self.rows_of_rank.numel() / total if total else 1.0


def coactivation(topk_ids: Tensor, num_experts: int, counts: Tensor | None = None) -> Tensor:
    """How many tokens use both of two experts.

    Args:
        topk_ids: int32 or int64 [..., K]. Dropped slots count nowhere, nor do ids from E on.
        num_experts: E.
        counts: int64 [E, E] of earlier batches on the same device, which is added to in place.

    Returns:
        int64 [E, E], symmetric; on the diagonal the rows of each expert. A token that names an
        expert twice has two rows of it, and counts once for its pairs.

    Raises:
        TypeError: for ids of another type, and numbers that are not whole.
        ValueError: for ids without slots, no experts, and counts of another shape or dtype.
    """
    _check_has_slots(topk_ids)
    check_whole(num_experts=num_experts)
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; 1 or more is accepted")
    if counts is None:
        counts = torch.zeros(num_experts, num_experts, dtype=torch.int64, device=topk_ids.device)
    _check_counts(counts, num_experts)
    ids = topk_ids.reshape(-1, topk_ids.shape[-1]).long()
    counts.diagonal().add_(torch.bincount(ids[_is_expert(ids, num_experts)], minlength=num_experts))
    own = ids.sort(-1).values
    own[:, 1:].masked_fill_(own[:, 1:] == own[:, :-1], -1)  # named before
    first, second = own.unsqueeze(-1), own.unsqueeze(-2)
    is_pair = _is_expert(first, num_experts) & _is_expert(second, num_experts) & (first != second)
    pairs = (first * num_experts + second)[is_pair]
    counts += torch.bincount(pairs, minlength=num_experts**2).reshape(num_experts, num_experts)
    return counts


def place_experts(
    recorded: Tensor,
    *,
    hosts: int,
    ranks: int | None = None,
    num_experts: int | None = None,
    slack: float = 0.05,
) -> Placement:
    """Places experts that tokens use together on one host, and there on one rank.

    Greedy, then pairwise exchange on the co-activation counts: first hosts, then the ranks of each.
    Every host, and every rank, has equally many experts. Deterministic: it computes in whole
    numbers, on the CPU.

    Args:
        recorded: what :func:`coactivation` gives, int64 [E, E]; or, with `num_experts`, ids
            [..., K] of some batches.
        hosts: that the ranks are on, equal runs of them.
        ranks: of the group. None: one for each host.
        num_experts: E, where `recorded` are ids.
        slack: by how much the rows of a host may exceed their mean, and those of a rank the mean of
            its host, if they can be spread as evenly; 0.05 is 5 %.

    Raises:
        TypeError: for what is of another type than these.
        ValueError: for counts of another shape, hosts that do not divide the ranks, ranks that do
            not divide the experts, counts that sum up to more than 2^60, or a negative slack.
    """
    check_number(slack=slack)
    check_tensors(recorded=recorded)
    if num_experts is not None:
        recorded = coactivation(recorded, num_experts)
    counts = recorded.cpu()
    _check_counts(counts, counts.shape[0] if counts.dim() else 0)
    ranks = hosts if ranks is None else ranks
    _check_layout(counts.shape[0], hosts, ranks)
    if not torch.equal(counts, counts.T) or bool((counts < 0).any()):
        raise ValueError(
            "co-activation counts are negative or not symmetric; what uniep.coactivation counts is "
            "accepted"
        )
    total = float(counts.double().sum())
    if total > _MOST_COUNTED:
        raise ValueError(
            f"co-activation counts sum up to {total:.3g}; up to 2^60 is accepted, so divide them"
        )
    if not slack >= 0:
        raise ValueError(f"slack is {slack}; 0 or more is accepted")
    order: list[Tensor] = []
    for of_host in partition(counts, hosts, slack):
        within = counts[of_host][:, of_host]
        order += [of_host[of_rank] for of_rank in partition(within, ranks // hosts, slack)]
    return Placement.of(torch.cat(order))


def predict_traffic(
    topk_ids: Tensor,
    placement: Placement,
    *,
    hosts: int,
    ranks: int | None = None,
    tokens_per_rank: Sequence[int] | None = None,
) -> Traffic:
    """What crosses between hosts, and what each rank computes.

    Args:
        topk_ids: int32 or int64 [..., K], as a router gives them, of all ranks' T tokens, rank
            after rank.
        placement: of the experts; :meth:`Placement.identity` for none.
        hosts: that the ranks are on.
        ranks: of the group. None: one for each host.
        tokens_per_rank: T in parts; None: rank r has tokens r T / N to (r + 1) T / N.

    Raises:
        TypeError: for what is of another type than these.
        ValueError: for parts that are not T tokens, and as :func:`place_experts` does.
    """
    _check_has_slots(topk_ids)
    ranks = hosts if ranks is None else ranks
    num_experts = placement.experts.numel()
    _check_layout(num_experts, hosts, ranks)
    places = placement.ids(topk_ids).cpu().long().reshape(-1, topk_ids.shape[-1])
    sources = _sources(places.shape[0], ranks, tokens_per_rank) // (ranks // hosts)
    is_placed = _is_expert(places, num_experts)
    rank = torch.where(is_placed, places * ranks // num_experts, 0)
    needs = torch.zeros(places.shape[0], hosts, dtype=torch.int64, device="cpu")
    needs.scatter_add_(1, rank // (ranks // hosts), is_placed.long())
    none = torch.zeros(hosts, hosts, dtype=torch.int64, device="cpu")
    rows = none.index_add(0, sources, needs)
    tokens = none.index_add(0, sources, needs.clamp(max=1))
    return Traffic(tokens, rows, torch.bincount(rank[is_placed], minlength=ranks))


def hosts_needed(topk_ids: Tensor, placement: Placement, *, hosts: int) -> Tensor:
    """Of each token, the number of hosts that have an expert of it.

    Args:
        topk_ids: int32 or int64 [..., K], as a router gives them.
        placement: of the experts.
        hosts: that have equal runs of places.

    Returns:
        int64 [...].

    Raises:
        TypeError: for ids of another type, and hosts that are no whole number.
        ValueError: for ids without slots, and hosts that do not divide the experts.
    """
    _check_has_slots(topk_ids)
    num_experts = placement.experts.numel()
    _check_layout(num_experts, hosts, hosts)
    places = placement.ids(topk_ids).long()
    is_placed = _is_expert(places, num_experts)
    host = torch.where(is_placed, places * hosts // num_experts, 0)
    found = torch.zeros(*places.shape[:-1], hosts, dtype=torch.int64, device=places.device)
    return found.scatter_add_(-1, host, is_placed.long()).clamp(max=1).sum(-1)


def _sources(tokens: int, ranks: int, tokens_per_rank: Sequence[int] | None) -> Tensor:
    """The rank of each token."""
    if tokens_per_rank is None:
        ends = [(rank + 1) * tokens // ranks for rank in range(ranks)]
        tokens_per_rank = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    for part in tokens_per_rank:
        check_whole(tokens_per_rank=part)
    parts = torch.as_tensor(tokens_per_rank, dtype=torch.int64, device="cpu")
    if parts.shape != (ranks,) or bool((parts < 0).any()) or int(parts.sum()) != tokens:
        raise ValueError(
            f"tokens_per_rank is {list(tokens_per_rank)}; the {tokens} tokens of topk_ids in "
            f"{ranks} parts are accepted"
        )
    return torch.repeat_interleave(torch.arange(ranks, device="cpu"), parts)


def _is_expert(ids: Tensor, num_experts: int) -> Tensor:
    return (ids >= 0) & (ids < num_experts)


def _off_diagonal(square: Tensor) -> int:
    return int(square.sum() - square.diagonal().sum())


def _check_ids(topk_ids: Tensor) -> None:
    check_tensors(topk_ids=topk_ids)
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {topk_ids.dtype}; it must be torch.int32 or torch.int64")


def _check_has_slots(topk_ids: Tensor) -> None:
    _check_ids(topk_ids)
    if topk_ids.dim() < 1 or topk_ids.shape[-1] < 1:
        raise ValueError(
            f"topk_ids has shape {list(topk_ids.shape)}; it must be [..., K] with K from 1 on"
        )


def _check_counts(counts: Tensor, num_experts: int) -> None:
    check_tensors(counts=counts)
    if counts.dtype != torch.int64 or list(counts.shape) != [num_experts, num_experts]:
        raise ValueError(
            f"co-activation counts are {counts.dtype} of shape {list(counts.shape)}; torch.int64 "
            f"of shape [{num_experts}, {num_experts}] is accepted"
        )


def _check_layout(num_experts: int, hosts: int, ranks: int) -> None:
    check_whole(hosts=hosts, ranks=ranks)
    if hosts < 1 or ranks < 1 or ranks % hosts:
        raise ValueError(
            f"hosts is {hosts} of {ranks} ranks; a divisor of the number of ranks from 1 on is "
            "accepted"
        )
    if num_experts % ranks:
        raise ValueError(
            f"ranks is {ranks}, which {num_experts} experts cannot be split over; a divisor of "
            "their number is accepted"
        )
