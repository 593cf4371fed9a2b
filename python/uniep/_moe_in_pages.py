"""uniep.moe of a workspace with a row pool: forward and backward as PyTorch calls them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    keeps_graph,
    weights_are_apart,
    weights_left,
)
from .deferred import (
    DeferredWeights,
    PendingPages,
    behind_data,
    check_waits,
    first_copy,
    read_later,
)
from .row_pool import PoolPages, SavedPages

__all__ = ["moe_in_pages"]


class _MoeInPages(torch.autograd.Function):
    """:func:`uniep.moe` of a workspace with a row pool."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_ids: Tensor,
        topk_probs: Tensor,
        shared_probs: Tensor | None,
        forms: Experts,
        main_grads: Experts | None,
        key: Tensor,
        overflow: Tensor,
        pool: PoolPages,
        dispatches_again: bool,
        in_parts: bool,
        flag: bool,
        schedule: str | None,
        deferred: DeferredWeights | None,
        crossing: Crossing | None,
        *weights: Tensor,
    ) -> Tensor:
        x = tokens_of(x)
        inputs = (key, overflow, x, topk_ids, topk_probs, forms.w1, forms.w2)
        end = (*forms.more(), shared_probs, forms.layout)
        waves = None if crossing is None else crossing.forward_waves
        out, address = ops.forward_pages(*inputs, flag, schedule, *end, waves)
        ctx.saved = SavedPages(address, pool)
        reads_x = dispatches_again or forms.shared_w1 is not None
        ctx.save_for_backward(x if reads_x else None, *weights)
        ctx.counts = (len(forms.w1), len(forms.w2))
        ctx.layout = forms.layout
        ctx.has_shared_probs = shared_probs is not None
        ctx.key = key
        ctx.main_grads = main_grads
        ctx.in_parts = in_parts
        ctx.tensors = len(weights)
        ctx.topk = topk_ids.shape[1]
        ctx.schedule = schedule
        ctx.deferred = deferred
        ctx.crossing = crossing
        # Not as checkpoints return them: those have a grad that nobody sees.
        ctx.weights = forms if deferred is not None else None
        ctx.copy = first_copy(forms, main_grads is not None) if deferred is not None else None
        return out  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    @with_refusals
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # compiled autograd
            return _backward_in_pages(ctx, dy)
        return _MoeInPages._backward(ctx, dy)

    @staticmethod
    def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_waits(ctx)
        asked = asked_for(ctx, _BEFORE_WEIGHTS, ctx.tensors, ctx.main_grads is not None)
        forget_weights_left(ctx, asked)
        if not asked.data and (call := weights_left(ctx, dy)) is not None:
            assert isinstance(call, PendingPages)
            gradients = behind_data(replace(call, keep=keeps_graph()), ctx.deferred)
            return for_arguments(ctx, _BEFORE_WEIGHTS, call.weights, gradients)
        x, *saved = ctx.saved_tensors
        weights = experts_from(saved, ctx.counts[0], ctx.counts[1], ctx.layout)
        own_dy, dy = dy, tokens_of(dy).contiguous()
        ahead = crossing_ahead(ctx, asked)
        data_only = weights_are_apart(ctx, asked, ahead)
        main = ctx.main_grads if asked.weights else None
        to_main = with_sums_of_shared(main, weights) if main else Experts((), ())
        with waves_of_backward(ctx.crossing, dy) as waves:
            dx, dprobs, dshared_probs, *new, rows = ops.backward_pages(
                ctx.key,
                ctx.saved.address,
                dy,
                weights.w1,
                weights.w2,
                x,
                to_main.w1,
                to_main.w2,
                ctx.topk,
                data_only,
                keeps_graph(),
                ctx.schedule,
                weights.b1,
                weights.b2,
                to_main.b1,
                to_main.b2,
                weights.shared_w1,
                weights.shared_w2,
                to_main.shared_w1,
                to_main.shared_w2,
                weights.layout,
                waves,
            )
        gradients = new if asked.weights and not data_only and main is None else None
        if data_only:
            pending = PendingPages(
                key=ctx.key,
                saved=ctx.saved,
                backward_memory=rows,
                tokens=dy.shape[0],
                shared=read_later(weights, dy, x),
                weights=ctx.weights or weights,
                main_grads=ctx.main_grads,
                keep=keeps_graph(),
                schedule=ctx.schedule,
            )
            gradients = gradients_of_weights(ctx, asked, ahead, own_dy, pending, dx, dprobs)
        elif main is not None:
            gradients = gradients_of_shared(main, to_main, weights)
        probs = dshared_probs if ctx.has_shared_probs else None
        of_data = (dx, None, dprobs, probs)
        return for_arguments(ctx, _BEFORE_WEIGHTS, weights, gradients, of_data)


@outside_graphs(reason="a row pool keeps what forwards save outside of the graph")
def _backward_in_pages(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _MoeInPages._backward(ctx, dy)


# Arguments of :meth:`_MoeInPages.forward` ahead of its weights.
_BEFORE_WEIGHTS = arguments_before(_MoeInPages.forward, "weights")


@outside_graphs(reason="a row pool keeps what forwards save outside of the graph")
def moe_in_pages(*arguments: Any) -> Tensor:
    """The arguments of :class:`_MoeInPages`."""
    out: Tensor = _MoeInPages.apply(*arguments)
    return out
