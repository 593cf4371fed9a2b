"""Tokens and sums between hosts: PyTorch's collectives over rails, ranks of the same number.

Rank ``h L + l`` of a mesh of N hosts with L ranks each is rank l of host h. On each host, rank l
sees the tokens of ranks ``l``, ``L + l`` and so on: of its rail, in the order of the hosts. With
:class:`Routes` only those cross that have an expert where they go. Sums of the others are 0, as
such a host would have found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .host_mesh import HostMesh
from .routes import Routes

__all__ = [
    "Found",
    "begin_to_collect",
    "by_host",
    "collect",
    "going_back",
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


def sum_of_hosts(partials: Sequence[Tensor], own: int) -> Tensor:
    """N times bf16 [T, H] to [own, H]: the sum over hosts, ascending, in fp32 from +0, rounded."""
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


def going_back(blocks: Tensor, host: int, routes: Routes | None) -> Tensor:
    """Of [N, T, n] that this host has found, the part that another gets."""
    return blocks[host] if routes is None else routes.taken(blocks[host], host)


class Found:
    """What hosts have for this rank's T tokens, or slots.

    Args:
        mesh: of the processes.
        shape: N, T, n.
        like: has the type of what comes, and lies where that will.
        routes: what comes from which host; None: all from all.

    Attributes:
        parts: by host what comes from there, to be written; of this host itself what it has,
            [T, n], to be put here.
    """

    def __init__(
        self, mesh: HostMesh, shape: Sequence[int], like: Tensor, routes: Routes | None
    ) -> None:
        self._host, self._shape, self._device = mesh.host, shape, like.device
        sizes = [shape[1]] * shape[0] if routes is None else list(routes.sent)
        sizes[mesh.host] = 0
        self._routes = routes
        self._others = like.new_empty(sum(sizes), shape[2])
        self.parts = list(torch.split(self._others, sizes))

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """What came from others, [P, n], and this host's own, [T, n], once all is there."""
        return self._others, self.parts[self._host]

    def blocks(self) -> list[Tensor]:
        """By host [T, n], 0 where it has nothing, once all is there."""
        if self._routes is None:
            return self.parts
        found = self._others.new_zeros(self._shape)
        found.flatten(0, 1).index_copy_(0, self._routes.places, self._others)
        blocks = list(found)
        blocks[self._host] = self.parts[self._host]
        return blocks

    def numbers(self) -> Tensor:
        """int64 [N, T]: where that of a host is in :attr:`rows`; -1: it has nothing for it."""
        numbers = torch.full(tuple(self._shape[:2]), -1, device=self._device)
        others = torch.arange(len(self._others), device=self._device)
        if self._routes is None:
            ahead, behind = numbers[: self._host], numbers[self._host + 1 :]
            ahead.copy_(others[: ahead.numel()].view_as(ahead))
            behind.copy_(others[ahead.numel() :].view_as(behind))
        else:
            numbers.view(-1)[self._routes.places] = others
        numbers[self._host] = torch.arange(self._shape[1], device=self._device) + len(others)
        return numbers


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
        seen[mesh.host] = rows
        _wait(_messages_of_all(mesh, to_hosts(mesh, rows, routes), by_host(seen, routes)))
    return seen.flatten(0, 1)


def collect(mesh: HostMesh, seen: Tensor, routes: Routes | None = None) -> Found:
    """The way back of [N T, n], or rows [N T, K, n]: what every host has for this rank's."""
    return begin_to_collect(mesh, seen, routes)()


def begin_to_collect(
    mesh: HostMesh, seen: Tensor, routes: Routes | None = None
) -> Callable[[], Found]:
    """What :func:`collect` gives, under way. Returns what waits for it."""
    blocks = seen.contiguous().view(mesh.hosts, -1, seen.shape[-1])
    found = Found(mesh, blocks.shape, blocks, routes)
    found.parts[mesh.host] = blocks[mesh.host]
    sent = [
        blocks[host] if host == mesh.host else going_back(blocks, host, routes)
        for host in range(mesh.hosts)
    ]
    works = _messages_of_all(mesh, sent, found.parts)

    def wait() -> Found:
        _wait(works)
        return found

    return wait


def step(mesh: HostMesh, sent: tuple[Tensor, int], received: tuple[Tensor, int]) -> None:
    """Of an exchange what goes to one host, and what comes from another.

    Args:
        mesh: of the processes.
        sent: what goes, and the host that gets it: as many behind this one as the other is ahead of
            it, or the other way round; on all ranks in the same order.
        received: what comes, to be written, and the host that it comes from.
    """
    _wait(_messages(mesh, [sent], [received]))


def _messages_of_all(
    mesh: HostMesh, sent: Sequence[Tensor], received: Sequence[Tensor]
) -> list[dist.Work]:
    """All steps, under way."""
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
