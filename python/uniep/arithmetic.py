"""What an expert computes: its activation, its biases, and where its rows' probabilities enter."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["ACTIVATIONS", "PROBS", "Activation", "Arithmetic", "ProbsPlace", "arithmetic_of"]

Activation = Literal["swiglu", "geglu", "geglu_tanh", "reglu", "gpt_oss", "relu2", "gelu", "silu"]
ProbsPlace = Literal["before", "after"]

# By the numbers of c_api.h.
ACTIVATIONS: tuple[Activation, ...] = (
    "swiglu",
    "geglu",
    "geglu_tanh",
    "reglu",
    "gpt_oss",
    "relu2",
    "gelu",
    "silu",
)
PROBS: tuple[ProbsPlace, ...] = ("before", "after")
_GATED = ACTIVATIONS[:5]


class Arithmetic(NamedTuple):
    """What an expert computes."""

    activation: Activation = "swiglu"
    probs: ProbsPlace = "before"
    bias: bool = False

    @property
    def halves(self) -> int:
        """Halves of w1's rows: gate and up, or one."""
        return 2 if self.activation in _GATED else 1


def arithmetic_of(
    activation: str | None = None, probs: str | None = None, bias: bool = False
) -> Arithmetic:
    """The arithmetic of that names; None: the default.

    Raises:
        ValueError: for a name that there is not.
    """
    activation = "swiglu" if activation is None else activation
    probs = "before" if probs is None else probs
    if activation not in ACTIVATIONS:
        names = ", ".join(f"'{name}'" for name in ACTIVATIONS)
        raise ValueError(f"activation is '{activation}'; it must be one of {names}")
    if probs not in PROBS:
        raise ValueError(f"probs is '{probs}'; it must be 'before' or 'after'")
    return Arithmetic(activation, probs, bias)
