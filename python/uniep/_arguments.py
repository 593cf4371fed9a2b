"""What uniep.moe accepts, with one sentence for everything else."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._forms import (
    Experts,
    ExpertWeight,
    W1Layout,
    WeightsLayout,
    experts_from,
    experts_of,
    layout_of,
    tuple_of,
)
from .arithmetic import Arithmetic
from .deferred import refuse_averaged, refuse_hooks
from .workspace import Workspace

__all__ = [
    "autocast",
    "check",
    "check_can_serve",
    "check_deferred",
    "check_device",
    "check_local_tensors",
    "check_shared_probs",
    "check_tensors",
    "check_workspace",
    "experts",
    "int32",
    "main_grads",
    "rows",
    "shared_wait",
]


def autocast(x: Tensor, weights: Experts) -> tuple[Tensor, Experts]:
    """Casts fp32 tensors to bf16, as autocast does.

    Raises:
        TypeError: where autocast is to another type, and for weights that are no tensors.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype != torch.bfloat16:
        raise TypeError(
            f"autocast is to {dtype}, which uniep.moe does not compute in; "
            "use torch.autocast(..., dtype=torch.bfloat16)"
        )
    try:
        x, *flat = (t.to(dtype) if t.dtype == torch.float32 else t for t in (x, *weights.flat()))
        return x, experts_from(flat, len(weights.w1), len(weights.w2), weights.layout)
    except AttributeError:
        _check_are_tensors(weights)
        raise


def check_tensors(**tensors: object) -> None:
    """Raises TypeError where one of these is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")


def check_local_tensors(**tensors: object) -> None:
    """Raises TypeError where one of these is no tensor, or one whose parts other ranks have."""
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise TypeError(f"{name} is a DTensor; it must be a local one, as {name}.to_local() is")


def check_device(
    x: Tensor, w1_layout: W1Layout = "halves", weights_layout: WeightsLayout = "out_in"
) -> None:
    """Raises ValueError where uniep has no backend for where `x` lies, or none for the layouts."""
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"x is on '{x.device}'; uniep.moe runs on 'cpu' and 'cuda'")
    if x.is_cuda and w1_layout == "interleaved" and weights_layout == "in_out":
        raise ValueError(
            f"w1_layout is 'interleaved', weights_layout is 'in_out', and x is on '{x.device}', "
            "where no tensor map tells columns of gate and up by turns apart; there 'halves' or "
            "'out_in' is accepted"
        )


def experts(
    w1: ExpertWeight,
    w2: ExpertWeight,
    b1: Tensor | None,
    b2: Tensor | None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    w1_layout: W1Layout = "halves",
    weights_layout: WeightsLayout = "out_in",
) -> Experts:
    """The tensors of the weights.

    Raises:
        TypeError: for what is no tensor, and weights of shared experts that are not one.
        ValueError: for a layout that there is not, or one that says nothing of these tensors.
    """
    if w1_layout not in ("halves", "interleaved"):
        raise ValueError(f"w1_layout is '{w1_layout}'; it must be 'halves' or 'interleaved'")
    if weights_layout not in ("out_in", "in_out"):
        raise ValueError(f"weights_layout is '{weights_layout}'; it must be 'out_in' or 'in_out'")
    _check_shared_given(shared_w1, shared_w2)
    for name, weight in (("w1", w1), ("w2", w2)):
        if not isinstance(weight, Tensor) and not isinstance(weight, Iterable):
            raise TypeError(
                f"{name} is a {type(weight).__name__}; it must be a torch.Tensor or several"
            )
    layout = layout_of(w1_layout, weights_layout)
    weights = experts_of(w1, w2, b1, b2, shared_w1, shared_w2, layout)
    if weights.interleaved() and not isinstance(w1, Tensor):
        raise ValueError(
            "w1_layout is 'interleaved', and w1 is several tensors; one tensor is accepted, or "
            "'halves'"
        )
    return weights


def _written(rows: str, columns: str, weights: Experts) -> str:
    """The shape of a matrix."""
    return f"{columns}, {rows}" if weights.in_out() else f"{rows}, {columns}"


def _lying(shape: tuple[int, int, int], weights: Experts) -> list[int]:
    """Experts, rows and columns in the order in which they lie."""
    experts, rows, columns = shape
    return [experts, columns, rows] if weights.in_out() else [experts, rows, columns]


def _check_weight(
    name: str, tensors: tuple[Tensor, ...], matrix: str, experts: int, pair: bool
) -> None:
    """Raises ValueError where these are neither one tensor, nor gate and up, nor one an expert."""
    dims = {tensor.dim() for tensor in tensors}
    shapes = {tuple(tensor.shape) for tensor in tensors}
    several = len(tensors) in (1, 2 if pair else 1) and dims == {3}
    each = dims == {2} and len(tensors) == experts
    if len(shapes) == 1 and (several or each):
        return
    if len(tensors) == 1:
        found = f"has shape {list(tensors[0].shape)}"
    else:
        found = f"is {len(tensors)} tensors of shapes {sorted(map(list, shapes))}"
    raise ValueError(
        f"{name} {found}; it must be [experts of this rank, {matrix}]"
        + (", a pair of these with I for 2 I," if pair else "")
        + f" or a list of one [{matrix}] for each expert of this rank"
    )


def _experts_in(weights: Experts) -> int:
    for tensors in (weights.w1, weights.w2):
        if tensors and tensors[0].dim() == 3:
            return tensors[0].shape[0]
    return len(weights.w1)


def _check_shapes(x: Tensor, weights: Experts, arithmetic: Arithmetic) -> None:
    halves, count = arithmetic.halves(), _experts_in(weights)
    matrix = _written("2 I" if halves == 2 else "I", "H", weights)
    _check_weight("w1", weights.w1, matrix, count, halves == 2)
    _check_weight("w2", weights.w2, _written("H", "I", weights), count, False)
    (experts, width, hidden), second = weights.shapes()
    if x.dim() < 1 or width % halves or hidden != x.shape[-1]:
        raise ValueError(
            f"w1 has shape {list(weights.w1[0].shape)}; it must be [experts of this rank, "
            f"{matrix}], where H is the last of x: {list(x.shape)}"
        )
    if weights.interleaved() and halves != 2:
        raise ValueError(
            f"w1_layout is 'interleaved', and '{arithmetic.activation}' has no gate; it must be "
            "'halves'"
        )
    if halves == 2 and second == (experts, hidden, width):
        raise ValueError(
            f"w1 has shape {_lying(weights.shapes()[0], weights)}, an expert's width of {width} as "
            f"w2 has it; '{arithmetic.activation}' has a gate, so it must be "
            f"{_lying((experts, 2 * width, hidden), weights)}: the gate's, then up's"
        )
    if second != (experts, hidden, width // halves):
        wanted = (experts, hidden, width // halves)
        raise ValueError(
            f"w2 has shape {_lying(second, weights)}; with w1 of "
            f"{_lying(weights.shapes()[0], weights)} it must be {_lying(wanted, weights)}"
            + ("" if halves == 2 else f" ('{arithmetic.activation}' has no gate)")
        )


def check(
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    weights: Experts,
    arithmetic: Arithmetic = Arithmetic(),  # noqa: B008
) -> None:
    """Raises TypeError or ValueError with a sentence for what does not fit.

    What has fitted once is not looked at in detail again: a layer calls with the same weights, and
    with few numbers of tokens.
    """
    if torch.compiler.is_compiling():  # sizes may be symbols
        _check(x, topk_ids, topk_probs, weights, arithmetic)
        return
    tensors = (x, topk_ids, topk_probs, *weights.flat())
    try:
        looks = (
            *(arithmetic, weights.layout, len(weights.w1), len(weights.w2)),
            *(tensor is None for tensor in weights.more()),
            *map(type, tensors),  # a DTensor looks as its local one does
            *map(_LOOK, tensors),
            *map(Tensor.is_contiguous, tensors),
        )
        if looks in _fitted:
            return
    except (AttributeError, TypeError):  # of what is no tensor, or has symbols for sizes
        looks = ()
    _check(x, topk_ids, topk_probs, weights, arithmetic)
    if len(_fitted) >= _MOST_FITTED:
        _fitted.clear()
    if looks:
        _fitted.add(looks)


# What has passed `check`: all that it looks at.
_fitted: set[tuple[object, ...]] = set()
_MOST_FITTED = 1024
_LOOK = operator.attrgetter("shape", "dtype", "device")


def _check(
    x: Tensor, topk_ids: Tensor, topk_probs: Tensor, weights: Experts, arithmetic: Arithmetic
) -> None:
    _check_are_tensors(weights)
    named = weights.named()
    for name, tensor in (("x", x), *named):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{name} is {tensor.dtype}; it must be torch.bfloat16, as {name}.bfloat16() is "
                "(under torch.autocast(..., dtype=torch.bfloat16) also torch.float32)"
            )
    if topk_ids.dtype != torch.int32 and topk_ids.dtype != torch.int64:
        raise TypeError(f"topk_ids is {topk_ids.dtype}; it must be torch.int32 or torch.int64")
    if topk_probs.dtype != torch.float32:
        raise TypeError(f"topk_probs is {topk_probs.dtype}; it must be torch.float32")
    _check_shapes(x, weights, arithmetic)
    _check_shared(weights)
    if topk_ids.dim() < 1 or topk_ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"topk_ids has shape {list(topk_ids.shape)}; with x of {list(x.shape)} it must be "
            f"[{', '.join(map(str, (*x.shape[:-1], 'K')))}], K experts for each token"
        )
    if topk_probs.shape != topk_ids.shape:
        raise ValueError(
            f"topk_probs has shape {list(topk_probs.shape)}; it must be that of topk_ids, "
            f"{list(topk_ids.shape)}"
        )
    for name, tensor in (("topk_ids", topk_ids), ("topk_probs", topk_probs), *named):
        if tensor.device != x.device:
            raise ValueError(
                f"{name} is on '{tensor.device}', x is on '{x.device}'; all tensors must be on the "
                "same device"
            )
    for name, bias, shape in zip(("b1", "b2"), weights.biases(), weights.shapes(), strict=False):
        if bias.shape != shape[:2]:
            raise ValueError(
                f"{name} is {list(bias.shape)}; it must be {list(shape[:2])}, as its weight is"
            )
    for name, tensor in named:
        if not tensor.is_contiguous():
            transposed = tensor.dim() > 1 and tensor.transpose(-1, -2).is_contiguous()
            other = "out_in" if weights.in_out() else "in_out"
            raise ValueError(
                f"{name} is not contiguous (strides {list(tensor.stride())}), and weights are read "
                f"where they lie, in whole rows one after another; pass {name}.contiguous()"
                + (f", or its transpose and weights_layout='{other}'" if transposed else "")
            )


def _check_are_tensors(weights: Experts) -> None:
    _check_biases_given(weights.b1, weights.b2)
    for name, weight in (("w1", weights.w1), ("w2", weights.w2)):
        check_tensors(**{f"{name}[{i}]": tensor for i, tensor in enumerate(weight)})
    check_tensors(**weights.more_named())
    check_local_tensors(**dict(weights.named()))


def _check_biases_given(b1: Tensor | None, b2: Tensor | None) -> None:
    if (b1 is None) != (b2 is None):
        given, missing = ("b2", "b1") if b1 is None else ("b1", "b2")
        raise ValueError(f"{given} is given without {missing}; give both, or neither")


def _check_shared_given(shared_w1: Tensor | None, shared_w2: Tensor | None) -> None:
    for name, tensor, other in (
        ("shared_w1", shared_w1, shared_w2),
        ("shared_w2", shared_w2, shared_w1),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; it must be one tensor, however w1 and w2 lie"
            )
        if other is None:
            raise ValueError(
                f"{name} is given alone; give shared_w1 and shared_w2, or none of them"
            )
        if tensor.dim() == 0:
            raise ValueError(
                f"{name} has shape []; it must be [shared experts, rows, columns], each as one of "
                "this rank's experts"
            )


def _check_shared(weights: Experts) -> None:
    first, second = weights.shared_w1, weights.shared_w2
    if first is None or second is None:
        return
    shared = first.shape[0] if first.dim() == 3 else 1
    for name, tensor, shape in zip(
        ("shared_w1", "shared_w2"), (first, second), weights.shapes(), strict=True
    ):
        _check_shared_shape(name, tensor, (shared, *shape[1:]), weights.w1[0])


def _check_shared_shape(name: str, tensor: Tensor, shape: Sequence[int], beside: Tensor) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.device != beside.device:
        raise ValueError(
            f"{name} is {list(tensor.shape)} on '{tensor.device}'; it must be {list(shape)} on "
            f"'{beside.device}', for as many shared experts as shared_w1 has, of the width of w1's"
        )


def check_shared_probs(
    shared_probs: Tensor | None, x: Tensor, weights: Experts, arithmetic: Arithmetic | None = None
) -> None:
    """Raises TypeError or ValueError with a sentence where these are not the probabilities."""
    if shared_probs is None:
        return
    if weights.shared_w1 is None:
        raise ValueError(
            "shared_probs is given alone; give shared_w1 and shared_w2, or none of them"
        )
    if arithmetic is not None and arithmetic.shared_experts and not arithmetic.shared_gate:
        raise ValueError(
            "shared_probs is given, and the workspace is for shared_gate=False; pass None, or a "
            "workspace with shared_gate=True"
        )
    check_local_tensors(shared_probs=shared_probs)
    if shared_probs.dtype != torch.float32:
        raise TypeError(f"shared_probs is {shared_probs.dtype}; it must be torch.float32")
    _check_shared_shape("shared_probs", shared_probs, (*x.shape[:-1], weights.shared()), x)


def check_workspace(
    workspace: Workspace, x: Tensor, weights: Experts, topk: int, max_tokens: int | None
) -> None:
    """Raises ValueError with a sentence where the workspace is for other tensors, or closed."""
    if not torch.compiler.is_compiling():
        workspace.require_open()
    experts, width, _ = weights.shape_of_w1()
    has_bias = weights.b1 is not None
    if x.device != workspace.device:
        raise ValueError(
            f"x is on '{x.device}', the workspace is on '{workspace.device}'; both must be on the "
            "same device"
        )
    for name, value, wanted in (
        ("hidden", x.shape[-1], workspace.hidden),
        ("intermediate", width // workspace.arithmetic.halves(), workspace.intermediate),
        ("experts of a rank", experts, workspace.local_experts),
        ("topk", topk, workspace.topk),
        ("shared experts", weights.shared(), workspace.arithmetic.shared_experts),
    ):
        if value != wanted:
            raise ValueError(f"{name} of the tensors is {value}; the workspace is for {wanted}")
    if has_bias != workspace.arithmetic.bias:
        raise ValueError(
            f"b1 and b2 are {'given' if has_bias else 'not given'}; the workspace is for "
            f"bias={workspace.arithmetic.bias}"
        )
    tokens = x.numel() // x.shape[-1]
    # Of several ranks all refuse it: to_all_hosts between hosts, within one the library.
    if workspace.group.size > 1 or workspace.mesh is not None:
        return
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(
            f"x has {tokens} tokens, and max_tokens is {max_tokens}; it must be the most that a "
            "rank ever has"
        )
    if tokens > workspace.max_tokens:
        raise ValueError(
            f"x has {tokens} tokens; the workspace has room for max_tokens={workspace.max_tokens}"
        )


def check_can_serve(
    workspace: Workspace, *, exact_rows: bool | None, deferred: bool, shared_apart: bool
) -> None:
    """Raises ValueError where a workspace cannot serve what a call alone decides."""
    if exact_rows and workspace.pages is not None:
        raise ValueError(
            "exact_rows is True, but rows are kept in a row pool (row_pool); it must be one of them"
        )
    if deferred and workspace.backward_rows:
        raise ValueError(
            "deferred is given, which keeps all rows of a backward, but backward_rows is "
            f"{workspace.backward_rows}; pass None, or backward_rows 0"
        )
    if shared_apart and workspace.of_shared is None:
        raise ValueError(
            "deferred is given, and the workspace has shared experts in its pass, whose gradients "
            "are not to wait; pass main_grads of them, or a workspace with shared_apart=True"
        )


def main_grads(given: Sequence[ExpertWeight], weights: Experts, passed: Experts) -> Experts:
    """The tensors that gradients are added to; those of shared experts may be left out.

    Args:
        given: to the call.
        weights: of the call.
        passed: what it was given for these, of which autocast has made copies.

    Raises:
        TypeError, ValueError: with a sentence where gradients cannot be added to these.
    """
    if not isinstance(given, Sequence):
        raise TypeError(
            f"main_grads is a {type(given).__name__}; it must be a tuple of tensors, as "
            "(dw1, dw2) is, or None"
        )
    if weights.shared_w1 is not None and len(given) == 2 + len(weights.biases()):
        weights, passed = weights.routed(), passed.routed()
    if not torch.compiler.is_compiling():
        _refuse_gradient_hooks(passed)
    wanted = 2 + len(weights.more_named())
    if len(given) != wanted:
        raise ValueError(
            f"main_grads has {len(given)} tensors; it must have {wanted}: those of "
            + "w1 and w2, then of biases or shared experts where there are any"
        )
    for i, gradient in enumerate(given):
        if not isinstance(gradient, (Tensor, Iterable)):
            raise TypeError(
                f"main_grads[{i}] is a {type(gradient).__name__}; it must be a torch.Tensor or "
                "several"
            )
    tensors = [tuple_of(gradient) for gradient in given]
    spans: list[tuple[int, int, str]] = []  # begin, end, name
    for i, parts in enumerate(tensors):
        for j, gradient in enumerate(parts):
            name = f"main_grads[{i}]" + ("" if isinstance(given[i], Tensor) else f"[{j}]")
            _check_main_grad(name, gradient, tensors[0][0], weights.w1[0])
            if torch.compiler.is_compiling() or gradient.numel() == 0:
                continue
            begin = gradient.data_ptr()
            spans.append((begin, begin + gradient.numel() * gradient.element_size(), name))
    spans.sort()
    for (_, end, taken_by), (begin, _, name) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(
                f"{name} has memory of {taken_by}, and experts' gradients are added at the same "
                "time; memory of its own for each is accepted"
            )
    flat = [tensor for parts in tensors for tensor in parts]
    main = experts_from(flat, len(tensors[0]), len(tensors[1]), weights.layout)
    count, pair = weights.shapes()[0][0], weights.shapes()[0][1] == 2 * weights.shapes()[1][2]
    matrix = _written("2 I" if pair else "I", "H", weights)
    _check_weight("main_grads[0]", main.w1, matrix, count, pair)
    _check_weight("main_grads[1]", main.w2, _written("H", "I", weights), count, False)
    shapes = [_lying(shape, main) for shape in main.shapes()]
    shapes += [list(parts[0].shape) for parts in tensors[2:]]
    needed = [_lying(shape, weights) for shape in weights.shapes()]
    needed += [list(more.shape) for more in weights.more_named().values()]
    for i, (shape, other) in enumerate(zip(shapes, needed, strict=True)):
        if shape != other:
            raise ValueError(
                f"main_grads[{i}] is {shape} in all; it must be {other}, as its weight is"
            )
    return main


def _refuse_gradient_hooks(weights: Experts) -> None:
    for name, weight in weights.named():
        if weight.requires_grad and weight._backward_hooks:
            raise ValueError(
                f"{name} has hooks (Tensor.register_hook), which take its gradient, and with "
                "main_grads autograd has none; remove them, or leave out main_grads"
            )


def _check_main_grad(name: str, gradient: Tensor, first: Tensor, weight: Tensor) -> None:
    check_local_tensors(**{name: gradient})
    if gradient.dtype != first.dtype or gradient.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"{name} is {gradient.dtype}; all must be torch.float32, or all torch.bfloat16"
        )
    if gradient.device != weight.device:
        raise ValueError(
            f"{name} is on '{gradient.device}'; it must be on '{weight.device}', as its weight is"
        )
    if not gradient.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous (strides {list(gradient.stride())}); gradients are "
            "added in place, which takes a contiguous tensor"
        )


def check_deferred(weights: Experts, main_grads: Experts | None) -> None:
    """Raises with a sentence where a weight gradient could not be brought to its place later.

    Those of shared experts without main gradients do not wait.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "deferred weight gradients cannot be compiled; call uniep.moe with deferred outside of "
            "torch.compile"
        )
    if main_grads is not None:
        return
    for name, weight in weights.routed().named():
        if not weight.requires_grad:
            continue
        if not weight.is_leaf:
            raise ValueError(
                f"{name} is computed from other tensors, which a gradient that waits cannot reach; "
                "pass the parameter itself, or main_grads"
            )
    refuse_hooks(weights)
    refuse_averaged(weights)


def shared_wait(weights: Experts, main_grads: Experts | None) -> bool:
    """Whether gradients of shared experts may wait: nobody is there to take them in backward."""
    if main_grads is not None and main_grads.shared_w1 is not None:
        return True
    return not any(
        weight is not None and weight.requires_grad
        for weight in (weights.shared_w1, weights.shared_w2)
    )


def rows(tensor: Tensor) -> Tensor:
    """The tensor as a contiguous one of two dimensions; itself where it is one."""
    if tensor.dim() == 2 and tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def int32(ids: Tensor) -> Tensor:
    """The ids as int32; those that int32 cannot hold stay impossible."""
    if ids.dtype == torch.int32:
        return ids
    return ids.clamp(-2, torch.iinfo(torch.int32).max).to(torch.int32)
