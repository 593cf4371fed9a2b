"""What ranks of all hosts must have alike, so that each sends what another waits for.

The library compares the ranks of one host. Between hosts nobody else does.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .. import _library
from .host_mesh import HostMesh

__all__ = ["require_same"]


def require_same(mesh: HostMesh, figures: dict[str, object]) -> None:
    """Compares the figures of all ranks. Collective.

    Raises:
        uniep.Error: on all ranks, with the same sentence, where one differs.
    """
    of_rail: list[Any] = _gathered(mesh.across, figures)
    of_ranks: list[Any] = _gathered(mesh.within, of_rail)
    for number in range(mesh.hosts * mesh.local_ranks):
        host, local = divmod(number, mesh.local_ranks)
        for name, first in of_ranks[0][0].items():
            other = of_ranks[local][host][name]
            if other != first:
                raise _library.Error.of(
                    "argument",
                    f"ranks disagree: {name} is {first} on rank 0 and {other} on rank {number}; "
                    "the same on all ranks is accepted",
                )


def _gathered(group: dist.ProcessGroup, own: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found
