"""uniep.moe: one mixture-of-experts layer as a function, with its gradients."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _arguments, _hooks
from ._ops import ops
from .deferred import DeferredWeights, _Pending
from .group import GroupLike
from .offload import saving_elsewhere
from .row_pool import moe_in_pages
from .workspace import Workspace, default_workspace

__all__ = ["moe"]


class _Moe(torch.autograd.Function):
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
        w1: Tensor,
        w2: Tensor,
        dw1: Tensor | None,
        dw2: Tensor | None,
        key: Tensor,
        overflow: Tensor,
        rows: int,
        rows_of_x: int,
        rows_of_h: int,
        plan_bytes: int,
        backward_bytes: int,
        exact: bool,
        flag: bool,
        schedule: str | None,
        deferred: DeferredWeights | None,
    ) -> Tensor:
        inputs = (key, overflow, x, topk_ids, topk_probs, w1, w2)
        if exact:
            saved = ops.forward_exact(*inputs, flag, schedule)
        else:
            saved = ops.forward(*inputs, rows, rows_of_x, rows_of_h, plan_bytes, flag, schedule)
        out, plan, x_rows, h, row_probs = saved
        # Without rows of x, backward dispatches x again.
        again = x if rows_of_x == 0 else None
        ctx.save_for_backward(plan, x_rows, h, row_probs, w1, w2, again)
        ctx.key = key
        ctx.dw1 = dw1
        ctx.dw2 = dw2
        ctx.topk = topk_ids.shape[1]
        ctx.backward_bytes = backward_bytes
        ctx.flag = flag
        ctx.schedule = schedule
        ctx.deferred = deferred
        # Not as hooks of saved tensors return them: those have a grad that nobody sees.
        ctx.weights = (w1, w2) if deferred is not None else None
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan, x_rows, h, row_probs, w1, w2, x = ctx.saved_tensors
        dy = dy.contiguous()
        call = (ctx.key, plan, x_rows, h, row_probs, dy, w1, w2, x)
        dw1 = dw2 = None
        wants_weights = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        if ctx.deferred is not None:
            dx, dprobs, rows = ops.backward_data(
                *call, ctx.topk, ctx.backward_bytes, ctx.flag, ctx.schedule
            )
            main_grads = None if ctx.dw1 is None else (ctx.dw1, ctx.dw2)
            ctx.deferred.add(
                _Pending(
                    key=ctx.key,
                    plan=plan,
                    x_rows=x_rows,
                    h=h,
                    row_probs=row_probs,
                    backward_rows=rows,
                    tokens=dy.shape[0],
                    w1=ctx.weights[0],
                    w2=ctx.weights[1],
                    main_grads=main_grads,
                    flag=ctx.flag,
                    schedule=ctx.schedule,
                )
            )
        elif ctx.dw1 is not None:
            dx, dprobs = ops.backward_main_grad(
                *call, ctx.dw1, ctx.dw2, ctx.topk, ctx.flag, ctx.schedule
            )
        elif wants_weights:
            dx, dprobs, dw1, dw2 = ops.backward(*call, ctx.topk, ctx.flag, ctx.schedule)
        else:
            dx, dprobs, _ = ops.backward_data(
                *call, ctx.topk, ctx.backward_bytes, ctx.flag, ctx.schedule
            )
        return (dx, None, dprobs, dw1, dw2) + (None,) * 13


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    group: GroupLike = None,
    workspace: Workspace | None = None,
    max_tokens: int | None = None,
    capacity_rows: int | None = None,
    save: Literal["rows", "tokens", "none"] | None = None,
    recompute_h: bool | None = None,
    exact_rows: bool | None = None,
    schedule: str | None = None,
    main_grads: tuple[Tensor, Tensor] | None = None,
    deferred: DeferredWeights | None = None,
) -> Tensor:
    """One MoE layer: out[t] is the sum over k of p[t,k] · expert(topk_ids[t,k])(x[t]).

    An expert e is SwiGLU: w2[e] · (silu(gate) * up), with [gate; up] = w1[e] · x[t]. Differentiable
    in x, topk_probs, w1 and w2, once. All ranks of the group call it in the same order, as they do
    their backward. Output and gradients have the same bits for every schedule and number of ranks.

    Args:
        x: bf16 [..., H], this rank's tokens. Under autocast to bf16, fp32 too, and so are weights.
        topk_ids: int32 or int64 [..., K], numbers of experts among those of all ranks; -1: the slot
            is dropped.
        topk_probs: fp32 [..., K].
        w1: bf16 [El, 2I, H], this rank's experts: rows of the gate, then those of up. Contiguous.
        w2: bf16 [El, H, I]. Contiguous.
        group: who holds the other experts: a ProcessGroup, a :class:`uniep.Group`, or None: nobody.
        workspace: what to work in. None: one that calls of this shape on this group share. It has a
            group, ``max_tokens`` and ``capacity_rows`` of its own, which are then not given here.
        max_tokens: most tokens that a rank ever has, the same on all ranks. None: those of this
            call, which then are the same on all ranks.
        capacity_rows: see :class:`uniep.Workspace`.
        save: what is kept of x; see :class:`uniep.Workspace`. None: ``"rows"``, or what
            the workspace has.
        recompute_h: whether backward computes h again; likewise. None: no, or what the workspace
            has.
        exact_rows: whether this call takes memory for the rows that come, and waits for their
            number; see :class:`uniep.Workspace`. None: no, or what the workspace has.
        schedule: of this call and its backward. None: the workspace's.
        main_grads: (dw1, dw2), of the shapes of w1 and w2, contiguous, both fp32 or both bf16:
            weight gradients are added to these, and ``w1.grad`` and ``w2.grad`` stay as they are.
        deferred: where weight gradients wait for :func:`uniep.backward_weights`.

    Returns:
        bf16 [..., H].

    Raises:
        TypeError: for a wrong dtype.
        ValueError: for a wrong shape, device or layout, and for arguments that exclude each other.
        RuntimeError: where the library refuses or fails: a routing that does not fit, a lost rank.
    """
    _arguments.check_device(x)
    if save not in (None, "rows", "tokens", "none"):
        raise ValueError(f"save is '{save}'; it must be 'rows', 'tokens' or 'none'")
    if torch.is_autocast_enabled(x.device.type):
        x, w1, w2 = _arguments.autocast(x, w1, w2)
    _arguments.check(x, topk_ids, topk_probs, w1, w2)
    experts, double, hidden = w1.shape
    topk = topk_ids.shape[-1]
    tokens = _arguments.rows(x)
    ids = _arguments.int32(_arguments.rows(topk_ids))
    probs = _arguments.rows(topk_probs)
    if workspace is None:
        workspace = default_workspace(
            group,
            x.device,
            hidden,
            double // 2,
            experts,
            topk,
            tokens.shape[0],
            max_tokens,
            capacity_rows,
            save or "rows",
            bool(recompute_h),
        )
    elif any(own is not None for own in (group, max_tokens, capacity_rows, save, recompute_h)):
        raise ValueError(
            "a workspace has its own group, max_tokens, capacity_rows, save and recompute_h; pass "
            "either the workspace or these"
        )
    _arguments.check_workspace(workspace, x, w1, topk)
    dw1, dw2 = (None, None) if main_grads is None else main_grads
    if dw1 is not None:
        assert dw2 is not None
        _arguments.check_main_grads(dw1, dw2, w1, w2)
    if deferred is not None:
        _arguments.check_deferred(w1, w2, main_grads)
    out: Tensor
    if workspace.row_pool is not None:
        if exact_rows:
            raise ValueError("exact_rows is True, but the workspace has a row pool; pass None")
        out = moe_in_pages(
            tokens,
            ids,
            probs,
            w1,
            w2,
            dw1,
            dw2,
            workspace.key,
            workspace.overflow,
            workspace.row_pool,
            workspace.save == "none",
            workspace.flag,
            schedule,
            deferred,
        )
        return _result(out, workspace, x, topk_ids, topk_probs, w1, w2)
    with saving_elsewhere((tokens, w1, w2)):
        out = _Moe.apply(
            tokens,
            ids,
            probs,
            w1,
            w2,
            dw1,
            dw2,
            workspace.key,
            workspace.overflow,
            workspace.rows,
            workspace.rows_of_x,
            workspace.rows_of_h,
            workspace.plan_bytes,
            workspace.backward_bytes,
            workspace.exact_rows if exact_rows is None else exact_rows,
            workspace.flag,
            schedule,
            deferred,
        )
    return _result(out, workspace, x, topk_ids, topk_probs, w1, w2)


def _result(
    out: Tensor,
    workspace: Workspace,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: Tensor,
    w2: Tensor,
) -> Tensor:
    """Of the shape of x, and shown to who watches calls."""
    if out.shape != x.shape:  # FSDP2 warns of modules that return views, even of the same shape
        out = out.reshape(x.shape)
    if not torch.compiler.is_compiling() and (watch := _hooks.watcher()) is not None:
        tensors = {"x": x, "topk_ids": topk_ids, "topk_probs": topk_probs, "w1": w1, "w2": w2}
        watch(workspace.group, tensors, out)
    return out
