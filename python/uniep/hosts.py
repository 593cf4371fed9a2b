"""Layers whose ranks are on several hosts: PyTorch's collectives between them, fused within each.

A mesh of hosts and ranks has two kinds of groups. `within` are the ranks of a host, which run one
fused layer; `across`, a rail, are the ranks of the same number on all hosts. With N hosts:

* `spread` brings every token to every host. A rail gathers what its ranks have, and within a host
  the ranks pass on what they got, so that local rank j has the tokens of ranks jN to jN + N - 1 of
  the mesh, one after another. So the fused layer of a host sees all tokens in the order in which
  one group of all ranks would see them: that order is that of the sums in weight gradients.
* The fused layer sees slots of other hosts' experts as dropped. What it gives a token is the sum
  over the experts of its host, rounded to bf16: a partial sum of combine groups.
* `collect` goes the same way back, and adds a token's sums up in the order of hosts.

Each is the other's gradient. All messages are of a size that the shapes say, so nothing waits for
the host, and CUDA graphs can capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _arguments
from . import zero_experts as _zero
from .arithmetic import Arithmetic
from .group import is_mesh_of_hosts

__all__ = ["HostMesh", "host_mesh", "moe_over_hosts"]


class HostMesh(NamedTuple):
    """The place of a process in a mesh of hosts and ranks; rank h L + l is rank l of host h."""

    across: dist.ProcessGroup  # of one local number, by host
    within: dist.ProcessGroup  # of this host, by local number
    hosts: int
    local_ranks: int
    host: int
    local: int


def host_mesh(group: object) -> HostMesh | None:
    """The places in a mesh of two dimensions; None for every other group.

    Raises:
        ValueError: where this process is not in the mesh.
    """
    if not is_mesh_of_hosts(group):
        return None
    place = group.get_coordinate()
    if place is None:
        raise ValueError("this process is not in the mesh; pass one that it is in")
    hosts, local_ranks = group.shape
    return HostMesh(group.get_group(0), group.get_group(1), hosts, local_ranks, *place)


def _check_sums(mesh: HostMesh, arithmetic: Arithmetic) -> None:
    """Raises ValueError where what crosses would not be one sum of each host in bf16."""
    if arithmetic.shared_experts:
        raise ValueError(
            "shared_w1 is given, and the group is a mesh of hosts; compute shared experts apart "
            "there, and add what they give to the result"
        )
    if mesh.hosts == 1:
        return
    groups, partials = arithmetic.combine_groups, arithmetic.combine_partials
    if groups != mesh.hosts or partials != "bf16":
        raise ValueError(
            f"combine_groups is {groups} and combine_partials '{partials}'; over the "
            f"{mesh.hosts} hosts of a mesh one sum of each crosses, in bf16: pass "
            f"combine_groups={mesh.hosts} and combine_partials='bf16'"
        )


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="what crosses hosts goes by collectives that compilers do not see through"
)
def moe_over_hosts(
    mesh: HostMesh,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    shapes: Sequence[tuple[int, int, int]],
    arithmetic: Arithmetic,
    room: tuple[int | None, int | None],
    zero: tuple[int, _zero.ZeroExpertType],
    fused: Callable[..., Tensor],
) -> Tensor:
    """:func:`uniep.moe` of a mesh: what `fused`, the layer of each host, gives a token, added up.

    Args:
        mesh: of the processes.
        x: bf16 [..., H].
        topk_ids: [..., K], numbers of experts among all.
        topk_probs: fp32 [..., K].
        shapes: of w1 and w2, as written [El, rows, columns].
        arithmetic: of the layer.
        room: max_tokens and capacity_rows.
        zero: zero_experts, and their type.
        fused: called with x [N T, H], ids among the experts of this host, probabilities, max_tokens
            and capacity_rows.

    Raises:
        ValueError: where other things would have to cross, and for more tokens than max_tokens.
    """
    _check_sums(mesh, arithmetic)
    experts, topk = shapes[0][0], topk_ids.shape[-1]
    rows = _arguments.rows(x)
    tokens, max_tokens = rows.shape[0], room[0]
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(f"x has {tokens} tokens, but max_tokens is {max_tokens}; pass as many")
    most = tokens if max_tokens is None else max_tokens
    slots = None
    if zero[0]:
        all_experts = experts * mesh.hosts * mesh.local_ranks
        slots = _zero.split(topk_ids, topk_probs, all_experts, zero[0])
        topk_ids = slots.ids
    ids = _arguments.int32(_arguments.rows(topk_ids))
    of_host = mesh.local_ranks * experts
    seen_x, seen_probs, seen_ids = _Spread.apply(
        mesh, most, of_host, rows, _arguments.rows(topk_probs), ids
    )
    seen = fused(
        seen_x,
        _ids_of_host(seen_ids, mesh, of_host),
        seen_probs,
        max_tokens=mesh.hosts * most,
        capacity_rows=room[1] or _capacity(mesh, shapes, topk, most),
    )
    out: Tensor = _Collect.apply(mesh, tokens, seen).reshape(x.shape)
    if slots is not None and zero[1] == "identity":
        return _zero.add_identity(out, x, slots)
    return out


def _capacity(
    mesh: HostMesh, shapes: Sequence[tuple[int, int, int]], topk: int, tokens: int
) -> int | None:
    """The default of :class:`uniep.Workspace`, for `tokens` tokens a rank of the mesh.

    None where that is any routing, as in a small layer; else twice the load if that is even. The
    layer of a host would count all slots of all tokens that it sees as its own.
    """
    experts, _, hidden = shapes[0]
    any_routing = mesh.hosts * mesh.local_ranks * tokens * min(topk, experts)
    bytes_of_row = 2 * (2 * hidden + 5 * shapes[1][2])
    if any_routing * bytes_of_row <= _SMALL_LAYER_BYTES:
        return None
    return min(any_routing, 2 * topk * tokens) + experts * _ROW_ALIGN


_SMALL_LAYER_BYTES = 1 << 30  # as include/uniep/problem.h has it
_ROW_ALIGN = 128


def _ids_of_host(ids: Tensor, mesh: HostMesh, of_host: int) -> Tensor:
    """Those of other hosts dropped; impossible ones stay so, for the fused layer to refuse."""
    local = ids - mesh.host * of_host
    possible = (ids >= -1) & (ids < mesh.hosts * of_host)
    is_here = (local >= 0) & (local < of_host)
    return torch.where(is_here, local, torch.where(possible, -1, ids)).contiguous()


class _Spread(torch.autograd.Function):
    """Tokens, ids and probabilities of N ranks; backward collects dx and dprobs."""

    @staticmethod
    def forward(
        ctx: Any, mesh: HostMesh, tokens: int, of_host: int, x: Tensor, probs: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.mesh, ctx.own, ctx.of_host = mesh, x.shape[0], of_host
        ctx.save_for_backward(ids)
        # Both of four bytes: in one message.
        slots = spread(mesh, padded(torch.cat((ids, probs.view(torch.int32)), 1), tokens, -1))
        seen_ids, seen_probs = slots.chunk(2, 1)
        ctx.mark_non_differentiable(seen_ids)
        seen = spread(mesh, padded(x, tokens))
        return seen, seen_probs.contiguous().view(torch.float32), seen_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        of_x = sum_of_hosts(collect(ctx.mesh, dx), ctx.own)
        # A slot has its gradient from the host that has its expert.
        of_probs = collect(ctx.mesh, dprobs)[:, : ctx.own]
        owner = (ids // ctx.of_host).clamp_(0, ctx.mesh.hosts - 1)
        return None, None, None, of_x, of_probs.gather(0, owner.long()[None])[0], None


class _Collect(torch.autograd.Function):
    """The sums of all hosts, added up, of this rank's tokens; backward spreads dy."""

    @staticmethod
    def forward(ctx: Any, mesh: HostMesh, own: int, out: Tensor) -> Tensor:
        ctx.mesh, ctx.tokens = mesh, out.shape[0] // mesh.hosts
        return sum_of_hosts(collect(mesh, out), own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, spread(ctx.mesh, padded(dy, ctx.tokens))


def padded(rows: Tensor, count: int, value: int = 0) -> Tensor:
    """[t, n] to [count, n], contiguous."""
    missing = count - rows.shape[0]
    if missing == 0:
        return rows.contiguous()
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
    _pass_on(mesh, of_rail, seen, forth=True)
    return seen.flatten(0, 1)


def collect(mesh: HostMesh, seen: Tensor) -> Tensor:
    """The way back: [N T, n] to [N, T, n], what every host has for this rank's T rows."""
    by_rank = seen.contiguous().view(mesh.hosts, -1, seen.shape[1])
    if mesh.hosts == 1:
        return by_rank
    of_rail = torch.empty_like(by_rank)
    _pass_on(mesh, of_rail, by_rank, forth=False)
    found = torch.empty_like(of_rail)
    dist.all_to_all_single(
        _bytes(found).flatten(0, 1), _bytes(of_rail).flatten(0, 1), group=mesh.across
    )
    return found


def _bytes(rows: Tensor) -> Tensor:
    """Of any type: what crosses need not be a type that the collectives know."""
    return rows.view(torch.uint8)


def _pass_on(mesh: HostMesh, of_rail: Tensor, seen: Tensor, *, forth: bool) -> None:
    """Blocks of ranks of this rank's rail, to or from the local ranks that see their tokens.

    Args:
        mesh: of the processes.
        of_rail: block h is of rank h L + l, l being this local rank.
        seen: block i is of rank j N + i, j being this local rank.
        forth: from of_rail to seen; else the other way.
    """
    hosts, local_ranks = mesh.hosts, mesh.local_ranks
    # Of two ranks both walk the blocks between them in the order of the ranks that these are of.
    held = [(h * local_ranks + mesh.local, of_rail[h]) for h in range(hosts)]
    looked_at = [(mesh.local * hosts + i, seen[i]) for i in range(hosts)]
    here = {rank: block for rank, block in held if rank // hosts == mesh.local}
    steps = []
    for rank, block in held:
        peer = rank // hosts
        if peer != mesh.local:
            steps.append(_step(mesh, dist.isend if forth else dist.irecv, block, peer))
    for rank, block in looked_at:
        peer = rank % local_ranks
        if peer != mesh.local:
            steps.append(_step(mesh, dist.irecv if forth else dist.isend, block, peer))
        elif forth:
            block.copy_(here[rank])
        else:
            here[rank].copy_(block)
    for work in dist.batch_isend_irecv(steps) if steps else []:
        work.wait()


def _step(mesh: HostMesh, way: Any, block: Tensor, local: int) -> dist.P2POp:
    return dist.P2POp(way, _bytes(block), dist.get_global_rank(mesh.within, local), mesh.within)
