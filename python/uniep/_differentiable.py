"""How often a call of uniep can be differentiated: once, by autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

__all__ = ["ONCE", "differentiable_once", "refuse_transforms"]

_Backward = Callable[..., tuple[Tensor | None, ...]]

#: The sentence of a second derivative.
ONCE = "uniep.moe is differentiable once: its backward has no gradient"


def differentiable_once(backward: _Backward) -> _Backward:
    """A backward whose results refuse to be differentiated.

    ``torch.autograd.function.once_differentiable`` lets them pass as constants where no gradient
    of an output asks for one, as behind a sum: a penalty on such gradients would then be 0.

    A graph of a compiler has no second derivative: there it is left to the compiler to say so.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # as it is with create_graph=True alone
            return found
        refuse: Any = torch._C._functions.DelayedError(ONCE.encode(), len(found))
        ends = (None if tensor is None else tensor.detach().requires_grad_() for tensor in found)
        refused: tuple[Tensor | None, ...] = refuse(*ends)
        return refused

    return run


def refuse_transforms() -> None:
    """Raises RuntimeError within a transform of ``torch.func``."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "uniep.moe is called within a transform of torch.func, such as grad or vmap; "
            "autograd and torch.func.functional_call are accepted"
        )
