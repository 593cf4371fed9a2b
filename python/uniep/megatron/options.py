"""What a Megatron-Core configuration may ask of experts that uniep runs.

Everything that uniep cannot do is refused when a layer is built, in one sentence that names the
option, its value and what is accepted. Nothing is ignored that would change a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.fusions import fused_bias_geglu

import uniep
from uniep._save_choice import Save
from uniep._shared_experts import SharedChoice, check_choice
from uniep.arithmetic import Activation, CombinePartials

__all__ = [
    "Options",
    "activation_of",
    "check_config",
    "check_options",
    "check_padding",
    "frees_inputs_of_graphs",
    "is_in_graph_of_te",
]

# Parts of a layer that Megatron may capture in CUDA graphs of their own: all but the experts.
_CAPTURED_ALONE = {"attn", "mamba", "mlp", "moe_router", "moe_preprocess"}


class Options(NamedTuple):
    """What a user may choose for the experts, beside Megatron's configuration.

    Attributes:
        layout: ``"stacked"``: one parameter ``linear_fc1.weight`` [experts, 2I, H] and one
            ``linear_fc2.weight`` [experts, H, I]. ``"per_expert"``: ``weight0``, ``weight1`` and so
            on, two-dimensional, as optimizers such as Muon need them; they lie in one tensor.
        max_tokens: most tokens that a rank has in a call. None: as many as the largest rank of the
            group has in its first call.
        capacity_rows: rows that a rank has room for. None: from ``moe_expert_rank_capacity_factor``
            where that is set, else :class:`uniep.Workspace`'s default.
        save: what a forward keeps of x; see :class:`uniep.Workspace`.
        recompute_h: whether backward computes h again; see :class:`uniep.Workspace`.
        backward_rows: rows that backward works in at a time, 0: all; see
            :class:`uniep.Workspace`. Not with ``delay_wgrad_compute``.
        exact_rows: whether calls take memory for the rows that come; see :class:`uniep.Workspace`.
        exact_hosts: over hosts, whether tokens go only to those that have an expert of them; see
            :class:`uniep.Workspace`.
        schedule: of both directions; None: the best known one.
        on_overflow: ``"raise"`` or ``"flag"``, as for :class:`uniep.Workspace`.
        row_pool: where forwards keep rows; see :func:`uniep.moe`.
        combine_groups: how a token's rows are added up; see :func:`uniep.moe`.
        combine_partials: likewise.
        shared_experts: ``"apart"``: Megatron's module computes them, or ``"fused"``: they are part
            of the same pass as the others. Their parameters stay the module's.
    """

    layout: Literal["stacked", "per_expert"] = "stacked"
    max_tokens: int | None = None
    capacity_rows: int | None = None
    save: Save = "rows"
    recompute_h: bool = False
    backward_rows: int = 0
    exact_rows: bool = False
    exact_hosts: bool = False
    schedule: str | None = None
    on_overflow: Literal["raise", "flag"] = "raise"
    row_pool: uniep.RowPool | int | None = None
    combine_groups: int = 1
    combine_partials: CombinePartials = "fp32"
    shared_experts: SharedChoice = "apart"


def check_options(options: Options) -> None:
    """Refuses words that are no choice, where nothing else would; those of calls Workspace checks.

    Raises:
        ValueError: one sentence.
    """
    check_choice(options.shared_experts)
    if options.layout not in ("stacked", "per_expert"):
        raise ValueError(f"layout is '{options.layout}'; it must be 'stacked' or 'per_expert'")


class _Only(NamedTuple):
    option: str
    accepted: Any
    why: str


_ONLY = [
    _Only("moe_single_grouped_bias", False, "biases lie as uniep's option layout says"),
    _Only("activation_func_fp8_input_store", False, "experts run in bf16"),
    _Only("moe_mlp_glu_interleave_size", None, "gate rows come first, then up rows"),
    _Only("fp8", None, "experts run in bf16"),
    _Only("fp8_param", False, "experts run in bf16"),
    _Only("fp4", None, "experts run in bf16"),
    _Only("fp4_param", False, "experts run in bf16"),
    _Only("quant_recipe", None, "experts run in bf16"),
    _Only("expert_tensor_parallel_size", 1, "an expert lies on one rank"),
    _Only("expert_tensor_parallel_num_weight_shards", (None, 1), "an expert lies on one rank"),
    _Only("expert_gtp_weight_remat_size", 1, "an expert lies on one rank"),
    _Only("moe_latent_size", None, "experts work on the hidden size"),
    _Only("moe_apply_probs_on_input", False, "probabilities are applied before fc2"),
    _Only("moe_pad_expert_input_to_capacity", False, "only routed tokens travel"),
    _Only("moe_pad_experts_for_cuda_graph_inference", (None, False), "only routed tokens travel"),
    _Only("moe_router_padding_for_quantization", (None, False), "only routed tokens travel"),
    _Only("moe_router_padding_for_fp8", (None, False), "only routed tokens travel"),
    _Only("moe_shared_expert_overlap", False, "shared experts run before the routed ones"),
    _Only("moe_paged_stash", False, "uniep keeps what backward needs in tensors of its own"),
    _Only("moe_use_legacy_grouped_gemm", False, "its weights are transposed"),
    _Only("overlap_dispatch_backward_with_experts_wgrad", False, "uniep overlaps both by itself"),
    _Only("init_model_with_meta_device", False, "weights are filled when the layer is built"),
    _Only("inference_fuse_tp_communication", False, "the layer is for training"),
    _Only("log_moe_overload_factor", False, "rows of experts are not counted on the host"),
]


class _Function(NamedTuple):
    """An activation_func, and what uniep calls it with and without a gate."""

    name: str
    functions: tuple[Any, ...]
    gated: Activation | None
    alone: Activation | None
    # Of glu_linear_offset and activation_func_clamp_value, with a gate.
    offset: float = 0.0
    clamp: float | None = None


_FUNCTIONS = [
    _Function("silu", (F.silu,), "swiglu", "silu"),
    _Function("silu", (F.silu,), "swiglu_clamped", "silu", clamp=10.0),
    _Function("gelu", (F.gelu,), "geglu", "gelu"),
    _Function("relu", (F.relu,), "reglu", None),
    _Function("squared_relu", (squared_relu,), None, "relu2"),
    _Function("quick_gelu", (quick_gelu, fused_bias_geglu.quick_gelu), "gpt_oss", None, 1.0, 7.0),
]


def activation_of(config: Any) -> Activation:
    """What uniep calls the activation of a configuration that :func:`check_config` accepts."""
    function = _function_of(config)
    assert function is not None
    activation = function.gated if config.gated_linear_unit else function.alone
    assert activation is not None
    return activation


def _functions_of(config: Any) -> list[_Function]:
    """Those with the configuration's function, the one with its clamp ahead of all others."""
    chosen = getattr(config, "activation_func", None)
    clamp = getattr(config, "activation_func_clamp_value", None)
    known = [f for f in _FUNCTIONS if any(chosen is own for own in f.functions)]
    return sorted(known, key=lambda f: f.clamp != clamp)


def _function_of(config: Any) -> _Function | None:
    return next(iter(_functions_of(config)), None)


def _refused_activations(config: Any) -> Iterator[tuple[str, Any, str]]:
    function, gated = _function_of(config), getattr(config, "gated_linear_unit", False)
    if function is None or (function.gated if gated else function.alone) is None:
        chosen = getattr(config, "activation_func", None)
        name = getattr(chosen, "__name__", chosen) if function is None else function.name
        named = (f.name for f in _FUNCTIONS if (f.gated if gated else f.alone) is not None)
        known = list(dict.fromkeys(named))
        yield "activation_func", name, f"one of {known} where gated_linear_unit is {gated}"
    elif gated:
        clamps = " or ".join(str(f.clamp) for f in _functions_of(config))
        for option, wanted, accepted in (
            ("glu_linear_offset", function.offset, function.offset),
            ("activation_func_clamp_value", function.clamp, clamps),
        ):
            value = getattr(config, option, wanted)
            if value != wanted:
                yield option, value, f"{accepted} where activation_func is {function.name}"


def check_config(config: Any) -> None:
    """Refuses a configuration that asks for what uniep does not do.

    Raises:
        ValueError: names the first such option, its value and what is accepted.
    """
    _raise_first(_refused(config))


def check_padding(config: Any) -> None:
    """As :func:`check_config`, of what Megatron's inference sets where layers have long been built.

    Raises:
        ValueError: likewise.
    """
    for only in _ONLY:
        if only.option == "moe_pad_expert_input_to_capacity":
            _raise_first(_refused_value(config, only))


def _raise_first(refused: Iterator[tuple[str, Any, str]]) -> None:
    for option, value, accepted in refused:
        raise ValueError(f"{option} is {value}; with uniep's experts it must be {accepted}")


def _refused_value(config: Any, only: _Only) -> Iterator[tuple[str, Any, str]]:
    accepted = only.accepted if isinstance(only.accepted, tuple) else (only.accepted,)
    value = getattr(config, only.option, accepted[0])
    if value not in accepted:
        yield only.option, value, f"{accepted[-1]} ({only.why})"


def _refused(config: Any) -> Iterator[tuple[str, Any, str]]:
    def get(name: str, default: Any = None) -> Any:
        return getattr(config, name, default)  # options come and go with Megatron's versions

    yield from _refused_activations(config)
    for only in _ONLY:
        yield from _refused_value(config, only)
    if get("params_dtype") != torch.bfloat16 and not get("bf16", False):
        yield "params_dtype", get("params_dtype"), "torch.bfloat16"
    if get("transformer_impl") == "inference_optimized":
        yield "transformer_impl", "inference_optimized", "local or transformer_engine"
    yield from _refused_schedules(config)
    offloaded = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(get("offload_modules") or [])
    if get("fine_grained_activation_offloading", False) and offloaded:
        yield "offload_modules", sorted(offloaded), "without them (the experts have no such parts)"


def _parts_in_graphs(config: Any) -> list[str]:
    """Names of a layer's parts that Megatron captures in CUDA graphs of their own."""
    modules = getattr(config, "cuda_graph_modules", None)
    if modules is None:  # megatron-core 0.16
        modules = getattr(config, "cuda_graph_scope", None)
    modules = modules if isinstance(modules, (list, tuple)) else [modules] if modules else []
    return [getattr(module, "name", str(module)) for module in modules]


def is_in_graph_of_te(config: Any, part: str) -> bool:
    """Whether Transformer Engine captures that part of a layer in a CUDA graph."""
    graphs = getattr(config, "cuda_graph_impl", "none")
    return graphs == "transformer_engine" and part in _parts_in_graphs(config)


def frees_inputs_of_graphs(config: Any) -> bool:
    """Whether Megatron frees what its graph of the router gets; the tokens must outlive it."""
    recomputed = getattr(config, "recompute_modules", None) or []
    return (
        is_in_graph_of_te(config, "moe_preprocess")
        and getattr(config, "recompute_granularity", None) == "selective"
        and "layernorm" in recomputed
    )


def _refused_schedules(config: Any) -> Iterator[tuple[str, Any, str]]:
    overlap = getattr(config, "overlap_moe_expert_parallel_comm", False)
    if overlap and config.moe_token_dispatcher_type == "flex":
        yield (
            "moe_token_dispatcher_type",
            "flex",
            "alltoall where overlap_moe_expert_parallel_comm is True",
        )
    graphs = getattr(config, "cuda_graph_impl", "none")
    if graphs in ("none", "full_iteration"):
        return
    names = _parts_in_graphs(config)
    if names == ["full_iteration"]:
        return
    if not names or not set(names) <= _CAPTURED_ALONE:
        yield (
            "cuda_graph_modules",
            names,
            f"one or more of {sorted(_CAPTURED_ALONE)} where cuda_graph_impl is '{graphs}' (the "
            "experts can be captured with cuda_graph_impl='full_iteration' only)",
        )
