"""Blocks of Llama-4, whose forward is uniep's.

Llama-4 scales what goes into an expert, and its experts have no choice of implementation: there the
block around them is what changes.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .blocks import become, check_hooks, with_forward
from .calls import run
from .experts import adapted_by, facts_of, is_offloaded
from .registration import choices_named

__all__ = ["CALLED", "experts_of", "is_block", "runs_uniep", "use_in_block"]

#: Modules of a block that our forward calls.
CALLED = ("router", "shared_expert")


def is_block(module: nn.Module) -> bool:
    """Whether it is one of Llama-4."""
    return any(
        cls.__name__ == "Llama4TextMoe" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def experts_of(block: Any) -> Any:
    """Of a block whose forward is ours, which runs no adapter around them, nor a hook of theirs."""
    if adapted_by(block.experts) is not None:
        raise NotImplementedError(
            f"the experts of {type(block).__name__} are adapted (LoRA), which uniep does not run; "
            "adapters of other modules are accepted"
        )
    if is_offloaded(block.experts):
        raise NotImplementedError(
            f"accelerate has offloaded the experts of {type(block).__name__} (cpu_offload, "
            "device_map), and brings them where their own forward runs, which uniep's does not "
            "call; experts that stay where they compute are accepted"
        )
    return block.experts


def runs_uniep(block: nn.Module) -> bool:
    """Whether :func:`use_in_block` has made its forward ours."""
    return hasattr(type(block), "_is_uniep")


def use_in_block(block: nn.Module, name: str) -> None:
    """Makes its forward ours, with what is registered under `name`."""
    block._uniep_name = name  # type: ignore[assignment]
    if not runs_uniep(block):
        own_class: Any = type(block)
        become(block, _class_with_uniep(own_class))


@functools.cache
def _class_with_uniep(block_class: Any) -> Any:
    """The same block, whose forward calls uniep."""
    return with_forward(_class_with_uniep, block_class, _block_forward, "_is_uniep")


def _block_forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """As Llama4TextMoe: an expert gets x times its score, and its output counts once.

    A token and its scores are K tokens with one expert each.
    """
    experts = experts_of(block)
    if any(isinstance(param, DTensor) for param in experts.parameters(recurse=False)):
        raise RuntimeError(
            f"the experts of {type(block).__name__} are sharded by themselves; uniep's forward of "
            "the block reads their weights, which must be gathered with it: call fully_shard on "
            "the block or its layer"
        )
    check_hooks(block, CALLED)  # which may have come since
    hidden_states = hidden_states.reshape(-1, block.hidden_dim)
    router_scores, router_logits = block.router(hidden_states)
    scores, ids = router_scores.sort(dim=1, descending=True, stable=True)  # those not chosen are 0
    scores, ids = scores[:, : block.top_k], ids[:, : block.top_k]
    scaled = hidden_states.unsqueeze(1) * scores.unsqueeze(2)
    choices = choices_named(block._uniep_name)
    if choices.max_tokens is not None:
        choices = choices.but(max_tokens=choices.max_tokens * block.top_k)
    out = run(
        choices,
        experts,
        facts_of(experts),
        scaled.flatten(0, 1),
        ids.reshape(-1, 1),
        scores.new_ones(ids.numel(), 1),
        group=None,
    )
    routed = out.view(-1, block.top_k, block.hidden_dim).sum(1)
    return block.shared_expert(hidden_states) + routed, router_logits
