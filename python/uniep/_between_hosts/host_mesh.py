"""The place of a process among hosts that compute a layer together."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

__all__ = ["HostMesh"]


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
