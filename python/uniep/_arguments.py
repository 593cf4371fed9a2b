"""What uniep.moe accepts, with one sentence for everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .workspace import Workspace

__all__ = [
    "autocast",
    "check",
    "check_deferred",
    "check_device",
    "check_main_grads",
    "check_workspace",
    "int32",
    "rows",
]


def autocast(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    x, w1, w2 = (t.to(dtype) if t.dtype == torch.float32 else t for t in (x, w1, w2))
    return x, w1, w2


def check_device(x: Tensor) -> None:
    """Raises ValueError where uniep has no backend for where `x` lies."""
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"x is on '{x.device}'; uniep.moe runs on 'cpu' and 'cuda'")


def check(x: Tensor, topk_ids: Tensor, topk_probs: Tensor, w1: Tensor, w2: Tensor) -> None:
    """Raises TypeError or ValueError with a sentence for what does not fit."""
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
    if x.dim() < 1 or w1.dim() != 3 or w1.shape[1] % 2 or w1.shape[2] != x.shape[-1]:
        raise ValueError(
            f"w1 has shape {list(w1.shape)}; it must be [experts of this rank, 2 I, H], where H is "
            f"the last of x: {list(x.shape)}"
        )
    if tuple(w2.shape) != (w1.shape[0], w1.shape[2], w1.shape[1] // 2):
        raise ValueError(
            f"w2 has shape {list(w2.shape)}; with w1 of {list(w1.shape)} it must be "
            f"{[w1.shape[0], w1.shape[2], w1.shape[1] // 2]}"
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


def check_workspace(workspace: Workspace, x: Tensor, w1: Tensor, topk: int) -> None:
    """Raises ValueError with a sentence where the workspace is for other tensors."""
    if x.device != workspace.device:
        raise ValueError(
            f"x is on '{x.device}', the workspace is on '{workspace.device}'; both must be on the "
            "same device"
        )
    for name, value, wanted in (
        ("hidden", x.shape[-1], workspace.hidden),
        ("intermediate", w1.shape[1] // 2, workspace.intermediate),
        ("experts of a rank", w1.shape[0], workspace.local_experts),
        ("topk", topk, workspace.topk),
    ):
        if value != wanted:
            raise ValueError(f"{name} of the tensors is {value}; the workspace is for {wanted}")
    tokens = x.numel() // x.shape[-1]
    if tokens > workspace.max_tokens:
        raise ValueError(
            f"x has {tokens} tokens; the workspace has room for max_tokens={workspace.max_tokens}"
        )


def check_main_grads(dw1: Tensor, dw2: Tensor, w1: Tensor, w2: Tensor) -> None:
    """Raises TypeError or ValueError with a sentence where gradients cannot be added to these."""
    for name, gradient, weight in (("main_grads[0]", dw1, w1), ("main_grads[1]", dw2, w2)):
        if gradient.dtype != dw1.dtype or gradient.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"{name} is {gradient.dtype}; both must be torch.float32, or both torch.bfloat16"
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


def check_deferred(w1: Tensor, w2: Tensor, main_grads: tuple[Tensor, Tensor] | None) -> None:
    """Raises with a sentence where a weight gradient could not be brought to its place later."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "deferred weight gradients cannot be compiled; call uniep.moe with deferred outside of "
            "torch.compile"
        )
    if main_grads is not None:
        return
    for name, weight in (("w1", w1), ("w2", w2)):
        if weight.requires_grad and not weight.is_leaf:
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
