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


@dataclass(frozen=True)
class Placement:
    """Which expert lies where. Places are counted over all ranks: rank r of N has E / N from r E / N
    on, and hosts have equal runs of ranks.

    Attributes:
        experts: int64 [E], the expert at each place.
        places: int64 [E], the place of each expert: the inverse.
    """

    experts: Tensor
    places: Tensor

    @staticmethod
    def of(experts: Tensor | Sequence[int]) -> Placement:
        """The placement with these experts at places 0, 1, ...

        Raises:
            ValueError: where they are no permutation of 0 to E - 1.
        """
        order = torch.as_tensor(experts, dtype=torch.int64)
        numbers = torch.arange(order.numel(), device=order.device)
        if order.dim() != 1 or not torch.equal(order.sort().values, numbers):
            raise ValueError(
                f"experts has shape {list(order.shape)} and is no permutation; each expert from 0 "
                "to E - 1 must be there once"
            )
        return Placement(order, order.argsort())

    @staticmethod
    def identity(num_experts: int) -> Placement:
        """Every expert at the place of its number."""
        return Placement.of(torch.arange(num_experts))

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
        """
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
            state: of all experts. Tensors whose last name is one of `tensors` are permuted. In
                names with ``experts.{number}.``, as Hugging Face has them, the number becomes the
                place. All else stays, the router included.
            tensors: names of what has experts as its first dimension.

        Raises:
            ValueError: for such a tensor of another number of experts, or a number from E on.
        """
        stacked = set(tensors)
        placed = {}
        for name, tensor in state.items():
            is_stacked = name.rpartition(".")[2] in stacked
            placed[self._renamed(name)] = self.permute(tensor) if is_stacked else tensor
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
        int64 [E, E], symmetric; on the diagonal the rows of each expert.

    Raises:
        ValueError: for counts of another shape or dtype.
    """
    if counts is None:
        counts = torch.zeros(num_experts, num_experts, dtype=torch.int64, device=topk_ids.device)
    _check_counts(counts, num_experts)
    ids = topk_ids.reshape(-1, topk_ids.shape[-1]).long()
    first, second = ids.unsqueeze(-1), ids.unsqueeze(-2)
    is_pair = _is_expert(first, num_experts) & _is_expert(second, num_experts)
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
    Every host, and every rank, has equally many experts. Deterministic: it computes in whole numbers,
    on the CPU.

    Args:
        recorded: what :func:`coactivation` gives, int64 [E, E]; or, with `num_experts`, ids
            [..., K] of some batches.
        hosts: that the ranks are on, equal runs of them.
        ranks: of the group. None: one for each host.
        num_experts: E, where `recorded` are ids.
        slack: by how much the rows of a host may exceed their mean, and those of a rank the mean of
            its host, if they can be spread as evenly; 0.05 is 5 %.

    Raises:
        ValueError: for counts of another shape, hosts that do not divide the ranks, ranks that do
            not divide the experts, or a negative slack.
    """
    if num_experts is not None:
        recorded = coactivation(recorded, num_experts)
    counts = recorded.cpu()
    _check_counts(counts, counts.shape[0] if counts.dim() else 0)
    ranks = hosts if ranks is None else ranks
    _check_layout(counts.shape[0], hosts, ranks)
    if not slack >= 0:
        raise ValueError(f"slack is {slack}; 0 or more is accepted")
    order: list[Tensor] = []
    for of_host in _partition(counts, hosts, slack):
        within = counts[of_host][:, of_host]
        order += [of_host[of_rank] for of_rank in _partition(within, ranks // hosts, slack)]
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
        topk_ids: int32 or int64 [T, K], as a router gives them, of all ranks' tokens, rank after
            rank.
        placement: of the experts; :meth:`Placement.identity` for none.
        hosts: that the ranks are on.
        ranks: of the group. None: one for each host.
        tokens_per_rank: T in parts; None: rank r has tokens r T / N to (r + 1) T / N.

    Raises:
        ValueError: for parts that are not T tokens, and as :func:`place_experts` does.
    """
    ranks = hosts if ranks is None else ranks
    num_experts = placement.experts.numel()
    _check_layout(num_experts, hosts, ranks)
    places = placement.ids(topk_ids).cpu().long()
    sources = _sources(places.shape[0], ranks, tokens_per_rank) // (ranks // hosts)
    is_placed = _is_expert(places, num_experts)
    rank = torch.where(is_placed, places * ranks // num_experts, 0)
    needs = torch.zeros(places.shape[0], hosts, dtype=torch.int64)
    needs.scatter_add_(1, rank // (ranks // hosts), is_placed.long())
    rows = torch.zeros(hosts, hosts, dtype=torch.int64).index_add_(0, sources, needs)
    tokens = torch.zeros(hosts, hosts, dtype=torch.int64).index_add_(0, sources, needs.clamp(max=1))
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
        ValueError: for hosts that do not divide the experts.
    """
    num_experts = placement.experts.numel()
    _check_layout(num_experts, hosts, hosts)
    places = placement.ids(topk_ids).long()
    is_placed = _is_expert(places, num_experts)
    host = torch.where(is_placed, places * hosts // num_experts, 0)
    found = torch.zeros(*places.shape[:-1], hosts, dtype=torch.int64, device=places.device)
    return found.scatter_add_(-1, host, is_placed.long()).clamp(max=1).sum(-1)


def _partition(counts: Tensor, parts: int, slack: float) -> list[Tensor]:
    """Experts of each of `parts` equal parts, ascending; the part with the first expert first."""
    if parts == 1:
        return [torch.arange(counts.shape[0])]
    load = counts.diagonal()
    affinity = counts - torch.diag(load)
    even = _even_start(load, parts)
    limit = max(int(_loads(load, even, parts).max()), (1 + slack) * int(load.sum()) / parts)
    best, most = even, -1
    for start in (_start_in_order(load, parts), even, _greedy_start(affinity, load, parts, limit)):
        if _loads(load, start, parts).max() > limit:
            continue
        found = _exchange(affinity, load, start, parts, limit)
        kept = int(affinity[found.unsqueeze(1) == found].sum())
        if kept > most:
            best, most = found, kept
    members = [(best == part).nonzero().squeeze(1) for part in range(parts)]
    return sorted(members, key=lambda experts: int(experts[0]))


def _start_in_order(load: Tensor, parts: int) -> Tensor:
    return torch.arange(load.numel()) * parts // load.numel()


def _even_start(load: Tensor, parts: int) -> Tensor:
    """The part of each expert: the busiest first, each to the part with the least that has room."""
    room = [load.numel() // parts] * parts
    loads = [0] * parts
    of = torch.zeros_like(load)
    for expert in load.argsort(descending=True, stable=True).tolist():
        part = min((p for p in range(parts) if room[p]), key=lambda p: (loads[p], p))
        of[expert] = part
        loads[part] += int(load[expert])
        room[part] -= 1
    return of


def _greedy_start(affinity: Tensor, load: Tensor, parts: int, limit: float) -> Tensor:
    """Likewise, each to the part of which tokens use most together with it. May exceed the limit."""
    room = [load.numel() // parts] * parts
    loads = [0] * parts
    of = torch.zeros_like(load)
    with_part = torch.zeros(load.numel(), parts, dtype=torch.int64)
    for expert in load.argsort(descending=True, stable=True).tolist():
        rows = int(load[expert])
        fits = [p for p in range(parts) if room[p] and loads[p] + rows <= limit]
        known = with_part[expert].tolist()
        part = min(
            fits or [p for p in range(parts) if room[p]],
            key=lambda p: (-known[p] if fits else 0, loads[p], p),
        )
        of[expert] = part
        loads[part] += rows
        room[part] -= 1
        with_part[:, part] += affinity[:, expert]
    return of


def _exchange(affinity: Tensor, load: Tensor, start: Tensor, parts: int, limit: float) -> Tensor:
    """Exchanges pairs of experts, best first, as long as any gains and no part gets too full."""
    state = _Parts(affinity, load, start, parts)
    while True:
        gain = state.gains(limit)
        best, partner = gain.max(1)
        order = best.argsort(descending=True, stable=True)
        changed = False
        for a in order[best[order] > 0].tolist():
            b = int(partner[a])
            # What was exchanged meanwhile may have changed both.
            if state.gain(a, b) > 0 and state.fits(a, b, limit):
                state.exchange(a, b)
                changed = True
        if not changed:
            return state.of


class _Parts:
    """The part of each expert, and what tokens of each expert use of each part."""

    def __init__(self, affinity: Tensor, load: Tensor, of: Tensor, parts: int) -> None:
        self.affinity = affinity
        self.load = load
        self.of = of.clone()
        self.loads = _loads(load, of, parts)
        self.uses = torch.zeros(load.numel(), parts, dtype=torch.int64)
        self.uses.index_add_(1, of, affinity)

    def gains(self, limit: float) -> Tensor:
        """[E, E]: what an exchange of two experts gains; 0 where it may not be."""
        mine = self.uses.gather(1, self.of.unsqueeze(1))
        moved = self.uses[:, self.of] - mine
        gain = moved + moved.T - 2 * self.affinity
        after = self.loads[self.of].unsqueeze(1) + self.load.unsqueeze(0) - self.load.unsqueeze(1)
        gain[(self.of.unsqueeze(1) == self.of) | (after > limit) | (after.T > limit)] = 0
        return gain

    def gain(self, a: int, b: int) -> int:
        of_a, of_b = int(self.of[a]), int(self.of[b])
        if of_a == of_b:
            return 0
        moved = self.uses[a, of_b] - self.uses[a, of_a] + self.uses[b, of_a] - self.uses[b, of_b]
        return int(moved - 2 * self.affinity[a, b])

    def fits(self, a: int, b: int, limit: float) -> bool:
        more = int(self.load[b] - self.load[a])
        loads = int(self.loads[self.of[a]]) + more, int(self.loads[self.of[b]]) - more
        return max(loads) <= limit

    def exchange(self, a: int, b: int) -> None:
        of_a, of_b = int(self.of[a]), int(self.of[b])
        change = self.affinity[:, b] - self.affinity[:, a]
        self.uses[:, of_a] += change
        self.uses[:, of_b] -= change
        more = self.load[b] - self.load[a]
        self.loads[of_a] += more
        self.loads[of_b] -= more
        self.of[a], self.of[b] = of_b, of_a


def _loads(load: Tensor, of: Tensor, parts: int) -> Tensor:
    return torch.zeros(parts, dtype=torch.int64).index_add_(0, of, load)


def _sources(tokens: int, ranks: int, tokens_per_rank: Sequence[int] | None) -> Tensor:
    """The rank of each token."""
    if tokens_per_rank is None:
        ends = [(rank + 1) * tokens // ranks for rank in range(ranks)]
        tokens_per_rank = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    parts = torch.as_tensor(tokens_per_rank, dtype=torch.int64)
    if parts.shape != (ranks,) or bool((parts < 0).any()) or int(parts.sum()) != tokens:
        raise ValueError(
            f"tokens_per_rank is {list(tokens_per_rank)}; the {tokens} tokens of topk_ids in "
            f"{ranks} parts are accepted"
        )
    return torch.repeat_interleave(torch.arange(ranks), parts)


def _is_expert(ids: Tensor, num_experts: int) -> Tensor:
    return (ids >= 0) & (ids < num_experts)


def _off_diagonal(square: Tensor) -> int:
    return int(square.sum() - square.diagonal().sum())


def _check_counts(counts: Tensor, num_experts: int) -> None:
    if counts.dtype != torch.int64 or list(counts.shape) != [num_experts, num_experts]:
        raise ValueError(
            f"co-activation counts are {counts.dtype} of shape {list(counts.shape)}; torch.int64 of "
            f"shape [E, E] is accepted{f', here [{num_experts}, {num_experts}]' * bool(num_experts)}"
        )


def _check_layout(num_experts: int, hosts: int, ranks: int) -> None:
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
