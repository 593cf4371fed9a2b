"""What PyTorch's compiler needs to know of the ops: the shapes of what they return.

The ops themselves are in libuniep_torch.so (python/ops of the sources). Their shapes depend on
figures of the workspace alone, never on data, but for ``forward_exact``, which cannot be compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library  # registers the ops
from ._forms import experts_of, new_weight

__all__ = ["ops"]

assert _library.torch_library is not None
ops = torch.ops.uniep


def _forward(
    key: Tensor,
    overflow: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    rows: int,
    rows_of_x: int,
    rows_of_h: int,
    plan_bytes: int,
    flag: bool,
    schedule: str | None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_probs: Tensor | None = None,
    layout: int = 0,
    waves: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x),
        x.new_empty((plan_bytes,), dtype=torch.uint8),
        x.new_empty((rows_of_x, x.shape[1])),
        x.new_empty((rows_of_h, experts_of(w1, w2, layout=layout).shape_of_w1()[1])),
        x.new_empty((rows,), dtype=torch.float32),
    )


def _forward_exact(
    key: Tensor,
    overflow: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    flag: bool,
    schedule: str | None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_probs: Tensor | None = None,
    layout: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    raise RuntimeError(
        "exact_rows=True waits for the number of rows in every call, which torch.compile cannot "
        "trace; it compiles calls with exact_rows=False"
    )


def _data_gradients(
    dy: Tensor, topk: int, shared_w1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = dy.shape[0]
    shared = 0 if shared_w1 is None else shared_w1.shape[0]
    probs, shared_probs = (
        dy.new_empty((tokens, width), dtype=torch.float32) for width in (topk, shared)
    )
    return torch.empty_like(dy), probs, shared_probs


def _bias_gradients(experts: int, width: int, hidden: int, beside: Tensor) -> tuple[Tensor, Tensor]:
    return beside.new_empty((experts, width)), beside.new_empty((experts, hidden))


def _shared_gradients(
    experts: int, width: int, hidden: int, intermediate: int, beside: Tensor
) -> tuple[Tensor, Tensor]:
    w1 = beside.new_empty((experts, width, hidden))
    return w1, beside.new_empty((experts, hidden, intermediate))


def _backward(
    key: Tensor,
    plan: Tensor,
    x_rows: Tensor,
    h: Tensor,
    row_probs: Tensor,
    dy: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    x: Tensor | None,
    topk: int,
    flag: bool,
    schedule: str | None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    layout: int = 0,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor]:
    (experts, width, hidden), (_, _, intermediate) = experts_of(w1, w2, layout=layout).shapes()
    biases = _bias_gradients(experts if b1 is not None else 0, width, hidden, dy)
    weights = [[torch.empty_like(tensor) for tensor in weight] for weight in (w1, w2)]
    dx, dprobs, dshared_probs = _data_gradients(dy, topk, shared_w1)
    shared = _shared_gradients(dshared_probs.shape[1], width, hidden, intermediate, dy)
    return (dx, dprobs, weights[0], weights[1], *biases, dshared_probs, *shared)


def _backward_main_grad(
    key: Tensor,
    plan: Tensor,
    x_rows: Tensor,
    h: Tensor,
    row_probs: Tensor,
    dy: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    x: Tensor | None,
    dw1: list[Tensor],
    dw2: list[Tensor],
    topk: int,
    flag: bool,
    schedule: str | None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    db1: Tensor | None = None,
    db2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    dshared_w1: Tensor | None = None,
    dshared_w2: Tensor | None = None,
    layout: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    return _data_gradients(dy, topk, shared_w1)


def _backward_data(
    key: Tensor,
    plan: Tensor,
    x_rows: Tensor,
    h: Tensor,
    row_probs: Tensor,
    dy: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    x: Tensor | None,
    topk: int,
    backward_bytes: int,
    flag: bool,
    schedule: str | None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    layout: int = 0,
    waves: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        *_data_gradients(dy, topk, shared_w1),
        dy.new_empty((backward_bytes,), dtype=torch.uint8),
    )


def _backward_weights(
    key: Tensor,
    plan: Tensor,
    x_rows: Tensor,
    h: Tensor,
    row_probs: Tensor,
    backward_memory: Tensor,
    tokens: int,
    local_experts: int,
    intermediate: int,
    bias: bool,
    flag: bool,
    schedule: str | None,
    shared_experts: int = 0,
    w1_form: int = 0,
    w2_form: int = 0,
    layout: int = 0,
    dy: Tensor | None = None,
    x: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    hidden, width = x_rows.shape[1], h.shape[1]
    return (
        new_weight(w1_form, layout, x_rows, (local_experts, width, hidden)),
        new_weight(w2_form, layout, x_rows, (local_experts, hidden, intermediate)),
        *_bias_gradients(local_experts if bias else 0, width, hidden, x_rows),
        *_shared_gradients(shared_experts, width, hidden, intermediate, x_rows),
    )


def _backward_weights_main_grad(
    key: Tensor,
    plan: Tensor,
    x_rows: Tensor,
    h: Tensor,
    row_probs: Tensor,
    backward_memory: Tensor,
    dw1: list[Tensor],
    dw2: list[Tensor],
    tokens: int,
    flag: bool,
    schedule: str | None,
    db1: Tensor | None = None,
    db2: Tensor | None = None,
    dshared_w1: Tensor | None = None,
    dshared_w2: Tensor | None = None,
    layout: int = 0,
    dy: Tensor | None = None,
    x: Tensor | None = None,
) -> None:
    return None


def _add_rows(
    rows: Tensor,
    more: Tensor,
    row: Tensor,
    ids: Tensor,
    factors: Tensor | None,
    num_experts: int,
    combine_groups: int,
    bf16_partials: bool,
) -> Tensor:
    return rows.new_empty((ids.shape[0], rows.shape[1]))


for _fake in (
    _forward,
    _forward_exact,
    _backward,
    _backward_main_grad,
    _backward_data,
    _backward_weights,
    _backward_weights_main_grad,
    _add_rows,
):
    torch.library.register_fake(f"uniep::{_fake.__name__[1:]}", _fake)


def _keep_order_of_backward() -> None:
    """Keeps compiled backward passes that need nothing of each other in their order.

    PyTorch 2.15 has effects in backward graphs for this; in 2.10 they do not compile.
    """
    if torch.torch_version.TorchVersion(torch.__version__) < "2.15":
        return
    try:
        from torch._higher_order_ops.effects import _register_effectful_op
        from torch._library.effects import EffectType
    except ImportError:  # neither is public
        return
    for op in (ops.backward, ops.backward_data):
        _register_effectful_op(op.default, EffectType.ORDERED)


_keep_order_of_backward()
