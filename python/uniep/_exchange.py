"""Tokens and sums between hosts: PyTorch's collectives over rails, ranks of the same number.

Rank ``h L + l`` of a mesh of N hosts with L ranks each is rank l of host h. On each host, rank l
sees the tokens of ranks ``l``, ``L + l`` and so on: of its rail, in the order of the hosts. With
:class:`Routes` only those cross that have an expert where they go. What others would have brought
is then never read, and their sums are 0, as such a host would have found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ._routes import Route, Routes

if TYPE_CHECKING:
    from .hosts import HostMesh

__all__ = [
    "begin_to_collect",
    "collect",
    "collect_step",
    "resized",
    "spread",
    "spread_step",
    "sum_of_hosts",
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


def spread(mesh: HostMesh, rows: Tensor, routes: Routes | None = None) -> Tensor:
    """[T, n] of each rank to [N T, n]: those of this rank's rail, by host."""
    if mesh.hosts == 1:
        return rows
    seen = rows.new_empty(mesh.hosts, *rows.shape)
    if routes is None:
        dist.all_gather_into_tensor(_bytes(seen).flatten(0, 1), _bytes(rows), group=mesh.across)
        return seen.flatten(0, 1)
    seen[mesh.host] = rows
    sent = rows.index_select(0, routes.sent.places % rows.shape[0])
    came, _ = _exchange(mesh, sent, routes.sent, routes.received)
    return seen.flatten(0, 1).index_copy_(0, routes.received.places, came)


def collect(mesh: HostMesh, seen: Tensor, routes: Routes | None = None) -> Tensor:
    """The way back: [N T, n] to [N, T, n], what every host has for this rank's T rows."""
    return begin_to_collect(mesh, seen, routes)()


def begin_to_collect(
    mesh: HostMesh, seen: Tensor, routes: Routes | None = None
) -> Callable[[], Tensor]:
    """What :func:`collect` gives, under way. Returns what waits for it."""
    seen = seen.contiguous()
    blocks = seen.view(mesh.hosts, -1, seen.shape[1])
    if mesh.hosts == 1:
        return lambda: blocks
    if routes is None:
        found = torch.empty_like(blocks)
        received, sent = (_bytes(rows).flatten(0, 1) for rows in (found, blocks))
        work = dist.all_to_all_single(received, sent, group=mesh.across, async_op=True)
        return lambda: _behind(work, found)
    found = torch.zeros_like(blocks)
    found[mesh.host] = blocks[mesh.host]
    # What came is sent, and received what was sent.
    came, work = _exchange(
        mesh,
        seen.index_select(0, routes.received.places),
        routes.received,
        routes.sent,
        is_async=True,
    )
    places = routes.sent.places
    return lambda: _behind(work, found, lambda: found.flatten(0, 1).index_copy_(0, places, came))


def _behind(
    work: dist.Work | None, found: Tensor, and_then: Callable[[], object] | None = None
) -> Tensor:
    if work is not None:
        work.wait()
    if and_then is not None:
        and_then()
    return found


def _exchange(
    mesh: HostMesh, sent: Tensor, to: Route, of: Route, *, is_async: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Rows for each host, in the order of the hosts, for those that come from each."""
    came = sent.new_empty(sum(of.counts), sent.shape[1])
    ends = (_bytes(came), _bytes(sent), of.counts, to.counts)
    return came, dist.all_to_all_single(*ends, group=mesh.across, async_op=is_async)


def spread_step(
    mesh: HostMesh, rows: Tensor, blocks: Tensor, step: int, routes: Routes | None = None
) -> None:
    """Of :func:`spread` the tokens of one host, the step-th behind this one; 0: its own.

    Args:
        mesh: of the processes.
        rows: [T, n] of this rank.
        blocks: [N, T, n] that this rank sees, of which those of that host are written.
        step: 0 to N - 1, on all ranks in the same order.
        routes: as of :func:`spread`.
    """
    of, to = (mesh.host + step) % mesh.hosts, (mesh.host - step) % mesh.hosts
    if step == 0:
        blocks[of].copy_(rows)
    elif routes is None:
        _swap(mesh, rows, to, blocks[of], of)
    else:
        _swap_some(mesh, rows, (routes.sent, to), blocks[of], (routes.received, of))


def collect_step(
    mesh: HostMesh, blocks: Tensor, found: Tensor, step: int, routes: Routes | None = None
) -> None:
    """Of :func:`collect` what goes to one host, the step-th behind this one; 0: to its own.

    Args:
        mesh: of the processes.
        blocks: [N, T, n], for tokens that this rank sees.
        found: [N, T, n], of which what the step-th host ahead of this one has is written.
        step: as in :func:`spread_step`.
        routes: as of :func:`collect`; what they lack stays as it is.
    """
    to, of = (mesh.host + step) % mesh.hosts, (mesh.host - step) % mesh.hosts
    if step == 0:
        found[of].copy_(blocks[to])
    elif routes is None:
        _swap(mesh, blocks[to], to, found[of], of)
    else:
        _swap_some(mesh, blocks[to], (routes.received, to), found[of], (routes.sent, of))


def _swap_some(
    mesh: HostMesh, rows: Tensor, to: tuple[Route, int], into: Tensor, of: tuple[Route, int]
) -> None:
    """As :func:`_swap`, of the tokens that two routes name."""
    tokens = rows.shape[0]
    leave, come = (route.of(host, tokens) for route, host in (to, of))
    came = rows.new_empty(len(come), rows.shape[1])
    _swap(mesh, rows.index_select(0, leave), to[1], came, of[1])
    into.index_copy_(0, come, came)


def _swap(mesh: HostMesh, sent: Tensor, to: int, received: Tensor, of: int) -> None:
    """Sends rows to this rank's rail on one host, and receives some of that on another."""
    ways = ((dist.isend, sent, to), (dist.irecv, received, of))
    steps = [
        dist.P2POp(way, _bytes(rows), dist.get_global_rank(mesh.across, host), mesh.across)
        for way, rows, host in ways
        if len(rows)  # neither end names a message of nothing
    ]
    for work in dist.batch_isend_irecv(steps) if steps else ():
        work.wait()


def _bytes(rows: Tensor) -> Tensor:
    """Of any type: what crosses need not be a type that the collectives know."""
    return rows.view(torch.uint8)
