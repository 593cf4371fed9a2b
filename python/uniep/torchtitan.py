"""uniep as the routed experts of torchtitan's MoE models.

    --override.imports uniep.torchtitan.uniep_routed_experts
    --override.imports uniep.torchtitan.uniep_routed_experts,uniep.torchtitan.uniep_selective_ac

The first replaces dispatch, experts and combine of every MoE layer, gpt-oss' too. The second also
tells torchtitan's selective activation checkpointing to keep what the layer computed.
docs/torchtitan.md has figures, and what is supported.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import uniep

from .arithmetic import Activation, CombinePartials, ProbsPlace

try:
    import spmd_types
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        "uniep.torchtitan needs torchtitan 0.3, which cannot be imported: "
        f"{error}; pip install torchtitan==0.3.0"
    ) from error

__all__ = [
    "UniepExperts",
    "UniepGptOssExperts",
    "UniepRoutedExperts",
    "UniepSelectiveAC",
    "uniep_routed_experts",
    "uniep_selective_ac",
]

# The names of torchtitan's weights, which stay those of checkpoints and of initialisers.
_GATE, _UP, _DOWN = "w1_EFD", "w3_EFD", "w2_EDF"
_FUSED = "w13_E2FD"
# Of gpt-oss: there, rows of gate and up alternate.
_GPT_OSS = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
_ALTERNATING = _GPT_OSS[:2]


class _Weights(NamedTuple):
    """What :func:`uniep.moe` takes."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None


class UniepExperts(GroupedExperts):
    """The weights of the experts, gate and up in one parameter, and :func:`uniep.moe` on them.

    Attributes:
        w13_E2FD: [E, 2F, D]: rows of the gate, then those of up. In state dicts it is torchtitan's
            ``w1_EFD`` and ``w3_EFD``.
        w2_EDF: [E, D, F].
        num_experts: E of all ranks.
        group: the expert-parallel process group, or None: this process has all experts.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's, and what every :func:`uniep.moe` is given."""

        probs: ProbsPlace = "after"
        max_tokens: int | None = None
        capacity_rows: int | None = None
        save: str | None = None
        recompute_h: bool | None = None
        backward_rows: int | None = None
        exact_rows: bool | None = None
        schedule: str | None = None
        row_pool: int | None = None
        combine_groups: int | None = None
        combine_partials: CombinePartials | None = None

    activation: Activation = "swiglu"

    def __init__(self, config: Config) -> None:
        # Not GroupedExperts.__init__, whose parameters these replace.
        nn.Module.__init__(self)
        self.num_experts = config.num_experts
        self.probs: ProbsPlace = config.probs
        self.group: torch.distributed.ProcessGroup | None = None
        self.max_tokens: int | None = config.max_tokens
        self.capacity_rows: int | None = config.capacity_rows
        self.save: Any = config.save
        self.recompute_h: bool | None = config.recompute_h
        self.backward_rows: int | None = config.backward_rows
        self.exact_rows: bool | None = config.exact_rows
        self.schedule: str | None = config.schedule
        self.row_pool: int | None = config.row_pool
        self.combine_groups: int | None = config.combine_groups
        self.combine_partials: CombinePartials | None = config.combine_partials
        self._add_parameters(config)

    def _add_parameters(self, config: Config) -> None:
        experts, inner, outer = config.num_experts, config.hidden_dim, config.dim
        self.w13_E2FD = nn.Parameter(torch.empty(experts, 2 * inner, outer))
        self.w2_EDF = nn.Parameter(torch.empty(experts, outer, inner))
        self.register_state_dict_post_hook(_split_on_save)
        self.register_load_state_dict_pre_hook(_fuse_on_load)

    def _weights(self) -> _Weights:
        return _Weights(self.w13_E2FD, self.w2_EDF)

    def forward(self, x: Tensor, scores: Tensor, expert_ids: Tensor) -> Tensor:
        """Dispatches, computes and combines; collective over the expert-parallel group.

        Args:
            x: [..., D] of any float type; products are of bf16, as torchtitan's are.
            scores: [..., K].
            expert_ids: int32 or int64 [..., K], among the experts of all ranks.

        Returns:
            [..., D], of the type of x.

        Raises:
            ValueError, RuntimeError: see :func:`uniep.moe`.
        """
        w1, w2, b1, b2 = (
            None if weight is None else _local(weight).bfloat16() for weight in self._weights()
        )
        assert w1 is not None and w2 is not None
        out = uniep.moe(
            x.bfloat16(),
            expert_ids,
            scores.float(),
            w1,
            w2,
            activation=self.activation,
            probs=self.probs,
            b1=b1,
            b2=b2,
            group=self.group,
            max_tokens=self.max_tokens,
            capacity_rows=self.capacity_rows,
            save=self.save,
            recompute_h=self.recompute_h,
            backward_rows=self.backward_rows,
            exact_rows=self.exact_rows,
            schedule=self.schedule,
            row_pool=self.row_pool,
            combine_groups=self.combine_groups,
            combine_partials=self.combine_partials,
        )
        return out.to(x.dtype)

    def _init_self_parameters(self) -> None:
        """Draws what torchtitan would with the same seed: w1, w2, then w3, each on its own."""
        halves = [torch.empty_like(half) for half in _halves(self.w13_E2FD)]
        self._init_param(_GATE, halves[0])
        self._init_param(_DOWN, self.w2_EDF)
        self._init_param(_UP, halves[1])
        with torch.no_grad():
            self.w13_E2FD.copy_(torch.cat(halves, 1))


class UniepGptOssExperts(UniepExperts):
    """The weights of gpt-oss' experts under torchtitan's names, and :func:`uniep.moe` on them.

    Attributes:
        mlp1_weight_EGD: [E, 2F, D]: rows of the gate, then those of up. In state dicts they
            alternate, as torchtitan has them.
        mlp1_bias_EG: [E, 2F], likewise.
        mlp2_weight_EDF: [E, D, F].
        mlp2_bias_ED: [E, D].
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(UniepExperts.Config):
        """As for other experts, and torchtitan's limit of the gate, which is 7."""

        swiglu_limit: float = 7.0

    activation: Activation = "gpt_oss"

    def _add_parameters(self, config: UniepExperts.Config) -> None:
        experts, inner, outer = config.num_experts, config.hidden_dim, config.dim
        self.mlp1_weight_EGD = nn.Parameter(torch.empty(experts, 2 * inner, outer))
        self.mlp1_bias_EG = nn.Parameter(torch.empty(experts, 2 * inner))
        self.mlp2_weight_EDF = nn.Parameter(torch.empty(experts, outer, inner))
        self.mlp2_bias_ED = nn.Parameter(torch.empty(experts, outer))
        self.register_state_dict_post_hook(_alternate_on_save)
        self.register_load_state_dict_pre_hook(_halve_on_load)

    def _weights(self) -> _Weights:
        return _Weights(
            self.mlp1_weight_EGD, self.mlp2_weight_EDF, self.mlp1_bias_EG, self.mlp2_bias_ED
        )

    def _init_self_parameters(self) -> None:
        """Draws what torchtitan would with the same seed."""
        for name in _GPT_OSS:
            self._init_param(name, getattr(self, name))
        with torch.no_grad():
            for name in _ALTERNATING:
                weight = getattr(self, name)
                weight.copy_(_reordered(weight, (-1, 2)))


class UniepRoutedExperts(RoutedExperts):
    """Takes the place of torchtitan's routed experts; the dispatcher in its config is not built."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """torchtitan's, with ``inner_experts`` a :class:`UniepExperts.Config`."""

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.inner_experts: UniepExperts = config.inner_experts.build()

    def forward(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, tokens_per_expert: Tensor
    ) -> Tensor:
        """Runs the experts on this rank's tokens.

        Args:
            x: [T, D], or [B, L, D] as torchtitan 0.3.0 passes it.
            scores: fp32 [T, K] or [B, L, K].
            expert_ids: int64 of the same shape.
            tokens_per_expert: [E]; not needed.

        Returns:
            What x is: shape and type.
        """
        # torchtitan knows no types of uniep's ops; the sharding config states those of the result.
        with spmd_types.no_typecheck():
            out: Tensor = self.inner_experts(x, scores, expert_ids)
        return out

    def parallelize(self, parallel_dims: Any) -> None:
        """Shards the weights, and takes the expert-parallel group of torchtitan's mesh.

        Raises:
            NotImplementedError: for tensor parallelism inside of experts.
        """
        if parallel_dims.tp > 1 and parallel_dims.ep == 1:
            raise NotImplementedError(
                "uniep does not split an expert over ranks, as tensor_parallel_degree="
                f"{parallel_dims.tp} does where expert_parallel_degree is 1; set "
                "parallelism.expert_parallel_degree to a multiple of "
                "parallelism.tensor_parallel_degree, so that experts stay whole"
            )
        Module.parallelize(self, parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        self.inner_experts.group = None if mesh is None else mesh.get_group()


# torchtitan finds placements of inputs by the names of arguments, which differ by its version.
UniepRoutedExperts.forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    RoutedExperts.forward
)


class UniepSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing, which also keeps what :func:`uniep.moe` computed."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's."""

    def get_save_ops(self) -> set[Any]:
        """Torchtitan's ops, and uniep's forward."""
        ops: set[Any] = super().get_save_ops()
        return ops | {
            torch.ops.uniep.forward.default,
            torch.ops.uniep.forward_exact.default,
        }


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
    save: str | None = None,
    recompute_h: bool | None = None,
    backward_rows: int | None = None,
    exact_rows: bool | None = None,
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
        schedule: see :func:`uniep.moe`.
        row_pool: True, or bytes of a pool that all layers of a shape share; see :func:`uniep.moe`.
        combine_groups: how a token's rows are added up; see :func:`uniep.moe`.
        combine_partials: likewise.

    Returns:
        A :class:`UniepRoutedExperts.Config`.

    Raises:
        NotImplementedError: for experts that uniep cannot compute.
    """
    _refuse_unsupported(config)
    experts = config.inner_experts
    sharding = experts.sharding_config
    is_gpt_oss = _is_gpt_oss(experts)
    if sharding is not None and not is_gpt_oss:
        states = dict(sharding.state_shardings)
        states[_FUSED] = states.pop(_GATE)
        del states[_UP]
        sharding = dataclasses.replace(sharding, state_shardings=states)
    inner = derive(
        experts,
        UniepGptOssExperts.Config if is_gpt_oss else UniepExperts.Config,
        sharding_config=sharding,
        probs=probs,
        max_tokens=max_tokens,
        capacity_rows=capacity_rows,
        save=save,
        recompute_h=recompute_h,
        backward_rows=backward_rows,
        exact_rows=exact_rows,
        schedule=schedule,
        row_pool=row_pool,
        combine_groups=combine_groups,
        combine_partials=combine_partials,
    )
    return derive(config, UniepRoutedExperts.Config, inner_experts=inner)


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


def _is_gpt_oss(experts: Any) -> bool:
    """Whether this is the config of gpt-oss' experts, whose package is not imported for others."""
    kind = type(experts)
    return (kind.__module__, kind.__qualname__) == (
        "torchtitan.models.gpt_oss.moe",
        "GptOssGroupedExperts.Config",
    )


def _refuse_unsupported(config: Any) -> None:
    """Raises one sentence if these are not bf16 experts of torchtitan's, or drop tokens."""
    if type(config) is not RoutedExperts.Config:
        raise NotImplementedError(
            f"{type(config).__qualname__} is not torchtitan's own RoutedExperts.Config; uniep does "
            "not know what it adds"
        )
    experts = config.inner_experts
    if _is_gpt_oss(experts):
        if experts.swiglu_limit != 7.0:
            raise NotImplementedError(
                f"swiglu_limit is {experts.swiglu_limit}; it must be 7.0, that of activation "
                "'gpt_oss'"
            )
    elif type(experts) is not GroupedExperts.Config:
        raise NotImplementedError(
            f"{type(experts).__qualname__} is not torchtitan's own GroupedExperts.Config, nor that "
            "of gpt-oss; uniep computes these in bf16, not quantised"
        )
    dispatcher = config.token_dispatcher
    if (
        isinstance(dispatcher, HybridEPTokenDispatcher.Config)
        and dispatcher.non_blocking_capacity_factor is not None
    ):
        raise NotImplementedError(
            "HybridEP's non_blocking_capacity_factor drops tokens, which uniep never does; leave "
            "it out, and give uniep_routed_experts capacity_rows"
        )


def _local(weight: Tensor) -> Tensor:
    """The part of a weight that is this rank's; FSDP has gathered it before."""
    if isinstance(weight, DTensor):
        local: Tensor = weight.to_local()
        return local
    return weight


def _halves(fused: Tensor) -> list[Tensor]:
    """Gate and up of [E, 2F, D]; DTensors have its placements, and share its memory if they can.

    They cannot where FSDP has split rows: a rank's rows of w13 are then not those of w1 and w3.
    """
    rows = fused.shape[1] // 2
    halves = [fused.narrow(1, 0, rows), fused.narrow(1, rows, rows)]
    if isinstance(fused, DTensor):
        halves = [
            half
            if half.placements == fused.placements  # type: ignore[attr-defined]
            else half.redistribute(placements=fused.placements)  # type: ignore[attr-defined]
            for half in halves
        ]
    return halves


def _split_on_save(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    gate, up = _halves(state_dict.pop(prefix + _FUSED))
    state_dict[prefix + _GATE] = gate
    state_dict[prefix + _UP] = up


def _fuse_on_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix + _GATE in state_dict and prefix + _UP in state_dict:
        halves = [state_dict.pop(prefix + name) for name in (_GATE, _UP)]
        state_dict[prefix + _FUSED] = torch.cat(halves, 1)


def _reordered(weight: Any, sizes: tuple[int, int]) -> Tensor:
    """Rows of [E, 2F, ...] from alternating to halves with (-1, 2), and back with (2, -1)."""
    placements = getattr(weight, "placements", None)
    split = placements is not None and any(placement.is_shard(1) for placement in placements)
    if split:  # FSDP has split rows: a rank's rows are not those of the other order
        weight = weight.redistribute(placements=[Replicate() for _ in placements or ()])
    weight = weight.unflatten(1, sizes).transpose(1, 2).flatten(1, 2).contiguous()
    if split:
        weight = weight.redistribute(placements=placements)
    return weight  # type: ignore[no-any-return]


def _alternate_on_save(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for name in _ALTERNATING:
        state_dict[prefix + name] = _reordered(state_dict[prefix + name], (2, -1))


def _halve_on_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in _ALTERNATING:
        if prefix + name in state_dict:
            state_dict[prefix + name] = _reordered(state_dict[prefix + name], (-1, 2))
