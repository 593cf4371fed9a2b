"""What compilers are to be told of functions: named where these are, told once there is a compiler.

``torch.compiler.disable`` and its like import the compiler where they decorate. That takes nearly
as long as PyTorch itself, in every process, for the many that never compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["CONSTANT", "OUTSIDE"]

#: Functions that run outside of graphs, by name; with what a graph that must not break is told.
OUTSIDE: dict[str, tuple[Callable[..., Any], str]] = {}

#: Functions that are called while a graph is made, of which their results are constants; by name.
CONSTANT: dict[str, Callable[..., Any]] = {}
