"""Where the ranks of a group are: on one host, or on several, which a mesh tells apart."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..arithmetic import Arithmetic
from ..group import (
    Group,
    GroupLike,
    find_hosts,
    group_of,
    is_mesh_of_hosts,
    place_in_mesh,
    process_group_of,
    without_mesh,
)
from .all_rows import AllRows
from .host_mesh import HostMesh

__all__ = [
    "ROW_ALIGN",
    "all_rows_of",
    "default_capacity",
    "group_of_host",
    "host_mesh",
    "mesh_of_ranks",
    "within_host",
]

#: Those of process groups whose GPUs are on several hosts; None: they are on one.
_found: weakref.WeakKeyDictionary[Any, HostMesh | None] = weakref.WeakKeyDictionary()


def host_mesh(group: GroupLike, device: torch.device) -> HostMesh | None:
    """The place of this process, where no group spans the hosts of what users pass as ``group``.

    That is a mesh of two dimensions; and a process group whose GPUs are on several hosts, which is
    found out once, collectively. None for every other group.

    Raises:
        ValueError: where this process is not in the mesh, for one of more dimensions, and one whose
            ranks do not ascend.
        uniep.Error: where hosts do not have as many consecutive ranks each.
    """
    if is_mesh_of_hosts(group):
        place_in_mesh(group)
        return HostMesh(group.get_group(0), group.get_group(1), (group.shape[0], group.shape[1]))
    if device.type != "cuda" or isinstance(group, Group):
        return None
    ranks = process_group_of(group)
    if ranks is None or dist.get_world_size(ranks) == 1:
        return None
    if ranks not in _found:
        _found[ranks] = mesh_of_ranks(ranks)
    return _found[ranks]


def within_host(group: GroupLike) -> GroupLike:
    """The group of the ranks of this host, as far as that is known."""
    if is_mesh_of_hosts(group):
        return group.get_group(1)
    ranks = without_mesh(group)
    mesh = _found.get(ranks) if isinstance(ranks, dist.ProcessGroup) else None
    return group if mesh is None else mesh.within


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
    of_world = torch.tensor(dist.get_process_group_ranks(ranks), device="cpu")
    of_world = of_world.view(hosts, local_ranks)
    host, local = divmod(dist.get_rank(ranks), local_ranks)

    def group_of_line(line: Tensor) -> dist.ProcessGroup:
        # By its members alone: other groups of the world may be on other hosts.
        made = dist.new_group(line.tolist(), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made

    # One after another in the same order on all ranks, as no two of a host are of one rail.
    within, across = group_of_line(of_world[host]), group_of_line(of_world[:, local])
    return HostMesh(across, within, (hosts, local_ranks))


def all_rows_of(mesh: HostMesh, arithmetic: Arithmetic, experts: int) -> AllRows | None:
    """How rows of all hosts are added up; None where one sum of each, in bf16, crosses instead.

    Raises:
        ValueError: for what hosts cannot compute together.
    """
    groups, rounds = arithmetic.combine_groups, arithmetic.combine_partials == "bf16"
    if mesh.hosts == 1 or (groups == mesh.hosts and rounds):
        return None
    if experts % groups:
        raise ValueError(
            f"combine_groups is {groups}, and num_experts {experts}; a divisor of that is accepted"
        )
    return AllRows(experts, groups, rounds, arithmetic.probs == "after")


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
    return min(any_routing, 2 * topk * tokens) + experts * ROW_ALIGN


_SMALL_LAYER_BYTES = 1 << 30  # as include/uniep/problem.h has it
#: Rows that the segment of an expert is a multiple of, as include/uniep/problem.h has it.
ROW_ALIGN = 128
