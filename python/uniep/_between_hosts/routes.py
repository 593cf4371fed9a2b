"""Which tokens cross to which host, where only those do that have an expert there.

Ranks of a rail know each other's numbers of experts, so each finds out alone what it sends and what
it receives: nothing more has to cross for that. A rank packs what it sends. What comes lies at the
beginning of its host's block, in the order of its rank: as the other tokens have no rows there, the
fused layer takes all rows in the order that it would have taken them in.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .host_mesh import HostMesh

__all__ = ["Routes", "RoutesOfSlots"]


class Routes:
    """Of the T tokens of a rank and of the N T of its rail.

    How many tokens cross is known once the device has counted them: whoever asks first waits.

    Args:
        mesh: of the processes.
        ids: int [T, K] of this rank, numbers of experts among all; others cross nowhere.
        seen: int [N T, K], those of its rail.
        experts: of a host.
    """

    def __init__(self, mesh: HostMesh, ids: Tensor, seen: Tensor, experts: int) -> None:
        hosts = torch.arange(mesh.hosts, device=ids.device)[:, None]
        first = hosts[..., None] * experts
        here = seen.view(mesh.hosts, -1, seen.shape[1]) - mesh.host * experts
        self._sent = ((ids >= first) & (ids < first + experts)).any(-1) & (hosts != mesh.host)
        received = ((here >= 0) & (here < experts)).any(-1) | (hosts == mesh.host)
        # By host its tokens: those that come ahead of the others, in their order.
        self._order = torch.argsort((~received).byte(), dim=-1, stable=True)
        counts = torch.stack((self._sent, received)).sum(-1)
        self._counts, self._is_told = counts, None
        if counts.is_cuda:
            self._counts = torch.empty_like(counts, device="cpu", pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._is_told = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_told.record(torch.cuda.current_stream(counts.device))

    @cached_property
    def _told(self) -> list[list[int]]:
        if self._is_told is not None:
            self._is_told.synchronize()
        counts: list[list[int]] = self._counts.tolist()
        return counts

    @property
    def sent(self) -> list[int]:
        """How many tokens of this rank go to each host; 0 to its own."""
        return self._told[0]

    @property
    def received(self) -> list[int]:
        """How many tokens come from each host; of its own all T."""
        return self._told[1]

    @cached_property
    def places(self) -> Tensor:
        """int64 [sum of `sent`], h T + t for token t that goes to host h, ascending."""
        return torch.nonzero_static(self._sent.flatten(), size=sum(self.sent)).flatten()

    def moved_up(self, rows: Tensor) -> Tensor:
        """[N T, n] of all tokens of the rail: those that come first in their blocks."""
        index = self._order[..., None].expand(-1, -1, rows.shape[1])
        return rows.view_as(index).gather(1, index).flatten(0, 1)

    def taken(self, block: Tensor, host: int) -> Tensor:
        """Of a host's block [T, n] as tokens lie here, those that came from there."""
        return block[: self.received[host]]

    def packed(self, rows: Tensor) -> Tensor:
        """[T, n] of this rank's tokens to [sum of `sent`, n]."""
        return rows.index_select(0, self.places % rows.shape[0])


class RoutesOfSlots(Routes):
    """Of the slots of tokens, [T K, 1] and [N T K, 1], which stay where they are in their block."""

    def taken(self, block: Tensor, host: int) -> Tensor:
        """Of a host's block [T K, n], the rows that an expert of this host has made."""
        return block.index_select(0, self._order[host, : self.received[host]])
