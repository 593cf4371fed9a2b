"""uniep.moe of a workspace that keeps rows in tensors: both passes as autograd runs them.

_moe_in_pages.py has the same for workspaces with a row pool.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._between_hosts.all_rows import tokens_of
from ._between_hosts.crossing import Crossing, waves_of_backward
from ._differentiable import differentiable_once
from ._forms import Experts, experts_from
from ._library import with_refusals
from ._ops import ops
from ._outside_graphs import outside_graphs
from ._shared_main_grads import gradients_of_shared, with_sums_of_shared
from ._split_backward import (
    arguments_before,
    asked_for,
    crossing_ahead,
    for_arguments,
    forget_weights_left,
    gradients_of_weights,
    weights_are_apart,
    weights_left,
)
from .deferred import (
    DeferredWeights,
    Pending,
    behind_data,
    check_waits,
    first_copy,
    read_later,
)

__all__ = ["Counts", "Figures", "moe_in_tensors"]


class Figures(NamedTuple):
    """Of the workspace, as it has them when a call begins: it may grow ahead of the backward."""

    rows: int
    rows_of_x: int
    rows_of_h: int
    plan_bytes: int
    backward_bytes: int


class Counts(NamedTuple):
    """How many of the tensors of a call are what."""

    w1: int
    w2: int
    weights: int  # all, with what not every layer has
    main_w1: int
    main_w2: int


class _MoeInTensors(torch.autograd.Function):
    """Forward and backward of the tokens of this rank.

    What backward needs is saved as tensors, so hooks of saved tensors may move it. The key is not:
    it is the layer's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_ids: Tensor,
        topk_probs: Tensor,
        shared_probs: Tensor | None,
        key: Tensor,
        overflow: Tensor,
        figures: Figures,
        in_parts: bool,
        exact: bool,
        flag: bool,
        schedule: str | None,
        deferred: DeferredWeights | None,
        crossing: Crossing | None,
        layout: int,
        counts: Counts,
        *tensors: Any,
    ) -> Tensor:
        x = tokens_of(x)
        # Those of weights, then of main gradients, and the None of moe_in_tensors.
        given, main = tensors[: counts.weights], tensors[counts.weights : -1]
        weights = experts_from(given, counts.w1, counts.w2, layout)
        inputs = (key, overflow, x, topk_ids, topk_probs, weights.w1, weights.w2)
        end = (flag, schedule, *weights.more(), shared_probs, layout)
        if exact:
            saved = ops.forward_exact(*inputs, *end)
        else:
            waves = None if crossing is None else crossing.forward_waves
            sizes = (figures.rows, figures.rows_of_x, figures.rows_of_h, figures.plan_bytes)
            saved = ops.forward(*inputs, *sizes, *end, waves)
        out, plan, x_rows, h, row_probs = saved
        # Without rows of x, backward dispatches x again; shared experts read it where it lies.
        again = x if figures.rows_of_x == 0 or weights.shared_w1 is not None else None
        ctx.save_for_backward(plan, x_rows, h, row_probs, again, *given)
        ctx.counts = counts
        ctx.layout = layout
        ctx.has_shared_probs = shared_probs is not None
        ctx.key = key
        ctx.main_grads = (
            experts_from(main, counts.main_w1, counts.main_w2, layout) if main else None
        )
        ctx.tensors = len(given) + len(main)
        ctx.topk = topk_ids.shape[1]
        ctx.backward_bytes = figures.backward_bytes
        ctx.in_parts = in_parts
        ctx.flag = flag
        ctx.schedule = schedule
        ctx.deferred = deferred
        ctx.crossing = crossing
        # Not as hooks of saved tensors return them: those have a grad that nobody sees.
        ctx.weights = weights if deferred is not None else None
        ctx.copy = first_copy(weights, bool(main)) if deferred is not None else None
        return out  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    @with_refusals
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.deferred is not None and torch.compiler.is_compiling():  # compiled autograd
            return _backward_that_waits(ctx, dy)
        return _MoeInTensors._backward(ctx, dy)

    @staticmethod
    def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_waits(ctx)
        main: Experts | None = ctx.main_grads
        asked = asked_for(ctx, _BEFORE_TENSORS, ctx.tensors, main is not None)
        forget_weights_left(ctx, asked)
        if not asked.data and (call := weights_left(ctx, dy)) is not None:
            gradients = behind_data(call, ctx.deferred)
            return for_arguments(ctx, _BEFORE_TENSORS, call.weights, gradients)
        plan, x_rows, h, row_probs, x, *given = ctx.saved_tensors
        weights = experts_from(given, ctx.counts.w1, ctx.counts.w2, ctx.layout)
        own_dy, dy = dy, tokens_of(dy).contiguous()
        saved = (ctx.key, plan, x_rows, h, row_probs, dy, weights.w1, weights.w2, x)
        gradients = None
        ahead = crossing_ahead(ctx, asked)
        if weights_are_apart(ctx, asked, ahead):
            with waves_of_backward(ctx.crossing, dy) as waves:
                dx, dprobs, dshared_probs, rows = ops.backward_data(
                    *saved,
                    ctx.topk,
                    ctx.backward_bytes,
                    ctx.flag,
                    ctx.schedule,
                    *weights.more(),
                    ctx.layout,
                    waves,
                )
            pending = Pending(
                key=ctx.key,
                plan=plan,
                x_rows=x_rows,
                h=h,
                row_probs=row_probs,
                backward_memory=rows,
                tokens=dy.shape[0],
                shared=read_later(weights, dy, x),
                weights=ctx.weights or weights,
                main_grads=main,
                flag=ctx.flag,
                schedule=ctx.schedule,
            )
            gradients = gradients_of_weights(ctx, asked, ahead, own_dy, pending, dx, dprobs)
        elif main is not None and asked.weights:
            sums = with_sums_of_shared(main, weights)
            dx, dprobs, dshared_probs = ops.backward_main_grad(
                *saved,
                sums.w1,
                sums.w2,
                ctx.topk,
                ctx.flag,
                ctx.schedule,
                weights.b1,
                weights.b2,
                sums.b1,
                sums.b2,
                weights.shared_w1,
                weights.shared_w2,
                sums.shared_w1,
                sums.shared_w2,
                ctx.layout,
            )
            gradients = gradients_of_shared(main, sums, weights)
        else:
            dx, dprobs, dw1, dw2, db1, db2, dshared_probs, *dshared = ops.backward(
                *saved, ctx.topk, ctx.flag, ctx.schedule, *weights.more(), ctx.layout
            )
            gradients = (dw1, dw2, db1, db2, *dshared) if asked.weights else None
        probs = dshared_probs if ctx.has_shared_probs else None
        of_data = (dx, None, dprobs, probs)
        return for_arguments(ctx, _BEFORE_TENSORS, weights, gradients, of_data)


@outside_graphs(reason="weight gradients that wait keep tensors outside of the graph")
def _backward_that_waits(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _MoeInTensors._backward(ctx, dy)


# Arguments of :meth:`_MoeInTensors.forward` ahead of its tensors.
_BEFORE_TENSORS = arguments_before(_MoeInTensors.forward, "tensors")


def moe_in_tensors(*arguments: Any, has_rows: bool, is_exact: bool) -> Tensor:
    """The arguments of :class:`_MoeInTensors`.

    Args:
        *arguments: these.
        has_rows: the layer gives rows of slots, not sums of tokens.
        is_exact: `exact` is True.
    """
    run = _rows_in_tensors if has_rows else _exactly if is_exact else _MoeInTensors.apply
    # So there are never two tensors: a forward that is compiled without gradients, and has as many
    # arguments as parameters, is one without a context to PyTorch 2.10 and 2.11.
    out: Tensor = run(*arguments, None)
    return out


@outside_graphs(reason="compilers know the shapes of sums, and not of rows that are to be added up")
def _rows_in_tensors(*arguments: Any) -> Tensor:
    out: Tensor = _MoeInTensors.apply(*arguments)
    return out


@outside_graphs(reason="exact_rows=True waits for the number of rows in every call")
def _exactly(*arguments: Any) -> Tensor:
    out: Tensor = _MoeInTensors.apply(*arguments)
    return out
