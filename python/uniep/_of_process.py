"""What belongs to a process and its peers, and therefore cannot be copied or sent."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

__all__ = ["OfProcess"]

_Self = TypeVar("_Self", bound="OfProcess")


class OfProcess:
    """Copies of a module that holds one hold the same one; pickling is refused."""

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a uniep.{type(self).__name__} belongs to this process and cannot be pickled; save "
            "the state_dict() of the module that holds it, and make it anew where that is loaded"
        )
