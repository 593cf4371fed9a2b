"""What the caller of a layer chooses, beside its tensors, and the kind of layer that makes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._forms import Experts
from ._plain_values import check_bool, check_whole, check_whole_or_none
from ._save_choice import Save, check_save
from .arithmetic import Activation, Arithmetic, CombinePartials, ProbsPlace, arithmetic_of
from .row_pool import RowPoolLike

__all__ = ["Choices", "LayerKind", "check_schedule"]


class LayerKind(NamedTuple):
    """What workspaces that calls share differ by, beside the pool of their rows."""

    hidden: int
    intermediate: int
    local_experts: int
    topk: int
    # From here on as Workspace names it.
    capacity_rows: int | None
    save: Save
    recompute_h: bool
    backward_rows: int
    activation: Activation
    probs: ProbsPlace
    bias: bool
    combine_groups: int
    combine_partials: CombinePartials
    shared_experts: int
    shared_gate: bool
    shared_apart: bool

    def options(self) -> dict[str, Any]:
        """What a workspace is made with, beside its figures."""
        return dict(zip(self._fields[4:], self[4:], strict=True))


class Choices(NamedTuple):
    """What :func:`uniep.moe` is given under these names; None: that is not chosen."""

    max_tokens: int | None = None
    capacity_rows: int | None = None
    save: Save | None = None
    recompute_h: bool | None = None
    backward_rows: int | None = None
    activation: Activation | None = None
    probs: ProbsPlace | None = None
    combine_groups: int | None = None
    combine_partials: CombinePartials | None = None
    row_pool: RowPoolLike = None
    # From here on what a call may choose in a workspace, too.
    exact_rows: bool | None = None
    exact_hosts: bool | None = None
    schedule: str | None = None

    def but(self, **others: Any) -> Choices:
        """These, with others for some."""
        # Not by _replace, as in Experts.routed.
        return Choices(**(self._asdict() | others))

    def check(self) -> None:
        """Raises TypeError or ValueError for choices that there are not.

        Those of the arithmetic :meth:`arithmetic` checks. Whether the library can serve them is its
        to say.
        """
        if self.max_tokens is not None:
            _check_max_tokens(self.max_tokens)
        check_schedule(self.schedule)
        if self.save is not None:
            check_save(self.save)
        if self.capacity_rows is not None or self.backward_rows is not None:
            check_whole_or_none(capacity_rows=self.capacity_rows, backward_rows=self.backward_rows)
        flags = self.recompute_h, self.exact_rows, self.exact_hosts
        if flags != (None, None, None):
            check_bool(recompute_h=flags[0], exact_rows=flags[1], exact_hosts=flags[2])

    def arithmetic(
        self, bias: bool = False, shared_experts: int = 0, shared_gate: bool = True
    ) -> Arithmetic:
        """That of a layer with or without these.

        Raises:
            TypeError, ValueError: see :func:`arithmetic_of`.
        """
        return arithmetic_of(
            self.activation,
            self.probs,
            bias,
            self.combine_groups,
            self.combine_partials,
            shared_experts,
            shared_gate,
        )

    def arguments(self, arithmetic: Arithmetic | None) -> dict[str, Any]:
        """What :func:`uniep.moe` is given: these, but those of the arithmetic as that one has them.

        Args:
            arithmetic: None: none is chosen, as beside a workspace.
        """
        named = self._asdict()
        for name in _OF_ARITHMETIC:
            named[name] = getattr(arithmetic, name, None)
        return named

    def kind(
        self, weights: Experts, topk: int, arithmetic: Arithmetic, shared_apart: bool
    ) -> LayerKind:
        """Of a call without a workspace."""
        experts, width, hidden = weights.shape_of_w1()
        return LayerKind(
            hidden,
            width // arithmetic.halves(),
            experts,
            topk,
            self.capacity_rows,
            self.save or "rows",
            bool(self.recompute_h),
            self.backward_rows or 0,
            *arithmetic,
            shared_apart,
        )

    def refuse_beside_workspace(self, **more: object) -> None:
        """Raises ValueError where a workspace has made one of these its own, or one of `more`."""
        all_given = more | dict(zip(_OF_WORKSPACES, self, strict=False))
        chosen = [name for name, choice in all_given.items() if choice is not None]
        if not chosen:
            return
        raise ValueError(
            f"{' and '.join(chosen)} {'is' if len(chosen) == 1 else 'are'} given beside a "
            "workspace, which has its own; pass either"
        )


# The first of the fields.
_OF_WORKSPACES: tuple[str, ...] = Choices._fields[: Choices._fields.index("exact_rows")]
_OF_ARITHMETIC = [name for name in Choices._fields if name in Arithmetic._fields]


def check_schedule(schedule: str | None) -> None:
    """Raises TypeError for what is no text; what it says is the library's to read."""
    if schedule is not None and not isinstance(schedule, str):
        raise TypeError(
            f"schedule is {schedule!r}, a {type(schedule).__name__}; it must be a str, such as "
            "'single', or None"
        )


def _check_max_tokens(max_tokens: int) -> None:
    check_whole(max_tokens=max_tokens)
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; 1 or more is accepted")
