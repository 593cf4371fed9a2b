"""What a module of experts in transformers computes, and how its weights lie.

transformers' decorator ``use_experts_implementation`` leaves on every class of experts what it
states here; only gates of a model's own have to be known by name. uniep reads weights where they
lie, but on GPUs no columns of gate and up by turns, as gpt-oss has them: w1 is then rearranged in
every call. :func:`pack` rearranges once whatever does not have gate rows, then up rows, and outputs
before inputs, which is fastest on GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

try:
    from transformers.integrations import moe as _hf_moe
except ImportError as error:
    raise ImportError(
        "uniep.transformers needs transformers 5.0 or later, and it cannot be imported: "
        f"{error}; pip install transformers"
    ) from error
from .._forms import W1Layout, WeightsLayout
from ..arithmetic import Activation

__all__ = [
    "IMPLEMENTATIONS",
    "Facts",
    "Packing",
    "Weights",
    "activation_of",
    "adapted_by",
    "check_packing",
    "facts_of",
    "is_offloaded",
    "is_packed",
    "is_quantised",
    "is_to_be_packed",
    "pack",
    "registered",
    "to_model",
    "to_uniep",
    "weights_of",
    "without_adapters",
]

# Names under which uniep is registered: they read packed weights, and no others do.
IMPLEMENTATIONS: set[str] = set()


def registered() -> str:
    """These names, for an error; none in a process that has only loaded a pickled model."""
    return str(sorted(IMPLEMENTATIONS) or "those that uniep.transformers.register() makes known")


class Weights(NamedTuple):
    """What :func:`uniep.moe` is given of them."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    w1_layout: W1Layout = "halves"
    weights_layout: WeightsLayout = "out_in"


# transformers' activations by class, under torch's names of the functions.
_FUNCTIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
_WITH_GATE: dict[str, Activation] = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_tanh": "geglu_tanh",
    "relu": "reglu",
}
_WITHOUT_GATE: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "relu2": "relu2"}


class OwnGate(NamedTuple):
    """What a gate is, and the attributes that make it so; None: what `act_fn` makes it.

    A name with dots is that of an attribute's attribute.
    """

    activation: Activation | None
    attributes: Mapping[str, float] = MappingProxyType({})
    of_silu: bool = False  # and `act_fn` has to be silu


_SOFTCAPS = {"act_fn.gate_softcap.softcap": 4.0, "act_fn.up_softcap.softcap": 25.0}

# Classes whose gate is their own.
_OWN_GATES = {
    "GptOssExperts": OwnGate("gpt_oss", {"alpha": 1.702, "limit": 7.0}),
    "OpenAIPrivacyFilterExperts": OwnGate("gpt_oss", {"alpha": 1.702, "limit": 7.0}),
    "MiniMaxM3VLExperts": OwnGate("gpt_oss", {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
    "DeepseekV4Experts": OwnGate("swiglu_clamped", {"limit": 10.0}, of_silu=True),
    "Glm5NextTextExperts": OwnGate("swiglu_clamped", {"swiglu_limit": 10.0}),
    "HYV4Experts": OwnGate("swiglu_clamped", {"swiglu_limit": 10.0}),
    "HYV4VLExperts": OwnGate("swiglu_clamped", {"swiglu_limit": 10.0}),
    "Inkling2Experts": OwnGate("swiglu_softcapped", _SOFTCAPS),
    "Inkling2LoopExperts": OwnGate("swiglu_softcapped", _SOFTCAPS),
    "BeamExperts": OwnGate(None),  # multiplied in fp32, as by uniep
}

# Classes without the decorator, which say nothing of themselves.
_TRANSPOSED = {"Llama4TextExperts"}


@dataclass(frozen=True)
class Facts:
    """What experts compute, and how their weights lie.

    Attributes:
        activation: as :func:`uniep.moe` names it.
        bias: whether both products have biases.
        transposed: whether weights are [E, inputs, outputs].
        interleaved: whether gate and up columns alternate.
    """

    activation: Activation
    bias: bool
    transposed: bool
    interleaved: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in the order w1, w2, b1, b2."""
        gated = self.activation not in _WITHOUT_GATE.values()
        weights = ("gate_up_proj" if gated else "up_proj", "down_proj")
        return weights + tuple(f"{name}_bias" for name in weights) if self.bias else weights


def facts_of(experts: Any) -> Facts:
    """What these experts are.

    Raises:
        NotImplementedError: one sentence, for experts that uniep cannot compute.
    """
    kind = type(experts).__name__
    if is_quantised(experts):
        raise NotImplementedError(
            f"{kind} ({type(experts).__module__}) has quantised weights, and uniep computes bf16 "
            "ones; load the model with dequantize=True in its quantization_config, such as "
            "FineGrainedFP8Config(dequantize=True), or one that is not quantised"
        )
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"{kind} normalises each expert's output; uniep sums outputs as they are"
        )
    return Facts(
        _activation(experts),
        getattr(experts, "has_bias", False),
        getattr(experts, "is_transposed", kind in _TRANSPOSED),
        not getattr(experts, "is_concatenated", True),
    )


def is_quantised(module: Any) -> bool:
    """Whether these are experts that transformers puts in the place of a model's own."""
    kind = type(module)
    made_for_types = kind.__module__.startswith(("transformers.integrations.", "transformers.quan"))
    return made_for_types and kind.__name__.endswith("Experts")


def is_offloaded(module: Any) -> bool:
    """Whether accelerate keeps its weights elsewhere, and brings them for its forward alone."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))


def _activation(experts: Any) -> Activation:
    has_gate = getattr(experts, "has_gate", True)
    gate = getattr(type(experts), "_apply_gate", _hf_moe._default_apply_gate)
    if has_gate and gate is not _hf_moe._default_apply_gate:
        return _own_gate(experts, gate)
    return activation_of(experts, has_gate)


def activation_of(experts: Any, has_gate: bool) -> Activation:
    """What experts, or a module of shared ones, compute with `act_fn`.

    Raises:
        NotImplementedError: one sentence, for what uniep cannot compute.
    """
    kind = type(experts).__name__
    known = _WITH_GATE if has_gate else _WITHOUT_GATE
    function = _function(experts.act_fn)
    if function not in known:
        raise NotImplementedError(
            f"{kind} has activation {_name_of(experts.act_fn)} "
            f"{'with' if has_gate else 'without'} a gate; uniep computes {', '.join(known)}"
        )
    return known[function]


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _function(activation: Any) -> str | None:
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    for name in ("silu", "gelu", "relu"):
        if activation is getattr(nn.functional, name):
            return name
    return _FUNCTIONS.get(type(activation).__name__)


def _own_gate(experts: Any, gate: Any) -> Activation:
    kind = type(experts).__name__
    owner = gate.__qualname__.split(".")[0]  # also where a subclass inherits the gate
    if owner not in _OWN_GATES or not gate.__module__.startswith("transformers."):
        raise NotImplementedError(
            f"{kind} has a gate of its own (_apply_gate), which uniep does not know; it knows "
            f"that of {', '.join(_OWN_GATES)}"
        )
    return gate_of(experts, _OWN_GATES[owner])


def gate_of(experts: Any, gate: OwnGate) -> Activation:
    """What experts, or a module of shared ones, compute with a gate of their own.

    Raises:
        NotImplementedError: one sentence, for attributes that make it another.
    """
    kind = type(experts).__name__
    activation, attributes, of_silu = gate
    if activation is None:
        return activation_of(experts, True)
    if of_silu and _function(experts.act_fn) != "silu":
        raise NotImplementedError(
            f"{kind} has activation {_name_of(experts.act_fn)}; it must be silu, that of "
            f"activation '{activation}'"
        )
    for name, wanted in attributes.items():
        found = _attribute(experts, name)
        if found != wanted:
            raise NotImplementedError(
                f"{kind} has {name} {found}; it must be {wanted}, that of activation '{activation}'"
            )
    return activation


def _attribute(owner: Any, name: str) -> Any:
    """Its attribute, or that of its attribute; None: it has none."""
    return functools.reduce(lambda of, part: getattr(of, part, None), name.split("."), owner)


def weights_of(experts: Any, facts: Facts) -> Weights:
    """The experts' weights as uniep takes them: themselves, wherever it reads them as they lie.

    Raises:
        RuntimeError: for adapters over weights that :func:`pack` has rearranged.
    """
    _refuse_adapted(experts, facts)
    w1, w2, *biases = (getattr(experts, name) for name in facts.names)
    packed = is_packed(experts)
    if not packed:
        biases = [to_uniep(bias, i, facts) for i, bias in enumerate(biases, 2)]
    b1, b2 = biases or (None, None)
    if packed:
        return Weights(w1, w2, b1, b2)
    w1_layout: W1Layout = "interleaved" if facts.interleaved else "halves"
    weights_layout: WeightsLayout = "in_out" if facts.transposed else "out_in"
    if facts.transposed and facts.interleaved and w1.device.type != "cpu":
        w1, w1_layout = gate_first(w1, 2), "halves"
    return Weights(w1.contiguous(), w2.contiguous(), b1, b2, w1_layout, weights_layout)


def gate_first(weight: Any, dim: int) -> Any:
    """The weight with all of the gate ahead of up, which take turns along that dimension."""
    return weight.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def to_uniep(weight: Any, which: int, facts: Facts) -> Tensor:
    """A parameter by its place in `Facts.names`, from transformers' layout to uniep's."""
    if facts.transposed and weight.dim() == 3:
        weight = weight.transpose(1, 2)
    if facts.interleaved and which in (0, 2):  # rows of w1, elements of b1
        weight = gate_first(weight, 1)
    return weight.contiguous()  # type: ignore[no-any-return]


def to_model(weight: Any, which: int, facts: Facts) -> Tensor:
    """The inverse of `to_uniep`."""
    if facts.interleaved and which in (0, 2):
        weight = weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if facts.transposed and weight.dim() == 3:
        weight = weight.transpose(1, 2)
    return weight.contiguous()  # type: ignore[no-any-return]


def adapted_by(module: Any) -> nn.Module | None:
    """What a layer of peft wraps; None: it is none."""
    own = getattr(module, "base_layer", None)
    return own if isinstance(own, nn.Module) else None


def without_adapters(module: Any) -> Any:
    """What layers of peft wrap, one around the other; a module that is none as it is."""
    while (own := adapted_by(module)) is not None:
        module = own
    return module


# Weights that are rearranged once.


def is_packed(experts: Any) -> bool:
    """Whether the weights lie as uniep takes them since :func:`pack`."""
    return hasattr(experts, "_uniep_packed")


# Modules of experts to be packed, with what they are, by name.
Packing = Mapping[str, tuple[Any, Facts]]


def is_to_be_packed(experts: Any, facts: Facts) -> bool:
    """Whether :func:`pack` is for these.

    It is not for those that lie as uniep takes them, nor for such as are spread over ranks; nor for
    offloaded ones: accelerate would bring others than we have rearranged.
    """
    if is_packed(experts) or is_offloaded(experts) or not (facts.transposed or facts.interleaved):
        return False
    return not any(isinstance(getattr(experts, name), DTensor) for name in facts.names)


def check_packing(model: nn.Module, packing: Packing) -> None:
    """Looks whether whoever else knows the parameters can have them rearranged.

    Raises:
        NotImplementedError: one sentence, for wrappers that know parameters by shape, and for a
            parameter that is another module's too, which would read it as it lay.
    """
    new = {id(experts): (name, experts, facts) for name, (experts, facts) in packing.items()}
    for wrapper in model.modules():
        if isinstance(wrapper, (DistributedDataParallel, FullyShardedDataParallel)):
            for name, experts, _ in (new[id(m)] for m in wrapper.modules() if id(m) in new):
                raise NotImplementedError(
                    f"use would rearrange the weights of {name} ({type(experts).__name__}), which "
                    f"{type(wrapper).__name__} has taken as they lie; call use before that"
                )
    lie = {}
    for name, experts, facts in new.values():
        for own in facts.names:
            lie[id(getattr(experts, own))] = (_rearranged(own, facts), f"{own} of {name}")
    for name, module in model.named_modules():
        known = new[id(module)][2] if id(module) in new else _packed_as(module)
        for own, param in module.named_parameters(recurse=False):
            if id(param) not in lie:
                continue
            how, first = lie[id(param)]
            if _rearranged(own, known) != how:
                raise NotImplementedError(
                    f"{first}, which use would rearrange, is {own} of {name} "
                    f"({type(module).__name__}), too, which reads it as it lies; give each of them "
                    "a parameter of its own"
                )


def _rearranged(name: str, facts: Facts | None) -> tuple[bool, ...] | None:
    """What `to_uniep` depends on; None: for a parameter that stays as it lies."""
    if facts is None or name not in facts.names:
        return None
    return facts.names.index(name) in (0, 2), facts.transposed, facts.interleaved


def _packed_as(module: Any) -> Facts | None:
    return module._uniep_packed if is_packed(module) else None


@torch.no_grad()
def pack(experts: Any, facts: Facts) -> None:
    """Rearranges the weights once; state dicts keep transformers' shapes and order.

    The parameters stay the same objects, with other shapes. Those that another module has, too, and
    that were packed with it, are left alone. Other implementations than uniep's then refuse to run.
    """
    for which, name in enumerate(facts.names):
        param = getattr(experts, name)
        if hasattr(param, "_uniep_packed"):
            continue
        param._uniep_packed = True
        grad, param.grad = param.grad, None
        param.data = to_uniep(param.data, which, facts)
        if grad is not None:
            param.grad = to_uniep(grad, which, facts)
    experts._uniep_packed = facts
    experts.register_state_dict_post_hook(_put_back_on_save)
    experts.register_load_state_dict_pre_hook(_rearrange_on_load)
    experts.register_forward_pre_hook(_refuse_others)


def _refuse_adapted(experts: Any, facts: Facts) -> None:
    """LoRA of rearranged weights would be of no use to a model whose weights lie as ever."""
    if not is_packed(experts):
        return
    for name in facts.names:
        if is_parametrized(experts, name):
            raise RuntimeError(
                f"{name} of {type(experts).__name__} is adapted (LoRA), and use(model) has "
                "rearranged it, so the adapter would fit no other model; adapt a model first and "
                "call use after it, or set_experts_implementation('uniep') instead of use"
            )


def _refuse_others(experts: Any, _inputs: Any) -> None:
    if is_offloaded(experts):
        raise RuntimeError(
            f"accelerate has offloaded the weights of this {type(experts).__name__} as the model "
            "has them, after use(model) had rearranged them; load the model anew and call use "
            "after cpu_offload, or set_experts_implementation('uniep') instead of use"
        )
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        raise RuntimeError(
            f"the weights of this {type(experts).__name__} lie as uniep takes them, and "
            f"experts_implementation is '{implementation}'; it must be one of {registered()}, or "
            "the model loaded anew"
        )


def _put_back_on_save(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for which, name in enumerate(module._uniep_packed.names):
        if prefix + name in state:
            state[prefix + name] = to_model(state[prefix + name], which, module._uniep_packed)


def _rearrange_on_load(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for which, name in enumerate(module._uniep_packed.names):
        if prefix + name in state:
            state[prefix + name] = to_uniep(state[prefix + name], which, module._uniep_packed)
