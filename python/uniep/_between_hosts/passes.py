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

Of any other combine groups than one of each host in bf16, rows cross instead of sums:
:class:`AllRows`.

Each is the other's gradient. All messages are of a size that the shapes say, so nothing waits for
the host, and CUDA graphs can capture it. With ``exact_hosts`` only those tokens cross that have an
expert where they go: their number is waited for. Which tokens do, and what crosses while the fused
layer computes, is the business of a :class:`Crossing`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._outside_graphs import outside_graphs
from . import exchange
from .agreed_faults import AgreedFaults
from .all_rows import AllRows
from .crossing import Crossing
from .host_mesh import HostMesh

__all__ = ["OverHosts", "from_all_hosts", "to_all_hosts"]


class OverHosts(NamedTuple):
    """What calls of a workspace have in common.

    Attributes:
        mesh: of the processes.
        experts: of a host.
        tokens: T, that every rank sends; what it lacks is padding.
        faults: of the workspace; None: there is one host.
        all_rows: how rows of all hosts are added up; None: a sum of each crosses.
    """

    mesh: HostMesh
    experts: int
    tokens: int
    faults: AgreedFaults | None
    all_rows: AllRows | None


@outside_graphs(reason="what crosses hosts goes by collectives that compilers do not see through")
def to_all_hosts(
    over: OverHosts,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    crossing: Crossing | None,
    *,
    learns: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Crossing]:
    """What the fused layer of this host sees, of rows; backward brings gradients back.

    Args:
        over: of the workspace.
        x: bf16 [t, H]. If t is more than T, all hosts refuse the call, as they do a routing that
            does not fit.
        topk_ids: int32 [t, K], numbers of experts among all.
        topk_probs: fp32 [t, K].
        crossing: of the call; None: all crosses in turn.
        learns: a backward will come, as on all ranks, whether or not x and probabilities of this
            one need gradients: what crosses then takes all of them.

    Returns:
        x [N T, H], ids among the experts of this host, and probabilities; where rows cross, x is
        [N T, K, H], which repeats a token for each slot. And what :func:`from_all_hosts` is given.

    Raises:
        uniep.Error: for a routing of a call before that did not fit on some host.
    """
    if over.faults is not None:
        over.faults.raise_earlier()
    if crossing is None:
        crossing = Crossing(over.mesh, over.all_rows)
    if learns and torch.is_grad_enabled() and not (x.requires_grad or topk_probs.requires_grad):
        topk_probs = topk_probs.detach().requires_grad_()
    x, probs, ids = _Spread.apply(over, crossing, x, topk_probs, topk_ids)
    return x, _ids_of_host(ids, over.mesh, over.experts), probs, crossing


@outside_graphs(reason="what crosses hosts goes by collectives that compilers do not see through")
def from_all_hosts(
    over: OverHosts,
    out: Tensor,
    tokens: int,
    found: Tensor,
    crossing: Crossing,
    more: Tensor | None = None,
) -> Tensor:
    """What all hosts give this rank's tokens, [N T, H] or rows [N T, K, H] to [t, H].

    Backward brings dy to them, for rows [N T, K, H] of repeated tokens.

    Where the routing did not fit on any host, dy is 0 for all, and so are gradients of weights.

    Args:
        over: of the workspace.
        out: of the fused layer of this host.
        tokens: t, of this rank.
        found: int64 [2], the fault that the fused layer found; becomes that of all hosts.
        crossing: of the call.
        more: bf16 [t, H] to be added to the sums, once these are rounded; None: nothing.
    """
    crossing.begin_to_collect(out.detach())
    agreed = None
    if over.faults is not None:
        agreed = over.faults.agree(found)
        found.copy_(agreed)
    collected: Tensor = _Collect.apply(over, tokens, crossing, out, agreed, more)
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
        ctx: Any, over: OverHosts, crossing: Crossing, x: Tensor, probs: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mesh, of_host, tokens = over.mesh, over.experts, over.tokens
        ctx.over, ctx.crossing, ctx.own = over, crossing, x.shape[0]
        ctx.save_for_backward(ids)
        # Both of four bytes: in one message.
        slots = torch.cat((ids, probs.view(torch.int32)), 1)
        if mesh.hosts == 1:  # the fused layer refuses what is too much
            tokens = max(tokens, ctx.own)
        elif ctx.own > tokens:
            slots[0, 0] = _IMPOSSIBLE
        sent = exchange.resized(slots, tokens, -1)
        slots = exchange.spread(mesh, sent)
        of_rank, of_rail = _ids_and_probs(sent), _ids_and_probs(slots)
        of_rail = crossing.find_routes(of_rank[0], of_rail, of_host)
        crossing.find_rows(of_rank, of_rail[0], of_host)
        seen = crossing.repeated(crossing.spread(exchange.resized(x, tokens)))
        ctx.mark_non_differentiable(of_rail[0])
        return seen, of_rail[1].contiguous(), of_rail[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        crossing: Crossing = ctx.crossing
        found, found_of_probs = crossing.take(dx, dprobs)
        # A slot has its gradient from the host that has its expert.
        of_hosts = torch.stack(found_of_probs.blocks())
        owner = (ids // ctx.over.experts).clamp_(0, len(of_hosts) - 1)[: of_hosts.shape[1]]
        of_probs = of_hosts[:, : ctx.own].gather(0, owner.long()[None])[0]
        of_x = _sums(crossing, found, ctx.own, of_rows=False)
        return None, None, of_x, exchange.resized(of_probs, ctx.own), None


class _Collect(torch.autograd.Function):
    """The sums of all hosts, added up, of this rank's tokens; backward spreads dy."""

    @staticmethod
    def forward(
        ctx: Any,
        over: OverHosts,
        own: int,
        crossing: Crossing,
        out: Tensor,
        agreed: Tensor | None,
        more: Tensor | None,
    ) -> Tensor:
        # More than over.tokens where there is one host, which refuses that.
        ctx.tokens = out.shape[0] // over.mesh.hosts
        ctx.crossing = crossing
        crossing.agree(agreed)
        ctx.save_for_backward(agreed)
        ctx.has_more = more is not None
        sums = _sums(crossing, crossing.collect(out), own, of_rows=True)
        return sums if more is None else sums + more

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (agreed,) = ctx.saved_tensors
        if agreed is not None:
            dy = torch.where(agreed[0] == 0, dy, 0)
        crossing: Crossing = ctx.crossing
        seen = crossing.spread_dy(exchange.resized(dy, ctx.tokens))
        more = dy if ctx.has_more else None
        return None, None, None, crossing.repeated(seen), None, more


def _ids_and_probs(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Of one message: int32 [T, K] and fp32 [T, K]."""
    ids, probs = slots.chunk(2, 1)
    return ids, probs.view(torch.float32)


def _sums(crossing: Crossing, found: exchange.Found, own: int, *, of_rows: bool) -> Tensor:
    """bf16 [own, H] of this rank's tokens, from what all hosts have for them."""
    if crossing.rows is not None:
        sums = crossing.rows.sums(found, of_rows=of_rows)[:own]
    else:
        sums = exchange.sum_of_hosts(found.blocks(), own)
    return exchange.resized(crossing.of_call(sums), own, math.nan)


#: In a message, for a rank with more tokens than it may send: no expert, nor a dropped slot.
_IMPOSSIBLE = -2
