"""Why a routing does not fit."""

from __future__ import annotations

import enum

__all__ = ["Overflow"]


class Overflow(enum.IntEnum):
    """What ``Workspace.overflow[0]`` says; ``overflow[1]`` is what would do.

    Attributes:
        NONE: all routings have fitted; ``overflow[1]`` as with ROWS.
        ROWS: a rank receives too many; the ``capacity_rows`` that would do.
        IMPOSSIBLE: an id of no expert, or more tokens than there may be; 0.
        PAGES: a row pool is too full; the bytes of one that would do.
        EXPERT_ROWS: an expert has more than ``backward_rows``; those that would do.
    """

    NONE = 0
    ROWS = 1
    IMPOSSIBLE = 2
    PAGES = 3
    EXPERT_ROWS = 4
