"""Which tokens cross to which host, where only those do that have an expert there.

Ranks of a rail know each other's numbers of experts, so each finds out alone what it sends and what
it receives: nothing more has to cross for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .hosts import HostMesh

__all__ = ["Route", "Routes"]


class Route(NamedTuple):
    """Of [N, T] tokens those that cross in one direction, to a host each or from one.

    Attributes:
        counts: how many, by host; 0 of this host.
        places: int64 [their sum], h T + t for token t to or from host h, ascending.
    """

    counts: list[int]
    places: Tensor

    def of(self, host: int, tokens: int) -> Tensor:
        """int64, which of the T = `tokens` tokens of one host."""
        first = sum(self.counts[:host])
        return self.places[first : first + self.counts[host]] - host * tokens


class Routes(NamedTuple):
    """Both directions.

    Attributes:
        sent: tokens of this rank, by the host that they go to.
        received: those of the other ranks of its rail, by their host.
    """

    sent: Route
    received: Route

    @classmethod
    def of(cls, mesh: HostMesh, ids: Tensor, seen: Tensor, experts: int) -> Routes:
        """Waits for the device, once.

        Args:
            mesh: of the processes.
            ids: int [T, K] of this rank, numbers of experts among all; others cross nowhere.
            seen: int [N T, K], those of its rail.
            experts: of a host.
        """
        hosts = torch.arange(mesh.hosts, device=ids.device)
        first = hosts[:, None, None] * experts
        sent = ((ids >= first) & (ids < first + experts)).any(-1)
        seen = seen.view(mesh.hosts, -1, seen.shape[1]) - mesh.host * experts
        received = ((seen >= 0) & (seen < experts)).any(-1)
        cross = torch.stack((sent, received)) & (hosts != mesh.host)[:, None]
        counts: list[list[int]] = cross.sum(-1).tolist()
        routes = []
        for route, of_hosts in zip(cross, counts, strict=True):
            places = torch.nonzero_static(route.flatten(), size=sum(of_hosts))
            routes.append(Route(of_hosts, places.flatten()))
        return cls(*routes)
