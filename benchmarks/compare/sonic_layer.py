"""SonicMoE behind a router of one's own: https://github.com/Dao-AILab/sonic-moe

Imported only where it is compared, since it needs a package that nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import torch
from sonicmoe import moe_general_routing_inputs
from sonicmoe.enums import ActivationType
from sonicmoe.functional import (
    TC_topk_router_metadata_triton,
    _DownProjection,
    _UpProjection,
)
from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel
from torch import Tensor

VERSIONS = f"sonic-moe {version('sonic-moe')}, quack-kernels {version('quack-kernels')}"
SWIGLU = ActivationType.SWIGLU


# Tiles (rows, columns, ping-pong) that its tuner has chosen for the shapes of compare_sonic.py.
USUAL_TILES = {
    (128, 224, False),
    (128, 256, False),
    (256, 128, False),
    (256, 192, False),
    (128, 192, True),
    (128, 208, True),
}


# Of the kernel that sums a token's rows: it has chosen 2048 columns and 2, 4 or 8 rows.
USUAL_SUMS = {"BLOCK_H": (1024, 2048), "BLOCK_K": (2, 4, 8)}


def tune_over_usual_tiles() -> int:
    """Leaves its tuner these in clusters of 2 x 1: minutes a shape become seconds.

    The kernel that sums a token's rows, which Triton tunes, is left a few sizes of its blocks.

    Returns how many candidates are left, of all together.
    """
    from quack import gemm_interface
    from quack.autotuner import Autotuner

    left = 0
    for tuner in vars(gemm_interface).values():
        if not isinstance(tuner, Autotuner):
            continue
        configs = [candidate.kwargs["config"] for candidate in tuner.configs]
        tuner.configs = [
            candidate
            for candidate, c in zip(tuner.configs, configs, strict=True)
            if c.device_capacity == 9
            and (c.tile_m, c.tile_n, c.pingpong) in USUAL_TILES
            and (c.cluster_m, c.cluster_n, c.swap_ab) == (2, 1, False)
        ]
        left += len(tuner.configs)
    sums = token_gather_sum_kernel
    sums.configs = [
        c for c in sums.configs if all(c.kwargs[name] in USUAL_SUMS[name] for name in USUAL_SUMS)
    ]
    return left + len(sums.configs)


def experts_last(weights: Tensor) -> Tensor:
    """A view of uniep's [E, rows, columns] as SonicMoE takes weights."""
    return weights.permute(1, 2, 0)


def moe(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """All that moe_TC_softmax_topk_layer does behind its router, which is one with the layer.

    The fastest that SonicMoE has: it knows that every token has K experts.
    """
    (tokens, topk), experts = ids.shape, w1.shape[0]

    def numbers(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=x.device)

    scatter, reverse_scatter, gather = (numbers(tokens * topk) for _ in range(3))
    offsets = numbers(experts + 1)
    TC_topk_router_metadata_triton(
        ids, experts, numbers(experts), offsets, gather, scatter, reverse_scatter
    )
    indices = (gather, scatter, reverse_scatter, None, False)  # none with fewer than K experts
    a, h = _UpProjection.apply(
        x, experts_last(w1), None, offsets, tokens * topk, topk, *indices, SWIGLU, False, True
    )
    out: Tensor = _DownProjection.apply(
        a, h, experts_last(w2), None, probs, offsets, tokens, topk, *indices, SWIGLU
    )
    return out


def general_moe(tokens: int, topk: int, device: torch.device) -> Callable[..., Tensor]:
    """The public function for any routing. What it needs besides is made beforehand."""
    token_of_slot = torch.arange(tokens, dtype=torch.int32, device=device).repeat_interleave(topk)

    def moe(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        out, _ = moe_general_routing_inputs(
            x,
            probs.flatten(),
            token_of_slot,
            ids.flatten(),
            experts_last(w1),
            None,
            experts_last(w2),
            None,
            w1.shape[0],
            torch.cuda.current_stream().cuda_stream,
            SWIGLU,
            concat_layout=True,
        )
        result: Tensor = out
        return result

    return moe
