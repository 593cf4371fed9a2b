"""What an expert computes, where probabilities enter, and how a token's rows are added up."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from ._plain_values import check_whole

__all__ = [
    "ACTIVATIONS",
    "PARTIALS",
    "PROBS",
    "Activation",
    "Arithmetic",
    "CombinePartials",
    "ProbsPlace",
    "arithmetic_of",
]

Activation = Literal[
    "swiglu",
    "geglu",
    "geglu_tanh",
    "reglu",
    "gpt_oss",
    "swiglu_clamped",
    "swiglu_softcapped",
    "relu2",
    "gelu",
    "silu",
]
ProbsPlace = Literal["before", "after"]
CombinePartials = Literal["fp32", "bf16"]

# By the numbers of c_api.h.
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
PROBS: tuple[ProbsPlace, ...] = ("before", "after")
PARTIALS: tuple[CombinePartials, ...] = ("fp32", "bf16")
_GATED = ACTIVATIONS[:7]


class Arithmetic(NamedTuple):
    """What an expert computes, and how a token's rows are added up."""

    activation: Activation = "swiglu"
    probs: ProbsPlace = "before"
    bias: bool = False
    combine_groups: int = 1
    combine_partials: CombinePartials = "fp32"
    shared_experts: int = 0
    shared_gate: bool = False  # whether what these give may count other than once

    def halves(self) -> int:
        """Halves of w1's rows: gate and up, or one."""
        return 2 if self.activation in _GATED else 1


def arithmetic_of(
    activation: str | None = None,
    probs: str | None = None,
    bias: bool = False,
    combine_groups: int | None = None,
    combine_partials: str | None = None,
    shared_experts: int = 0,
    shared_gate: bool = True,
) -> Arithmetic:
    """The arithmetic of that names; None: the default. Without shared experts there is no gate.

    Raises:
        TypeError: for numbers that are not whole.
        ValueError: for a name that there is not, fewer than one group, or fewer than no shared
            expert.
    """
    activation = "swiglu" if activation is None else activation
    probs = "before" if probs is None else probs
    if activation not in ACTIVATIONS:
        names = ", ".join(f"'{name}'" for name in ACTIVATIONS)
        raise ValueError(f"activation is '{activation}'; it must be one of {names}")
    if probs not in PROBS:
        raise ValueError(f"probs is '{probs}'; it must be 'before' or 'after'")
    groups = 1 if combine_groups is None else combine_groups
    partials = "fp32" if combine_partials is None else combine_partials
    if type(groups) is not int or type(shared_experts) is not int:
        check_whole(combine_groups=groups, shared_experts=shared_experts)
    if groups < 1:
        raise ValueError(
            f"combine_groups is {groups}; it must be a divisor of the number of experts, from 1 on"
        )
    if partials not in PARTIALS:
        raise ValueError(f"combine_partials is '{partials}'; it must be 'fp32' or 'bf16'")
    if shared_experts < 0:
        raise ValueError(f"shared_experts is {shared_experts}; it must be 0 or more")
    gate = bool(shared_experts and shared_gate)
    return Arithmetic(activation, probs, bias, groups, partials, shared_experts, gate)
