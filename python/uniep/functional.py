"""uniep.moe: one mixture-of-experts layer as a function, with its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _arguments, _hooks, _library
from . import zero_experts as _zero
from ._checked_call import CheckedCall
from ._choices import Choices
from ._common_workspaces import shared_workspace
from ._differentiable import refuse_transforms
from ._forms import Experts, ExpertWeight, W1Layout, WeightsLayout
from ._save_choice import Save
from .arithmetic import Activation, Arithmetic, CombinePartials, ProbsPlace
from .deferred import DeferredWeights, check_is_deferred
from .group import GroupLike, without_mesh
from .row_pool import RowPoolLike
from .workspace import Workspace, check_is_workspace

__all__ = ["moe"]


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: ExpertWeight,
    w2: ExpertWeight,
    *,
    group: GroupLike = None,
    workspace: Workspace | None = None,
    max_tokens: int | None = None,
    capacity_rows: int | None = None,
    save: Save | None = None,
    recompute_h: bool | None = None,
    backward_rows: int | None = None,
    exact_rows: bool | None = None,
    exact_hosts: bool | None = None,
    schedule: str | None = None,
    main_grads: tuple[ExpertWeight, ...] | None = None,
    deferred: DeferredWeights | None = None,
    activation: Activation | None = None,
    probs: ProbsPlace | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    combine_groups: int | None = None,
    combine_partials: CombinePartials | None = None,
    row_pool: RowPoolLike = None,
    zero_experts: int = 0,
    zero_expert_type: _zero.ZeroExpertType = "identity",
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_probs: Tensor | None = None,
    w1_layout: W1Layout = "halves",
    weights_layout: WeightsLayout = "out_in",
) -> Tensor:
    """One MoE layer: out[t] is the sum over k of p[t,k] · expert(topk_ids[t,k])(x[t]).

    An expert e is w2[e] · f(h) + b2[e], with h = w1[e] · x[t] + b1[e] and f the activation: SwiGLU,
    silu(gate) * up of [gate; up] = h, unless another is asked for. With shared experts out[t] is
    that sum, rounded, plus the sum over them. Differentiable in x, topk_probs, shared_probs and
    all weights, once. All ranks of the group call it in the same order, as they do their
    backward. Output and gradients have the same bits for every schedule and number of ranks.

    Args:
        x: bf16 [..., H], this rank's tokens. Under autocast to bf16, fp32 too, and so are weights.
        topk_ids: int32 or int64 [..., K], numbers of experts among those of all ranks; -1: the slot
            is dropped, and adds nothing.
        topk_probs: fp32 [..., K]; those of dropped slots are not read, and have gradient 0.
        w1: bf16 [El, 2I, H], this rank's experts: rows of the gate, then those of up; without a
            gate [El, I, H]. Or a pair of tensors [El, I, H], gate and up; or a list of a tensor
            [2I, H] for each expert. Each contiguous; they may lie anywhere, and are read there.
        w2: bf16 [El, H, I], or a list of a tensor [H, I] for each expert. Contiguous.
        group: who holds the other experts: a ProcessGroup, a DeviceMesh of one dimension, a
            :class:`uniep.Group`, or None: nobody. Or a DeviceMesh of two, hosts and the ranks of
            each: tokens and rows cross by PyTorch's collectives. That is how GPUs of several hosts
            share experts, in a group of one dimension, too. If ``combine_groups`` is their number
            and ``combine_partials`` ``"bf16"``, one sum of each host crosses instead of rows.
        workspace: what to work in. None: one that calls of this shape on this group share. It has a
            group, ``max_tokens`` and ``capacity_rows`` of its own, which are then not given here.
        max_tokens: most tokens that a rank ever has, the same on all ranks. None: those of this
            call, which then are the same on all ranks.
        capacity_rows: see :class:`uniep.Workspace`.
        save: what is kept of x; see :class:`uniep.Workspace`. None: ``"rows"``, or what
            the workspace has.
        recompute_h: whether backward computes h again; likewise. None: no, or what the workspace
            has.
        backward_rows: rows that backward works in at a time; likewise. None: all, or what the
            workspace has.
        exact_rows: whether this call takes memory for the rows that come, and waits for their
            number; see :class:`uniep.Workspace`. None: no, or what the workspace has.
        exact_hosts: over hosts, whether a token goes only to those that have an expert of it, and
            this call waits for the number of such tokens; see :class:`uniep.Workspace`. None: no,
            or what the workspace has.
        schedule: of this call and its backward. None: the workspace's.
        main_grads: (dw1, dw2), contiguous, all fp32 or all bf16: weight gradients are added to
            these, and ``w1.grad`` and ``w2.grad`` stay as they are. With biases
            (dw1, dw2, db1, db2), with shared experts (dw1, dw2, dshared_w1, dshared_w2), of which
            the last two may be left out: autograd has their gradients then. Each has one of the
            forms of its weight, not always the same.
        deferred: where gradients of w1, w2 and biases wait for :func:`uniep.backward_weights`, and
            with ``main_grads`` of shared experts theirs, too. Without these, autograd has gradients
            of shared experts in backward, which then run beside the pass. Without ``main_grads``
            weights are parameters, and no arguments of a reentrant checkpoint, which copies them.
        activation: ``"swiglu"``, ``"geglu"``, ``"geglu_tanh"``, ``"reglu"``, ``"gpt_oss"``
            (gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up within -7 and 7),
            ``"swiglu_clamped"`` (swiglu, gate at most 10, up within -10 and 10) or
            ``"swiglu_softcapped"`` (4 tanh(gate / 4) * sigmoid(gate) * 25 tanh(up / 25)); or
            without a gate ``"relu2"``, ``"gelu"`` or ``"silu"``. None: swiglu, or what the
            workspace has.
        probs: where a row's probability is multiplied: ``"before"`` fc2, into a, as Megatron-Core
            has it; or ``"after"``, into the rows as they are added up, as transformers and
            torchtitan do. None: before, or what the workspace has.
        b1: bf16 [El, 2I], or [El, I] without a gate, added to h. None: there are no biases.
        b2: bf16 [El, H], added to the rows behind fc2, where ``probs`` is before, times p. Given
            with b1.
        combine_groups: G, a divisor of the number of all experts, which are cut into G equal runs:
            a token's rows are added up run by run, then the runs' sums, run ascending. More than
            one makes other bits than one. None: one, or what the workspace has.
        combine_partials: what the sums of more than one run are before they are added up:
            ``"fp32"``, or rounded to ``"bf16"``. None: fp32, or what the workspace has.
        row_pool: where what is kept lies; see :class:`uniep.Workspace`. True, or a number of bytes:
            in a pool of half of the free memory, or of that many, which the first call of this
            shape on this group makes, and all share. None: in tensors, or where the workspace says.
        zero_experts: Z; numbers from E, that of all experts, to E + Z - 1 are experts that compute
            nothing and lie nowhere.
        zero_expert_type: what they give: ``"identity"``, p · x; or ``"zero"``, nothing, and no
            gradient to p.
        shared_w1: bf16 [S, 2I, H], or [S, I, H] without a gate, one tensor however w1 lies, the
            gate's rows first: experts that every rank has, and every token goes to, those whose
            slots are all dropped, too: of padding x is to be finite then. Their work is
            part of the same pass; over hosts, with biases, with several combine groups, and with
            ``deferred`` beside it, a layer of this rank alone. Their gradients are sums over the
            tokens of this rank, as those of a dense layer are: add them up over ranks as you do
            with these. None: none.
        shared_w2: bf16 [S, H, I]. Given with shared_w1.
        shared_probs: fp32 [..., S], multiplied where ``probs`` says. None: each is 1.
        w1_layout: of a w1, and its gradient, that is one tensor: ``"halves"``; or
            ``"interleaved"``, rows of gate and up by turns, as gpt-oss has them.
            b1 has the gate's first either way.
        weights_layout: of w1 and w2 and their gradients: ``"out_in"``, as above; or ``"in_out"``,
            each matrix transposed, as torch's grouped products take it, and gpt-oss and Llama-4
            keep it: w1 [El, H, 2I], w2 [El, I, H], in any of the forms; on GPUs not interleaved,
            and a pair where I is a multiple of 64.

    Returns:
        bf16 [..., H].

    Raises:
        TypeError: for a wrong dtype, and for what is of another type than these.
        ValueError: for a wrong shape, device or layout, and for arguments that exclude each other.
        RuntimeError: within a transform of ``torch.func``.
        uniep.Error: where the library refuses or fails: a routing that does not fit, a lost rank.
            A compiled call raises a RuntimeError of the same sentence.
    """
    refuse_transforms()
    _arguments.check_local_tensors(x=x, topk_ids=topk_ids, topk_probs=topk_probs)
    _arguments.check_device(x, w1_layout, weights_layout)
    _zero.check(zero_experts, zero_expert_type)
    choices = Choices(
        max_tokens=max_tokens,
        capacity_rows=capacity_rows,
        save=save,
        recompute_h=recompute_h,
        backward_rows=backward_rows,
        activation=activation,
        probs=probs,
        combine_groups=combine_groups,
        combine_partials=combine_partials,
        row_pool=row_pool,
        exact_rows=exact_rows,
        exact_hosts=exact_hosts,
        schedule=schedule,
    )
    choices.check()
    if deferred is not None:
        check_is_deferred(deferred)
    weights = _arguments.experts(w1, w2, b1, b2, shared_w1, shared_w2, w1_layout, weights_layout)
    if workspace is None:
        arithmetic = choices.arithmetic(b1 is not None, weights.shared(), shared_probs is not None)
    else:
        check_is_workspace(workspace)
        arithmetic = workspace.arithmetic
    passed = weights
    if torch.is_autocast_enabled(x.device.type):
        x, weights = _arguments.autocast(x, weights)
    _arguments.check(x, topk_ids, topk_probs, weights, arithmetic)
    _arguments.check_shared_probs(shared_probs, x, weights, arithmetic)
    main = None if main_grads is None else _arguments.main_grads(main_grads, weights, passed)
    shared_apart = False
    if deferred is not None:
        _arguments.check_deferred(weights, main)
        shared_apart = not _arguments.shared_wait(weights, main)
    first_says_most = workspace is None and max_tokens is None
    workspace = _workspace_for(
        workspace,
        choices,
        group,
        x,
        weights,
        topk_ids.shape[-1],
        arithmetic,
        waits=deferred is not None,
        shared_apart=shared_apart,
    )
    slots = None
    if zero_experts:
        slots = _zero.split(topk_ids, topk_probs, workspace.num_experts, zero_experts)
        topk_ids = slots.ids
    identity = slots if zero_expert_type == "identity" else None
    fault = _fault_of_call(workspace, identity)
    call = CheckedCall(
        workspace,
        weights,
        main,
        None if shared_probs is None else _arguments.rows(shared_probs),
        workspace.exact_rows if exact_rows is None else exact_rows,
        workspace.exact_hosts if exact_hosts is None else exact_hosts,
        schedule,
        deferred,
        fault,
    )
    ids = _arguments.int32(_arguments.rows(topk_ids))
    rows = _arguments.rows(x), ids, _arguments.rows(topk_probs)
    out = call.run(*rows) if torch.compiler.is_compiling() else _run(call, *rows, first_says_most)
    if identity is not None and fault is not None:
        identity = identity.unless(fault)
    return _result(out, workspace, identity, x, topk_ids, topk_probs, shared_probs, weights)


def _workspace_for(
    given: Workspace | None,
    choices: Choices,
    group: GroupLike,
    x: Tensor,
    weights: Experts,
    topk: int,
    arithmetic: Arithmetic,
    *,
    waits: bool,
    shared_apart: bool,
) -> Workspace:
    """What a call works in: `given`, or the workspace that calls of its kind share.

    Args:
        given: to the call.
        choices: of the call; likewise `group`, x and `weights`.
        group: who holds the other experts.
        x: bf16 [..., H].
        weights: of its experts.
        topk: K.
        arithmetic: of the layer.
        waits: weight gradients do.
        shared_apart: shared experts run beside the pass.

    Raises:
        TypeError, ValueError: for one that cannot serve the call, and choices that it has made.
    """
    if given is None:
        kind = choices.kind(weights, topk, arithmetic, shared_apart)
        tokens = _arguments.rows(x).shape[0]
        workspace = shared_workspace(
            without_mesh(group), x.device, kind, tokens, choices.max_tokens, choices.row_pool
        )
    else:
        workspace = given
        choices.refuse_beside_workspace(group=group)
    _arguments.check_workspace(workspace, x, weights, topk, choices.max_tokens)
    _arguments.check_can_serve(
        workspace, exact_rows=choices.exact_rows, deferred=waits, shared_apart=shared_apart
    )
    return workspace


def _fault_of_call(workspace: Workspace, identity: _zero.ZeroSlots | None) -> Tensor | None:
    """As :class:`CheckedCall` has it: asked for by what is added to the output beside the pass."""
    beside = identity is not None or workspace.of_shared is not None
    return torch.zeros_like(workspace.overflow) if workspace.flag and beside else None


def _run(
    call: CheckedCall, tokens: Tensor, ids: Tensor, probs: Tensor, first_says_most: bool
) -> Tensor:
    try:
        with _library.refusals:
            return call.run(tokens, ids, probs)
    except _library.Error as error:
        if not first_says_most or "max_tokens=" not in str(error):
            raise
        # Nobody has said max_tokens: the first call has, and the error is to say so.
        raise _library.Error.of(
            error.code,
            f"{error}, which the first call of this shape had; pass max_tokens, the most that any "
            "rank ever has, to the layer or to every call",
        ) from error


def _result(
    out: Tensor,
    workspace: Workspace,
    identity: _zero.ZeroSlots | None,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    shared_probs: Tensor | None,
    weights: Experts,
) -> Tensor:
    """Of the shape of x, shown to who watches calls, and with what identity experts add."""
    if out.shape != x.shape:  # FSDP2 warns of modules that return views, even of the same shape
        out = out.reshape(x.shape)
    if not torch.compiler.is_compiling() and (watch := _hooks.watcher()) is not None:
        tensors = {"x": x, "topk_ids": topk_ids, "topk_probs": topk_probs}
        w1, w2 = weights.joined()
        tensors |= {"w1": w1, "w2": w2}
        tensors |= weights.more_named()
        if shared_probs is not None:
            tensors["shared_probs"] = shared_probs
        watch(workspace.members, workspace.arithmetic, tensors, out)
    return out if identity is None else _zero.add_identity(out, x, identity)
