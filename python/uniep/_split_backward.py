"""A backward in two calls: gradients of data first, those of weights later.

Pipeline schedules without bubbles ask autograd for the first, which the stage before waits for, and
fill gaps with the second: two calls of ``torch.autograd.grad`` on one graph. A function written in
Python is run by both, and has to find out itself what it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._between_hosts.crossing import Crossing, crosses_under_weights
from ._forms import Experts
from .deferred import Pending, PendingPages, behind_data

__all__ = [
    "Asked",
    "arguments_before",
    "asked_for",
    "crossing_ahead",
    "for_arguments",
    "forget_weights_left",
    "gradients_of_weights",
    "keeps_graph",
    "weights_are_apart",
    "weights_left",
]


class Asked(NamedTuple):
    """Gradients that the backward at work is to give.

    Attributes:
        data: of tokens and probabilities.
        weights: of any weight.
        weights_later: weights need gradients, and another backward may ask for them.
    """

    data: bool
    weights: bool
    weights_later: bool


def arguments_before(forward: Callable[..., Any], name: str) -> int:
    """Arguments of an autograd function's forward ahead of the one of that name; not ctx."""
    return list(inspect.signature(forward).parameters).index(name) - 1


def asked_for(ctx: Any, before: int, weights: int, has_main_grads: bool) -> Asked:
    """What the backward at work is asked for.

    Args:
        ctx: of the function whose backward it is.
        before: arguments of the function ahead of its weights.
        weights: tensors from there on.
        has_main_grads: gradients are added to tensors of the caller's. Where autograd knows of no
            weight that needs one, they are asked for always.
    """
    need = any(ctx.needs_input_grad[before:])
    if torch.compiler.is_compiling():  # a graph computes all
        return Asked(True, need or has_main_grads, False)
    nodes = [node for node, _ in ctx.next_functions]
    data = any(map(_is_asked_for, nodes[:-weights]))
    if not need:
        return Asked(data, has_main_grads, False)
    asked = any(map(_is_asked_for, nodes[-weights:]))
    return Asked(data, asked, not asked and keeps_graph())


def _is_asked_for(node: Any) -> bool:
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a leaf whose gradient torch.autograd.grad returns
        return True


def keeps_graph() -> bool:
    """Whether the backward at work has ``retain_graph=True``, as far as PyTorch says so."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is not None and bool(ask())


def crossing_ahead(ctx: Any, asked: Asked) -> Crossing | None:
    """What gives the gradients of data away while those of weights are computed; None: nothing."""
    crossing: Crossing | None = ctx.crossing
    return crossing if asked.weights and crosses_under_weights(crossing) else None


def weights_are_apart(ctx: Any, asked: Asked, ahead: Crossing | None) -> bool:
    """Whether a pass of data alone comes first.

    A ring gives rows back behind weight gradients: these are computed even if nobody asks.
    """
    unasked = ctx.in_parts and not asked.weights
    return ctx.deferred is not None or ahead is not None or unasked


def gradients_of_weights(
    ctx: Any,
    asked: Asked,
    ahead: Crossing | None,
    dy: Tensor,
    call: Pending | PendingPages,
    dx: Tensor,
    dprobs: Tensor,
) -> Any:
    """Behind a pass of data alone: those of weights, or None where they wait or nobody asks.

    Args:
        ctx: of the function.
        asked: what it was asked for.
        ahead: what gives `dx` and `dprobs` away meanwhile.
        dy: as autograd gave it.
        call: what weight gradients are computed of.
        dx: gradients of data, which the pass gave.
        dprobs: likewise.
    """
    if asked.weights:
        return behind_data(call, ctx.deferred, ahead, dx, dprobs)
    if asked.weights_later:
        ctx.left = _Left(dy, dy._version, call)
    return None


class _Left(NamedTuple):
    dy: Tensor
    version: int
    call: Pending | PendingPages


def weights_left(ctx: Any, dy: Tensor) -> Pending | PendingPages | None:
    """What :func:`gradients_of_weights` left for later, if it was of the same `dy`.

    Once: a backward that asks for weight gradients again computes everything anew.
    """
    left: _Left | None = getattr(ctx, "left", None)
    if left is None or not _is_same(left.dy, dy) or left.version != dy._version:
        return None
    ctx.left = None
    return left.call


def forget_weights_left(ctx: Any, asked: Asked) -> None:
    """Lets go of what a backward before has left, if the one at work gives everything itself."""
    if torch.compiler.is_compiling():  # then none has left anything
        return
    if asked.data and asked.weights and hasattr(ctx, "left"):
        ctx.left = None


def _is_same(kept: Tensor, dy: Tensor) -> bool:
    # Behind a view, as of an output of three dimensions, each backward has a tensor of its own.
    # What is kept keeps the memory, so no other gradient is there.
    # Its address alone says nothing where there are no tokens.
    return kept is dy or (kept.dtype == dy.dtype and kept.is_set_to(dy))


def for_arguments(
    ctx: Any,
    before: int,
    weights: Experts,
    of_weights: Any,
    of_data: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor | None, ...]:
    """What a backward returns: a gradient for each argument of its forward, or None.

    Args:
        ctx: of the function.
        before: its arguments ahead of the weights.
        weights: all of them.
        of_weights: their gradients, as ops return them; None: none.
        of_data: gradients of its first arguments.
    """
    new = () if of_weights is None else weights.gradients(*of_weights)
    rest = len(ctx.needs_input_grad) - before - len(new)
    return (*of_data, *(None,) * (before - len(of_data)), *new, *(None,) * rest)
