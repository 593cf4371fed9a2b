"""The workspaces that calls without one share, one for each kind of layer on a group."""

from __future__ import annotations

import re
import weakref
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import _library
from ._between_hosts.place import host_mesh, within_host
from ._choices import LayerKind
from ._outside_graphs import constant_in_graphs, outside_graphs
from .group import Group, GroupLike, group_named, group_of, groups_known
from .row_pool import RowPool, RowPoolLike, shared_pool
from .workspace import Workspace

__all__ = [
    "drop_workspaces",
    "prepare",
    "room",
    "shared_workspace",
]


def shared_workspace(
    group: GroupLike,
    device: torch.device,
    kind: LayerKind,
    tokens: int,
    max_tokens: int | None,
    row_pool: RowPoolLike = None,
) -> Workspace:
    """The workspace that calls without one share, of this kind; made by the first of them.

    Of one process alone it grows with the tokens of a call where ``max_tokens`` is None. With
    several ranks such a call is refused by all of them.

    Raises:
        ValueError: where ``max_tokens`` of several ranks is more than in their first call.
    """
    if row_pool is None or row_pool is False:
        return _shared(group, device, kind, tokens, max_tokens)
    return _in_pages(row_pool, group, device, kind, tokens, max_tokens)


def _shared(
    group: GroupLike,
    device: torch.device,
    kind: LayerKind,
    tokens: int,
    max_tokens: int | None,
    row_pool: RowPool | None = None,
) -> Workspace:
    """As :func:`shared_workspace`; with a pool not while compiling."""
    wanted = tokens if max_tokens is None else max_tokens
    may_grow = max_tokens is None
    if torch.compiler.is_compiling():
        # The compiler cannot see into libraries: what is missing is made while it looks on. Sizes
        # of tensors that have changed are symbols of the graph. The number of tokens stays one
        # where there is room for it.
        figures: list[Any] = [_as_constant(f) if type(f) is int else f for f in kind]
        kind = LayerKind(*figures)
        called = group.name if isinstance(group, Group) else group
        missing = 0
        if wanted > room(called, str(device), *kind):
            missing = _as_constant(wanted)
        name = prepare(called, str(device), missing, may_grow, *kind)
        workspace: Workspace | None = getattr(_prepared, name)()
        assert workspace is not None
        return workspace
    place = _Place.of(group, device)
    if place.rail or kind.bias or kind.combine_groups > 1:  # where they are apart anyway
        kind = kind._replace(shared_apart=False)
    found = _found_or_made(place, kind, wanted, may_grow, row_pool)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _keep_for_replays(found, place.owner)
    return found


def _keep_for_replays(workspace: Workspace, owner: Group) -> None:
    """A larger one may take its place; that of a graph stays."""
    if all(workspace is not known for known in owner.captured):
        owner.captured.append(workspace)


class _Place(NamedTuple):
    """Where workspaces that calls share are kept: with the group of this host, or a row pool."""

    group: GroupLike
    owner: Group
    hosts: int
    rail: str  # the name of the process group across hosts: those of a host may have several

    @classmethod
    def of(cls, group: GroupLike, device: torch.device) -> _Place:
        mesh = host_mesh(group, device)
        if mesh is None:
            owner = group_of(group, device)
            return cls(owner, owner, 1, "")
        return cls(group, group_of(mesh.within, device), mesh.hosts, mesh.across.group_name)

    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.owner.size

    def known(self, row_pool: RowPool | None) -> dict[tuple[object, ...], Workspace]:
        """Those that there are. They hold their pool: so it is the pool that holds them."""
        return (self.owner if row_pool is None else row_pool).workspaces

    def key(self, kind: LayerKind) -> tuple[object, ...]:
        """Of a workspace among these."""
        return (*kind, self.owner.name, self.hosts, self.rail)


@outside_graphs(reason="a row pool keeps what forwards save outside of the graph")
def _in_pages(
    row_pool: RowPoolLike,
    group: GroupLike,
    device: torch.device,
    kind: LayerKind,
    tokens: int,
    max_tokens: int | None,
) -> Workspace:
    """As :func:`shared_workspace`, of those with this row pool."""
    kept = (kind.hidden, kind.intermediate, kind.save, kind.recompute_h, kind.activation)
    pool = shared_pool(row_pool, group, device, *kept)
    return _shared(group, device, kind, tokens, max_tokens, pool)


def drop_workspaces(group: GroupLike = None) -> None:
    """Lets go of the workspaces and row pools that calls of a group share.

    A group keeps what :func:`uniep.moe` and :class:`uniep.MoELayer` make for calls without a
    workspace until it ends, which one process alone does not. Their memory is free behind this, or
    behind the last backward that is still to come. A later call makes what it needs again, which
    is collective: so all ranks drop them between the same calls. CUDA graphs that have captured
    such calls must not be replayed any more.

    Args:
        group: what :func:`uniep.moe` takes; None: this process alone.

    Raises:
        TypeError, ValueError: for what is no group that this process is in.
    """
    for owner in groups_known(within_host(group)):
        owner.workspaces.clear()
        owner.row_pools.clear()
        owner.captured.clear()


def _found_or_made(
    place: _Place, kind: LayerKind, wanted: int, may_grow: bool, row_pool: RowPool | None = None
) -> Workspace:
    known = place.known(row_pool).get(place.key(kind))
    # Tokens of this rank alone are no reason to make a workspace, which takes all of them.
    if known is not None and (wanted <= known.max_tokens or (may_grow and place.ranks() > 1)):
        return known
    return _make(place, kind, wanted, may_grow, row_pool)


def _make(
    place: _Place, kind: LayerKind, wanted: int, may_grow: bool, row_pool: RowPool | None
) -> Workspace:
    key, known = place.key(kind), place.known(row_pool)
    smaller = known.get(key)
    if smaller is not None:
        if place.ranks() > 1:
            raise ValueError(
                f"max_tokens is {wanted}, but the first call of this shape, of this layer or of "
                f"another, had {smaller.max_tokens}; pass max_tokens, the most that any rank ever "
                "has, to every layer and call of the shape, or a workspace"
            )
        if may_grow:
            wanted = max(wanted, 2 * smaller.max_tokens)
    # The smaller one is not closed: a backward may be outstanding. It ends with its last user.
    try:
        known[key] = _workspace(place, kind, wanted, row_pool)
    except _library.Error as error:
        others = _disagreement(str(error))
        if others is None:
            raise
        if may_grow and others.startswith("max_tokens "):
            raise ValueError(
                f"ranks disagree in their first call of this shape, which has {wanted} tokens on "
                f"rank {place.owner.rank}; where ranks have different numbers of tokens, pass "
                "max_tokens, the most that any rank ever has, to every call (of transformers' "
                "models: to uniep.transformers.register)"
            ) from error
        raise ValueError(
            f"ranks disagree in their first call of this shape: {others}; the same on all ranks is "
            "accepted"
        ) from error
    return known[key]


def _disagreement(sentence: str) -> str | None:
    """What the library says that two ranks have differently, of many figures; None: nothing."""
    calls = re.findall(r"(rank \d+) calls layer (\w+=[^; ]*)", sentence)
    if len(calls) != 2:
        return None
    (rank, figures), (other, theirs) = calls
    pairs = zip(figures.split(","), theirs.split(","), strict=False)
    for own, differing in pairs:
        if own != differing:
            name, _, value = own.partition("=")
            return f"{name} is {value} on {rank} and {differing.partition('=')[2]} on {other}"
    return None


def _workspace(place: _Place, kind: LayerKind, tokens: int, row_pool: RowPool | None) -> Workspace:
    return Workspace(
        place.group,
        kind.hidden,
        kind.intermediate,
        kind.local_experts * place.ranks(),
        kind.topk,
        max(tokens, 1),
        **kind.options(),
        row_pool=row_pool,
        device=place.owner.device,
    )


def _as_constant(number: int) -> int:
    """A number that is not negative, as a constant of the graph that it may be a symbol of."""
    high = 1
    while high < number:
        high *= 2
    low = high // 2
    while low < high:
        middle = (low + high) // 2
        if number <= middle:
            high = middle
        else:
            low = middle + 1
    return high


@constant_in_graphs
def room(group: GroupLike | str, device: str, *figures: Any) -> int:
    """Tokens that there is a workspace for, of those that :func:`shared_workspace` finds."""
    place = _Place.of(_given(group), torch.device(device))
    known = place.known(None).get(place.key(LayerKind(*figures)))
    return 0 if known is None else known.max_tokens


# Weak references to those of graphs: while a graph is made, groups are not what they are else.
# Attributes of a module, since of a dict the compiler knows the keys that it had when first read.
_prepared = ModuleType("uniep._prepared")
_names: dict[tuple[object, ...], str] = {}


@constant_in_graphs
def prepare(group: GroupLike | str, device: str, wanted: int, may_grow: bool, *figures: Any) -> str:
    """Which of `_prepared` :func:`shared_workspace` returns. It is made if need be.

    The compiler hands on constants: a :class:`Group` and the device by their names, the figures of
    a LayerKind.
    """
    place = _Place.of(_given(group), torch.device(device))
    kind = LayerKind(*figures)
    name = _names.setdefault(place.key(kind), f"workspace_{len(_names)}")
    setattr(_prepared, name, weakref.ref(_found_or_made(place, kind, wanted, may_grow)))
    return name


def _given(group: GroupLike | str) -> GroupLike:
    """What the compiler was given. Since PyTorch 2.15 a process group or mesh has a stand-in."""
    if isinstance(group, str):
        return group_named(group)
    given: GroupLike = getattr(group, "real_obj", group)
    return given
