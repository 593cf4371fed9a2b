"""Which configs of torchtitan's layers uniep computes; one sentence for everything else."""

from __future__ import annotations

from typing import Any

from torchtitan.config import derive
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher

from .. import _shared_experts
from .shared import UniepGatedSharedExperts, UniepSharedExperts


def is_gpt_oss(experts: Any) -> bool:
    """Whether this is the config of gpt-oss' experts, whose package is not imported for others."""
    kind = type(experts)
    return (kind.__module__, kind.__qualname__) == (
        "torchtitan.models.gpt_oss.moe",
        "GptOssGroupedExperts.Config",
    )


def refuse_unsupported(config: Any) -> None:
    """Raises one sentence if these are not bf16 experts of torchtitan's, or drop tokens."""
    _refuse_lora(config)
    if type(config) is not RoutedExperts.Config:
        raise NotImplementedError(
            f"{type(config).__qualname__} is not torchtitan's own RoutedExperts.Config; uniep does "
            "not know what it adds"
        )
    experts = config.inner_experts
    if is_gpt_oss(experts):
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


def refuse_other_layers(config: Any) -> None:
    """Raises one sentence if this is no MoE layer of torchtitan's own."""
    _refuse_lora(config)
    if type(config) is not MoE.Config:
        raise NotImplementedError(
            f"{type(config).__qualname__} is not torchtitan's own MoE.Config; uniep does not know "
            "what it adds (uniep_routed_experts takes it)"
        )


def shared_config(config: Any) -> Any:
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
    if is_gpt_oss(config.routed_experts.inner_experts):
        raise NotImplementedError(
            "gpt-oss' experts have an activation of their own, and these shared experts SwiGLU; "
            "uniep_routed_experts leaves these to torchtitan"
        )
    _shared_experts.count(shared.w1.out_features, config.routed_experts.inner_experts.hidden_dim)
    return derive(shared, kinds[type(shared)])


def _refuse_lora(config: Any) -> None:
    """Raises one sentence if torchtitan's LoRAConverter has frozen this."""
    if type(config).__module__ == "torchtitan.components.lora":
        raise NotImplementedError(
            f"LoRAConverter has made a {type(config).__qualname__} of this layer, whose experts "
            "would not train; uniep does not run torchtitan's LoRA: take the converter out of the "
            "model's converters, or uniep's out of override.imports"
        )
