"""Calls of :func:`uniep.moe` in place of a forward of transformers' experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import uniep

from .._choices import Choices
from .._shared_experts import Shared
from .experts import Facts, facts_of, weights_of

__all__ = ["experts_forward", "run"]


def experts_forward(
    choices: Choices,
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    shared: Shared | None = None,
) -> Tensor:
    """The function behind `set_experts_implementation`: experts of this rank alone.

    `shared` comes from blocks whose shared experts are part of the pass.
    """
    facts = facts_of(experts)
    if getattr(experts, "_is_expert_parallel", False):
        # transformers' own EP marks slots of other ranks' experts by the number of local ones, and
        # sends one expert's rows of all ranks here: as many as the routing says, not max_tokens.
        if choices.combine_groups not in (None, 1):
            raise ValueError(
                f"combine_groups is {choices.combine_groups}, but transformers' own EP adds rows "
                "up; it must be 1 or None there, or uniep the EP implementation"
            )
        top_k_index = top_k_index.masked_fill(top_k_index >= experts.num_experts, -1)
        choices = choices.but(max_tokens=None)
    return run(
        choices,
        experts,
        facts,
        hidden_states,
        top_k_index,
        top_k_weights,
        group=None,
        shared=shared,
    )


def run(
    choices: Choices,
    experts: Any,
    facts: Facts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    group: Any,
    shared: Shared | None = None,
) -> Tensor:
    """What the experts give these tokens, over the ranks of `group`, in the type of the tokens.

    Raises:
        TypeError: for tokens or weights in another type than bf16, but under autocast.
    """
    weights = weights_of(experts, facts)
    own = {name: getattr(experts, name) for name in facts.names}
    if shared is not None:
        own |= {"shared_w1": shared.shared_w1, "shared_w2": shared.shared_w2}
    _refuse_dtypes(experts, hidden_states, own)
    out = uniep.moe(
        hidden_states,
        top_k_index,
        top_k_weights.float(),
        weights.w1,
        weights.w2,
        group=group,
        b1=weights.b1,
        b2=weights.b2,
        w1_layout=weights.w1_layout,
        weights_layout=weights.weights_layout,
        **(choices._asdict() | {"activation": facts.activation}),
        **({} if shared is None else shared._asdict()),
    )
    return out.to(hidden_states.dtype)


def _refuse_dtypes(experts: Any, hidden_states: Tensor, weights: dict[str, Tensor]) -> None:
    if torch.is_autocast_enabled(hidden_states.device.type):
        return  # uniep.moe casts fp32 then, and refuses the rest
    for name, tensor in {"hidden_states": hidden_states, **weights}.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{name} of {type(experts).__name__} is {tensor.dtype}; it must be torch.bfloat16 "
                "(from_pretrained(..., dtype=torch.bfloat16)), or the model run under "
                "torch.autocast(..., dtype=torch.bfloat16)"
            )
