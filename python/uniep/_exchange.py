"""Tokens and sums between hosts: PyTorch's collectives over rails, ranks of the same number.

Rank ``h L + l`` of a mesh of N hosts with L ranks each is rank l of host h. On each host, rank l
sees the tokens of ranks ``l``, ``L + l`` and so on: of its rail, in the order of the hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .hosts import HostMesh

__all__ = [
    "Collected",
    "begin_to_collect",
    "collect",
    "collect_step",
    "collected",
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


def spread(mesh: HostMesh, rows: Tensor) -> Tensor:
    """[T, n] of each rank to [N T, n]: those of this rank's rail, by host."""
    if mesh.hosts == 1:
        return rows
    seen = rows.new_empty(mesh.hosts, *rows.shape)
    dist.all_gather_into_tensor(_bytes(seen).flatten(0, 1), _bytes(rows), group=mesh.across)
    return seen.flatten(0, 1)


def collect(mesh: HostMesh, seen: Tensor) -> Tensor:
    """The way back: [N T, n] to [N, T, n], what every host has for this rank's T rows."""
    return collected(begin_to_collect(mesh, seen))


#: What is collected, and what has to be waited for first.
Collected: TypeAlias = tuple[Tensor, dist.Work | None]


def collected(begun: Collected) -> Tensor:
    """What :func:`begin_to_collect` has begun."""
    found, work = begun
    if work is not None:
        work.wait()
    return found


def begin_to_collect(mesh: HostMesh, seen: Tensor) -> Collected:
    """What :func:`collect` gives, under way."""
    blocks = seen.contiguous().view(mesh.hosts, -1, seen.shape[1])
    if mesh.hosts == 1:
        return blocks, None
    found = torch.empty_like(blocks)
    received, sent = (_bytes(rows).flatten(0, 1) for rows in (found, blocks))
    work = dist.all_to_all_single(received, sent, group=mesh.across, async_op=True)
    return found, work


def spread_step(mesh: HostMesh, rows: Tensor, blocks: Tensor, step: int) -> None:
    """Of :func:`spread` the tokens of one host, the step-th behind this one; 0: its own.

    Args:
        mesh: of the processes.
        rows: [T, n] of this rank.
        blocks: [N, T, n] that this rank sees, of which those of that host are written.
        step: 0 to N - 1, on all ranks in the same order.
    """
    of, to = (mesh.host + step) % mesh.hosts, (mesh.host - step) % mesh.hosts
    _swap(mesh, rows, to, blocks[of], of)


def collect_step(mesh: HostMesh, blocks: Tensor, found: Tensor, step: int) -> None:
    """Of :func:`collect` what goes to one host, the step-th behind this one; 0: to its own.

    Args:
        mesh: of the processes.
        blocks: [N, T, n], for tokens that this rank sees.
        found: [N, T, n], of which what the step-th host ahead of this one has is written.
        step: as in :func:`spread_step`.
    """
    to, of = (mesh.host + step) % mesh.hosts, (mesh.host - step) % mesh.hosts
    _swap(mesh, blocks[to], to, found[of], of)


def _swap(mesh: HostMesh, sent: Tensor, to: int, received: Tensor, of: int) -> None:
    """Sends rows to this rank's rail on one host, and receives as many of that on another."""
    if of == mesh.host:
        received.copy_(sent)
        return
    ways = ((dist.isend, sent, to), (dist.irecv, received, of))
    steps = [
        dist.P2POp(way, _bytes(rows), dist.get_global_rank(mesh.across, host), mesh.across)
        for way, rows, host in ways
    ]
    for work in dist.batch_isend_irecv(steps):
        work.wait()


def _bytes(rows: Tensor) -> Tensor:
    """Of any type: what crosses need not be a type that the collectives know."""
    return rows.view(torch.uint8)
