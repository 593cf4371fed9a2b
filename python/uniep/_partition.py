"""Splits experts into equal parts by what tokens use together: greedy, then pairwise exchange."""

from __future__ import annotations

import torch
from torch import Tensor


def partition(counts: Tensor, parts: int, slack: float) -> list[Tensor]:
    """The experts of each part, ascending; the part with the first expert first.

    Args:
        counts: int64 [E, E] on the CPU: tokens that use both of two experts, on the diagonal rows
            of each.
        parts: how many; they divide E.
        slack: by how much the rows of a part may exceed the mean, if they can be spread so evenly.
    """
    if parts == 1:
        return [torch.arange(counts.shape[0], device="cpu")]
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
    return torch.arange(load.numel(), device="cpu") * parts // load.numel()


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
    """Likewise, each to the part that its tokens use most. May exceed the limit."""
    room = [load.numel() // parts] * parts
    loads = [0] * parts
    of = torch.zeros_like(load)
    with_part = torch.zeros(load.numel(), parts, dtype=torch.int64, device="cpu")
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
        self.uses = torch.zeros(load.numel(), parts, dtype=torch.int64, device="cpu")
        self.uses.index_add_(1, of, affinity)

    def gains(self, limit: float) -> Tensor:
        """[E, E]: what an exchange of two experts gains; 0 where it may not be."""
        mine = self.uses.gather(1, self.of.unsqueeze(1))
        moved = self.uses[:, self.of] - mine
        gain = moved + moved.T - 2 * self.affinity
        after = self.loads[self.of].unsqueeze(1) + self.load.unsqueeze(0) - self.load.unsqueeze(1)
        too_full = after > limit
        gain[(self.of == self.of.unsqueeze(1)) | too_full | too_full.T] = 0
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
    return torch.zeros(parts, dtype=torch.int64, device="cpu").index_add_(0, of, load)
