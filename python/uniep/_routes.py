"""Which tokens cross to which host, where only those do that have an expert there.

Ranks of a rail know each other's numbers of experts, so each finds out alone what it sends and what
it receives: nothing more has to cross for that. A rank packs what it sends. What comes lies at the
beginning of its host's block, in the order of its rank: as the other tokens have no rows there, the
fused layer takes all rows in the order that it would have taken them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .hosts import HostMesh

__all__ = ["Routes"]


class Routes(NamedTuple):
    """Of the T tokens of a rank and of the N T of its rail.

    Attributes:
        sent: how many tokens of this rank go to each host; 0 to its own.
        places: int64 [sum of `sent`], h T + t for token t that goes to host h, ascending.
        received: how many tokens come from each host; of its own all T.
        order: int64 [N, T], by host its tokens: those that come ahead of the others.
    """

    sent: list[int]
    places: Tensor
    received: list[int]
    order: Tensor

    @classmethod
    def of(cls, mesh: HostMesh, ids: Tensor, seen: Tensor, experts: int) -> Routes:
        """Waits for the device, once.

        Args:
            mesh: of the processes.
            ids: int [T, K] of this rank, numbers of experts among all; others cross nowhere.
            seen: int [N T, K], those of its rail.
            experts: of a host.
        """
        hosts = torch.arange(mesh.hosts, device=ids.device)[:, None]
        first = hosts[..., None] * experts
        sent = ((ids >= first) & (ids < first + experts)).any(-1) & (hosts != mesh.host)
        here = seen.view(mesh.hosts, -1, seen.shape[1]) - mesh.host * experts
        received = ((here >= 0) & (here < experts)).any(-1) | (hosts == mesh.host)
        counts: list[list[int]] = torch.stack((sent, received)).sum(-1).tolist()
        places = torch.nonzero_static(sent.flatten(), size=sum(counts[0])).flatten()
        order = torch.argsort((~received).byte(), dim=-1, stable=True)
        return cls(counts[0], places, counts[1], order)

    def moved_up(self, rows: Tensor) -> Tensor:
        """[N T, n] of all tokens of the rail: those that come first in their blocks."""
        index = self.order[..., None].expand(-1, -1, rows.shape[1])
        return rows.view_as(index).gather(1, index).flatten(0, 1)

    def packed(self, rows: Tensor) -> Tensor:
        """[T, n] of this rank's tokens to [sum of `sent`, n]."""
        return rows.index_select(0, self.places % rows.shape[0])
