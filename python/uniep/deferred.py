"""Weight gradients that wait, as schedules of pipeline parallelism need it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._ops import ops

if TYPE_CHECKING:
    from .row_pool import SavedPages

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
    weights: tuple[Tensor, ...]  # w1 and w2, and b1 and b2 where there are biases
    main_grads: tuple[Tensor, ...] | None
    flag: bool
    schedule: str | None


@dataclass(frozen=True)
class _PendingPages:
    """The same of a call that keeps its rows in a row pool; `saved` is its SavedPages."""

    key: Tensor
    saved: SavedPages
    backward_rows: Tensor
    tokens: int
    weights: tuple[Tensor, ...]
    main_grads: tuple[Tensor, ...] | None
    keep: bool
    schedule: str | None


def four(main_grads: tuple[Tensor, ...] | None) -> list[Tensor | None]:
    """dw1, dw2, db1 and db2 of what :func:`uniep.moe` was given: as many as there are."""
    given = main_grads or ()
    return [*given, *[None] * (4 - len(given))]


class DeferredWeights:
    """Collects the weight gradients that backward leaves out, until :func:`backward_weights`.

    ``len(deferred)`` is how many calls of :func:`uniep.moe` wait. Each keeps what forward saved and
    the rows of dy, dh and a.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending | _PendingPages] = deque()

    def add(self, pending: _Pending | _PendingPages) -> None:
        """Called by the backward of :func:`uniep.moe`."""
        self._pending.append(pending)

    def pop(self) -> _Pending | _PendingPages:
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

    Not collective. The place is ``w1.grad`` and so on (bf16), or the ``main_grads`` that the
    call was given. The bits are those of a backward that does not defer.

    Args:
        deferred: what calls of :func:`uniep.moe` were given as ``deferred``; empty afterwards.

    Raises:
        RuntimeError: where the workspace of a call has been closed. What waits behind it stays.
    """
    while len(deferred):
        call = deferred.pop()
        if isinstance(call, _PendingPages):
            if (gradients := _gradients_of_pages(call)) is not None:
                _add_gradients(call.weights, gradients)
            continue
        saved = (call.key, call.plan, call.x_rows, call.h, call.row_probs, call.backward_rows)
        if call.main_grads is not None:
            dw, db = call.main_grads[:2], call.main_grads[2:]
            ops.backward_weights_main_grad(*saved, *dw, call.tokens, call.flag, call.schedule, *db)
            continue
        w2 = call.weights[1]
        figures = (call.tokens, w2.shape[0], w2.shape[2], len(call.weights) == 4)
        gradients = ops.backward_weights(*saved, *figures, call.flag, call.schedule)
        # Without biases their gradients are empty, and end the list.
        _add_gradients(call.weights, gradients)


def _gradients_of_pages(call: _PendingPages) -> tuple[Tensor, ...] | None:
    dw1, dw2, db1, db2 = four(call.main_grads)
    gradients: tuple[Tensor, ...] = ops.backward_weights_pages(
        call.key, call.saved.address, dw1, dw2, call.tokens, call.keep, call.schedule, db1, db2
    )
    return gradients if call.main_grads is None else None


def _add_gradients(weights: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    for weight, gradient in zip(weights, gradients, strict=False):
        if not weight.requires_grad:
            continue
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient
