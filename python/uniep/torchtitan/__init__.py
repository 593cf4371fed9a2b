"""uniep as the routed experts of torchtitan's MoE models.

    --override.imports uniep.torchtitan.uniep_routed_experts
    --override.imports uniep.torchtitan.uniep_routed_experts,uniep.torchtitan.uniep_selective_ac
    --override.imports uniep.torchtitan.uniep_moe

The first replaces dispatch, experts and combine of every MoE layer, gpt-oss' too. The second also
tells torchtitan's selective activation checkpointing to keep what the layer computed. The third
does what the first does, and runs shared experts in the same pass.
docs/torchtitan.md has figures, and what is supported.
"""

from __future__ import annotations

from typing import Any

from .._save_choice import Save
from ..arithmetic import CombinePartials, ProbsPlace

try:
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import MoE, RoutedExperts

    from .accepted import is_gpt_oss, refuse_other_layers, refuse_unsupported, shared_config
    from .checkpointing import UniepSelectiveAC
    from .experts import UniepExperts, UniepGptOssExperts, UniepRoutedExperts
    from .shared import UniepGatedSharedExperts, UniepMoE, UniepSharedExperts
except ImportError as error:
    raise ImportError(
        "uniep.torchtitan needs torchtitan 0.3, which cannot be imported: "
        f"{error}; pip install torchtitan==0.3.0"
    ) from error

__all__ = [
    "UniepExperts",
    "UniepGatedSharedExperts",
    "UniepGptOssExperts",
    "UniepMoE",
    "UniepRoutedExperts",
    "UniepSelectiveAC",
    "UniepSharedExperts",
    "uniep_moe",
    "uniep_routed_experts",
    "uniep_selective_ac",
]


# torchtitan knows an override by the module that defines it, so these are here.


@override(  # type: ignore[untyped-decorator]
    target=RoutedExperts.Config,
    description="Dispatch, experts and combine in uniep.",
)
def uniep_routed_experts(
    config: Any,
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
    row_pool: int | None = None,
    combine_groups: int | None = None,
    combine_partials: CombinePartials | None = None,
) -> Any:
    """What torchtitan calls for the config of each layer's routed experts.

    Args:
        config: torchtitan's ``RoutedExperts.Config``.
        probs: where scores are multiplied: ``"after"`` the second projection, as torchtitan does,
            or ``"before"`` it, which gives the same but for roundings.
        max_tokens: most tokens that a rank has in a call; None: those of the first call.
        capacity_rows: see :class:`uniep.Workspace`.
        save: what a forward keeps of x; see :class:`uniep.Workspace`.
        recompute_h: whether backward computes h again; see :class:`uniep.Workspace`.
        backward_rows: rows that backward works in at a time; see :class:`uniep.Workspace`.
        exact_rows: whether calls take memory for the rows that come; see :class:`uniep.Workspace`.
        exact_hosts: over hosts, whether tokens go only to those that have an expert of them; see
            :class:`uniep.Workspace`.
        schedule: see :func:`uniep.moe`.
        row_pool: True, or bytes of a pool that all layers of a shape share; see :func:`uniep.moe`.
        combine_groups: how a token's rows are added up; see :func:`uniep.moe`.
        combine_partials: likewise.

    Returns:
        A :class:`UniepRoutedExperts.Config`.

    Raises:
        NotImplementedError: for experts that uniep cannot compute.
    """
    refuse_unsupported(config)
    experts = config.inner_experts
    inner = derive(
        experts,
        UniepGptOssExperts.Config if is_gpt_oss(experts) else UniepExperts.Config,
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
    return derive(config, UniepRoutedExperts.Config, inner_experts=inner)


@override(  # type: ignore[untyped-decorator]
    target=MoE.Config,
    description="Routed and shared experts in one pass of uniep.",
)
def uniep_moe(config: Any, **options: Any) -> Any:
    """What torchtitan calls for the config of each MoE layer, instead of its routed experts'.

    Args:
        config: torchtitan's ``MoE.Config``.
        options: see :func:`uniep_routed_experts`.

    Returns:
        A :class:`UniepMoE.Config`.

    Raises:
        NotImplementedError: for experts that uniep cannot compute.
        TypeError: for an unknown option.
    """
    refuse_other_layers(config)
    return derive(
        config,
        UniepMoE.Config,
        routed_experts=uniep_routed_experts(config.routed_experts, **options),
        shared_experts=shared_config(config),
    )


@override(  # type: ignore[untyped-decorator]
    target=SelectiveAC.Config,
    description="Selective checkpointing keeps what uniep computed.",
)
def uniep_selective_ac(config: Any) -> Any:
    """What torchtitan calls for the config of its selective activation checkpointing.

    Raises:
        NotImplementedError: for a subclass, which may have a choice of ops of its own.
    """
    if type(config) is not SelectiveAC.Config:
        raise NotImplementedError(
            f"{type(config).__qualname__} is not torchtitan's own selective checkpointing; add "
            "torch.ops.uniep.forward.default to what its get_save_ops returns, and leave "
            "uniep_selective_ac out of override.imports"
        )
    return derive(config, UniepSelectiveAC.Config)
