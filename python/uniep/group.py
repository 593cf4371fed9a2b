"""Expert-parallel groups: which processes hold the experts of a layer together."""

from __future__ import annotations

import ctypes
import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import _library
from ._of_process import OfProcess

__all__ = [
    "Group",
    "GroupLike",
    "all_gathered",
    "find_hosts",
    "gather_objects",
    "group_named",
    "group_of",
    "groups_known",
    "is_mesh_of_hosts",
    "objects_on_first",
    "place_in_mesh",
    "process_group_of",
    "rank_and_size",
    "warn_of_others",
    "without_mesh",
]

_BACKENDS = {"cpu": 0, "cuda": 1}


class Group(OfProcess):
    """The ranks of an expert-parallel group; each is a process.

    On CPUs they may be on several hosts, with as many consecutive ranks on each. Those with a GPU
    are on one; :func:`uniep.moe` takes a mesh of such groups. Making a group is collective. The
    process group serves only for that; later calls need none.

    Args:
        process_group: a ``torch.distributed.ProcessGroup`` of any backend, a ``DeviceMesh`` of one
            dimension, or None: this process alone.
        device: where the tensors of its layers lie: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. None:
            the current CUDA device where PyTorch and uniep have CUDA, else the CPU.
        share_device: lets several ranks use one GPU. For tests and development: it is slow.
        timeout_ms: limit of every wait while it is made, once all ranks have met: that is a
            collective of the process group, and has its timeout. 0: ``UNIEP_TIMEOUT_MS``, else
            30000.

    Raises:
        ValueError: for a device that is neither CPU nor CUDA, or that this build cannot use, for a
            mesh of several dimensions, and a group that this process is not in.
        TypeError: for anything else that is no process group.
        uniep.Error: where a rank is lost, hosts do not have as many consecutive ranks each, or
            GPUs are on several.

    Attributes:
        rank, size: of this process in the group, and the number of ranks.
        device: as above, with its index.
        hosts: on how many hosts the ranks are.
        local_ranks: how many of them each host has; host 0 has the first, and so on.
        name: one of its own in this process.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | int | None = None,
        share_device: bool = False,
        timeout_ms: int = 0,
    ) -> None:
        self.device = device_of(device)
        timeout_ms = _library.int32(timeout_ms=timeout_ms)
        process_group = _process_group_of_mesh(process_group)
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            _refuse(process_group)
        # Weak, so that a process group ends when PyTorch lets go of it.
        self._process_group = None if process_group is None else weakref.ref(process_group)
        if process_group is None:
            warn_of_others()
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(_NO_MEMBER)

        if self.device.type == "cuda" and self.size > 1 and self.rank == 0:
            _warn_of_collectives()
        handle = ctypes.c_void_p()
        _meet(
            process_group,
            lambda config: _library.library.uniep_group_create(config, ctypes.byref(handle)),
            backend=_BACKENDS[self.device.type],
            device=self.device.index or 0,
            share_device=int(share_device),
            timeout_ms=timeout_ms,
        )
        self.hosts, self.local_ranks = _layout_of(handle)
        self.name = f"group {next(_numbers)}"
        _named[self.name] = self
        #: The uniep.Workspaces of calls without one, and the uniep.RowPools of such: by shape.
        self.workspaces: dict[tuple[object, ...], Any] = {}
        self.row_pools: dict[tuple[object, ...], Any] = {}
        #: The uniep.Workspaces of such calls in CUDA graphs: replays use them, too.
        self.captured: list[Any] = []
        self._handle = handle
        # Layers keep what they need of the group, so the order in which things end is free.
        self._finalizer = weakref.finalize(self, _library.library.uniep_group_destroy, handle)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """What it was made of, or None where that has ended."""
        return None if self._process_group is None else self._process_group()

    @property
    def handle(self) -> ctypes.c_void_p:
        """The ``uniep_group*``; for :class:`uniep.Workspace`.

        Raises:
            ValueError: where the group is closed.
        """
        if not self._finalizer.alive:
            raise ValueError("the group is closed; make another uniep.Group")
        return self._handle

    def close(self) -> None:
        """Lets go of the group. Not collective; workspaces that exist keep working."""
        self._finalizer()

    def __repr__(self) -> str:
        hosts = f", hosts={self.hosts}" if self.hosts > 1 else ""
        return f"uniep.Group(rank={self.rank}, size={self.size}{hosts}, device='{self.device}')"


_numbers = itertools.count()
_named: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def group_named(name: str) -> Group:
    """The group that has this name in this process."""
    return _named[name]


GroupLike: TypeAlias = "Group | dist.ProcessGroup | DeviceMesh | None"


def _process_group_of_mesh(
    group: dist.ProcessGroup | DeviceMesh | None,
) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names
        one = f"mesh['{names[-1]}']" if names else "one made with mesh_dim_names, and its part"
        raise ValueError(
            f"group is a DeviceMesh of {group.ndim} dimensions; one of a single dimension is "
            f"accepted: {one}; uniep.moe and uniep.MoELayer also take one of hosts and ranks"
        )
    place_in_mesh(group)
    return group.get_group()


def place_in_mesh(mesh: DeviceMesh) -> tuple[int, ...]:
    """Where this process is in a mesh: along each dimension its rank in that process group, too.

    Raises:
        ValueError: where it is not in the mesh, or where these differ, as process groups number
            their ranks in ascending order, and weights that are cut by the one would be others'.
    """
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError("this process is not in the mesh; pass one that it is in")
    in_groups = [dist.get_rank(mesh.get_group(dimension)) for dimension in range(mesh.ndim)]
    if list(place) != in_groups:
        raise ValueError(
            f"the mesh has this process at {list(place)}, and its process groups at {in_groups}; "
            "one whose ranks ascend along each dimension is accepted"
        )
    return tuple(place)


def is_mesh_of_hosts(group: object) -> TypeGuard[DeviceMesh]:
    """Whether that is a mesh of two dimensions: hosts, and the ranks of each."""
    return isinstance(group, DeviceMesh) and group.ndim == 2


def warn_of_others() -> None:
    """Before init_process_group, ``dist.group.WORLD`` is None, which means this process alone."""
    processes = os.environ.get("WORLD_SIZE", "")
    if not processes.isdecimal() or int(processes) < 2:
        return
    if dist.is_available() and dist.is_initialized():
        return
    warnings.warn(
        f"WORLD_SIZE is {processes}, but torch.distributed is not initialised and group is None: "
        "this process keeps all experts to itself; to share them, call "
        "torch.distributed.init_process_group() and then pass group=torch.distributed.group.WORLD",
        stacklevel=2,
    )


#: Among so many SMs that a pass spares, four lie side by side, as a cluster of NCCL's CTAs needs.
_ROOM_FOR_CLUSTERS = 32
#: What to set for collectives beside passes.
_BESIDE_PASSES = "UNIEP_SPARE_SMS=16 NCCL_MAX_CTAS=16 NCCL_CGA_CLUSTER_SIZE=0"


def _warn_of_collectives() -> None:
    """Whether any run beside passes is what only the user knows; where they do, it is needed."""
    spared = os.environ.get("UNIEP_SPARE_SMS", "")
    in_clusters = os.environ.get("NCCL_CGA_CLUSTER_SIZE") not in ("0", "1")
    if not spared:
        said = (
            "UNIEP_SPARE_SMS is not set: where collectives of NCCL run beside uniep's passes, as "
            "those of FSDP and DDP do, both can wait for each other until the time limit; set "
            f"{_BESIDE_PASSES}, or UNIEP_SPARE_SMS=0 where none do"
        )
    elif in_clusters and spared.isdecimal() and 0 < int(spared) < _ROOM_FOR_CLUSTERS:
        said = (
            f"UNIEP_SPARE_SMS is {spared}, but NCCL_CGA_CLUSTER_SIZE is not 0: NCCL starts its "
            "CTAs in clusters, for which passes leave no room, so that a collective waits until "
            f"they have ended; set {_BESIDE_PASSES}"
        )
    else:
        return
    warnings.warn(f"{said} (docs/parallelism.md, Spare SMs)", stacklevel=3)


def _layout_of(handle: ctypes.c_void_p) -> tuple[int, int]:
    hosts, local_ranks = ctypes.c_int32(), ctypes.c_int32()
    _library.check(
        _library.library.uniep_group_layout(handle, ctypes.byref(hosts), ctypes.byref(local_ranks))
    )
    return hosts.value, local_ranks.value


def find_hosts(process_group: dist.ProcessGroup) -> tuple[int, int]:
    """On how many hosts the ranks are, and how many each has; collective.

    Raises:
        uniep.Error: where hosts do not have as many consecutive ranks each.
    """
    hosts, local_ranks = ctypes.c_int32(), ctypes.c_int32()
    found = (ctypes.byref(hosts), ctypes.byref(local_ranks))
    _meet(
        process_group,
        lambda config: _library.library.uniep_group_find_hosts(config, *found),
    )
    return hosts.value, local_ranks.value


def _meet(
    process_group: dist.ProcessGroup | None, call: Callable[[Any], int], **options: int
) -> None:
    """A collective call of the library with the config of a group."""
    gather = _Gather(process_group)
    config = _library.GroupConfig(
        rank=0 if process_group is None else dist.get_rank(process_group),
        size=1 if process_group is None else dist.get_world_size(process_group),
        all_gather=gather.callback,
        ranks_note=_ranks_note(process_group),
        **options,
    )
    result = call(ctypes.byref(config))
    if gather.error is not None:
        raise gather.error
    _library.check(result)


def _ranks_note(process_group: dist.ProcessGroup | None) -> bytes | None:
    """Which of all processes the ranks of a part of them are, for errors that name a rank."""
    if process_group is None:
        return None
    ranks = dist.get_process_group_ranks(process_group)
    first, last = ranks[0], ranks[-1]
    if ranks == list(range(len(ranks))):
        return None
    are_a_run = ranks == list(range(first, last + 1))
    named = f"{first} to {last}" if are_a_run else ", ".join(map(str, ranks))
    return f"of a group whose ranks are {named} of the world".encode()


class _Gather:
    """The all-gather of bytes that a group's set-up asks for, over any process group."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.error: BaseException | None = None
        self._group = process_group
        self.callback: Any = _library.AllGather(self._run)

    def _run(self, _: int | None, own: int, count: int, gathered: int) -> int:
        try:
            parts: list[Any] = [None] * dist.get_world_size(self._group)
            # Works with every backend: bytes travel on the device that the group can use.
            dist.all_gather_object(parts, ctypes.string_at(own, count), group=self._group)
            for rank, part in enumerate(parts):
                if len(part) != count:
                    raise RuntimeError(
                        f"rank {rank} sent {len(part)} bytes where this rank sent {count}; "
                        "all ranks must make the same group at the same time"
                    )
            ctypes.memmove(gathered, b"".join(parts), count * len(parts))
        except BaseException as error:  # cannot pass through the C call; raised after it
            self.error = error
            return 1
        return 0


def device_of(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        with_cuda = torch.cuda.is_available() and _library.has_cuda()
        device = torch.device("cuda" if with_cuda else "cpu")
    device = torch.device(device)
    if device.type not in _BACKENDS:
        raise ValueError(f"device is '{device}'; uniep runs on 'cpu' and 'cuda'")
    if device.type == "cpu":
        return torch.device("cpu")
    if not _library.has_cuda():
        raise ValueError(
            f"device is '{device}', but this build of uniep has no CUDA backend; "
            "install it where nvcc 13.0 and NCCL's headers are"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


# Groups that were made for process groups, by device. A process group that ends takes them along.
_of_process_groups: weakref.WeakKeyDictionary[Any, dict[torch.device, Group]] = (
    weakref.WeakKeyDictionary()
)
# Those of one process alone, by its number: a child that was forked off cannot use its parent's.
_alone: dict[int, dict[torch.device, Group]] = {}
_NO_MEMBER = "this process is not a member of process_group; pass a group it is in"


def group_of(group: GroupLike, device: torch.device) -> Group:
    """The :class:`Group` for what users pass as ``group``; made once for each device.

    Raises:
        ValueError: for a :class:`Group` on another device, a mesh of several dimensions, and a
            group that this process is not in.
        TypeError: for anything that is no group.
    """
    if not isinstance(group, Group):
        group = _process_group_of_mesh(group)
    if isinstance(group, Group):
        if group.device != device:
            raise ValueError(
                f"the group is on '{group.device}', the tensors are on '{device}'; "
                "both must be on the same device"
            )
        return group
    if group is None:
        known = _alone.setdefault(os.getpid(), {})
    elif isinstance(group, dist.ProcessGroup):
        known = _of_process_groups.setdefault(group, {})
    else:
        _refuse(group)
    if device not in known:
        known[device] = Group(group, device=device)
    return known[device]


def groups_known(group: GroupLike) -> list[Group]:
    """Those that :func:`group_of` has made or found for what users pass as ``group``.

    Raises:
        ValueError: for a mesh of several dimensions, and a group that this process is not in.
        TypeError: for anything that is no group.
    """
    group = group if isinstance(group, Group) else _process_group_of_mesh(group)
    if isinstance(group, Group):
        return [group]
    if group is None:
        return list(_alone.get(os.getpid(), {}).values())
    if isinstance(group, dist.ProcessGroup):
        return list(_of_process_groups.get(group, {}).values())
    _refuse(group)


def without_mesh(group: GroupLike) -> Group | dist.ProcessGroup | DeviceMesh | None:
    """What users pass as ``group``; where that is a mesh of one dimension, its process group.

    Raises:
        ValueError: for a mesh of more than two dimensions.
    """
    if isinstance(group, Group) or is_mesh_of_hosts(group):
        return group
    return _process_group_of_mesh(group)


def rank_and_size(group: GroupLike) -> tuple[int, int]:
    """Rank and number of ranks of what users pass as ``group``; not collective.

    Raises:
        ValueError: for a mesh of more than two dimensions, and what this process is not in.
        TypeError: for anything that is no group.
    """
    if is_mesh_of_hosts(group):
        host, local = place_in_mesh(group)
        return host * group.shape[1] + local, group.size()
    group = without_mesh(group)
    if group is None:
        return 0, 1
    if isinstance(group, Group):
        return group.rank, group.size
    if isinstance(group, dist.ProcessGroup):
        return dist.get_rank(group), dist.get_world_size(group)
    _refuse(group)


def ranks_of(group: GroupLike) -> list[int] | None:
    """The numbers among all processes of the ranks of what users pass as ``group``, in its order.

    None where its process group has ended, which knows them.

    Raises:
        ValueError, TypeError: as :func:`rank_and_size`.
    """
    if is_mesh_of_hosts(group):
        ranks: list[int] = group.mesh.flatten().tolist()
        return ranks
    if rank_and_size(group)[1] == 1:
        return [dist.get_rank() if dist.is_initialized() else 0]
    try:
        found = process_group_of(group)
        return None if found is None else dist.get_process_group_ranks(found)
    except KeyError:  # one that has ended, of which somebody keeps the object
        return None


def gather_objects(own: object, group: GroupLike) -> list[Any]:
    """What every rank passes as `own`, by rank, on all of them; collective."""
    if is_mesh_of_hosts(group):
        of_host = _gather_objects(own, group.get_group(1))
        return [part for parts in _gather_objects(of_host, group.get_group(0)) for part in parts]
    return _gather_objects(own, _meeting(group))


def objects_on_first(own: object, group: GroupLike) -> list[Any] | None:
    """As :func:`gather_objects`, on rank 0 alone; None elsewhere."""
    if is_mesh_of_hosts(group):
        of_host = _objects_on_first(own, group.get_group(1))
        # Only the first ranks of hosts have anything, but all of a rail meet.
        of_all = _objects_on_first(of_host, group.get_group(0))
        if of_host is None or of_all is None:
            return None
        return [part for parts in of_all for part in parts]
    return _objects_on_first(own, _meeting(group))


def _objects_on_first(own: object, group: dist.ProcessGroup | None) -> list[Any] | None:
    if group is None:
        return [own]
    is_first = dist.get_rank(group) == 0
    parts: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    dist.gather_object(own, parts, group=group, group_dst=0)
    return parts


def _gather_objects(own: object, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [own]
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    return parts


def all_gathered(own: Tensor, group: GroupLike) -> Tensor:
    """The tensors [n] of all ranks one behind another, in the order of ranks; collective."""
    if is_mesh_of_hosts(group):
        return _all_gathered(_all_gathered(own, group.get_group(1)), group.get_group(0))
    return _all_gathered(own, _meeting(group))


def _all_gathered(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return own
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts)


def process_group_of(group: GroupLike) -> dist.ProcessGroup | None:
    """The process group behind what users pass as ``group``.

    Raises:
        ValueError: for a mesh of several dimensions.
    """
    return group.process_group if isinstance(group, Group) else _process_group_of_mesh(group)


def _meeting(group: GroupLike) -> dist.ProcessGroup | None:
    """Where PyTorch brings the ranks together; None: this process is alone, not all of them.

    Raises:
        ValueError: where that has ended.
    """
    if rank_and_size(group)[1] == 1:
        return None
    found = process_group_of(group)
    if found is None:
        raise ValueError("the process group of the group has ended; ask before it is destroyed")
    return found


def _refuse(group: object) -> NoReturn:
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # a number, which new_group returns
        raise ValueError(_NO_MEMBER)
    raise TypeError(
        f"group is of type {type(group).__name__}; it must be None, a "
        "torch.distributed ProcessGroup, a DeviceMesh or a uniep.Group"
    )
