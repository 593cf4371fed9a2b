"""What is to be a number, or true or false, with one sentence for everything else."""

from __future__ import annotations

import math
from typing import SupportsFloat

__all__ = ["check_bool", "check_finite", "check_number", "check_whole", "check_whole_or_none"]


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


def check_number(**numbers: object) -> None:
    """Raises TypeError where one of these is no number; NumPy's are some, too, and NaN is."""
    for name, number in numbers.items():
        is_one = isinstance(number, SupportsFloat) and getattr(number, "ndim", 0) == 0
        if not is_one or isinstance(number, str):
            raise TypeError(f"{name} is {number!r}, a {type(number).__name__}; it must be a float")


def check_finite(**numbers: float) -> None:
    """Likewise, and ValueError where one is infinite or NaN."""
    check_number(**numbers)
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}; it must be finite")


def check_bool(**flags: object) -> None:
    """Raises TypeError where one of these is neither a bool nor None, nor 0, 1, or NumPy's bool.

    Python would take any other for True, also "no".
    """
    for name, flag in flags.items():
        known = flag is None or isinstance(flag, bool) or type(flag).__name__ in ("bool", "bool_")
        if not known and not (isinstance(flag, int) and flag in (0, 1)):
            raise TypeError(
                f"{name} is {flag!r}, a {type(flag).__name__}; it must be True or False"
            )
