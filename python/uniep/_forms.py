"""How weights of experts lie: one tensor, gate and up, or a tensor for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "ExpertWeight",
    "Experts",
    "W1Layout",
    "experts_from",
    "experts_of",
    "joined",
    "new_weight",
    "tuple_of",
]

#: A weight of this rank's experts: a tensor [El, rows, columns]; of w1 also a pair of these, gate
#: and up; or a list of one tensor [rows, columns] for each expert.
ExpertWeight: TypeAlias = Tensor | Sequence[Tensor]

#: Of rows of w1, if it is one tensor: gate, then up; or by turns.
W1Layout: TypeAlias = Literal["halves", "interleaved"]

# By the numbers of python/ops/weights.h.
_ONE, _INTERLEAVED, _PAIR, _EACH = range(4)


def tuple_of(weight: ExpertWeight) -> tuple[Tensor, ...]:
    """The tensors of a weight."""
    return (weight,) if isinstance(weight, Tensor) else tuple(weight)


def _form(tensors: Sequence[Tensor], interleaved: bool) -> int:
    if not tensors or tensors[0].dim() == 2:
        return _EACH
    if len(tensors) == 2:
        return _PAIR
    return _INTERLEAVED if interleaved else _ONE


def _shape(tensors: Sequence[Tensor]) -> tuple[int, int, int]:
    """Experts, rows and columns; of tensors that were checked."""
    first = tensors[0].shape
    if len(first) == 2:
        return len(tensors), first[0], first[1]
    return first[0], len(tensors) * first[1], first[2]


class Experts(NamedTuple):
    """Weights of a call, or their gradients."""

    w1: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    b1: Tensor | None = None
    b2: Tensor | None = None
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None
    interleaved: bool = False

    @property
    def forms(self) -> tuple[int, int]:
        """Of w1 and w2, as ops take them."""
        return _form(self.w1, self.interleaved), _form(self.w2, False)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Experts, rows and columns of w1 and w2."""
        return _shape(self.w1), _shape(self.w2)

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """Those that there are."""
        return tuple(bias for bias in (self.b1, self.b2) if bias is not None)

    @property
    def more(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """What not every layer has."""
        return self.b1, self.b2, self.shared_w1, self.shared_w2

    @property
    def more_named(self) -> dict[str, Tensor]:
        """What this one has of it, and what errors call it."""
        named = zip(("b1", "b2", "shared_w1", "shared_w2"), self.more, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

    @property
    def shared(self) -> int:
        """Shared experts."""
        return 0 if self.shared_w1 is None else self.shared_w1.shape[0]

    def named(self) -> list[tuple[str, Tensor]]:
        """Every tensor, and what errors call it."""
        named = []
        for name, tensors in (("w1", self.w1), ("w2", self.w2)):
            alone = len(tensors) == 1 and tensors[0].dim() != 2
            named += [(name if alone else f"{name}[{i}]", t) for i, t in enumerate(tensors)]
        return named + list(self.more_named.items())

    def flat(self) -> tuple[Tensor, ...]:
        """Every tensor."""
        return (*self.w1, *self.w2, *self.more_named.values())

    def gradients(
        self, dw1: Sequence[Tensor], dw2: Sequence[Tensor], *more: Tensor
    ) -> list[Tensor]:
        """Those of :meth:`flat`, of what ops return: it has empty ones for what there is not."""
        own = zip(self.more, more, strict=True)
        return [*dw1, *dw2, *(gradient for weight, gradient in own if weight is not None)]


def experts_of(
    w1: ExpertWeight,
    w2: ExpertWeight,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    interleaved: bool = False,
) -> Experts:
    """The tensors of these weights."""
    return Experts(tuple_of(w1), tuple_of(w2), b1, b2, shared_w1, shared_w2, interleaved)


def experts_from(flat: Sequence[Tensor], count1: int, count2: int, interleaved: bool) -> Experts:
    """What :meth:`Experts.flat` gave, of so many tensors of w1 and w2."""
    rest = flat[count1 + count2 :]
    # Biases have two dimensions, weights of shared experts three.
    b1, b2 = rest[:2] if rest and rest[0].dim() == 2 else (None, None)
    shared_w1, shared_w2 = rest[-2:] if rest and rest[-1].dim() == 3 else (None, None)
    own = tuple(flat[:count1]), tuple(flat[count1 : count1 + count2])
    return Experts(*own, b1, b2, shared_w1, shared_w2, interleaved)


def joined(tensors: Sequence[Tensor], interleaved: bool = False) -> Tensor:
    """The weight as one tensor, gate first: itself, or a copy."""
    form = _form(tensors, interleaved)
    if form == _EACH:
        return torch.stack(list(tensors))
    if form == _PAIR:
        return torch.cat(list(tensors), 1)
    if form == _INTERLEAVED:
        return torch.cat([tensors[0][:, ::2], tensors[0][:, 1::2]], 1)
    return tensors[0]


def new_weight(form: int, beside: Tensor, experts: int, rows: int, columns: int) -> list[Tensor]:
    """Uninitialised tensors of a weight of that form."""
    if form == _EACH:
        return [beside.new_empty((rows, columns)) for _ in range(experts)]
    count = 2 if form == _PAIR else 1
    return [beside.new_empty((experts, rows // count, columns)) for _ in range(count)]
