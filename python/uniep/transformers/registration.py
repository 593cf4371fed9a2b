"""Names under which transformers' settings refer to uniep."""

from __future__ import annotations

import functools

import uniep

from .._choices import Choices
from .._save_choice import Save
from ..arithmetic import CombinePartials, ProbsPlace
from .calls import experts_forward
from .expert_parallel import expert_parallel_class
from .experts import IMPLEMENTATIONS

__all__ = ["choices_named", "is_registered", "register"]

_registered: dict[str, Choices] = {}


def register(
    name: str = "uniep",
    *,
    probs: ProbsPlace = "after",
    max_tokens: int | None = None,
    capacity_rows: int | None = None,
    save: Save | None = None,
    recompute_h: bool | None = None,
    backward_rows: int | None = None,
    exact_rows: bool | None = None,
    exact_hosts: bool | None = None,
    schedule: str | None = None,
    row_pool: uniep.RowPool | int | None = None,
    combine_groups: int | None = None,
    combine_partials: CombinePartials | None = None,
) -> None:
    """Makes `name` an experts implementation and an EP implementation of transformers.

    Calling again replaces what an earlier call registered under `name`: models look experts up at
    every forward, and an EP implementation once, when they are distributed. transformers before
    5.23 has no EP implementations; there, only the experts are registered.

    Args:
        name: by which settings refer to it.
        probs: where routing weights are multiplied: ``"after"`` the second projection, as
            transformers does, or ``"before"`` it, which gives the same but for roundings.
        max_tokens: see :func:`uniep.moe`; needed for EP where the number of tokens varies. It does
            not count for experts in transformers' own EP, which hands them rows, not tokens.
        capacity_rows: see :class:`uniep.Workspace`.
        save: what a forward keeps of x; see :class:`uniep.Workspace`.
        recompute_h: whether backward computes h again; see :class:`uniep.Workspace`.
        backward_rows: rows that backward works in at a time; see :class:`uniep.Workspace`.
        exact_rows: whether calls take memory for the rows that come; see :class:`uniep.Workspace`.
        exact_hosts: over hosts, whether tokens go only to those that have an expert of them; see
            :class:`uniep.Workspace`.
        schedule: see :func:`uniep.moe`.
        row_pool: where forwards keep rows; see :func:`uniep.moe`.
        combine_groups: how a token's rows are added up; see :func:`uniep.moe`. Not in transformers'
            own EP, which adds them up itself.
        combine_partials: likewise.

    Raises:
        ValueError: for a place of routing weights or a type of partial sums that there is not, and
            for fewer than one combine group.
    """
    choices = Choices(
        probs=probs,
        max_tokens=max_tokens,
        capacity_rows=capacity_rows,
        save=save,
        recompute_h=recompute_h,
        backward_rows=backward_rows,
        exact_rows=exact_rows,
        exact_hosts=exact_hosts,
        schedule=schedule,
        row_pool=row_pool,
        combine_groups=combine_groups,
        combine_partials=combine_partials,
    )
    choices.arithmetic()
    from transformers.integrations.moe import ExpertsInterface

    _registered[name] = choices
    IMPLEMENTATIONS.add(name)
    ExpertsInterface.register(name, functools.partial(experts_forward, choices))
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return
    EPImplementationInterface.register(name, functools.partial(expert_parallel_class(), choices))


def is_registered(name: str) -> bool:
    """Whether :func:`register` was called for it, in this process."""
    return name in _registered


def choices_named(name: str) -> Choices:
    """What `name` was registered with.

    Raises:
        RuntimeError: where it is not.
    """
    if name not in _registered:  # it was in the process that pickled the model
        raise RuntimeError(
            f"experts_implementation is '{name}', which is not registered in this process; call "
            "uniep.transformers.register() before a model runs that was pickled, with its options"
        )
    return _registered[name]
