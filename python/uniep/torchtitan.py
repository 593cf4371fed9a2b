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

import dataclasses
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import uniep

from . import _shared_experts
from ._choices import Choices
from ._forms import W1Layout
from ._save_choice import Save
from ._shared_experts import Shared
from .arithmetic import Activation, CombinePartials, ProbsPlace

try:
    import spmd_types
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
    from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher
    from torchtitan.protocols.module import Module
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


class _Weights(NamedTuple):
    """What :func:`uniep.moe` takes."""

    w1: Tensor | tuple[Tensor, Tensor]
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None


class UniepExperts(GroupedExperts):
    """The weights of the experts, which are torchtitan's own, and :func:`uniep.moe` on them.

    Attributes:
        w1_EFD: [E, F, D], the gate's.
        w3_EFD: [E, F, D], those of up.
        w2_EDF: [E, D, F].
        num_experts: E of all ranks.
        group: the expert-parallel process group, or None: this process has all experts.
        shared: the module of the layer's shared experts, if they are part of the pass, in a tuple:
            it is the layer's.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's, and what every :func:`uniep.moe` is given."""

        probs: ProbsPlace = "after"
        max_tokens: int | None = None
        capacity_rows: int | None = None
        save: Save | None = None
        recompute_h: bool | None = None
        backward_rows: int | None = None
        exact_rows: bool | None = None
        exact_hosts: bool | None = None
        schedule: str | None = None
        row_pool: int | None = None
        combine_groups: int | None = None
        combine_partials: CombinePartials | None = None

    activation: Activation = "swiglu"
    w1_layout: W1Layout = "halves"

    def __init__(self, config: Config) -> None:
        # Not GroupedExperts.__init__: gpt-oss has other parameters.
        nn.Module.__init__(self)
        self.num_experts = config.num_experts
        self.group: torch.distributed.ProcessGroup | None = None
        self.shared: tuple[UniepSharedExperts, ...] = ()
        self._choices = Choices(
            activation=self.activation,
            **{name: getattr(config, name) for name in Choices._fields if name != "activation"},
        )
        self._add_parameters(config)

    def _add_parameters(self, config: Config) -> None:
        experts, inner, outer = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD = nn.Parameter(torch.empty(experts, inner, outer))
        self.w2_EDF = nn.Parameter(torch.empty(experts, outer, inner))
        self.w3_EFD = nn.Parameter(torch.empty(experts, inner, outer))

    def _weights(self) -> _Weights:
        return _Weights((self.w1_EFD, self.w3_EFD), self.w2_EDF)

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
        weights = self._weights()
        b1, b2 = (None if bias is None else _local(bias).bfloat16() for bias in weights[2:])
        w1 = (
            _local(weights.w1).bfloat16()
            if isinstance(weights.w1, Tensor)
            else [_local(weight).bfloat16() for weight in weights.w1]
        )
        tokens = x.bfloat16()
        shared = {}
        for module in self.shared:
            shared = module.weights(tokens, weights.w2.shape[2])._asdict()
        out = uniep.moe(
            tokens,
            expert_ids,
            scores.float(),
            w1,
            _local(weights.w2).bfloat16(),
            w1_layout=self.w1_layout,
            b1=b1,
            b2=b2,
            group=self.group,
            **self._choices._asdict(),
            **shared,
        )
        return out.to(x.dtype)


class UniepGptOssExperts(UniepExperts):
    """The weights of gpt-oss' experts, which are torchtitan's own, and :func:`uniep.moe` on them.

    Attributes:
        mlp1_weight_EGD: [E, 2F, D]: rows of gate and up alternate.
        mlp1_bias_EG: [E, 2F], likewise.
        mlp2_weight_EDF: [E, D, F].
        mlp2_bias_ED: [E, D].
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(UniepExperts.Config):
        """As for other experts, and torchtitan's limit of the gate, which is 7."""

        swiglu_limit: float = 7.0

    activation: Activation = "gpt_oss"
    w1_layout: W1Layout = "interleaved"

    def _add_parameters(self, config: UniepExperts.Config) -> None:
        experts, inner, outer = config.num_experts, config.hidden_dim, config.dim
        self.mlp1_weight_EGD = nn.Parameter(torch.empty(experts, 2 * inner, outer))
        self.mlp1_bias_EG = nn.Parameter(torch.empty(experts, 2 * inner))
        self.mlp2_weight_EDF = nn.Parameter(torch.empty(experts, outer, inner))
        self.mlp2_bias_ED = nn.Parameter(torch.empty(experts, outer))

    def _weights(self) -> _Weights:
        # uniep has the gate's biases first; they are few, unlike weights.
        bias = _local(self.mlp1_bias_EG)
        b1 = torch.cat([bias[:, ::2], bias[:, 1::2]], 1)
        return _Weights(self.mlp1_weight_EGD, self.mlp2_weight_EDF, b1, self.mlp2_bias_ED)


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


class UniepSharedExperts(FeedForward):
    """The weights of shared experts, torchtitan's own; they run with the routed ones.

    A module as wide as S routed experts is S shared ones.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """torchtitan's."""

    def forward(self, x: Tensor) -> None:
        """Nothing is to be added: what they give is in the routed experts' output."""

    def weights(self, x: Tensor, intermediate: int) -> Shared:
        """What :func:`uniep.moe` takes.

        Args:
            x: bf16 [..., D].
            intermediate: I of a routed expert.
        """
        first, second, third = (
            _local(linear.weight).bfloat16() for linear in (self.w1, self.w2, self.w3)
        )
        return Shared(*_shared_experts.weights([first, third], second, intermediate))


class UniepGatedSharedExperts(UniepSharedExperts, SigmoidGatedFeedForward):
    """Likewise, with a gate: what they give a token counts sigmoid(gate(x)) times."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SigmoidGatedFeedForward.Config):
        """torchtitan's."""

    def __init__(self, config: Config) -> None:
        SigmoidGatedFeedForward.__init__(self, config)

    def weights(self, x: Tensor, intermediate: int) -> Shared:
        """What :func:`uniep.moe` takes; see :class:`UniepSharedExperts`."""
        w1, w2, _ = super().weights(x, intermediate)
        logits = nn.functional.linear(x, _local(self.gate.weight).bfloat16())
        probs = torch.sigmoid(logits).float()
        return Shared(w1, w2, probs.expand(*probs.shape[:-1], w1.shape[0]))


class UniepMoE(MoE):
    """torchtitan's MoE layer, whose shared experts run in the pass of the routed ones."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """torchtitan's, with experts of uniep's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.shared_experts is not None:
            _refuse_other_linears(self.shared_experts)
            self.routed_experts.inner_experts.shared = (self.shared_experts,)

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan does.

        Raises:
            NotImplementedError: for tensor parallelism, which splits shared experts.
        """
        if self.shared_experts is not None and parallel_dims.tp > 1:
            raise NotImplementedError(
                f"tensor_parallel_degree is {parallel_dims.tp}, which splits shared experts over "
                "ranks; in uniep's pass they stay whole: set it to 1, or use uniep_routed_experts"
            )
        super().parallelize(parallel_dims)


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
    _refuse_unsupported(config)
    experts = config.inner_experts
    is_gpt_oss = _is_gpt_oss(experts)
    inner = derive(
        experts,
        UniepGptOssExperts.Config if is_gpt_oss else UniepExperts.Config,
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
    _refuse_lora(config)
    if type(config) is not MoE.Config:
        raise NotImplementedError(
            f"{type(config).__qualname__} is not torchtitan's own MoE.Config; uniep does not know "
            "what it adds (uniep_routed_experts takes it)"
        )
    return derive(
        config,
        UniepMoE.Config,
        routed_experts=uniep_routed_experts(config.routed_experts, **options),
        shared_experts=_shared_config(config),
    )


def _shared_config(config: Any) -> Any:
    """The config of the layer's shared experts, if it has any."""
    shared = config.shared_experts
    if shared is None:
        return None
    kinds = {
        FeedForward.Config: UniepSharedExperts.Config,
        SigmoidGatedFeedForward.Config: UniepGatedSharedExperts.Config,
    }
    linears = [getattr(shared, name, None) for name in ("w1", "w2", "w3", "gate")]
    # Converters, as to fp8, put subclasses in the place of Linear.
    known = all(own is None or (type(own) is Linear.Config and not own.bias) for own in linears)
    if type(shared) not in kinds or not known:
        raise NotImplementedError(
            f"shared experts of {type(shared).__qualname__} with biases, with converted linears or "
            "of another class are none that uniep knows: FeedForward and SigmoidGatedFeedForward "
            "of Linear without biases are (uniep_routed_experts leaves any to torchtitan)"
        )
    if _is_gpt_oss(config.routed_experts.inner_experts):
        raise NotImplementedError(
            "gpt-oss' experts have an activation of their own, and these shared experts SwiGLU; "
            "uniep_routed_experts leaves these to torchtitan"
        )
    _shared_experts.count(shared.w1.out_features, config.routed_experts.inner_experts.hidden_dim)
    return derive(shared, kinds[type(shared)])


def _refuse_other_linears(shared: nn.Module) -> None:
    """Raises one sentence if a converter has come after the override: the pass reads weights."""
    for name, linear in shared.named_children():
        if type(linear) is not Linear:
            raise NotImplementedError(
                f"{name} of the shared experts is a {type(linear).__qualname__}, of which uniep's "
                "pass would read the weight alone, without an adapter (LoRA) or whatever else it "
                "computes; torchtitan's Linear is accepted (uniep_routed_experts takes any)"
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


def _is_gpt_oss(experts: Any) -> bool:
    """Whether this is the config of gpt-oss' experts, whose package is not imported for others."""
    kind = type(experts)
    return (kind.__module__, kind.__qualname__) == (
        "torchtitan.models.gpt_oss.moe",
        "GptOssGroupedExperts.Config",
    )


def _refuse_lora(config: Any) -> None:
    """Raises one sentence if torchtitan's LoRAConverter has frozen this."""
    if type(config).__module__ == "torchtitan.components.lora":
        raise NotImplementedError(
            f"LoRAConverter has made a {type(config).__qualname__} of this layer, whose experts "
            "would not train; uniep does not run torchtitan's LoRA: take the converter out of the "
            "model's converters, or uniep's out of override.imports"
        )


def _refuse_unsupported(config: Any) -> None:
    """Raises one sentence if these are not bf16 experts of torchtitan's, or drop tokens."""
    _refuse_lora(config)
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
