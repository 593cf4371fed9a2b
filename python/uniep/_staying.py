"""Tensors of the caller's that are read later than PyTorch looks at their versions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Staying"]


class Staying(NamedTuple):
    """A tensor that stays where it is, which others may write.

    PyTorch looks at versions of what it saves, but not behind hooks, nor behind the backward.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Staying:
        """It as it is now."""
        return cls(tensor, tensor._version)

    def unchanged(self, what: str, since: str, until: str) -> Tensor:
        """The tensor.

        Args:
            what: it is.
            since: when it was as it is needed.
            until: behind what it may be changed.

        Raises:
            RuntimeError: where it has been written since.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{what}, {self.tensor.dtype} {list(self.tensor.shape)}, has been modified by an "
                f"inplace operation since the {since}: it is at version {self.tensor._version}, "
                f"and version {self.version} is needed; change it after the {until}, or a copy"
            )
        return self.tensor
