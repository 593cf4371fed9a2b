"""Who watches calls of uniep.moe; nobody, as a rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from .arithmetic import Arithmetic
from .group import GroupLike

__all__ = ["Watcher", "watcher", "watching"]

#: Called with the group, what the layer computes, the tensors of a call by name, and its output.
Watcher = Callable[[GroupLike, Arithmetic, dict[str, Tensor], Tensor], None]

_watchers: list[Watcher] = []


def watcher() -> Watcher | None:
    """The one that watches now."""
    return _watchers[-1] if _watchers else None


@contextlib.contextmanager
def watching(watch: Watcher) -> Iterator[None]:
    """Calls `watch` for every call of uniep.moe in the block.

    Raises:
        RuntimeError: where somebody watches already.
    """
    if _watchers:
        raise RuntimeError("another capture is under way; end its block first")
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.clear()
