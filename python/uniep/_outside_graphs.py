"""Functions that compilers call and do not look into, with no compiler imported ahead of its use.

``torch.compiler.disable`` imports the compiler where it decorates. That takes nearly as long as
PyTorch itself, in every process, for the many that never compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["OUTSIDE", "outside_graphs"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: The functions by name, with what a graph that must not break is told.
OUTSIDE: dict[str, tuple[Callable[..., Any], str]] = {}


def outside_graphs(*, reason: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """``torch.compiler.disable``, as soon as there is a compiler.

    Of functions that ``import uniep`` defines, whose names differ.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__name__
        assert name not in OUTSIDE, name
        OUTSIDE[name] = (function, reason)

        @wraps(function)
        def called(*arguments: _P.args, **named: _P.kwargs) -> _R:
            if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
                # The compiler knows what it finds in a module, not what is made while it looks on.
                from . import _in_graphs

                disabled: Callable[_P, _R] = getattr(_in_graphs, name)
                return disabled(*arguments, **named)
            return function(*arguments, **named)

        return called

    return decorate
