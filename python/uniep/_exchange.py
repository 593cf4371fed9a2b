"""Tokens and sums between hosts: PyTorch's collectives, over rails and within each host.

Rank ``h L + l`` of a mesh of N hosts with L ranks each is rank l of host h. Its tokens are block
``h L + l`` of all. On each host, local rank j sees blocks ``j N`` to ``j N + N - 1``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

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
    "pass_on",
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
    """[T, n] of each rank to [N T, n]: those of ranks j N to j N + N - 1, on local rank j."""
    if mesh.hosts == 1:
        return rows
    of_rail = rows.new_empty(mesh.hosts, *rows.shape)
    dist.all_gather_into_tensor(_bytes(of_rail).flatten(0, 1), _bytes(rows), group=mesh.across)
    seen = torch.empty_like(of_rail)
    pass_on(mesh, dict(enumerate(of_rail)), seen, forth=True)
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
    """What :func:`collect` gives; within the host all is done, between hosts it has begun."""
    by_rank = seen.contiguous().view(mesh.hosts, -1, seen.shape[1])
    if mesh.hosts == 1:
        return by_rank, None
    of_rail = torch.empty_like(by_rank)
    pass_on(mesh, dict(enumerate(of_rail)), by_rank, forth=False)
    found = torch.empty_like(of_rail)
    received, sent = (_bytes(rows).flatten(0, 1) for rows in (found, of_rail))
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
    came = rows
    if step > 0:
        seen_here = _block_of_rail(mesh, blocks, of)
        came = torch.empty_like(rows) if seen_here is None else seen_here
        _swap(mesh, rows, to, came, of)
    pass_on(mesh, {of: came}, blocks, forth=True, hosts=(of,))


def collect_step(mesh: HostMesh, blocks: Tensor, found: Tensor, step: int) -> None:
    """Of :func:`collect` what goes to one host, the step-th behind this one; 0: to its own.

    Args:
        mesh: of the processes.
        blocks: [N, T, n], for tokens that this rank sees.
        found: [N, T, n], of which what the step-th host ahead of this one has is written.
        step: as in :func:`spread_step`.
    """
    to, of = (mesh.host + step) % mesh.hosts, (mesh.host - step) % mesh.hosts
    if step == 0:
        return pass_on(mesh, {to: found[to]}, blocks, forth=False, hosts=(to,))
    seen_here = _block_of_rail(mesh, blocks, to)
    sent = torch.empty_like(found[of]) if seen_here is None else seen_here
    pass_on(mesh, {to: sent}, blocks, forth=False, hosts=(to,))
    _swap(mesh, sent, to, found[of], of)
    return None


def _block_of_rail(mesh: HostMesh, blocks: Tensor, host: int) -> Tensor | None:
    """Where this rank sees the tokens of its rail on a host; None: another rank sees them."""
    seen_by, block = divmod(host * mesh.local_ranks + mesh.local, mesh.hosts)
    return blocks[block] if seen_by == mesh.local else None


def _swap(mesh: HostMesh, sent: Tensor, to: int, received: Tensor, of: int) -> None:
    """Sends rows to this rank's rail on one host, and receives as many of that on another."""
    send = _step(mesh.across, dist.isend, sent, to)
    _do([send, _step(mesh.across, dist.irecv, received, of)])


def pass_on(
    mesh: HostMesh,
    of_rail: Mapping[int, Tensor],
    seen: Tensor,
    *,
    forth: bool,
    hosts: Collection[int] | None = None,
) -> None:
    """Blocks of ranks of this rank's rail, to or from the local ranks that see their tokens.

    Args:
        mesh: of the processes.
        of_rail: block h is of rank h L + l, l being this local rank.
        seen: block i is of rank j N + i, j being this local rank.
        forth: from of_rail to seen; else the other way. A block may be both.
        hosts: of whose ranks blocks are passed on; None: of all.
    """
    local_ranks, among = mesh.local_ranks, range(mesh.hosts) if hosts is None else hosts
    # Of two ranks both walk the blocks between them in the order of the ranks that these are of.
    held = [(h * local_ranks + mesh.local, of_rail[h]) for h in sorted(among)]
    looked_at = [
        (rank, seen[i])
        for i, rank in enumerate(range(mesh.local * mesh.hosts, (mesh.local + 1) * mesh.hosts))
        if rank // local_ranks in among
    ]
    here = {rank: block for rank, block in held if rank // mesh.hosts == mesh.local}
    steps = []
    for rank, block in held:
        peer = rank // mesh.hosts
        if peer != mesh.local:
            steps.append(_step(mesh.within, dist.isend if forth else dist.irecv, block, peer))
    for rank, block in looked_at:
        peer = rank % local_ranks
        if peer != mesh.local:
            steps.append(_step(mesh.within, dist.irecv if forth else dist.isend, block, peer))
            continue
        to, source = (block, here[rank]) if forth else (here[rank], block)
        if to.data_ptr() != source.data_ptr():
            to.copy_(source)
    _do(steps)


def _step(group: dist.ProcessGroup, way: Any, block: Tensor, rank: int) -> dist.P2POp:
    return dist.P2POp(way, _bytes(block), dist.get_global_rank(group, rank), group)


def _do(steps: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(steps) if steps else []:
        work.wait()


def _bytes(rows: Tensor) -> Tensor:
    """Of any type: what crosses need not be a type that the collectives know."""
    return rows.view(torch.uint8)
