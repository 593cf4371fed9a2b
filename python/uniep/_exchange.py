"""Tokens and sums between hosts: PyTorch's collectives over rails, ranks of the same number.

Rank ``h L + l`` of a mesh of N hosts with L ranks each is rank l of host h. On each host, rank l
sees the tokens of ranks ``l``, ``L + l`` and so on: of its rail, in the order of the hosts. With
:class:`Routes` only those cross that have an expert where they go. Sums of the others are 0, as
such a host would have found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ._routes import Routes

if TYPE_CHECKING:
    from .hosts import HostMesh

__all__ = [
    "Found",
    "begin_to_collect",
    "by_host",
    "collect",
    "resized",
    "spread",
    "step",
    "sum_of_hosts",
    "to_hosts",
]


def resized(rows: Tensor, count: int, value: float = 0) -> Tensor:
    """[t, n] to [count, n], contiguous: without its last rows, or with some of `value`."""
    missing = count - rows.shape[0]
    if missing <= 0:
        return rows[:count].contiguous()
    return torch.cat((rows, rows.new_full((missing, rows.shape[1]), value)))


def sum_of_hosts(partials: Tensor, own: int) -> Tensor:
    """bf16 [N, T, H] to [own, H]: the sum over hosts, ascending, fp32, from +0, rounded once."""
    first, *others = (partial[:own] for partial in partials)
    if len(others) == 1:  # one sum, which PyTorch computes in fp32 and rounds
        total: Tensor = first + others[0]
    else:
        total = first.float()
        for other in others:
            total += other
        total = total.to(first.dtype)
    return total.add_(0.0)  # from +0: only a sum of nothing but -0 is -0 without it


def to_hosts(mesh: HostMesh, rows: Tensor, routes: Routes | None) -> list[Tensor]:
    """Of this rank's rows, [T, n], those that go to each host; to its own, all."""
    if routes is None:
        return [rows] * mesh.hosts
    parts = list(torch.split(routes.packed(rows), routes.sent))
    parts[mesh.host] = rows
    return parts


def by_host(blocks: Tensor, routes: Routes | None) -> list[Tensor]:
    """Of [N, T, n] that a rank sees, the part of each host that has come from there."""
    if routes is None:
        return list(blocks)
    return [block[:count] for block, count in zip(blocks, routes.received, strict=True)]


class Found:
    """What hosts have for this rank's tokens.

    Args:
        mesh: of the processes.
        like: [N, T, n] of what comes; of one host that itself.
        routes: which tokens went to which host; None: all to all.

    Attributes:
        parts: by host what comes from there, to be written.
    """

    def __init__(self, mesh: HostMesh, like: Tensor, routes: Routes | None) -> None:
        self._host, self._routes, self._shape = mesh.host, routes, like.shape
        if routes is None:
            self._whole = like if mesh.hosts == 1 else torch.empty_like(like)
            self.parts = list(self._whole)
            return
        self._packed = like.new_empty(len(routes.places), like.shape[2])
        self.parts = list(torch.split(self._packed, routes.sent))
        self.parts[mesh.host] = like.new_empty(like.shape[1:])

    def blocks(self) -> Tensor:
        """[N, T, n], once all parts are there."""
        if self._routes is None:
            return self._whole
        found = self._packed.new_zeros(self._shape)
        found.flatten(0, 1).index_copy_(0, self._routes.places, self._packed)
        found[self._host] = self.parts[self._host]
        return found

    def rows(self, owner: Tensor) -> Tensor:
        """[T, n] of tokens that no more than one host has anything for, once all parts are there.

        Args:
            owner: int64 [T], that host; any where there is none.
        """
        if self._routes is None:
            rows: Tensor = self._whole[owner, torch.arange(len(owner), device=owner.device)]
            return rows
        rows = self.parts[self._host]
        return rows.index_copy_(0, self._routes.places % len(rows), self._packed)


def spread(mesh: HostMesh, rows: Tensor, routes: Routes | None = None) -> Tensor:
    """[T, n] of each rank to [N T, n]: those of this rank's rail, by host.

    With routes rows that came are ahead of the others of their host, which are not written.
    """
    if mesh.hosts == 1:
        return rows
    seen = rows.new_empty(mesh.hosts, *rows.shape)
    if routes is None:
        dist.all_gather_into_tensor(_bytes(seen).flatten(0, 1), _bytes(rows), group=mesh.across)
    else:
        _wait(_exchange(mesh, to_hosts(mesh, rows, routes), by_host(seen, routes)))
    return seen.flatten(0, 1)


def collect(mesh: HostMesh, seen: Tensor, routes: Routes | None = None) -> Found:
    """The way back of [N T, n]: what every host has for this rank's T rows."""
    return begin_to_collect(mesh, seen, routes)()


def begin_to_collect(
    mesh: HostMesh, seen: Tensor, routes: Routes | None = None
) -> Callable[[], Found]:
    """What :func:`collect` gives, under way. Returns what waits for it."""
    blocks = seen.contiguous().view(mesh.hosts, -1, seen.shape[1])
    if mesh.hosts == 1:
        return lambda: Found(mesh, blocks, None)
    found = Found(mesh, blocks, routes)
    works: Sequence[dist.Work | None]
    if routes is not None:
        works = _exchange(mesh, by_host(blocks, routes), found.parts)
    else:
        received, sent = (_bytes(rows).flatten(0, 1) for rows in (found.blocks(), blocks))
        works = [dist.all_to_all_single(received, sent, group=mesh.across, async_op=True)]
    return lambda: _behind(works, found)


def _behind(works: Sequence[dist.Work | None], found: Found) -> Found:
    _wait(works)
    return found


def step(
    mesh: HostMesh, sent: Sequence[Tensor], received: Sequence[Tensor], to: int, of: int
) -> None:
    """Of an exchange what goes to one host, and what comes from another; or stays at this one.

    Args:
        mesh: of the processes.
        sent: what goes to each host.
        received: what comes from each host, to be written.
        to: a host, as many behind this one as `of` is ahead of it, or the other way round; on all
            ranks in the same order.
        of: a host.
    """
    if of == mesh.host:
        received[of].copy_(sent[to])
    else:
        _wait(_messages(mesh, [(sent[to], to)], [(received[of], of)]))


def _exchange(
    mesh: HostMesh, sent: Sequence[Tensor], received: Sequence[Tensor]
) -> list[dist.Work]:
    """All steps, under way."""
    received[mesh.host].copy_(sent[mesh.host])
    others = [host for host in range(mesh.hosts) if host != mesh.host]
    ends = [[(rows[host], host) for host in others] for rows in (sent, received)]
    return _messages(mesh, *ends)


def _messages(
    mesh: HostMesh, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]
) -> list[dist.Work]:
    """Rows to this rank's rail on some hosts, and from that on some."""
    ways = [(dist.isend, *end) for end in sent] + [(dist.irecv, *end) for end in received]
    messages = [
        dist.P2POp(way, _bytes(rows), dist.get_global_rank(mesh.across, host), mesh.across)
        for way, rows, host in ways
        if len(rows)  # neither end names a message of nothing
    ]
    return dist.batch_isend_irecv(messages) if messages else []


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _bytes(rows: Tensor) -> Tensor:
    """Of any type: what crosses need not be a type that the collectives know."""
    return rows.view(torch.uint8)
