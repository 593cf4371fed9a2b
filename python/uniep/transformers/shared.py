"""Shared experts of transformers' MoE blocks in the pass of the routed ones.

The block calls its shared experts itself, so the block's forward is what changes. It does what the
blocks named here do: router, experts, shared experts, whose sum is the output.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _shared_experts
from .._shared_experts import Shared
from ..arithmetic import Activation
from .blocks import become, check_hooks, with_forward
from .experts import (
    IMPLEMENTATIONS,
    Facts,
    OwnGate,
    activation_of,
    facts_of,
    gate_of,
    is_offloaded,
    registered,
    without_adapters,
)

__all__ = [
    "check_block",
    "fuse",
    "is_fused",
    "names_of_shared",
    "separate",
]

# Blocks whose output is the sum of experts(x) and shared_experts(x), or of the latter times
# sigmoid(shared_expert_gate(x)).
_BLOCKS = {
    "DeepseekV3MoE",
    "DeepseekV4SparseMoeBlock",
    "Glm4MoeMoE",
    "Glm5NextTextMoE",
    "HYV4MoE",
    "MiniMaxM3VLSparseMoeBlock",
    "NemotronHMoE",
    "Qwen2MoeSparseMoeBlock",
    "Qwen3NextSparseMoeBlock",
}
# Those that multiply what experts return by `routed_scaling_factor`; elsewhere the router does.
_SCALED = {"MiniMaxM3VLSparseMoeBlock"}
# Shared experts whose gate is their own.
_OWN_GATES = {
    "DeepseekV4MLP": OwnGate("swiglu_clamped", {"limit": 10.0}, of_silu=True),
    "Glm5NextTextMLP": OwnGate("swiglu_clamped", {"swiglu_limit": 10.0}, of_silu=True),
    "MiniMaxM3VLDenseMLP": OwnGate("gpt_oss", {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
}
_MODULES = ("shared_experts", "shared_expert")
_UPS = ("gate_up_proj", "gate_proj", "up_proj")
_APART = "shared_experts='apart' is accepted"
# What the forward with shared experts in the pass calls of the block's modules.
_CALLED = ("gate", "experts", "shared_expert_gate")


def names_of_shared(block: nn.Module) -> list[str]:
    """Of the block's modules that have to do with shared experts."""
    return [name for name, _ in block.named_children() if "shared" in name]


def check_block(block: Any, name: str) -> None:
    """Looks whether the block's shared experts can run in the pass.

    Args:
        block: one with shared experts.
        name: of the block in its model.

    Raises:
        NotImplementedError: the sentence that says why not.
    """
    kind = type(block).__name__
    if not _is_known(block):
        reason = (
            "gives its shared expert x, and the others x times their scores"
            if kind == "Llama4TextMoe"
            else f"is none of the blocks that uniep knows, {', '.join(sorted(_BLOCKS))}"
        )
        raise NotImplementedError(f"{kind} {reason}; {_APART}")
    if not isinstance(getattr(block, "fc1_latent_proj", nn.Identity()), nn.Identity):
        raise NotImplementedError(
            f"{kind} projects what its routed experts are given, but not the shared ones; {_APART}"
        )
    experts, shared = without_adapters(block.experts), _module(block)
    facts = facts_of(experts)
    found = _activation(shared)
    if found != facts.activation or facts.bias or _has_bias(shared):
        raise NotImplementedError(
            f"{kind} has {'biases' if facts.bias or _has_bias(shared) else f'activation {found}'} "
            f"in its shared experts or the others, of {facts.activation}; uniep runs both in one "
            f"pass where they are alike and without biases; {_APART}"
        )
    if any(isinstance(param, DTensor) for param in block.parameters()):
        raise NotImplementedError(
            f"the weights of {kind} are spread over ranks already; call use before fully_shard, "
            f"and with transformers' expert parallelism {_APART}"
        )
    _check_linears(shared)
    width, intermediate = shared.down_proj.weight.shape[1], _intermediate(experts, facts)
    together = _shared_experts.count(width, intermediate)
    if block.gate.top_k + together > _shared_experts.MAX_SLOTS:
        raise NotImplementedError(
            f"{kind} has shared experts of {width} columns, which are {together} of the routed "
            f"ones' {intermediate}, and a token has {block.gate.top_k} routed experts; in one pass "
            f"they are at most {_shared_experts.MAX_SLOTS} together; {_APART}"
        )
    _check_hooks(block, name)


def fuse(block: Any) -> None:
    """Makes the block's forward run its shared experts in the pass."""
    if not hasattr(type(block), "_can_be_fused"):
        own_class: Any = type(block)
        become(block, _fused(own_class))
    block._uniep_is_fused = True
    ups, experts = _ups(_module(block)), without_adapters(block.experts)
    if ups[0].shape[0] == _intermediate(experts, facts_of(experts)) and len(ups) > 1:
        _shared_experts.lay_together(ups)


def separate(block: Any) -> None:
    """The block's own forward again. Its class stays: FSDP2 may have made another of it."""
    if is_fused(block):
        block._uniep_is_fused = False


def is_fused(block: Any) -> bool:
    """Whether the block's forward is that of :func:`fuse`."""
    fused: bool = getattr(block, "_uniep_is_fused", False)
    return fused


@functools.cache
def _fused(block_class: Any) -> Any:
    """A subclass, whose forward is the class' own again where it is told so."""

    def forward(block: Any, *inputs: Any, **more: Any) -> Any:
        run = _forward if is_fused(block) else block_class.forward
        return run(block, *inputs, **more)

    return with_forward(_fused, block_class, forward, "_can_be_fused")


def _forward(block: Any, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
    own = without_adapters(block.experts)
    implementation = own.config._experts_implementation
    if implementation not in IMPLEMENTATIONS or getattr(own, "_is_expert_parallel", False):
        raise RuntimeError(
            f"the shared experts of this {type(block).__name__} run in uniep's pass, and "
            f"experts_implementation is '{implementation}'; it must be one of {registered()}, of "
            "experts that are all in this process, or use(model, shared_experts='apart') be called"
        )
    _check_hooks(block)  # which may have come since, as adapters may
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    by_token = (input_ids,) if getattr(block, "is_hash", False) else ()  # of DeepSeek-V4
    _, weights, ids = block.gate(flat, *by_token)
    if any(cls.__name__ in _SCALED for cls in type(block).__mro__):
        weights = weights * block.routed_scaling_factor
    out: Tensor = block.experts(flat, ids, weights, shared=_shared(block, flat))
    return out.view(hidden_states.shape)


def _shared(block: Any, x: Tensor) -> Shared:
    module = _module(block)
    ups, down = _ups(module), module.down_proj.weight
    if any(isinstance(weight, DTensor) for weight in (*ups, down)):
        raise RuntimeError(
            f"the shared experts of {type(block).__name__} are sharded by themselves; in uniep's "
            "pass they must be gathered with their block: call fully_shard on that or its layer"
        )
    _check_linears(module)  # adapters may have come since
    experts = without_adapters(block.experts)
    intermediate = _intermediate(experts, facts_of(experts))
    w1, w2 = _shared_experts.weights(ups, down, intermediate)
    gate = getattr(block, "shared_expert_gate", None)
    if gate is None:
        return Shared(w1, w2)
    # One gate for all: each of them counts as often.
    return Shared(w1, w2, torch.sigmoid(gate(x)).float().expand(-1, w1.shape[0]))


def _is_known(block: nn.Module) -> bool:
    return any(
        cls.__name__ in _BLOCKS and cls.__module__.startswith("transformers.")
        for cls in type(block).__mro__
    )


def _activation(shared: Any) -> Activation:
    gate = _OWN_GATES.get(type(shared).__name__)
    if gate is None:
        return activation_of(shared, hasattr(shared, "gate_proj"))
    try:
        return gate_of(shared, gate)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error}; {_APART}") from None


def _module(block: Any) -> Any:
    return next(getattr(block, name) for name in _MODULES if hasattr(block, name))


def _ups(module: Any) -> list[nn.Parameter]:
    return [getattr(module, name).weight for name in _UPS if hasattr(module, name)]


def _check_linears(module: Any) -> None:
    """Looks whether the weights of its layers are all that these are: an adapter's is its base's.

    Raises:
        NotImplementedError: the sentence that says which is not.
    """
    for name in (*_UPS, "down_proj"):
        layer = getattr(module, name, None)
        if layer is not None and type(layer) is not nn.Linear:
            raise NotImplementedError(
                f"{name} of {type(module).__name__} is a {type(layer).__module__}."
                f"{type(layer).__qualname__}, of which uniep's pass would read the weight alone, "
                "without an adapter (LoRA) or whatever else it computes; torch.nn.Linear is "
                "accepted, and any other after use(model, shared_experts='apart')"
            )
        if is_offloaded(layer):
            raise NotImplementedError(
                f"accelerate has offloaded {name} of {type(module).__name__} (cpu_offload, "
                "device_map), and brings it where its own forward runs, which uniep's pass does "
                f"not call; {_APART}"
            )


def _check_hooks(block: nn.Module, name: str = "") -> None:
    check_hooks(block, _CALLED, name, ", and with shared_experts='apart' any")


def _has_bias(module: nn.Module) -> bool:
    return any(name.endswith("bias") for name, _ in module.named_parameters())


def _intermediate(experts: Any, facts: Facts) -> int:
    """I of the routed experts."""
    size: int = experts.down_proj.shape[1 if facts.transposed else 2]
    return size
