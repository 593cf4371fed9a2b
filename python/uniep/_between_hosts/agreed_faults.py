"""Routings that do not fit, found by the layer of one host and made known to those of all.

Each host has a fused layer of its own, whose plan finds that a routing is beyond a capacity. Such a
layer is called with the fault as a value: it gives NaN for all tokens, so that every token's sum is
NaN on every host. Behind the pass the hosts agree on the largest fault, by one message of 8 bytes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library
from .._lasting_tensors import lasting_tensors
from .._overflow import Overflow
from .host_mesh import HostMesh

__all__ = ["AgreedFaults"]

# On a GPU a fault is raised by the forward that is so many calls later, as the host gets no further
# ahead of the device than that. So all ranks raise it at the same call, and none is left waiting.
_CALLS_AHEAD = 8

# What a fault is comes above how much would do, so that of faults of two kinds one is kept whole.
_AMOUNT_BITS = 48


class AgreedFaults:
    """The faults of the calls of one workspace on several hosts.

    Args:
        mesh: of the hosts.
        overflow: int64 [2] on the device, as :attr:`uniep.Workspace.overflow`, which keeps the
            largest fault.
        flag: whether that is all; else :meth:`agree` raises it, on a GPU a later
            :meth:`raise_earlier`, or :meth:`raise_any`.
        rows: the capacity of a rank.
        backward_rows, num_experts, max_tokens: as those of the workspace.
    """

    def __init__(
        self,
        mesh: HostMesh,
        overflow: Tensor,
        *,
        flag: bool,
        rows: int,
        backward_rows: int,
        num_experts: int,
        max_tokens: int,
    ) -> None:
        self._mesh = mesh
        self._flag = flag
        self._figures = (rows, backward_rows, num_experts, max_tokens)
        with lasting_tensors():
            self._largest = overflow if flag else torch.zeros_like(overflow)
        self._told: deque[_Told] = deque()  # of calls whose faults are still to be raised

    def agree(self, found: Tensor) -> Tensor:
        """The largest fault of a call on any host. Collective.

        Args:
            found: int64 [2] that the fused layer of this host was given as `overflow`.

        Returns:
            int64 [2], the same on all ranks.

        Raises:
            uniep.Error: on a CPU, without ``flag``, where there is one.
        """
        packed = (found[:1] << _AMOUNT_BITS) + found[1:]
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self._mesh.across)
        agreed = torch.cat((packed >> _AMOUNT_BITS, packed & ((1 << _AMOUNT_BITS) - 1)))
        torch.maximum(self._largest, agreed, out=self._largest)
        if not self._flag:
            if not found.is_cuda:
                self.raise_any()
            elif not torch.cuda.is_current_stream_capturing():  # replays are for raise_any
                self._told.append(_Told.of(self._largest))
        return agreed

    def raise_earlier(self) -> None:
        """Raises the fault of a call so long ago that the device is done with it.

        Raises:
            uniep.Error: the sentence names what would do.
        """
        if len(self._told) < _CALLS_AHEAD or torch.cuda.is_current_stream_capturing():
            return
        if self._told.popleft().is_fault():
            self.raise_any()

    def raise_any(self) -> None:
        """Raises the largest fault of all calls since the last; waits for them.

        Raises:
            uniep.Error: the sentence names what would do.
        """
        if self._flag:
            return
        what, amount = self._largest.tolist()
        self._told.clear()
        self._largest.zero_()
        if what:
            code = "argument" if what == Overflow.IMPOSSIBLE else "capacity"
            raise _library.Error.of(code, self._sentence(what, amount))

    def _sentence(self, what: int, amount: int) -> str:
        rows, backward_rows, num_experts, max_tokens = self._figures
        if what == Overflow.IMPOSSIBLE:
            return (
                f"topk_ids has a number that is no expert; -1 (dropped) to {num_experts - 1} is "
                f"accepted. Or a rank has more tokens than max_tokens={max_tokens}"
            )
        if what == Overflow.PAGES:
            return (
                "a rank would save more pages than its row pool has left; "
                f"{amount} bytes would do for this routing, or backward passes ahead of it"
            )
        if what == Overflow.EXPERT_ROWS:
            return (
                f"an expert would receive {amount} rows (padding included), but backward_rows is "
                f"{backward_rows}; backward_rows={amount} or more would do for this routing, or 0"
            )
        return (
            f"a rank would receive {amount} rows (padding included), but capacity_rows is {rows}; "
            f"capacity_rows={amount} would do for this routing"
        )


class _Told(NamedTuple):
    """What the device tells the host behind a call."""

    fault: Tensor  # int64 [2], pinned
    is_told: torch.cuda.Event

    @classmethod
    def of(cls, largest: Tensor) -> _Told:
        fault = torch.empty(2, dtype=torch.int64, device="cpu", pin_memory=True)
        fault.copy_(largest, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(largest.device))
        return cls(fault, event)

    def is_fault(self) -> bool:
        self.is_told.synchronize()
        return bool(self.fault[0])
