"""Weight gradients that wait, as schedules of pipeline parallelism need it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ._ops import ops

__all__ = ["DeferredWeights", "backward_weights"]


@dataclass(frozen=True)
class _Pending:
    """What the weight gradients of one backward are computed of, and where they go."""

    key: Tensor
    plan: Tensor
    x_rows: Tensor
    h: Tensor
    row_probs: Tensor
    backward_rows: Tensor
    tokens: int
    w1: Tensor
    w2: Tensor
    main_grads: tuple[Tensor, Tensor] | None
    flag: bool
    schedule: str | None


class DeferredWeights:
    """Collects the weight gradients that backward leaves out, until :func:`backward_weights`.

    ``len(deferred)`` is how many calls of :func:`uniep.moe` wait. Each keeps what forward saved and
    the rows of dy, dh and a.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def add(self, pending: _Pending) -> None:
        """Called by the backward of :func:`uniep.moe`."""
        self._pending.append(pending)

    def pop(self) -> _Pending:
        """The one that waits longest."""
        return self._pending.popleft()

    def clear(self) -> None:
        """Forgets what waits: those weights get no gradient."""
        self._pending.clear()

    def __len__(self) -> int:
        return len(self._pending)


@torch.no_grad()
def backward_weights(deferred: DeferredWeights) -> None:
    """Computes the weight gradients that wait, oldest first, and adds each to its place.

    Not collective. The place is ``w1.grad`` and ``w2.grad`` (bf16), or the ``main_grads`` that the
    call was given. The bits are those of a backward that does not defer.

    Args:
        deferred: what calls of :func:`uniep.moe` were given as ``deferred``; empty afterwards.

    Raises:
        RuntimeError: where the workspace of a call has been closed. What waits behind it stays.
    """
    while len(deferred):
        call = deferred.pop()
        saved = (call.key, call.plan, call.x_rows, call.h, call.row_probs, call.backward_rows)
        if call.main_grads is not None:
            ops.backward_weights_main_grad(
                *saved, *call.main_grads, call.tokens, call.flag, call.schedule
            )
            continue
        experts = call.w1.shape[0]
        gradients = ops.backward_weights(*saved, call.tokens, experts, call.flag, call.schedule)
        for weight, gradient in zip((call.w1, call.w2), gradients, strict=True):
            if not weight.requires_grad:
                continue
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad += gradient
