"""Memory for what forwards keep, in pages that all layers of one shape share."""

from __future__ import annotations

import ctypes
import operator
import weakref
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import _library
from ._between_hosts.place import group_of_host
from ._lasting_tensors import lasting_tensors
from ._of_process import OfProcess
from ._plain_values import check_bool, check_whole_or_none
from ._save_choice import SAVES, Save, check_save
from .arithmetic import ACTIVATIONS, Activation, arithmetic_of
from .group import Group, GroupLike, device_of

__all__ = ["PoolPages", "RowPool", "RowPoolLike", "SavedPages", "shared_pool"]


class PoolPages:
    """What layers and saved forwards hold of a pool: it ends with the last of them.

    Not the pool itself, which holds workspaces: they would hold each other.

    Attributes:
        handle: the ``uniep_row_pool*``.
        device: where they lie.
        captured: handles of forwards that were captured in CUDA graphs, whose replays write their
            plans.
    """

    def __init__(
        self, handle: ctypes.c_void_p, device: torch.device, memory: Tensor | None
    ) -> None:
        self.handle = handle
        self.device = device
        self.captured: list[ctypes.c_void_p] = []
        weakref.finalize(self, _destroy, handle, memory)
        # Ahead of that, as it comes later here.
        ends = weakref.finalize(self, _end_all, self.captured)
        ends.atexit = False  # the device may be gone


class RowPool(OfProcess):
    """Where forwards keep what their backward needs: in pages of 128 rows, or of tokens.

    A forward takes as many pages as its rows need, and its backward gives them back. So memory
    follows the rows that came, as with ``exact_rows``, and the host waits for nothing. Workspaces
    of the same ``hidden``, ``intermediate``, ``save`` and ``recompute_h`` may share one, and all
    their outstanding forwards do. Output and gradients have the same bits.

    A routing for which a pool is too full is refused on all ranks, as one that exceeds the
    capacity; the sentence names the bytes that would do.

    A backward with ``retain_graph=True`` keeps its pages for the next. Without, they go back behind
    it, and a second one raises. They also go back when the output that nobody runs a backward of
    goes, together with its graph. Hooks of saved tensors do not see what is kept here, so neither
    activation checkpointing nor :class:`uniep.Offload` makes it less. torch.compile breaks its
    graph at such a call. A pool goes with the last that holds it, and takes along the workspaces
    that calls which were given it share.

    Args:
        group: a :class:`uniep.Group`, a ProcessGroup, or None: this process alone.
        hidden: H.
        intermediate: I.
        bytes: of the pool, on this rank; ranks may differ. None: half of the memory that is free
            now.
        save: as the workspaces'.
        recompute_h: as the workspaces'.
        device: where it lies. None: the group's device.
        activation: as the workspaces', of which only counts whether there is a gate.

    Attributes:
        pages: how many it has.
        page_bytes: of one.
        bytes: of all of it, from PyTorch's allocator on a GPU.

    Raises:
        TypeError: for ``bytes`` that are no int.
        ValueError: for another ``save`` or ``activation``, and fewer than 1 of ``bytes``.
        uniep.Error: for figures out of range, and a pool without room for a page.
    """

    def __init__(
        self,
        group: GroupLike,
        hidden: int,
        intermediate: int,
        *,
        bytes: int | None = None,
        save: Save = "rows",
        recompute_h: bool = False,
        device: torch.device | str | int | None = None,
        activation: Activation = "swiglu",
    ) -> None:
        check_save(save)
        check_whole_or_none(bytes=bytes)
        check_bool(recompute_h=recompute_h)
        if device is None and isinstance(group, Group):
            device = group.device
        self.group = group_of_host(group, device_of(device))
        self.device = self.group.device
        if bytes is not None and not 0 < bytes < 2**63:
            raise ValueError(f"bytes is {bytes}; 1 to 2^63 - 1 is accepted, or None")
        problem = _library.problem(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=self.group.size,  # which a page does not depend on, as the next two
            topk=1,
            max_tokens=1,
            save=SAVES.index(save),
            recompute_h=int(recompute_h),
            activation=ACTIVATIONS.index(arithmetic_of(activation).activation),
        )
        memory, start = _memory(bytes, self.device)
        handle = ctypes.c_void_p()
        _library.check(
            _library.library.uniep_row_pool_create(
                self.group.handle,
                ctypes.byref(problem),
                (bytes or 0) if memory is None else memory.numel() - _ALIGNMENT,
                start,
                ctypes.byref(handle),
            )
        )
        self.memory = PoolPages(handle, self.device, memory)
        #: The uniep.Workspaces of calls without one that are given this pool: by shape.
        self.workspaces: dict[tuple[object, ...], Any] = {}
        state = self._state()
        self.pages = state.pages
        self.page_bytes = state.page_bytes
        self.bytes = state.bytes

    @property
    def free_pages(self) -> int:
        """Pages that no forward has now; waits for the device."""
        return self._state().free_pages

    @property
    def fewest_free_pages(self) -> int:
        """The fewest that there were at a time; waits for the device."""
        return self._state().fewest_free_pages

    def _state(self) -> _library.RowPoolState:
        state = _library.RowPoolState()
        _library.check(_library.library.uniep_row_pool_ask(self.memory.handle, ctypes.byref(state)))
        return state

    def __repr__(self) -> str:
        return f"uniep.RowPool(pages={self.pages}, bytes={self.bytes}, device='{self.device}')"


#: What layers take for a pool: one; True, of half of the free memory; its bytes; or None.
RowPoolLike: TypeAlias = RowPool | int | None


def shared_pool(
    row_pool: RowPoolLike,
    group: GroupLike,
    device: torch.device,
    hidden: int,
    intermediate: int,
    save: Save,
    recompute_h: bool,
    activation: Activation = "swiglu",
) -> RowPool | None:
    """The pool that is meant: where it is not given itself, one for all layers of this shape.

    Raises:
        ValueError: for bytes below 1.
        TypeError: for anything else.
    """
    if row_pool is None or row_pool is False or isinstance(row_pool, RowPool):
        return row_pool or None
    if not hasattr(type(row_pool), "__index__"):
        raise TypeError(
            f"row_pool is {row_pool!r}; a uniep.RowPool, True or a number of bytes is accepted"
        )
    if row_pool < 1:
        raise ValueError(f"row_pool is {row_pool}; 1 byte or more is accepted, or True")
    bytes = None if row_pool is True else operator.index(row_pool)
    owner = group_of_host(group, device)
    key = (hidden, intermediate, save, recompute_h, arithmetic_of(activation).halves(), bytes)
    if key not in owner.row_pools:
        owner.row_pools[key] = RowPool(
            owner,
            hidden,
            intermediate,
            bytes=bytes,
            save=save,
            recompute_h=recompute_h,
            activation=activation,
        )
    pool: RowPool = owner.row_pools[key]
    return pool


_ALIGNMENT = 256


def _memory(bytes: int | None, device: torch.device) -> tuple[Tensor | None, int | None]:
    # PyTorch's on a GPU, and where it begins. On a CPU the library's own, of which pages that were
    # never used take nothing.
    if device.type == "cpu":
        return None, None
    if bytes is None:
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        bytes = (free + unused) // 2
    with lasting_tensors():
        memory = torch.empty(bytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    return memory, memory.data_ptr() + -memory.data_ptr() % _ALIGNMENT


def _destroy(handle: ctypes.c_void_p, memory: Tensor | None) -> None:
    _library.library.uniep_row_pool_destroy(handle)
    del memory


class SavedPages:
    """What one forward keeps in a pool. Its end gives back what no backward has.

    One that was captured in a CUDA graph lasts as long as its pool, as the graph may.
    """

    def __init__(self, address: int, pool: PoolPages) -> None:
        self.address = address
        if pool.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            pool.captured.append(ctypes.c_void_p(address))
            return
        self._end = weakref.finalize(self, _end, ctypes.c_void_p(address), pool)
        self._end.atexit = False  # the device may be gone


def _end_all(captured: list[ctypes.c_void_p]) -> None:
    for saved in captured:
        _library.library.uniep_saved_destroy(saved)


def _end(saved: ctypes.c_void_p, pool: PoolPages) -> None:
    _library.library.uniep_saved_destroy(saved)
    del pool  # only now
