"""Modules of shared experts of other libraries, as :func:`uniep.moe` takes shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "MAX_SLOTS",
    "Shared",
    "SharedChoice",
    "check_choice",
    "count",
    "lay_together",
    "rows_together",
    "weights",
]

# Where the shared experts of a model run: in its own modules, or in the pass of the routed ones.
SharedChoice = Literal["apart", "fused"]
# Experts of a token in one pass, routed and shared: kMaxTopk of include/uniep/problem.h.
MAX_SLOTS = 16


class Shared(NamedTuple):
    """Arguments of :func:`uniep.moe`."""

    shared_w1: Tensor
    shared_w2: Tensor
    shared_probs: Tensor | None = None


def check_choice(shared_experts: str) -> None:
    """Refuses another word.

    Raises:
        ValueError: one sentence.
    """
    if shared_experts not in ("apart", "fused"):
        raise ValueError(f"shared_experts is '{shared_experts}'; it must be 'apart' or 'fused'")


def count(width: int, intermediate: int) -> int:
    """S, where one module of `width` columns is S experts as wide as the routed ones.

    Raises:
        NotImplementedError: where it is no whole number of them.
    """
    if width % intermediate:
        raise NotImplementedError(
            f"the shared experts have {width} columns, and each routed one has {intermediate}; "
            "in one pass with them a multiple of that is accepted, apart any number"
        )
    return width // intermediate


def weights(ups: Sequence[Tensor], down: Tensor, intermediate: int) -> tuple[Tensor, Tensor]:
    """shared_w1 and shared_w2 of a module that is S experts in one.

    Of one expert they are read where they lie, if gate and up do so one behind the other. Others
    are copied. Gradients reach the weights that are given.

    Args:
        ups: gate and up [S I, H], or without a gate up alone; or both in one, [2 S I, H].
        down: [H, S I].
        intermediate: I.

    Returns:
        [S, 2 I, H], without a gate [S, I, H], and [S, H, I].
    """
    hidden, width = down.shape
    shared = count(width, intermediate)
    if shared == 1:
        return rows_together(ups).unsqueeze(0), down.unsqueeze(0)
    halves = ups[0].chunk(2) if len(ups[0]) == 2 * width else ups
    each = [up.reshape(shared, intermediate, hidden) for up in halves]
    first = each[0] if len(each) == 1 else torch.cat(each, 1)
    # Not a transposed copy: of one that runs again in backward the compiler makes another layout.
    return first, torch.stack(torch.split(down, intermediate, 1))


def rows_together(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other: their common memory, or a copy. Gradients reach each."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling() or not _adjacent(parts):
        return torch.cat(list(parts))
    out: Tensor = _Together.apply(*parts)
    return out


@torch.no_grad()
def lay_together(parts: Sequence[torch.nn.Parameter]) -> None:
    """Makes the parameters views of one tensor, one behind the other; they stay the same objects.

    Those that lie with others in one memory already, as after FSDP, are left alone.
    """
    if _adjacent(parts) or any(part.untyped_storage().nbytes() != part.nbytes for part in parts):
        return
    whole = torch.cat([part.detach() for part in parts])
    rows = [len(part) for part in parts]
    for part, own in zip(parts, torch.split(whole, rows), strict=True):
        part.data = own


def _adjacent(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        same_memory = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (part.is_contiguous() and same_memory and part.data_ptr() == end):
            return False
        end += part.nbytes
    return all(part.dtype == first.dtype for part in parts)


class _Together(torch.autograd.Function):
    """A view of the memory that the parts have in common."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        first = parts[0].detach()
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.split(gradient, ctx.rows)
