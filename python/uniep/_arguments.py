"""What uniep.moe accepts, with one sentence for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arithmetic import Arithmetic

if TYPE_CHECKING:
    from .deferred import AllWeights
    from .workspace import Workspace

__all__ = [
    "autocast",
    "check",
    "check_biases",
    "check_deferred",
    "check_device",
    "check_main_grads",
    "check_shared",
    "check_workspace",
    "int32",
    "rows",
]


def autocast(x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """Casts fp32 tensors to bf16, as autocast does.

    Raises:
        TypeError: where autocast is to another type.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype != torch.bfloat16:
        raise TypeError(
            f"autocast is to {dtype}, which uniep.moe does not compute in; "
            "use torch.autocast(..., dtype=torch.bfloat16)"
        )
    return tuple(
        t.to(dtype) if t is not None and t.dtype == torch.float32 else t for t in (x, *weights)
    )


def check_device(x: Tensor) -> None:
    """Raises ValueError where uniep has no backend for where `x` lies."""
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"x is on '{x.device}'; uniep.moe runs on 'cpu' and 'cuda'")


def check(
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    arithmetic: Arithmetic = Arithmetic(),  # noqa: B008
) -> None:
    """Raises TypeError or ValueError with a sentence for what does not fit."""
    halves = arithmetic.halves
    for name, tensor in (("x", x), ("w1", w1), ("w2", w2)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{name} is {tensor.dtype}; it must be torch.bfloat16 (under "
                "torch.autocast(..., dtype=torch.bfloat16) also torch.float32)"
            )
    if topk_ids.dtype != torch.int32 and topk_ids.dtype != torch.int64:
        raise TypeError(f"topk_ids is {topk_ids.dtype}; it must be torch.int32 or torch.int64")
    if topk_probs.dtype != torch.float32:
        raise TypeError(f"topk_probs is {topk_probs.dtype}; it must be torch.float32")
    if x.dim() < 1 or w1.dim() != 3 or w1.shape[1] % halves or w1.shape[2] != x.shape[-1]:
        raise ValueError(
            f"w1 has shape {list(w1.shape)}; it must be [experts of this rank, "
            f"{'2 I' if halves == 2 else 'I'}, H], where H is the last of x: {list(x.shape)}"
        )
    if tuple(w2.shape) != (w1.shape[0], w1.shape[2], w1.shape[1] // halves):
        raise ValueError(
            f"w2 has shape {list(w2.shape)}; with w1 of {list(w1.shape)} it must be "
            f"{[w1.shape[0], w1.shape[2], w1.shape[1] // halves]}"
            + ("" if halves == 2 else f" ('{arithmetic.activation}' has no gate)")
        )
    if topk_ids.dim() < 1 or topk_ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"topk_ids has shape {list(topk_ids.shape)}; with x of {list(x.shape)} it must be "
            f"{[*x.shape[:-1], 'K']}"
        )
    if topk_probs.shape != topk_ids.shape:
        raise ValueError(
            f"topk_probs has shape {list(topk_probs.shape)}; it must be that of topk_ids, "
            f"{list(topk_ids.shape)}"
        )
    for name, tensor in (
        ("topk_ids", topk_ids),
        ("topk_probs", topk_probs),
        ("w1", w1),
        ("w2", w2),
    ):
        if tensor.device != x.device:
            raise ValueError(
                f"{name} is on '{tensor.device}', x is on '{x.device}'; all tensors must be on the "
                "same device"
            )
    for name, tensor in (("w1", w1), ("w2", w2)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} is not contiguous (strides {list(tensor.stride())}); pass "
                f"{name}.contiguous()"
            )


def check_biases(b1: Tensor | None, b2: Tensor | None, w1: Tensor, w2: Tensor) -> None:
    """Raises TypeError or ValueError with a sentence where these are no biases of the weights."""
    if (b1 is None) != (b2 is None):
        given, missing = ("b2", "b1") if b1 is None else ("b1", "b2")
        raise ValueError(f"{given} is given without {missing}; give both, or neither")
    for name, bias, weight in (("b1", b1, w1), ("b2", b2, w2)):
        if bias is None:
            continue
        if bias.dtype != torch.bfloat16:
            raise TypeError(
                f"{name} is {bias.dtype}; it must be torch.bfloat16 (under "
                "torch.autocast(..., dtype=torch.bfloat16) also torch.float32)"
            )
        if bias.shape != weight.shape[:2] or bias.device != weight.device:
            raise ValueError(
                f"{name} is {list(bias.shape)} on '{bias.device}'; it must be "
                f"{list(weight.shape[:2])} on '{weight.device}', as its weight is"
            )
        if not bias.is_contiguous():
            raise ValueError(
                f"{name} is not contiguous (strides {list(bias.stride())}); pass "
                f"{name}.contiguous()"
            )


def check_shared(
    shared_w1: Tensor | None,
    shared_w2: Tensor | None,
    shared_probs: Tensor | None,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
) -> None:
    """Raises TypeError or ValueError with a sentence where these are no shared experts."""
    if shared_w1 is None or shared_w2 is None:
        given = {"shared_w1": shared_w1, "shared_w2": shared_w2, "shared_probs": shared_probs}
        for name, tensor in given.items():
            if tensor is not None:
                raise ValueError(
                    f"{name} is given alone; give shared_w1 and shared_w2, or none of them"
                )
        return
    shared = shared_w1.shape[0] if shared_w1.dim() == 3 else 1
    wanted = (
        ("shared_w1", shared_w1, torch.bfloat16, [shared, *w1.shape[1:]]),
        ("shared_w2", shared_w2, torch.bfloat16, [shared, *w2.shape[1:]]),
        ("shared_probs", shared_probs, torch.float32, [*x.shape[:-1], shared]),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if list(tensor.shape) != shape or tensor.device != x.device:
            raise ValueError(
                f"{name} is {list(tensor.shape)} on '{tensor.device}'; it must be {shape} on "
                f"'{x.device}', for as many shared experts as shared_w1 has, of the width of w1's"
            )
        if dtype == torch.bfloat16 and not tensor.is_contiguous():
            raise ValueError(
                f"{name} is not contiguous (strides {list(tensor.stride())}); pass "
                f"{name}.contiguous()"
            )


def check_workspace(
    workspace: Workspace,
    x: Tensor,
    w1: Tensor,
    topk: int,
    b1: Tensor | None = None,
    shared_w1: Tensor | None = None,
) -> None:
    """Raises ValueError with a sentence where the workspace is for other tensors."""
    if x.device != workspace.device:
        raise ValueError(
            f"x is on '{x.device}', the workspace is on '{workspace.device}'; both must be on the "
            "same device"
        )
    for name, value, wanted in (
        ("hidden", x.shape[-1], workspace.hidden),
        ("intermediate", w1.shape[1] // workspace.arithmetic.halves, workspace.intermediate),
        ("experts of a rank", w1.shape[0], workspace.local_experts),
        ("topk", topk, workspace.topk),
        (
            "shared experts",
            0 if shared_w1 is None else shared_w1.shape[0],
            workspace.arithmetic.shared_experts,
        ),
    ):
        if value != wanted:
            raise ValueError(f"{name} of the tensors is {value}; the workspace is for {wanted}")
    has_bias = b1 is not None
    if has_bias != workspace.arithmetic.bias:
        raise ValueError(
            f"b1 and b2 are {'given' if has_bias else 'not given'}; the workspace is for "
            f"bias={workspace.arithmetic.bias}"
        )
    tokens = x.numel() // x.shape[-1]
    if tokens > workspace.max_tokens:
        raise ValueError(
            f"x has {tokens} tokens; the workspace has room for max_tokens={workspace.max_tokens}"
        )


def check_main_grads(main_grads: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Raises TypeError or ValueError with a sentence where gradients cannot be added to these."""
    if len(main_grads) != len(weights):
        raise ValueError(
            f"main_grads has {len(main_grads)} tensors; it must have {len(weights)}: those of "
            + "w1 and w2, then of biases or shared experts where there are any"
        )
    for i, (gradient, weight) in enumerate(zip(main_grads, weights, strict=True)):
        name = f"main_grads[{i}]"
        if gradient.dtype != main_grads[0].dtype or gradient.dtype not in (
            torch.float32,
            torch.bfloat16,
        ):
            raise TypeError(
                f"{name} is {gradient.dtype}; all must be torch.float32, or all torch.bfloat16"
            )
        if gradient.shape != weight.shape or gradient.device != weight.device:
            raise ValueError(
                f"{name} is {list(gradient.shape)} on '{gradient.device}'; it must be "
                f"{list(weight.shape)} on '{weight.device}', as its weight is"
            )
        if not gradient.is_contiguous():
            raise ValueError(
                f"{name} is not contiguous (strides {list(gradient.stride())}); gradients are "
                "added in place, which takes a contiguous tensor"
            )


def check_deferred(weights: AllWeights, main_grads: Sequence[Tensor] | None) -> None:
    """Raises with a sentence where a weight gradient could not be brought to its place later."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "deferred weight gradients cannot be compiled; call uniep.moe with deferred outside of "
            "torch.compile"
        )
    if main_grads is not None:
        return
    names = ("w1", "w2", "b1", "b2", "shared_w1", "shared_w2")
    for name, weight in zip(names, weights, strict=True):
        if weight is not None and weight.requires_grad and not weight.is_leaf:
            raise ValueError(
                f"{name} is computed from other tensors, which a gradient that waits cannot reach; "
                "pass the parameter itself, or main_grads"
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
