"""All rows cross between hosts, and are added up where their token is: the sums of one group.

Where hosts give one sum each, the order in which a token's rows are added up is that of its hosts.
Any other order needs the rows themselves. So the fused layer of a host does not add them up
(``Problem::slot_rows``): it gives a row for each slot of a token, which goes back. For autograd a
layer of rows is given a token for each of them, [T, K, H], and has such gradients: so tokens and dy
are repeated, without memory, and what crosses is one of each.

With ``probs="after"`` rows are multiplied as they are added up. Their gradients are those of
products of probability and row: the fused layer multiplies dy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from .exchange import Found
from .host_mesh import HostMesh
from .routes import RoutesOfSlots

__all__ = ["AllRows", "RowsOfCall", "tokens_of"]


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


class RowsOfCall:
    """The rows of one call.

    Args:
        how: they are added up.
        mesh: of the processes.
        sent: ids [T, K] among all experts and probabilities [T, K], of this rank.
        seen: ids [N T, K] of its rail, in the order in which tokens lie.
        experts: of a host.
        exact: only rows cross that there are, else as many as there could be.

    Attributes:
        routes: of slots; None: all to all.
        topk: K.
    """

    def __init__(
        self,
        how: AllRows,
        mesh: HostMesh,
        sent: tuple[Tensor, Tensor],
        seen: Tensor,
        experts: int,
        exact: bool,
    ) -> None:
        self._how, self.topk = how, sent[0].shape[1]
        self._ids, self._probs = (slots.contiguous() for slots in sent)
        # An id of no expert is a fault of the plan. Where that is a value, sums are NaN anyway.
        self._ids = torch.where(self._ids < how.experts, self._ids, -1)
        self._owner = (sent[0] // experts).clamp_(0, mesh.hosts - 1).flatten().long()
        self.routes: RoutesOfSlots | None = None
        if exact:
            slots = sent[0].reshape(-1, 1), seen.reshape(-1, 1)
            self.routes = RoutesOfSlots(mesh, *slots, experts)

    def repeated(self, tokens: Tensor) -> Tensor:
        """[N T, n] to [N T, K, n], a token for each of its slots, which takes no memory."""
        return tokens[:, None].expand(-1, self.topk, -1)

    def sums(self, found: Found, *, of_rows: bool) -> Tensor:
        """bf16 [T, n] of this rank's tokens: docs/numerics.md, "Combine groups".

        Args:
            found: what hosts have for its slots, [T K, n] each.
            of_rows: rows of forward; else gradients of them, which are multiplied already.
        """
        how = self._how
        numbers = found.numbers().gather(0, self._owner[None]).view_as(self._ids)
        probs = self._probs if of_rows and how.probs_after else None
        sums: Tensor = ops.add_rows(
            *found.rows, numbers, self._ids, probs, how.experts, how.groups, how.rounds
        )
        return sums


def tokens_of(repeated: Tensor) -> Tensor:
    """[T, n] of what :meth:`RowsOfCall.repeated` gave; and what it did not give, as it is."""
    return repeated[:, 0] if repeated.dim() == 3 else repeated
