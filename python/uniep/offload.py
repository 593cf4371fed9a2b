"""Keeps what forwards save in the host's memory until their backward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ._plain_values import check_whole, check_whole_or_none
from ._staying import Staying

__all__ = ["Offload", "saving_elsewhere"]


class Offload:
    """Where forwards of :func:`uniep.moe` keep what they save: in pinned memory of the host.

    Calls in a ``with`` block of it do, whichever layer, adapter or thread makes them; their
    backward may come after the block. One object serves all layers of a model. Copies run on
    streams of their own, beside the layers' work: to the host behind a forward, and back before the
    backward, whose order is known: the reverse of the forwards'. Output and gradients have the same
    bits.

    What a forward saves of its own is moved: rows of x, h, probabilities, plan. Its weights, and x
    with ``save="none"``, stay where they are. Calls within other hooks of saved tensors, as
    activation checkpointing has them, are left to those.

    Args:
        ahead: calls whose tensors are on the device beside those of the call at work: in forward
            they are on their way to the host, in backward back. At least 1.
        max_bytes: of the host's memory; what a call saves beyond that stays on the device. PyTorch
            rounds pinned memory up to powers of two and keeps it for the next step. None: no limit.

    Raises:
        TypeError: for an ``ahead`` or ``max_bytes`` that is no whole number.
        ValueError: for an ``ahead`` below 1, or a negative ``max_bytes``.
    """

    def __init__(self, *, ahead: int = 1, max_bytes: int | None = None) -> None:
        check_whole(ahead=ahead)
        check_whole_or_none(max_bytes=max_bytes)
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}; it must be at least 1")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be 0 or more, or None")
        self.ahead = ahead
        self.max_bytes = max_bytes
        self._lock = threading.RLock()  # backward runs in threads of autograd
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()  # that have memory of the host
        self._leaving: deque[weakref.ref[_Call]] = deque()  # still on the device, oldest first
        self._last: weakref.ref[_Call] | None = None
        self._movers: dict[torch.device, _Mover] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what is pickled, have the same figures, and calls of their own."""
        return partial(type(self), ahead=self.ahead, max_bytes=self.max_bytes), ()

    @property
    def bytes(self) -> int:
        """Kept in the host's memory now."""
        with self._lock:
            return sum(call.bytes for call in self._calls)

    def __enter__(self) -> Offload:
        with _blocks:
            _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        # Blocks of other threads may have begun since. The last of its own, as blocks nest.
        with _blocks:
            del _active[len(_active) - 1 - _active[::-1].index(self)]

    @contextlib.contextmanager
    def saving(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Moves what autograd saves in the block, which is one call, but for `inputs`."""
        stay = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        call = _Call(self)

        def pack(tensor: Tensor) -> Staying | _Saved:
            if tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in stay:
                return Staying.of(tensor)
            return call.save(tensor)

        with saved_tensors_hooks(pack, _unpack):
            yield
        if call.saved:
            self._send(call)

    def _send(self, call: _Call) -> None:
        with self._lock:
            if self.max_bytes is not None and self.bytes + call.bytes > self.max_bytes:
                return
            call.send(self._mover(call.device))  # it may fail: the host's memory is full
            call.before, self._last = self._last, weakref.ref(call)
            self._calls.add(call)
            self._leaving.append(weakref.ref(call))
            while len(self._leaving) > self.ahead:
                left = self._leaving.popleft()()
                if left is not None:
                    left.leave()

    def fetch(self, saved: _Saved) -> Tensor:
        """A tensor of a call whose backward has come; those of calls before it set out."""
        with self._lock:
            tensor = saved.call.take(saved)
            before = saved.call.predecessor()
            for _ in range(self.ahead):
                if before is None:
                    break
                before.bring()
                before = before.predecessor()
            return tensor

    def _mover(self, device: torch.device) -> _Mover:
        if device not in self._movers:
            self._movers[device] = _Streams(device) if device.type == "cuda" else _Copies(device)
        return self._movers[device]


_active: list[Offload] = []
_blocks = threading.Lock()  # held while that list changes


def saving_elsewhere(inputs: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """For one call of uniep.moe: as the innermost :class:`Offload` block has it, if there is one.

    Raises:
        RuntimeError: in compiled code and in the capture of a CUDA graph, which cannot move it.
    """
    if not _active:
        return contextlib.nullcontext()
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "uniep.Offload moves tensors while a step runs, which torch.compile cannot trace; it "
            "serves eager calls of uniep.moe"
        )
    if _others_decide():
        return contextlib.nullcontext()
    if inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "uniep.Offload moves tensors while a step runs, which a CUDA graph cannot capture; it "
            "serves steps that are launched"
        )
    with _blocks:  # another thread's block may have been the last, and ended
        innermost = _active[-1] if _active else None
    return contextlib.nullcontext() if innermost is None else innermost.saving(inputs)


def _others_decide() -> bool:
    """Whether hooks of saved tensors surround the call: activation checkpointing has such."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Saved:
    """A tensor that autograd has given away; it is kept as long as autograd keeps this."""

    def __init__(self, call: _Call, tensor: Tensor) -> None:
        self.call = call
        self.on_device: Tensor | None = tensor
        self.on_host: Tensor | None = None
        self.original = True  # what is on the device was never away
        self.back: Any = None  # when what is on the device is complete, which was away

    def __del__(self) -> None:
        self.call.settle()  # with its graph: before its memory is handed on


def _unpack(packed: Staying | _Saved) -> Tensor:
    if isinstance(packed, Staying):
        return packed.unchanged("an input of uniep.moe", since="forward", until="backward")
    return packed.call.owner.fetch(packed)


class _Call:
    """What one forward saved: on the device, on the host, or on its way."""

    def __init__(self, owner: Offload) -> None:
        self.owner = owner
        self.before: weakref.ref[_Call] | None = None  # the call that was sent before it
        self.saved: list[weakref.ref[_Saved]] = []
        self.bytes = 0
        self.device = torch.device("cpu")
        self._mover: _Mover | None = None  # None: it stays on the device
        self._gone: Any = None  # when all of it is on the host
        self._back: Any = None  # when all of it is on the device again; None: nothing is under way

    def save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self, tensor)
        self.saved.append(weakref.ref(saved))
        self.bytes += tensor.numel() * tensor.element_size()
        self.device = tensor.device
        return saved

    def _all(self) -> list[_Saved]:
        return [saved for ref in self.saved if (saved := ref()) is not None]

    def send(self, mover: _Mover) -> None:
        """Begins to copy it to the host. It stays on the device until it is told to leave."""
        self._mover = mover
        here = [(saved, saved.on_device) for saved in self._all() if saved.on_device is not None]
        hosts, self._gone = mover.out([tensor for _, tensor in here])
        for (saved, _), host in zip(here, hosts, strict=True):
            saved.on_host = host

    def leave(self) -> None:
        """Lets go of its memory of the device, once the copies are done."""
        originals = [s for s in self._all() if s.original and s.on_device is not None]
        if not originals:
            return  # its backward has been
        assert self._mover is not None
        self._mover.drop(self._gone)
        for saved in originals:
            saved.on_device, saved.original = None, False

    def bring(self) -> None:
        """Begins to copy back what is not on the device."""
        away = [
            (s, s.on_host) for s in self._all() if s.on_device is None and s.on_host is not None
        ]
        if not away:
            return
        assert self._mover is not None
        tensors, self._back = self._mover.back([host for _, host in away], self._gone)
        for (saved, _), tensor in zip(away, tensors, strict=True):
            saved.on_device, saved.back = tensor, self._back

    def take(self, saved: _Saved) -> Tensor:
        """A tensor of it, for its backward, which then has it alone."""
        if saved.on_device is None:
            self.bring()
        assert saved.on_device is not None
        tensor = saved.on_device
        if self._mover is None:
            return tensor  # there is no other
        if saved.original:
            self._mover.still_read(tensor)
        else:
            self._mover.wait(saved.back, tensor)
            self._back = None
        saved.on_device, saved.original = None, False
        return tensor

    def predecessor(self) -> _Call | None:
        return None if self.before is None else self.before()

    def settle(self) -> None:
        """Makes memory that copies back are written to free, once these are done."""
        if self._mover is not None and self._back is not None:
            self._mover.drop(self._back)
            self._back = None


class _Mover(Protocol):
    """How tensors of a device come to the host and back."""

    def out(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Copies on the host, and when they are complete."""

    def back(self, hosts: list[Tensor], complete: Any) -> tuple[list[Tensor], Any]:
        """Tensors of the device, and when they are complete; copies wait for `complete`."""

    def wait(self, moment: Any, tensor: Tensor) -> None:
        """What the current stream does with `tensor`, which came back then, waits for it."""

    def drop(self, moment: Any) -> None:
        """Memory of the device that is copied until then is given away: it is free then."""

    def still_read(self, tensor: Tensor) -> None:
        """A copy to the host may be reading it when its memory is free."""


class _Streams:
    """A GPU's. The host waits for nothing.

    Memory of the device belongs to the stream that is current, its home, so PyTorch hands it on in
    the order of that stream's work. Copies back therefore wait for all that is on it already. A
    moment is an event and that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make: Any = torch.cuda.Stream  # which has no types in some versions of PyTorch
        self.leaving, self.coming = make(device), make(device)

    def out(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        home = torch.cuda.current_stream(self.device)
        self.leaving.wait_stream(home)
        with torch.cuda.stream(self.leaving):
            hosts = [_pinned(t).copy_(t, non_blocking=True) for t in tensors]
            return hosts, (self.leaving.record_event(), home)

    def back(self, hosts: list[Tensor], complete: Any) -> tuple[list[Tensor], Any]:
        tensors = [torch.empty_like(host, device=self.device) for host in hosts]
        home = torch.cuda.current_stream(self.device)
        self.coming.wait_stream(home)
        self.coming.wait_event(complete[0])
        with torch.cuda.stream(self.coming):
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
            return tensors, (self.coming.record_event(), home)

    def wait(self, moment: Any, tensor: Tensor) -> None:
        event, home = moment
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        if current != home:
            home.wait_event(event)  # for what came back with it, and is never read
            tensor.record_stream(current)

    def drop(self, moment: Any) -> None:
        event, home = moment
        home.wait_event(event)

    def still_read(self, tensor: Tensor) -> None:
        tensor.record_stream(self.leaving)


def _pinned(tensor: Tensor) -> Tensor:
    # Not on PyTorch's default device, which may be a GPU.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


class _Copies:
    """A CPU's: the same way without anything beside it. It saves no memory."""

    def __init__(self, device: torch.device) -> None:
        pass

    def out(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        return [tensor.clone() for tensor in tensors], None

    def back(self, hosts: list[Tensor], complete: Any) -> tuple[list[Tensor], Any]:
        return [host.clone() for host in hosts], None

    def wait(self, moment: Any, tensor: Tensor) -> None:
        pass

    def drop(self, moment: Any) -> None:
        pass

    def still_read(self, tensor: Tensor) -> None:
        pass
