"""The layer in plain PyTorch: each rounding and each order of the numerics contract, nothing fused.

`plain.moe` takes what `uniep.moe` takes. On a Hopper GPU its results are bitwise those of uniep.
On a CPU PyTorch's products add up in an order of their own, so results agree to tolerance; with
`ascending=True` products add up one step at a time, and then the bits are uniep's there too. It is
a yardstick: it allocates freely, and with a group the host waits to learn how many rows travel.

    forward, per row    h  = bf16(w1[e] x[t])                        gate half h_g, up half h_u
                        a  = bf16(p (silu(h_g) h_u))
                        out[t] = bf16(sum over k ascending of bf16(w2[e] a))
    backward, per row   da = bf16(w2[e]^T dy[t])
                        dp = sum over columns of da (silu(h_g) h_u)
                        dh = bf16([((p da) h_u) silu'(h_g); (p da) silu(h_g)])
                        dx[t] = bf16(sum over k ascending of bf16(w1[e]^T dh))
    per expert          dw2 = bf16(dy^T a)    dw1 = bf16(dh^T x)

The rows of an expert are in one order everywhere: (source rank, token, k). Other activations,
probabilities behind fc2, biases and combine groups: docs/numerics.md has their formulas.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import _arguments
from ._activations import activated, activated_gradient
from ._differentiable import differentiable_once
from ._shared_apart import for_both
from .arithmetic import Activation, Arithmetic, CombinePartials, ProbsPlace, arithmetic_of
from .group import GroupLike, process_group_of, rank_and_size
from .zero_experts import ZeroExpertType

_DPROB_GROUP = 64  # columns of the intermediate size that are summed before groups are


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    group: GroupLike = None,
    main_grads: tuple[Tensor, ...] | None = None,
    ascending: bool = False,
    activation: Activation | None = None,
    probs: ProbsPlace | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    combine_groups: int | None = None,
    combine_partials: CombinePartials | None = None,
    zero_experts: int = 0,
    zero_expert_type: ZeroExpertType = "identity",
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_probs: Tensor | None = None,
) -> Tensor:
    """Return the routed experts' output; differentiable by x, topk_probs, w1, w2, b1 and b2.

    x: bf16 [..., H]. topk_ids: int32 or int64 [..., K], -1 drops the slot.
    topk_probs: fp32 [..., K].
    w1: bf16 [El, 2I, H], gate rows first, or [El, I, H] without a gate. w2: bf16 [El, H, I]. El
    experts are those of this rank; all ranks of `group` together have num_experts = El * size, and
    all of them must call.
    main_grads: (dw1, dw2) or with biases (dw1, dw2, db1, db2), fp32 or bf16, to which gradients are
    added; then w1 and so on get no gradient from autograd.
    ascending: on a CPU, sums in uniep's order, and slow: a PyTorch call for each reduction index.
    activation, probs, b1 [El, 2I] or [El, I], b2 [El, H], combine_groups, combine_partials: as
    uniep.moe takes them.
    zero_experts, zero_expert_type: likewise. The gradient of an identity's weight is autograd's,
    which agrees with uniep's to tolerance.
    shared_w1 [S, 2I, H], shared_w2 [S, H, I], shared_probs [..., S]: likewise; main_grads may have
    (dshared_w1, dshared_w2) behind the others then. Shared experts are a layer of their own, of S
    experts that all tokens go to; what it gives is added to the other's output, and rounded.
    """
    routed = partial(
        moe,
        group=group,
        ascending=ascending,
        activation=activation,
        probs=probs,
        b1=b1,
        b2=b2,
        combine_groups=combine_groups,
        combine_partials=combine_partials,
    )
    if zero_experts:
        experts = w1.shape[0] * (1 if group is None else rank_and_size(group)[1])
        zero = (topk_ids >= experts) & (topk_ids < experts + zero_experts)
        real = routed(
            x,
            torch.where(zero, -1, topk_ids),
            topk_probs,
            w1,
            w2,
            main_grads=main_grads,
            shared_w1=shared_w1,
            shared_w2=shared_w2,
            shared_probs=shared_probs,
        )
        if zero_expert_type == "zero":
            return real
        share = torch.zeros_like(topk_probs[..., 0])
        for k in range(topk_probs.shape[-1]):
            share = share + torch.where(zero[..., k], topk_probs[..., k], 0.0)
        total = (real.float() + share[..., None] * x.float()).bfloat16()
        return torch.where(zero.any(-1, keepdim=True), total, real)
    if shared_w1 is not None and shared_w2 is not None:
        weights = _arguments.experts(w1, w2, b1, b2, shared_w1, shared_w2)
        _arguments.check(x, topk_ids, topk_probs, weights, arithmetic_of(activation))
        _arguments.check_shared_probs(shared_probs, x, weights)
        routed_weights = 2 + len(weights.biases())
        own = main_grads and main_grads[:routed_weights]
        of_shared = (main_grads and main_grads[routed_weights:]) or None
        tokens, mine = for_both(x)
        return routed(tokens, topk_ids, topk_probs, w1, w2, main_grads=own) + moe(
            mine,
            _all_shared(x, shared_w1.shape[0]),
            _ones_like_shared(x, shared_w1.shape[0]) if shared_probs is None else shared_probs,
            shared_w1,
            shared_w2,
            main_grads=of_shared,
            ascending=ascending,
            activation=activation,
            probs=probs,
        )
    group = process_group_of(group)
    arithmetic = arithmetic_of(activation, probs, b1 is not None, combine_groups, combine_partials)
    weights = _arguments.experts(w1, w2, b1, b2)
    _arguments.check(x, topk_ids, topk_probs, weights, arithmetic)
    experts = w1.shape[0] * (1 if group is None else dist.get_world_size(group))
    _check_ids(topk_ids, experts)
    if experts % arithmetic.combine_groups:
        raise ValueError(
            f"combine_groups is {arithmetic.combine_groups}; it must divide the number of experts, "
            f"{experts}"
        )
    if main_grads is not None:
        _arguments.main_grads(main_grads, weights, weights)
    topk = topk_ids.shape[-1]
    out: Tensor = _Moe.apply(
        x.reshape(-1, x.shape[-1]),
        topk_ids.reshape(-1, topk),
        topk_probs.reshape(-1, topk),
        w1,
        w2,
        b1,
        b2,
        arithmetic,
        group,
        main_grads,
        ascending and not x.is_cuda,
    )
    return out.reshape(x.shape)


def _all_shared(x: Tensor, shared: int) -> Tensor:
    return torch.arange(shared, device=x.device).expand(*x.shape[:-1], shared)


def _ones_like_shared(x: Tensor, shared: int) -> Tensor:
    return torch.ones(*x.shape[:-1], shared, dtype=torch.float32, device=x.device)


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_ids: Tensor,
        topk_probs: Tensor,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
        arithmetic: Arithmetic,
        group: dist.ProcessGroup | None,
        main_grads: tuple[Tensor, ...] | None,
        ascending: bool,
    ) -> Tensor:
        routing = _route(topk_ids, w1.shape[0], group)
        x_rows = _dispatch(x, routing, group)
        p = _dispatch_slots(topk_probs, routing, group)[:, None]
        h = _grouped(x_rows, w1.transpose(1, 2), routing.ends, ascending)
        before = arithmetic.probs == "before"
        if b1 is not None:
            h = _add_bias(h, b1, routing.ends)
        a = activated(h, arithmetic.activation)
        a = (p * a if before else a).bfloat16()
        y = _grouped(a, w2.transpose(1, 2), routing.ends, ascending)
        if b2 is not None:
            y = _add_bias(y, b2, routing.ends, p if before else None)
        ctx.save_for_backward(x_rows, h, p, w1, w2, b1, b2, *routing.tensors())
        ctx.splits = routing.sent, routing.received
        ctx.arithmetic = arithmetic
        ctx.group, ctx.main_grads, ctx.ascending = group, main_grads, ascending
        return _combine(y, routing, group, arithmetic, None if before else topk_probs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_rows, h, p, w1, w2, b1, b2, *tensors = ctx.saved_tensors
        routing = _Routing(*tensors, *ctx.splits)
        ends, ascending = routing.ends, ctx.ascending
        activation = ctx.arithmetic.activation
        dy_rows = _dispatch(dy, routing, ctx.group)
        weight, divisor = p, None
        if ctx.arithmetic.probs == "after":
            # A row whose p is 0 stays dy for the sake of dprobs; it counts as 0 for all else.
            divisor = torch.where(p == 0, 1, p)
            weight = torch.where(p == 0, 0.0, 1.0)
            dy_rows = (divisor * dy_rows.float()).bfloat16()
        da = _grouped(dy_rows, w2, ends, ascending).float()
        product = activated(h, activation)
        a = (weight * product).bfloat16()
        dh = activated_gradient(h, weight * da, activation).bfloat16()
        dx = _combine(_grouped(dh, w1, ends, ascending), routing, ctx.group, ctx.arithmetic)
        dprobs = _sum_columns(da * product)
        if b2 is not None:
            dprobs = dprobs + _sum_columns(dy_rows.float() * _of_rows(b2, dy_rows, ends).float())
        if divisor is not None:
            dprobs = dprobs / divisor[:, 0]
        dprobs = _return_to_slots(dprobs, routing, ctx.group)
        dw: list[Tensor | None] = [None] * 4
        for i, (left, right) in enumerate([(dh, x_rows), (dy_rows, a)]):
            if ctx.main_grads is not None:
                _add_outer(ctx.main_grads[i], left, right, ends, ascending)
            elif ctx.needs_input_grad[3 + i]:
                dw[i] = _grouped_outer(left, right, ends, ascending)
        if b1 is not None:
            for i, rows in enumerate([dh.float(), weight * dy_rows.float()], start=2):
                sums = _sum_rows(rows, ends)
                if ctx.main_grads is not None:
                    _add_sums(ctx.main_grads[i], sums, ends)
                else:
                    dw[i] = sums.bfloat16()
        return dx, None, dprobs, *dw, None, None, None, None


# Where rows go.


class _Routing(NamedTuple):
    """How slots (token * K + k) of this rank become rows of its experts, and back."""

    dropped: Tensor  # bool [T, K]
    experts: Tensor  # int [T, K]: of each slot, among those of all ranks; -1 where it is dropped
    order: Tensor  # the slots that travel, by expert, then token, then k
    regroup: Tensor  # of received rows (by source, expert, token, k): by expert, source, token, k
    ends: Tensor  # int32 [El]: behind each expert's last row; rows past the last one are unused
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank

    def tensors(self) -> tuple[Tensor, ...]:
        return self.dropped, self.experts, self.order, self.regroup, self.ends


def _route(topk_ids: Tensor, local_experts: int, group: dist.ProcessGroup | None) -> _Routing:
    ranks = 1 if group is None else dist.get_world_size(group)
    experts = local_experts * ranks
    dropped = topk_ids < 0
    slots = torch.where(dropped, experts, topk_ids).flatten().long()  # dropped ones sort last
    order = torch.argsort(slots, stable=True)
    if ranks == 1:  # no size depends on data: no wait for a GPU
        ends = torch.cumsum(_histogram(slots, experts), 0).int()
        regroup = torch.arange(len(order), device=order.device)
        return _Routing(dropped, topk_ids, order, regroup, ends, [], [])
    counts = _histogram(slots, experts).view(ranks, local_experts)
    same = [1] * ranks
    received_counts = _exchange(counts, same, same, group)  # [source, local expert]
    sent, received = counts.sum(1).tolist(), received_counts.sum(1).tolist()
    local = torch.arange(local_experts, device=order.device).repeat(ranks)
    regroup = torch.argsort(torch.repeat_interleave(local, received_counts.flatten()), stable=True)
    ends = torch.cumsum(received_counts.sum(0), 0).int()
    return _Routing(dropped, topk_ids, order[: sum(sent)], regroup, ends, sent, received)


def _histogram(slots: Tensor, experts: int) -> Tensor:
    counts = torch.zeros(experts + 1, dtype=torch.long, device=slots.device)
    return counts.scatter_add_(0, slots, torch.ones_like(slots))[:experts]


def _exchange(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    # Of CUDA tensors gloo, which ranks that share a GPU have to use, exchanges copies on the host.
    device = "cpu" if dist.get_backend(group) == "gloo" else rows.device
    own = rows.to(device).contiguous()
    out = own.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, own, received, sent, group=group)
    return out.to(rows.device)


def _dispatch_rows(sent_rows: Tensor, routing: _Routing, group: Any) -> Tensor:
    if group is None or not routing.sent:
        return sent_rows
    return _exchange(sent_rows, routing.received, routing.sent, group)[routing.regroup]


def _dispatch(tokens: Tensor, routing: _Routing, group: Any) -> Tensor:
    """[T, n] -> the rows of this rank's experts."""
    topk = routing.dropped.shape[1]
    return _dispatch_rows(tokens[routing.order // topk], routing, group)


def _dispatch_slots(slots: Tensor, routing: _Routing, group: Any) -> Tensor:
    """[T, K] -> one value for each row."""
    return _dispatch_rows(slots.flatten()[routing.order], routing, group)


def _return_to_slots(rows: Tensor, routing: _Routing, group: Any) -> Tensor:
    """Undo dispatch: rows -> [T, K, ...], zeros in dropped slots."""
    if group is not None and routing.sent:
        by_source = torch.empty_like(rows)
        by_source[routing.regroup] = rows
        rows = _exchange(by_source, routing.sent, routing.received, group)
    tokens, topk = routing.dropped.shape
    slots = rows.new_zeros(tokens * topk, *rows.shape[1:])
    slots[routing.order] = rows
    slots = slots.view(tokens, topk, *rows.shape[1:])
    return slots.masked_fill_(routing.dropped.view(tokens, topk, *[1] * (rows.dim() - 1)), 0)


def _combine(
    rows: Tensor,
    routing: _Routing,
    group: Any,
    arithmetic: Arithmetic,
    weights: Tensor | None = None,
) -> Tensor:
    """Rows -> [T, n]: the sum over k ascending, fp32, from +0, rounded once.

    Each slot is multiplied by its weight in [T, K] first, if there are any. With combine groups,
    the sum over groups ascending of such sums, which may be rounded to bf16.
    """
    slots = _return_to_slots(rows, routing, group)
    if weights is not None:
        weights = weights.masked_fill(routing.dropped, 0)  # what dropped slots hold is not read
    slots = slots.float()
    if weights is not None:
        slots = weights[..., None] * slots
    groups = arithmetic.combine_groups
    experts = routing.ends.shape[0] * (len(routing.sent) or 1)
    group_of_slot = routing.experts // (experts // groups)
    total = torch.zeros(slots.shape[0], slots.shape[2], device=slots.device)
    for g in range(groups):
        part = torch.zeros_like(total)
        for k in range(slots.shape[1]):
            part = part + torch.where(group_of_slot[:, k, None] == g, slots[:, k], 0)
        if groups > 1 and arithmetic.combine_partials == "bf16":
            part = part.bfloat16().float()
        total = total + part
    return total.bfloat16()


# Arithmetic of rows.


def _of_rows(bias: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """[El, n] -> [M, n]: of each row's expert; rows behind the last expert's get any."""
    numbers = torch.arange(rows.shape[0], device=ends.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, numbers, right=True).clamp_(max=len(ends) - 1)
    return bias[experts]


def _add_bias(rows: Tensor, bias: Tensor, ends: Tensor, factor: Tensor | None = None) -> Tensor:
    """Rows plus their experts' biases, these times a factor [M, 1] first; rounded once more."""
    added = _of_rows(bias, rows, ends).float()
    return (rows.float() + (added if factor is None else factor * added)).bfloat16()


def _sum_rows(rows: Tensor, ends: Tensor) -> Tensor:
    """[M, n] -> [El, n]: the sums over each expert's rows in uniep's order, fp32, from +0.

    Rows in groups of 64, then groups ascending. In a group partial sum q takes rows 8m + 2q and the
    next, ascending; then they add up pairwise. Behind an expert's rows there are zeros.
    """
    by_expert = _by_expert(rows, ends)
    groups = -(-by_expert.shape[1] // 64)
    padded = torch.nn.functional.pad(by_expert, (0, 0, 0, groups * 64 - by_expert.shape[1]))
    by_partial = padded.view(len(ends), groups, 8, 4, 2, rows.shape[1])
    partials = by_partial.new_zeros(len(ends), groups, 4, rows.shape[1])
    for m in range(8):
        for row in range(2):
            partials = partials + by_partial[:, :, m, :, row]
    of_group = (partials[:, :, 0] + partials[:, :, 1]) + (partials[:, :, 2] + partials[:, :, 3])
    total = rows.new_zeros(len(ends), rows.shape[1])
    for group in range(groups):
        total = total + of_group[:, group]
    return total


def _add_sums(grad: Tensor, sums: Tensor, ends: Tensor) -> None:
    """grad[e] += sums[e], rounded once to grad's type, where e has rows."""
    for expert, (first, last) in enumerate(_spans(ends)):
        if last > first:
            grad[expert] = grad[expert].float() + sums[expert]


def _sum_columns(terms: Tensor) -> Tensor:
    """Add up each row in uniep's order: groups of 64 columns, then over groups ascending.

    On a GPU four threads hold a row of a group: thread q sums columns 8m + 2q and the next,
    ascending; then they add up pairwise. On a CPU lane l of 16 sums columns l, l + 16, ...
    """
    rows, columns = terms.shape
    groups = -(-columns // _DPROB_GROUP)
    padded = torch.nn.functional.pad(terms, (0, groups * _DPROB_GROUP - columns))
    if terms.is_cuda:
        lanes = padded.view(rows, groups, 8, 4, 2).transpose(3, 4).reshape(rows, groups, 16, 4)
        distances = [1, 2]
    else:
        lanes = padded.view(rows, groups, 4, 16)
        distances = [8, 4, 2, 1]
    sums = torch.zeros_like(lanes[:, :, 0])
    for step in range(lanes.shape[2]):
        sums = sums + lanes[:, :, step]
    others = torch.arange(sums.shape[2], device=sums.device)
    for distance in distances:
        sums = sums + sums[:, :, others ^ distance]
    total = terms.new_zeros(rows)
    for g in range(groups):
        total = total + sums[:, g, 0]
    return total


# Products: fp32 sums, ascending, one rounding, which is what _grouped_mm does on a Hopper GPU.


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    last = ends.tolist()
    return list(zip([0, *last[:-1]], last, strict=True))


def _fits_grouped_mm(a: Tensor, b: Tensor) -> bool:
    sizes = [a.shape[-1], b.shape[-2], b.shape[-1]]
    return a.is_cuda and a.shape[0] > 0 and all(n % 8 == 0 for n in sizes)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in fp32, without a rounding."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _ascending_bmm(a: Tensor, b: Tensor) -> Tensor:
    """[El, m, k] x [El, k, n] in fp32: each element one sum, from +0, over k ascending.

    A product of two bf16 is exact in fp32, so a fused multiply-add would give the same.
    """
    a, b = a.float(), b.float()
    total = a.new_zeros(a.shape[0], a.shape[1], b.shape[2])
    for k in range(a.shape[2]):
        total.addcmul_(a[:, :, k, None], b[:, k, None, :])
    return total


def _ascending_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left^T right over each expert's rows: each element one sum, from +0, over these ascending.

    Only over these: a row of zeros more would make +0 of a sum that is -0, which a product may be
    that is too small for fp32.
    """
    spans = _spans(ends)
    # Experts with most rows ahead: at each step those that have a row left are the first ones.
    order = sorted(range(len(spans)), key=lambda e: spans[e][0] - spans[e][1])
    counts = [spans[e][1] - spans[e][0] for e in order]
    steps = [  # [most rows of an expert, El, n]
        torch.nn.utils.rnn.pad_sequence([rows[slice(*spans[e])] for e in order])
        for rows in (left.float(), right.float())
    ]
    sums = left.new_zeros(len(spans), left.shape[1], right.shape[1], dtype=torch.float32)
    having = len(spans)
    for k in range(counts[0]):
        while counts[having - 1] <= k:
            having -= 1
        sums[:having].addcmul_(steps[0][k, :having, :, None], steps[1][k, :having, None])
    out = torch.empty_like(sums)
    out[order] = sums
    return out


def _by_expert(rows: Tensor, ends: Tensor) -> Tensor:
    """[M, n] -> [El, most rows of an expert, n], zeros behind the rows of an expert."""
    parts = [rows[first:last] for first, last in _spans(ends)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor, ascending: bool) -> Tensor:
    """Each expert's rows times its weights: [M, k] x [El, k, n] -> bf16 [M, n]."""
    if _fits_grouped_mm(rows, weights):
        return torch._grouped_mm(rows, weights, offs=ends)
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    if ascending:
        products = _ascending_bmm(_by_expert(rows, ends), weights)
    for expert, (first, last) in enumerate(_spans(ends)):
        if ascending:
            out[first:last] = products[expert, : last - first].bfloat16()
        elif last > first:
            out[first:last] = _mm(rows[first:last], weights[expert]).bfloat16()
    return out


def _outer(left: Tensor, right: Tensor, ends: Tensor, ascending: bool) -> Tensor:
    """left^T right over each expert's rows: fp32 [El, m, n]."""
    if ascending:
        return _ascending_outer(left, right, ends)
    out = left.new_zeros(len(ends), left.shape[1], right.shape[1], dtype=torch.float32)
    for expert, (first, last) in enumerate(_spans(ends)):
        if last > first:
            out[expert] = _mm(left[first:last].t(), right[first:last])
    return out


def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor, ascending: bool) -> Tensor:
    """Likewise, rounded to bf16."""
    if _fits_grouped_mm(left, right):
        return torch._grouped_mm(left.t(), right, offs=ends)
    return _outer(left, right, ends, ascending).bfloat16()


def _add_outer(grad: Tensor, left: Tensor, right: Tensor, ends: Tensor, ascending: bool) -> None:
    """grad[e] += left^T right, an fp32 sum rounded once to grad's type, where e has rows."""
    sums = _outer(left, right, ends, ascending)
    for expert, (first, last) in enumerate(_spans(ends)):
        if last > first:
            grad[expert] = grad[expert].float() + sums[expert]


def _check_ids(ids: Tensor, experts: int) -> None:
    if ids.is_cuda or ids.numel() == 0:
        return
    found = [int(ids.min()), int(ids.max())]
    if found[0] < -1 or found[1] >= experts:
        raise ValueError(
            f"topk_ids lie in {found}; they must be -1 (dropped) or 0 to {experts - 1}"
        )
