"""Whether ranks that share experts have the same of all other weights, looked at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .group import Group, GroupLike, gather_objects

__all__ = ["warn_of_other_weights"]


@torch.no_grad()
def warn_of_other_weights(weights: Iterable[tuple[str, Tensor]], group: GroupLike) -> None:
    """Warns on all ranks if one of these has other bits on one of them. Collective.

    Routers that differ choose differently for the same token, so experts learn what no single
    router asks of them, and nothing fails. Only plain tensors are compared: others, such as
    DTensors, may be parts.

    Args:
        weights: by name, in the same order on all ranks.
        group: the ranks. Nothing is compared where the process group it was made of has ended.
    """
    if isinstance(group, Group) and _has_ended(group.process_group):
        return
    plain = (Tensor, nn.Parameter)
    own = {name: _digest(weight) for name, weight in weights if type(weight) in plain}
    of_ranks = gather_objects(own, group)
    for rank, other in enumerate(of_ranks):
        for name, digest in other.items():
            if of_ranks[0].get(name, digest) != digest:
                warnings.warn(
                    f"{name} of rank {rank} differs from that of rank 0; the same on all ranks is "
                    f"expected. {_remedy(name)}",
                    stacklevel=4,
                )
                return


def _remedy(name: str) -> str:
    if name == "router.bias":  # which begins as zeros, whatever the seed
        return (
            "Load the same bias on all of them, and pass update_bias the process group of all "
            "ranks that share the router"
        )
    return "Seed PyTorch alike on all of them before the layer is made, or load the same weights"


def _has_ended(group: dist.ProcessGroup | None) -> bool:
    if group is None or not dist.is_initialized():
        return True
    try:
        dist.get_rank(group)
    except ValueError:  # destroyed, though somebody holds it
        return True
    return False


_PART = 1 << 20  # bytes at a time, so that large weights need no memory beside them


def _digest(weight: Tensor) -> list[int]:
    """Of its bits. Sums of integers, which do not depend on their order."""
    bits = weight.detach().contiguous().flatten().view(torch.uint8)
    places = torch.arange(1, _PART + 1, device=bits.device)
    sums = [(part * places[: part.numel()]).sum() for part in torch.split(bits, _PART)]
    found: list[int] = torch.stack(sums).tolist()
    return found
