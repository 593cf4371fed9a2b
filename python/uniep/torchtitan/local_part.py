"""The part of a weight that this rank has."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(weight: Tensor) -> Tensor:
    """The part of a weight that is this rank's; FSDP has gathered it before."""
    if isinstance(weight, DTensor):
        local: Tensor = weight.to_local()
        return local
    return weight
