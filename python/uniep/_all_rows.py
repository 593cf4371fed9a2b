"""All rows cross between hosts, and are added up where their token is: the sums of one group.

Where hosts give one sum each, the order in which a token's rows are added up is that of its hosts.
Any other order needs the rows themselves. So the fused layer of a host sees each slot of a token as
a token with that slot alone, whose sum is the row. Tokens still cross once, and are repeated behind
that; rows go back, and gradients of rows do.

With ``probs="after"`` the fused layer would round the product of probability and row. So it has the
probability 1, dy comes multiplied, and rows are multiplied as they are added up. With probability 0
it has that, and dy itself: the gradient of the probability needs it (docs/numerics.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._exchange import Found
from ._routes import Routes

if TYPE_CHECKING:
    from .hosts import HostMesh

__all__ = ["AllRows", "RowsOfCall"]


class AllRows(NamedTuple):
    """How rows of all hosts are added up, with the words of :func:`uniep.moe`.

    Attributes:
        experts: E, of all hosts.
        groups: G, which divides E.
        rounds: the sums of several groups are rounded to bf16.
        probs_after: rows are multiplied by probabilities.
    """

    experts: int
    groups: int
    rounds: bool
    probs_after: bool

    def add_up(self, rows: Tensor, ids: Tensor, probs: Tensor | None) -> Tensor:
        """The sum of a token's rows in docs/numerics.md, "Combine groups".

        Args:
            rows: bf16 [T, K, n]; of slots without an expert 0.
            ids: int [T, K], numbers of experts among all; less than 0: none.
            probs: fp32 [T, K], what rows are multiplied by; None: nothing.

        Returns:
            bf16 [T, n].
        """
        groups = torch.where(ids < 0, -1, ids // (self.experts // self.groups))
        # Group by group, and by slot in each; slots of none, which are 0, ahead of all.
        groups, order = groups.sort(dim=1, stable=True)
        begins = groups.diff(dim=1) != 0
        part = rows.new_zeros(rows.shape[0], rows.shape[2], dtype=torch.float32)
        total = torch.zeros_like(part)
        tokens = torch.arange(rows.shape[0], device=rows.device)
        for j in range(ids.shape[1]):
            row = rows[tokens, order[:, j]].float()
            if probs is not None:
                row *= probs.gather(1, order[:, j, None])
            if j and self.groups > 1:
                ends = begins[:, j - 1, None]
                total += torch.where(ends, self._partial(part), 0)
                part.masked_fill_(ends, 0)
            part += row
        return (total + self._partial(part)).bfloat16()

    def _partial(self, part: Tensor) -> Tensor:
        return part.bfloat16().float() if self.rounds and self.groups > 1 else part


class RowsOfCall:
    """The rows of one call.

    Args:
        how: they are added up.
        mesh: of the processes.
        sent: ids [T, K] among all experts and probabilities [T, K], of this rank.
        seen: those of its rail, [N T, K], in the order in which tokens lie.
        experts: of a host.
        exact: only rows cross that there are, else as many as there could be.

    Attributes:
        ids: int [N T K, 1], among all experts, as the fused layer sees slots.
        probs: fp32 [N T K, 1], likewise.
        routes: of slots; None: all to all.
        topk: K.
    """

    def __init__(
        self,
        how: AllRows,
        mesh: HostMesh,
        sent: tuple[Tensor, Tensor],
        seen: tuple[Tensor, Tensor],
        experts: int,
        exact: bool,
    ) -> None:
        self._how, self._hosts, self.topk = how, mesh.hosts, sent[0].shape[1]
        self._own_ids, self._own_probs = sent
        self._owner = (sent[0] // experts).clamp_(0, mesh.hosts - 1).flatten().long()
        ids, probs = (slots.reshape(-1, 1) for slots in seen)
        self.routes = Routes(mesh, sent[0].reshape(-1, 1), ids, experts) if exact else None
        if self.routes is not None:
            ids, probs = self.routes.moved_up(ids), self.routes.moved_up(probs)
        self.ids, self._seen_probs = ids.contiguous(), probs.contiguous()

    @property
    def probs(self) -> Tensor:
        """fp32 [N T K, 1] that the fused layer is given."""
        if not self._how.probs_after:
            return self._seen_probs
        return (self._seen_probs != 0).float()

    def repeated(self, tokens: Tensor) -> Tensor:
        """[N T, n] of the tokens that this rank sees to [N T K, n], a row for each slot.

        Rows of slots that have no expert on this host may be anything.
        """
        topk = self.topk
        if self.routes is None:
            return tokens.repeat_interleave(topk, 0)
        blocks = tokens.view(self._hosts, -1, tokens.shape[1])
        rows = tokens.new_empty(self._hosts, topk * blocks.shape[1], tokens.shape[1])
        for host, block in enumerate(blocks):
            came = self.routes.came(host)
            torch.index_select(block, 0, came // topk, out=rows[host, : len(came)])
        return rows.flatten(0, 1)

    def repeated_dy(self, dy: Tensor) -> Tensor:
        """As :meth:`repeated`, of gradients; multiplied where rows are."""
        rows = self.repeated(dy)
        if not self._how.probs_after:
            return rows
        probs = self._seen_probs
        return torch.where(probs == 0, rows, (probs * rows).bfloat16())

    def sums(self, found: Found, *, of_rows: bool) -> Tensor:
        """[T, n] of this rank's tokens from their rows.

        Args:
            found: what hosts have for its slots, [T K, n] each.
            of_rows: rows of forward; else gradients of them, which are multiplied already.
        """
        multiplies = of_rows and self._how.probs_after
        probs = self._own_probs.masked_fill(self._own_ids < 0, 0) if multiplies else None
        rows = found.rows(self._owner)
        rows = rows.view(-1, self.topk, rows.shape[1])
        return self._how.add_up(rows, self._own_ids, probs)

    def dprobs(self, found: Found) -> Tensor:
        """fp32 [T, K], gradients of this rank's probabilities."""
        gradients = found.rows(self._owner).view(-1, self.topk)
        if self._how.probs_after:
            probs = self._own_probs
            gradients = torch.where(probs == 0, gradients, gradients / probs)
        return gradients.masked_fill(self._own_ids < 0, 0)
