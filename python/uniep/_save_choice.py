"""What a forward keeps of x for its backward: the words for it."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = ["SAVES", "Save", "check_save"]

#: A row for each copy of a token, each received token once, or nothing.
Save: TypeAlias = Literal["rows", "tokens", "none"]

# By the numbers of c_api.h.
SAVES: tuple[Save, ...] = get_args(Save)


def check_save(save: str) -> None:
    """Raises ValueError for a word that there is not."""
    if save not in SAVES:
        raise ValueError(f"save is '{save}'; it must be 'rows', 'tokens' or 'none'")
