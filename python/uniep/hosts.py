"""Layers whose ranks are on several hosts: PyTorch's collectives between them, fused within each.

A mesh of hosts and ranks has two kinds of groups. `within` are the ranks of a host, which run one
fused layer; `across`, a rail, are the ranks of the same number on all hosts. With N hosts:

* `spread` brings every token to every host: a rail exchanges what its ranks have, so that each has
  N blocks of tokens, by host. The fused layer of a host knows of these blocks
  (``Problem::gathered_hosts``), and takes all tokens in the order in which one group of all ranks
  would: that order is that of the sums in weight gradients.
* The fused layer sees slots of other hosts' experts as dropped. What it gives a token is the sum
  over the experts of its host, rounded to bf16: a partial sum of combine groups.
* `collect` goes the same way back, and adds a token's sums up in the order of hosts.

Each is the other's gradient. All messages are of a size that the shapes say, so nothing waits for
the host, and CUDA graphs can capture it. With ``exact_hosts`` only those tokens cross that have an
expert where they go: their number is waited for. Which tokens do, and what crosses while the fused
layer computes, is the business of a :class:`Crossing`.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _exchange as exchange
from ._agreed_faults import AgreedFaults
from ._crossing import Crossing
from .arithmetic import Arithmetic
from .group import Group, GroupLike, find_hosts, group_of, is_mesh_of_hosts, process_group_of

__all__ = [
    "HostMesh",
    "check_sums",
    "default_capacity",
    "from_all_hosts",
    "group_of_host",
    "host_mesh",
    "mesh_of_ranks",
    "to_all_hosts",
]


class HostMesh:
    """The place of a process in a mesh of hosts and ranks; rank h L + l is rank l of host h.

    Attributes:
        hosts, local_ranks: N, and L of each.
        host, local: of this process.
    """

    def __init__(
        self, across: dist.ProcessGroup, within: dist.ProcessGroup, shape: tuple[int, int]
    ) -> None:
        self.hosts, self.local_ranks = shape
        self.host, self.local = dist.get_rank(across), dist.get_rank(within)
        # Weak, so that process groups end when PyTorch lets go of them.
        self._across, self._within = weakref.ref(across), weakref.ref(within)
        self._stream: torch.cuda.Stream | None = None

    @property
    def across(self) -> dist.ProcessGroup:
        """The ranks of this local number, by host."""
        return _alive(self._across())

    @property
    def within(self) -> dist.ProcessGroup:
        """The ranks of this host, by local number."""
        return _alive(self._within())

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """For what crosses beside passes."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream


def _alive(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise ValueError("a process group of the mesh has ended; make another mesh")
    return group


#: Those of process groups whose GPUs are on several hosts; None: they are on one.
_found: weakref.WeakKeyDictionary[Any, HostMesh | None] = weakref.WeakKeyDictionary()


def host_mesh(group: GroupLike, device: torch.device) -> HostMesh | None:
    """The place of this process, where no group spans the hosts of what users pass as ``group``.

    That is a mesh of two dimensions; and a process group whose GPUs are on several hosts, which is
    found out once, collectively. None for every other group.

    Raises:
        ValueError: where this process is not in the mesh, and for one of more dimensions.
        uniep.Error: where hosts do not have as many consecutive ranks each.
    """
    if is_mesh_of_hosts(group):
        if group.get_coordinate() is None:
            raise ValueError("this process is not in the mesh; pass one that it is in")
        return HostMesh(group.get_group(0), group.get_group(1), (group.shape[0], group.shape[1]))
    if device.type != "cuda" or isinstance(group, Group):
        return None
    ranks = process_group_of(group)
    if ranks is None or dist.get_world_size(ranks) == 1:
        return None
    if ranks not in _found:
        _found[ranks] = mesh_of_ranks(ranks)
    return _found[ranks]


def group_of_host(group: GroupLike, device: torch.device) -> Group:
    """The :class:`uniep.Group` of the ranks of this host: where they are on one, of all."""
    mesh = host_mesh(group, device)
    return group_of(group if mesh is None else mesh.within, device)


def mesh_of_ranks(ranks: dist.ProcessGroup) -> HostMesh | None:
    """The mesh of a group on several hosts; None where it is on one. Collective.

    Raises:
        uniep.Error: where hosts do not have as many consecutive ranks each.
    """
    hosts, local_ranks = find_hosts(ranks)
    if hosts == 1:
        return None
    of_world = torch.tensor(dist.get_process_group_ranks(ranks)).view(hosts, local_ranks)
    host, local = divmod(dist.get_rank(ranks), local_ranks)

    def group_of_line(line: Tensor) -> dist.ProcessGroup:
        # By its members alone: other groups of the world may be on other hosts.
        made = dist.new_group(line.tolist(), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made

    # One after another in the same order on all ranks, as no two of a host are of one rail.
    within, across = group_of_line(of_world[host]), group_of_line(of_world[:, local])
    return HostMesh(across, within, (hosts, local_ranks))


def check_sums(mesh: HostMesh, arithmetic: Arithmetic) -> None:
    """Raises ValueError where what crosses would not be one sum of each host in bf16."""
    if arithmetic.shared_experts:
        raise ValueError(
            "there are shared experts, and the group is on several hosts of GPUs or a mesh; "
            "compute them apart there, and add what they give to the result"
        )
    if mesh.hosts == 1:
        return
    groups, partials = arithmetic.combine_groups, arithmetic.combine_partials
    if groups != mesh.hosts or partials != "bf16":
        raise ValueError(
            f"combine_groups is {groups} and combine_partials '{partials}'; over "
            f"{mesh.hosts} hosts one sum of each crosses, in bf16: pass "
            f"combine_groups={mesh.hosts} and combine_partials='bf16'"
        )


def default_capacity(
    mesh: HostMesh, hidden: int, intermediate: int, experts: int, topk: int, tokens: int
) -> int:
    """The default of :class:`uniep.Workspace`, for `tokens` tokens a rank of the mesh.

    0 where that is any routing, as in a small layer; else twice the load if that is even. The layer
    of a host would count all slots of all tokens that it sees as its own.
    """
    any_routing = mesh.hosts * mesh.local_ranks * tokens * min(topk, experts)
    if any_routing * 2 * (2 * hidden + 5 * intermediate) <= _SMALL_LAYER_BYTES:
        return 0
    return min(any_routing, 2 * topk * tokens) + experts * _ROW_ALIGN


_SMALL_LAYER_BYTES = 1 << 30  # as include/uniep/problem.h has it
_ROW_ALIGN = 128


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="what crosses hosts goes by collectives that compilers do not see through"
)
def to_all_hosts(
    mesh: HostMesh,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    experts: int,
    tokens: int,
    faults: AgreedFaults | None,
    crossing: Crossing | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the fused layer of this host sees, of rows; backward brings gradients back.

    Args:
        mesh: of the processes.
        x: bf16 [t, H]. If t is more than `tokens`, all hosts refuse the call, as they do a routing
            that does not fit.
        topk_ids: int32 [t, K], numbers of experts among all.
        topk_probs: fp32 [t, K].
        experts: of a host.
        tokens: T, that every rank sends; what it lacks is padding.
        faults: of the workspace; None: there is one host.
        crossing: of the call; None: all crosses in turn.

    Returns:
        x [N T, H], ids among the experts of this host, and probabilities.

    Raises:
        uniep.Error: for a routing of a call before that did not fit on some host.
    """
    if faults is not None:
        faults.raise_earlier()
    seen = _Spread.apply(mesh, tokens, experts, crossing, x, topk_probs, topk_ids)
    return seen[0], _ids_of_host(seen[2], mesh, experts), seen[1]


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="what crosses hosts goes by collectives that compilers do not see through"
)
def from_all_hosts(
    mesh: HostMesh,
    out: Tensor,
    tokens: int,
    faults: AgreedFaults | None,
    found: Tensor,
    crossing: Crossing | None,
) -> Tensor:
    """What all hosts give this rank's tokens, [N T, H] to [t, H]; backward brings dy to them.

    Where the routing did not fit on any host, dy is 0 for all, and so are gradients of weights.

    Args:
        mesh: of the processes.
        out: of the fused layer of this host.
        tokens: t, of this rank.
        faults: of the workspace; None: there is one host.
        found: int64 [2], the fault that the fused layer found.
        crossing: of the call; None: all crosses in turn.
    """
    if crossing is not None:
        crossing.begin_to_collect(out.detach())
    agreed = None if faults is None else faults.agree(found)
    collected: Tensor = _Collect.apply(mesh, tokens, crossing, out, agreed)
    return collected


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
        ctx: Any,
        mesh: HostMesh,
        tokens: int,
        of_host: int,
        crossing: Crossing | None,
        x: Tensor,
        probs: Tensor,
        ids: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.mesh, ctx.own, ctx.of_host = mesh, x.shape[0], of_host
        ctx.crossing = crossing or Crossing(mesh)
        ctx.save_for_backward(ids)
        # Both of four bytes: in one message.
        slots = torch.cat((ids, probs.view(torch.int32)), 1)
        if mesh.hosts == 1:  # the fused layer refuses what is too much
            tokens = max(tokens, ctx.own)
        elif ctx.own > tokens:
            slots[0, 0] = _IMPOSSIBLE
        sent = exchange.resized(slots, tokens, -1)
        slots = exchange.spread(mesh, sent)
        sent_ids, (seen_ids, seen_probs) = sent[:, : ids.shape[1]], slots.chunk(2, 1)
        seen_ids, seen_probs = ctx.crossing.find_routes(sent_ids, (seen_ids, seen_probs), of_host)
        ctx.mark_non_differentiable(seen_ids)
        seen = ctx.crossing.spread(exchange.resized(x, tokens))
        return seen, seen_probs.contiguous().view(torch.float32), seen_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        partials, dprobs_of_hosts = ctx.crossing.take(dx, dprobs)
        # A slot has its gradient from the host that has its expert.
        owner = (ids // ctx.of_host).clamp_(0, ctx.mesh.hosts - 1)[: dprobs_of_hosts.shape[1]]
        of_probs = dprobs_of_hosts[:, : ctx.own].gather(0, owner.long()[None])[0]
        sums = ctx.crossing.of_call(exchange.sum_of_hosts(partials, ctx.own))
        of_x = exchange.resized(sums, ctx.own, math.nan)
        return None, None, None, None, of_x, exchange.resized(of_probs, ctx.own), None


class _Collect(torch.autograd.Function):
    """The sums of all hosts, added up, of this rank's tokens; backward spreads dy."""

    @staticmethod
    def forward(
        ctx: Any,
        mesh: HostMesh,
        own: int,
        crossing: Crossing | None,
        out: Tensor,
        agreed: Tensor | None,
    ) -> Tensor:
        ctx.tokens = out.shape[0] // mesh.hosts
        ctx.crossing = crossing or Crossing(mesh)
        ctx.crossing.agree(agreed)
        ctx.save_for_backward(agreed)
        sums = ctx.crossing.of_call(exchange.sum_of_hosts(ctx.crossing.collect(out), own))
        return exchange.resized(sums, own, math.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (agreed,) = ctx.saved_tensors
        if agreed is not None:
            dy = torch.where(agreed[0] == 0, dy, 0)
        dy = ctx.crossing.spread_dy(exchange.resized(dy, ctx.tokens))
        return None, None, None, dy, None


#: In a message, for a rank with more tokens than it may send: no expert, nor a dropped slot.
_IMPOSSIBLE = -2
