"""What is to be a whole number, with one sentence for everything else."""

from __future__ import annotations

__all__ = ["check_whole", "check_whole_or_none"]


def check_whole(**numbers: object) -> None:
    """Raises TypeError where one of these is no whole number; NumPy's are some, too."""
    for name, number in numbers.items():
        if not hasattr(type(number), "__index__"):
            raise TypeError(f"{name} is {number!r}, a {type(number).__name__}; it must be an int")


def check_whole_or_none(**numbers: object) -> None:
    """Likewise, where None is accepted, too."""
    for name, number in numbers.items():
        if number is not None:
            check_whole(**{name: number})
