"""Weight gradients that wait, as schedules of pipeline parallelism need it.

Those of shared experts do not, but for main gradients: what averages gradients over ranks, as FSDP2
and DDP do, takes them from autograd in backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ._between_hosts.crossing import Crossing
from ._forms import Experts
from ._library import refusals
from ._ops import ops
from ._shared_main_grads import gradients_of_shared, with_sums_of_shared
from ._staying import Staying
from .row_pool import SavedPages

__all__ = ["DeferredWeights", "backward_weights"]


@dataclass(frozen=True)
class Pending:
    """What the weight gradients of one backward are computed of, and where they go.

    `shared` has dy and x where there are shared experts in the pass, whose weight gradients read
    them: :func:`read_later`.
    """

    key: Tensor
    plan: Tensor
    x_rows: Tensor
    h: Tensor
    row_probs: Tensor
    backward_memory: Tensor
    tokens: int
    shared: tuple[Staying, ...]
    weights: Experts
    main_grads: Experts | None
    flag: bool
    schedule: str | None

    def memory(self) -> Iterator[Tensor | None]:
        """What nobody else may hold."""
        yield from (self.plan, self.x_rows, self.h, self.row_probs, self.backward_memory)
        yield from (staying.tensor for staying in self.shared)


@dataclass(frozen=True)
class PendingPages:
    """The same of a call that keeps its rows in a row pool; `saved` is its SavedPages."""

    key: Tensor
    saved: SavedPages
    backward_memory: Tensor
    tokens: int
    shared: tuple[Staying, ...]
    weights: Experts
    main_grads: Experts | None
    keep: bool
    schedule: str | None

    def memory(self) -> Iterator[Tensor | None]:
        """What nobody else may hold."""
        yield from (self.backward_memory, *(staying.tensor for staying in self.shared))


class DeferredWeights:
    """Collects the weight gradients that backward leaves out, until :func:`backward_weights`.

    ``len(deferred)`` is how many calls of :func:`uniep.moe` wait. Each keeps what forward saved and
    the rows of dy, dh and a.
    """

    def __init__(self) -> None:
        self._pending: deque[Pending | PendingPages] = deque()

    def add(self, pending: Pending | PendingPages) -> None:
        """Called by the backward of :func:`uniep.moe`."""
        self._pending.append(pending)

    def pop(self) -> Pending | PendingPages:
        """The one that waits longest."""
        return self._pending.popleft()

    def clear(self) -> None:
        """Forgets what waits: those weights get no gradient."""
        self._pending.clear()

    def __len__(self) -> int:
        return len(self._pending)


def check_is_deferred(deferred: object) -> None:
    """Raises TypeError for what does not collect weight gradients."""
    if not isinstance(deferred, DeferredWeights):
        raise TypeError(
            f"deferred is a {type(deferred).__name__}; it must be a uniep.DeferredWeights"
        )


def first_copy(weights: Experts, has_main_grads: bool) -> str | None:
    """Which weight may be a copy that a checkpoint has made; None: none is.

    A forward inside a backward is run again by a checkpoint. A reentrant one hands on copies of its
    arguments, cut off from the graph: their gradients reach the originals by autograd alone, and
    only in this backward. Copies are no parameters, but leaves as these are.
    """
    if has_main_grads or torch._C._current_graph_task_id() == -1:
        return None
    for name, weight in weights.routed().named():
        if weight.requires_grad and not isinstance(weight, torch.nn.Parameter):
            return name
    return None


def refuse_copy(name: str | None) -> None:
    """Raises ValueError for what :func:`first_copy` has found; called by backward.

    Not by forward: a checkpoint that is not reentrant runs that again inside a backward, too, with
    the originals, and nobody runs a backward of it.
    """
    if name is not None:
        raise ValueError(
            f"{name} is no nn.Parameter, in a forward that a backward runs; a checkpoint with "
            "use_reentrant=True passes copies of its arguments there, in which a gradient that "
            "waits is lost; pass parameters, as those of a module that the checkpointed function "
            "calls are, or main_grads, or use_reentrant=False"
        )


def refuse_hooks(weights: Experts) -> None:
    """Raises ValueError where autograd would run hooks of a routed expert's weight in backward."""
    for name, weight in weights.routed().named():
        if weight.requires_grad and (weight._backward_hooks or weight._post_accumulate_grad_hooks):
            raise ValueError(
                f"{name} has hooks, which autograd runs in backward, and with deferred its "
                "gradient comes later; remove them, or pass main_grads"
            )


def refuse_averaged(weights: Experts) -> None:
    """Raises ValueError where DistributedDataParallel, in whose forward this is, averages one."""
    # PyTorch's own names, which it may change; then nobody is told.
    model = getattr(DistributedDataParallel, "_active_ddp_module", None)
    averaged = {id(parameter) for parameter in getattr(model, "_module_parameters", ())}
    for name, weight in weights.routed().named():
        if weight.requires_grad and id(weight) in averaged:
            raise ValueError(
                f"{name} is a parameter that DistributedDataParallel averages over ranks in "
                "backward, and with deferred its gradient comes later; leave it out "
                "(_set_params_and_buffers_to_ignore_for_model), or pass main_grads"
            )


def check_waits(ctx: Any) -> None:
    """Called by backward: :func:`refuse_copy`, and hooks that were put there since forward."""
    refuse_copy(ctx.copy)
    if ctx.deferred is not None and ctx.main_grads is None:
        refuse_hooks(ctx.weights)


@torch.no_grad()
def backward_weights(deferred: DeferredWeights) -> None:
    """Computes the weight gradients that wait, oldest first, and adds each to its place.

    Not collective. The place is ``w1.grad`` and so on (bf16), or the ``main_grads`` that the
    call was given. The bits of each call's gradients are those of a backward that does not defer.
    Those of a weight that several calls of one backward have add up in another order there:
    autograd adds them up ahead of ``grad``.

    Args:
        deferred: what calls of :func:`uniep.moe` were given as ``deferred``; empty afterwards.

    Raises:
        TypeError: for another type.
        RuntimeError: where the workspace of a call has been closed, or the library refuses or fails
            (uniep.Error), or shared experts have main
            gradients and x or the gradient of the output has been changed in place since the
            backward, or FSDP2 shards a weight. What waits behind the call stays.
    """
    check_is_deferred(deferred)
    while len(deferred):
        call = deferred.pop()
        _hold_for_current_stream(call)
        with refusals:
            gradients = weight_gradients(call)
        if gradients is not None:
            _add_gradients(call.weights, gradients)


def _hold_for_current_stream(call: Pending | PendingPages) -> None:
    """PyTorch hands memory on in the order of the stream that it was made on: that of backward."""
    for tensor in call.memory():
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def behind_data(
    call: Pending | PendingPages,
    deferred: DeferredWeights | None,
    crossing: Crossing | None = None,
    *data: Tensor,
) -> Any:
    """Weight gradients behind a backward of data, which gave dx and dprobs.

    They wait where there is `deferred`, and else are computed, while `crossing` takes these to
    other hosts if it is given. Returns them; None where they wait, or were added to ``main_grads``.
    """
    if deferred is not None:
        deferred.add(call)
        return None
    if crossing is None:
        return weight_gradients(call)
    with crossing.ahead_of_others(*data):
        return weight_gradients(call)


def weight_gradients(call: Pending | PendingPages) -> Any:
    """Those that a backward of data left out, but for what was added to ``main_grads``."""
    if isinstance(call, PendingPages):
        return _gradients_of_pages(call)
    saved = (call.key, call.plan, call.x_rows, call.h, call.row_probs, call.backward_memory)
    main = call.main_grads
    if main is not None:
        sums = with_sums_of_shared(main, call.weights)
        end = (call.flag, call.schedule, *sums.more(), sums.layout, *_still(call.shared))
        ops.backward_weights_main_grad(*saved, sums.w1, sums.w2, call.tokens, *end)
        return gradients_of_shared(main, sums, call.weights)
    weights = call.weights
    experts, _, intermediate = weights.shapes()[1]
    figures = (call.tokens, experts, intermediate, weights.b1 is not None)
    lie = (weights.shared(), *weights.forms(), weights.layout)
    end = (call.flag, call.schedule, *lie, *_still(call.shared))
    return ops.backward_weights(*saved, *figures, *end)


def _gradients_of_pages(call: PendingPages) -> Any:
    main = call.main_grads
    sums = with_sums_of_shared(main, call.weights) if main else Experts((), ())
    gradients = ops.backward_weights_pages(
        call.key,
        call.saved.address,
        call.backward_memory,
        sums.w1,
        sums.w2,
        call.tokens,
        call.keep,
        call.schedule,
        *sums.more(),
        *call.weights.forms(),
        call.weights.layout,
        *_still(call.shared),
    )
    return gradients_of_shared(main, sums, call.weights) if main else gradients


def read_later(weights: Experts, dy: Tensor, x: Tensor | None) -> tuple[Staying, ...]:
    """The caller's tensors that are read once weight gradients are computed, of shared experts.

    All else that these are computed of, a pass has copied.
    """
    if weights.shared_w1 is None or torch.compiler.is_compiling():  # a graph leaves nothing
        return ()
    assert x is not None
    return Staying.of(dy), Staying.of(x)


def _still(shared: tuple[Staying, ...]) -> list[Tensor]:
    """What :func:`read_later` returned, unless it has been changed."""
    names = zip(("the gradient of an output of uniep.moe", "x of uniep.moe"), shared, strict=False)
    return [
        staying.unchanged(what, since="backward of data", until="weight gradients")
        for what, staying in names
    ]


def _add_gradients(weights: Experts, gradients: Any) -> None:
    for weight, gradient in zip(weights.flat(), weights.gradients(*gradients), strict=True):
        if gradient is None or not weight.requires_grad:
            continue
        if weight.numel() > 0 and weight.untyped_storage().size() == 0:
            raise RuntimeError(
                "a weight of uniep.moe with deferred was gathered by FSDP2, which has put it away "
                "since, and its gradient reaches no parameter; leave experts out "
                "(ignored_params of fully_shard), or pass main_grads"
            )
        if weight.grad is None:
            # As autograd casts it; PyTorch refuses another type.
            weight.grad = gradient.to(getattr(weight, "grad_dtype", None) or gradient.dtype)
        else:
            weight.grad += gradient
