"""A layer of the library, with its memory and the tensors by which ops find it."""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from . import _library
from ._lasting_tensors import lasting_tensors
from .group import Group
from .row_pool import PoolPages

__all__ = ["LibraryLayer"]

_CLOSED = "the workspace is closed; make another uniep.Workspace"
_ids = itertools.count(1)

# Symmetric memory that other ranks may still reach, by the number of its layer.
_reached_by_others: dict[int, Tensor] = {}


class LibraryLayer:
    """Of a workspace. Making one is collective.

    Args:
        group: of the ranks of this host.
        problem: the layer's figures.
        needs: what ``uniep_needs`` says of them.
        shape_of_ops: the figures of LayerShape (python/ops/layer_registry.h of the sources), in
            its order.
        schedule: of both directions; None: what the library finds.
        timeout_ms: limit of every wait; 0: that of the environment.
        pages: where forwards keep rows; None: in tensors.

    Attributes:
        key: int64 [1] on the device, the number by which ops find it. A call keeps it until its
            backward, and with it the layer.
        overflow: int64 [2] on the device: see :class:`uniep.Workspace`.
        bytes: what it holds as long as it is open.
        handle: the uniep_layer, for those who are alone with it; others use :meth:`turn`.

    Raises:
        uniep.Error: what the library refuses.
    """

    def __init__(
        self,
        group: Group,
        problem: _library.Problem,
        needs: _library.Needs,
        shape_of_ops: Sequence[int],
        *,
        schedule: str | None,
        timeout_ms: int,
        pages: PoolPages | None,
    ) -> None:
        number = _number_of(problem, group)
        with lasting_tensors():
            workspace = _aligned(needs.workspace, needs.alignment, group.device)
            symmetric = None
            if _hands_in_symmetric(group):
                symmetric = _aligned(needs.symmetric, needs.alignment, group.device)
            self.overflow = torch.zeros(2, dtype=torch.int64, device=group.device)
            self.key = torch.full((1,), number, dtype=torch.int64, device=group.device)
        if group.device.type == "cuda":
            # Graphs of inductor then take both where they are, rather than copies.
            for tensor in (self.key, self.overflow):
                tensor._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
        config = _library.LayerConfig(
            timeout_ms=timeout_ms,
            schedule=None if schedule is None else schedule.encode(),
            workspace=workspace.data_ptr(),
            row_pool=None if pages is None else pages.handle,
            erf_since_13_2=int(_has_newer_erf()),
        )
        shared = symmetric if group.size > 1 else None
        if symmetric is not None:
            config.symmetric = symmetric.data_ptr()
        self.handle = _create(group, problem, config, number, shared)
        _library.torch_library.uniep_torch_bind(
            number,
            self.key.data_ptr(),
            self.handle,
            (ctypes.c_int64 * len(shape_of_ops))(*shape_of_ops),
        )
        self._number = number
        # With its key, which a call keeps until its backward, the layer outlives this object.
        self._finalizer = weakref.finalize(
            self.key, _destroy, number, self.handle, (workspace, symmetric, pages)
        )
        self.bytes = self._bytes()

    def _bytes(self) -> int:
        """Asked of the layer, which knows the hosts of its group: it has a part for each."""
        needs = _library.Needs()
        _library.check(_library.library.uniep_layer_needs(self.handle, 0, ctypes.byref(needs)))
        return int(needs.workspace + needs.symmetric)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Lets go of the memory, once calls are done. Closing again does nothing."""
        self._finalizer()

    def require_open(self) -> None:
        """Raises ValueError where it is closed."""
        if self.closed:
            raise ValueError(_CLOSED)

    @contextmanager
    def turn(self) -> Iterator[ctypes.c_void_p]:
        """The layer's handle, while calls of other threads wait, closing it included."""
        self.require_open()
        turn = _library.torch_library.uniep_torch_begin_turn(self._number)
        if turn is None:
            raise ValueError(_CLOSED)
        try:
            yield self.handle
        finally:
            _library.torch_library.uniep_torch_end_turn(turn)

    def schedule(self, number_of_pass: int) -> str:
        """The schedule of calls that name none, with every axis."""
        text = ctypes.create_string_buffer(4096)
        with self.turn() as layer:
            _library.check(
                _library.library.uniep_layer_schedule(layer, number_of_pass, text, len(text))
            )
        return text.value.decode()

    def synchronize(self) -> None:
        """Waits until every call is done, and raises what went wrong on the way."""
        with self.turn() as layer:
            _library.check(_library.library.uniep_layer_synchronize(layer))


def _number_of(problem: _library.Problem, group: Group) -> int:
    """By which ops find the layer in this process.

    A program of torch.export that another process has saved asks for the number it knew. So the
    upper half says what the layer computes: that of another one is not found.
    """
    layer = bytes(problem) + bytes((group.rank, group.size))
    return (zlib.crc32(layer) & 0x7FFFFFFF) << 32 | next(_ids)


def _create(
    group: Group,
    problem: _library.Problem,
    config: _library.LayerConfig,
    number: int,
    shared: Tensor | None,
) -> ctypes.c_void_p:
    """The layer's handle. `shared`: memory that other ranks reach, until they let go of it."""
    if shared is not None:
        _reached_by_others[number] = shared
        config.release = _release
        config.release_context = number
    layer = ctypes.c_void_p()
    result = _library.library.uniep_layer_create(
        group.handle, ctypes.byref(problem), ctypes.byref(config), ctypes.byref(layer)
    )
    if result != 0:
        _reached_by_others.pop(number, None)
    _library.check(result)
    return layer


def _let_go(number: int | None) -> None:
    _reached_by_others.pop(number or 0, None)


_release = _library.Release(_let_go)


def _destroy(number: int, layer: ctypes.c_void_p, memory: tuple[object, ...]) -> None:
    _library.torch_library.uniep_torch_unbind(number)
    # What went wrong in a call has been, or is no longer of interest: nothing can be done about it.
    _library.library.uniep_layer_synchronize(layer)
    _library.library.uniep_layer_destroy(layer)
    del memory  # only now


def _has_newer_erf() -> bool:
    """Whether PyTorch's erf on GPUs is that of CUDA 13.2 and newer."""
    version = torch.version.cuda or "0"  # such as "13.2"
    return tuple(int(part) for part in version.split(".")[:2]) >= (13, 2)


def _aligned(count: int, alignment: int, device: torch.device) -> Tensor:
    whole = torch.empty(count + alignment, dtype=torch.uint8, device=device)
    begin = -whole.data_ptr() % alignment
    return whole[begin : begin + count]


def _hands_in_symmetric(group: Group) -> bool:
    if group.size == 1:
        return True
    if group.device.type == "cpu":
        return False  # shared memory between processes, which PyTorch has no allocator for
    # Memory of expandable segments cannot be mapped into other processes.
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", ""
    )
    return "expandable_segments:True" not in settings
