"""uniep behind ``moe_megakernel_backend`` of Megatron-Core, where that exists.

Megatron's own modules keep the parameters, the router and the checkpoints; the backend takes over
between the router and the layer's output. It came with Megatron-LM's pull request 6572; the
released packages up to 0.19.2 do not have it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .experts import RoutedExperts
from .options import Options, check_config
from .routes import routes, too_many_routes
from .weights import ExpertParams

try:
    from megatron.core.transformer.moe.megakernel.backend import MegakernelBackend
except ImportError:  # a Megatron-Core without it; use_megakernel says so
    MegakernelBackend = Module

__all__ = ["UniepMegakernelBackend", "use_megakernel"]

_SEAM = "megatron.core.transformer.moe.megakernel"
_NAME = "uniep"


class UniepMegakernelBackend(MegakernelBackend):  # type: ignore[misc]
    """Runs routed experts by :func:`uniep.moe`, with the parameters of Megatron's modules.

    The parameters stay Megatron's, and are read where they lie, as lists of a tensor an expert.

    Args:
        config: Megatron's TransformerConfig; what uniep cannot do is refused.
        ep_group: the expert-parallel group.
        routed_experts: Megatron's TEGroupedMLP or SequentialMLP.
        shared_experts: Megatron's, or None.
        num_local_experts: experts of this rank.
    """

    def __init__(
        self,
        *,
        config: Any,
        ep_group: torch.distributed.ProcessGroup,
        routed_experts: Module,
        shared_experts: Module | None,
        num_local_experts: int,
    ) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.topk = config.moe_router_topk
        self._checked = False
        # Not registered: the layer has these modules, their parameters and their checkpoints.
        self._linears, weights = _weights_of(routed_experts, num_local_experts)
        self._shared = (shared_experts,)
        options = getattr(config, "uniep_options", Options())
        self.routed = RoutedExperts(config, options, ep_group, *weights)
        modules = config.recompute_modules if config.recompute_granularity == "selective" else []
        self._recomputed = set(modules or []) & {"moe", "shared_experts"}

    def forward(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        """The layer's output, shared experts included, in the shape of ``hidden_states``."""
        if not self._checked and not (
            routing_map.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            wrong = too_many_routes(routing_map, self.topk)
            if wrong is not None:
                raise ValueError(wrong)
            self._checked = routing_map.is_cuda  # there, asking means waiting
        # Megatron's DDP gathers parameters in hooks of the modules that own them.
        for linear in self._linears:
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
        out = self._run("moe", self._routed_experts, hidden_states, probs, routing_map)
        (shared,) = self._shared
        if shared is not None:
            out = out + self._run("shared_experts", shared, hidden_states)
        return out

    def _routed_experts(self, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        ids, weights = routes(probs, routing_map, self.topk)
        return self.routed(hidden.reshape(-1, hidden.shape[-1]), ids, weights).view(hidden.shape)

    def _run(self, name: str, part: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if not (self.training and name in self._recomputed):
            return part(*inputs)
        from megatron.core import tensor_parallel

        out: Tensor = tensor_parallel.checkpoint(part, False, *inputs)
        return out


def _check(config: Any) -> None:
    check_config(config)
    graphs = getattr(config, "cuda_graph_impl", "none")
    for option, value, accepted in (
        ("add_bias_linear", getattr(config, "add_bias_linear", False), False),
        ("moe_single_grouped_weight", getattr(config, "moe_single_grouped_weight", False), False),
        ("delay_wgrad_compute", getattr(config, "delay_wgrad_compute", False), False),
        (
            "overlap_moe_expert_parallel_comm",
            getattr(config, "overlap_moe_expert_parallel_comm", False),
            False,
        ),
        ("cuda_graph_impl", graphs, graphs if graphs in ("none", "full_iteration") else "none"),
    ):
        if value != accepted:
            raise ValueError(
                f"{option} is {value}; with moe_megakernel_backend='{_NAME}' it must be {accepted} "
                "(with_uniep(spec) takes it)"
            )


def _weights_of(
    experts: Module, count: int
) -> tuple[list[Module], tuple[ExpertParams, ExpertParams]]:
    linears: list[Module] = []
    weights = []
    for name in ("linear_fc1", "linear_fc2"):
        grouped = getattr(experts, name, None)
        each = [getattr(expert, name) for expert in getattr(experts, "local_experts", [])]
        if isinstance(grouped, Module) and hasattr(grouped, f"weight{count - 1}"):
            places = [(grouped, f"weight{i}") for i in range(count)]
            linears.append(grouped)
        elif len(each) == count:
            places = [(linear, "weight") for linear in each]
            linears.extend(each)
        else:
            raise ValueError(
                f"routed_experts is a {type(experts).__name__}; with moe_megakernel_backend="
                f"'{_NAME}' it must be TEGroupedMLP or SequentialMLP"
            )
        weights.append(ExpertParams(places, f"{name}.weight"))
    return linears, (weights[0], weights[1])


def use_megakernel(config: Any, **options: Any) -> None:
    """Makes the layers of models that are built with this configuration run uniep.

    Call it between making the TransformerConfig, which refuses backends that it does not know, and
    building the model.

    Args:
        config: Megatron's TransformerConfig; gets ``moe_megakernel_backend = "uniep"``.
        options: see :class:`uniep.megatron.Options`, without ``layout``.

    Raises:
        RuntimeError: where this Megatron-Core has no such backend.
        ValueError: for an option of the configuration that uniep cannot do.
        TypeError: for an unknown option.
    """
    if MegakernelBackend is Module or not hasattr(config, "moe_megakernel_backend"):
        from megatron.core import __version__

        raise RuntimeError(
            f"megatron-core {__version__} has no moe_megakernel_backend; use with_uniep(spec)"
        )
    if "layout" in options:
        raise TypeError("layout is given; Megatron's modules own the parameters, so there is none")
    config.uniep_options = Options(**options)
    if config.uniep_options.shared_experts != "apart":
        raise ValueError(
            f"shared_experts is '{config.uniep_options.shared_experts}'; with "
            f"moe_megakernel_backend='{_NAME}' it must be 'apart' (with_uniep(spec) takes 'fused')"
        )
    _check(config)
    _register()
    config.moe_megakernel_backend = _NAME


def _register() -> None:
    """Lets Megatron's factory know uniep, wherever its functions have been imported to."""
    factory = importlib.import_module(f"{_SEAM}.factory")
    places = [
        factory,
        importlib.import_module(_SEAM),
        importlib.import_module("megatron.core.transformer.moe.moe_layer"),
    ]
    for name, ours in (
        ("build_megakernel_backend", UniepMegakernelBackend),
        ("prepare_megakernel_shared_expert_config", lambda config: config),
        ("megakernel_shared_expert_init_context", lambda config: nullcontext()),
    ):
        theirs = getattr(factory, name, None)
        if theirs is None or getattr(theirs, "knows_uniep", False):
            continue
        chosen = _choice(ours, theirs)
        for place in places:
            if getattr(place, name, None) is theirs:
                setattr(place, name, chosen)


def _choice(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        config = kwargs["config"] if "config" in kwargs else args[0]
        return (ours if config.moe_megakernel_backend == _NAME else theirs)(*args, **kwargs)

    choose.knows_uniep = True  # type: ignore[attr-defined]
    return choose
