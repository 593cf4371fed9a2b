"""Functions that compilers do not look into, with no compiler imported ahead of its use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ._compiler_registry import CONSTANT, OUTSIDE

__all__ = ["constant_in_graphs", "outside_graphs"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(*, reason: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """``torch.compiler.disable``, as soon as there is a compiler.

    Of functions that ``import uniep`` defines, whose names differ.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        _check_is_new(function.__name__)
        OUTSIDE[function.__name__] = (function, reason)
        return _as_compilers_see_it(function)

    return decorate


def constant_in_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Likewise ``torch.compiler.assume_constant_result``, of a function whose arguments are."""
    _check_is_new(function.__name__)
    CONSTANT[function.__name__] = function
    return _as_compilers_see_it(function)


def _check_is_new(name: str) -> None:
    assert name not in OUTSIDE and name not in CONSTANT, name


def _as_compilers_see_it(function: Callable[_P, _R]) -> Callable[_P, _R]:
    name = function.__name__

    @wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _R:
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            # The compiler knows what it finds in a module, not what is made while it looks on.
            from . import _in_graphs

            told: Callable[_P, _R] = getattr(_in_graphs, name)
            return told(*arguments, **named)
        return function(*arguments, **named)

    return called
