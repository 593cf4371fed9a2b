"""How weights of experts lie.

Their form says in which tensors: one, gate and up, or one for each expert. Their layout says how
matrices lie in these: which rows of w1 come first, and whether outputs or inputs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "ExpertWeight",
    "Experts",
    "W1Layout",
    "WeightsLayout",
    "experts_from",
    "experts_of",
    "layout_of",
    "new_weight",
    "tuple_of",
]

#: A weight of this rank's experts: a tensor [El, rows, columns], or [El, columns, rows]; of w1 also
#: a pair of these, gate and up; or a list of one such matrix for each expert.
ExpertWeight: TypeAlias = Tensor | Sequence[Tensor]

#: Of rows of w1, if it is one tensor: gate, then up; or by turns.
W1Layout: TypeAlias = Literal["halves", "interleaved"]

#: Of all weights: each matrix [outputs, inputs], as nn.Linear has it; or [inputs, outputs].
WeightsLayout: TypeAlias = Literal["out_in", "in_out"]

# By the numbers of python/ops/weights.h.
_ONE, _PAIR, _EACH = range(3)
_INTERLEAVED, _IN_OUT = 1, 2


def tuple_of(weight: ExpertWeight) -> tuple[Tensor, ...]:
    """The tensors of a weight."""
    return (weight,) if isinstance(weight, Tensor) else tuple(weight)


def layout_of(w1_layout: W1Layout, weights_layout: WeightsLayout) -> int:
    """As ops take it."""
    interleaved = _INTERLEAVED if w1_layout == "interleaved" else 0
    return interleaved + (_IN_OUT if weights_layout == "in_out" else 0)


def _form(tensors: Sequence[Tensor]) -> int:
    if not tensors or tensors[0].dim() == 2:
        return _EACH
    return _PAIR if len(tensors) == 2 else _ONE


def _shape(tensors: Sequence[Tensor], layout: int) -> tuple[int, int, int]:
    """Experts, rows and columns; of tensors that were checked."""
    *own, rows, columns = tensors[0].shape
    if layout & _IN_OUT:
        rows, columns = columns, rows
    return (own[0], len(tensors) * rows, columns) if own else (len(tensors), rows, columns)


class Experts(NamedTuple):
    """Weights of a call, or their gradients."""

    w1: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    b1: Tensor | None = None
    b2: Tensor | None = None
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None
    layout: int = 0

    def interleaved(self) -> bool:
        """Whether rows of gate and up take turns in a w1 that is one tensor."""
        return bool(self.layout & _INTERLEAVED)

    def in_out(self) -> bool:
        """Whether each matrix is [inputs, outputs]."""
        return bool(self.layout & _IN_OUT)

    def forms(self) -> tuple[int, int]:
        """Of w1 and w2, as ops take them."""
        return _form(self.w1), _form(self.w2)

    def shape_of_w1(self) -> tuple[int, int, int]:
        """Experts, rows (outputs) and columns (inputs) of w1, however it lies."""
        return _shape(self.w1, self.layout)

    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Likewise, of w1 and w2."""
        return self.shape_of_w1(), _shape(self.w2, self.layout)

    def joined(self) -> tuple[Tensor, Tensor]:
        """w1 and w2, each as one tensor [El, outputs, inputs], gate first: itself, or a copy."""
        w1 = _joined(self.w1, self.interleaved(), self.in_out())
        return w1, _joined(self.w2, False, self.in_out())

    def biases(self) -> tuple[Tensor, ...]:
        """Those that there are."""
        return tuple(bias for bias in (self.b1, self.b2) if bias is not None)

    def more(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """What not every layer has."""
        return self.b1, self.b2, self.shared_w1, self.shared_w2

    def more_named(self) -> dict[str, Tensor]:
        """What this one has of it, and what errors call it."""
        named = zip(("b1", "b2", "shared_w1", "shared_w2"), self.more(), strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

    def shared(self) -> int:
        """Shared experts."""
        return 0 if self.shared_w1 is None else self.shared_w1.shape[0]

    def routed(self) -> Experts:
        """Without shared experts."""
        # Not by _replace, behind which PyTorch 2.11 compiles a tuple of nothing.
        return Experts(self.w1, self.w2, self.b1, self.b2, layout=self.layout)

    def named(self) -> list[tuple[str, Tensor]]:
        """Every tensor, and what errors call it."""
        named = []
        for name, tensors in (("w1", self.w1), ("w2", self.w2)):
            alone = len(tensors) == 1 and tensors[0].dim() != 2
            named += [(name if alone else f"{name}[{i}]", t) for i, t in enumerate(tensors)]
        return named + list(self.more_named().items())

    def flat(self) -> tuple[Tensor, ...]:
        """Every tensor."""
        return (*self.w1, *self.w2, *self.more_named().values())

    def gradients(
        self, dw1: Sequence[Tensor | None], dw2: Sequence[Tensor | None], *more: Tensor | None
    ) -> list[Tensor | None]:
        """Those of :meth:`flat`, of what ops return: it has empty ones for what there is not."""
        own = zip(self.more(), more, strict=True)
        return [*dw1, *dw2, *(gradient for weight, gradient in own if weight is not None)]


def experts_of(
    w1: ExpertWeight,
    w2: ExpertWeight,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    layout: int = 0,
) -> Experts:
    """The tensors of these weights."""
    return Experts(tuple_of(w1), tuple_of(w2), b1, b2, shared_w1, shared_w2, layout)


def experts_from(flat: Sequence[Tensor], count1: int, count2: int, layout: int) -> Experts:
    """What :meth:`Experts.flat` gave, of so many tensors of w1 and w2."""
    rest = flat[count1 + count2 :]
    # Biases have two dimensions, weights of shared experts three.
    b1, b2 = rest[:2] if rest and rest[0].dim() == 2 else (None, None)
    shared_w1, shared_w2 = rest[-2:] if rest and rest[-1].dim() == 3 else (None, None)
    own = tuple(flat[:count1]), tuple(flat[count1 : count1 + count2])
    return Experts(*own, b1, b2, shared_w1, shared_w2, layout)


def _joined(tensors: Sequence[Tensor], interleaved: bool, in_out: bool) -> Tensor:
    if in_out:
        tensors = [tensor.transpose(-1, -2) for tensor in tensors]
    form = _form(tensors)
    if form == _EACH:
        return torch.stack(list(tensors))
    if form == _PAIR:
        return torch.cat(list(tensors), 1)
    if interleaved:
        return torch.cat([tensors[0][:, ::2], tensors[0][:, 1::2]], 1)
    return tensors[0].contiguous()


def new_weight(form: int, layout: int, beside: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Uninitialised tensors of a weight of that form, of so many experts, rows and columns."""
    experts, rows, columns = shape
    parts = 2 if form == _PAIR else 1
    matrix = (columns, rows // parts) if layout & _IN_OUT else (rows // parts, columns)
    if form == _EACH:
        return [beside.new_empty(matrix) for _ in range(experts)]
    return [beside.new_empty((experts, *matrix)) for _ in range(parts)]
