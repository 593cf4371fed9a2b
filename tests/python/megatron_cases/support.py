"""Layers, models and comparisons that the cases share."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Largest relative L2 distances from Megatron's layer; docs/megatron.md states them.
OUTPUT = 5e-3


OTHER_OUTPUT = 1e-2  # of experts that are not SwiGLU without biases


KINK_GRADIENT = 4e-2  # of activations with a kink


GRADIENT = 1e-2


MODEL_GRADIENT = 3e-2


HIDDEN, INTERMEDIATE, EXPERTS = 64, 48, 8


def make_groups(expert_parallel: int) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1
    )


def make_config(**options: Any) -> Any:
    """A TransformerConfig; options of other versions are left out."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": INTERMEDIATE,
        "moe_ffn_hidden_size": INTERMEDIATE,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "expert_model_parallel_size": dist.get_world_size(),
        "expert_tensor_parallel_size": 1,
    }
    return TransformerConfig(**{**values, **options})


def make_spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)


def make_layer(config: Any, **options: Any) -> Any:
    """The MoE layer of Megatron's spec; with options, uniep's."""
    from megatron.core.transformer.spec_utils import build_module

    from uniep.megatron import with_uniep

    spec = with_uniep(make_spec(), **options) if options else make_spec()
    mlp = spec.submodules.mlp
    return mlp(config=config) if callable(mlp) else build_module(mlp, config=config)


def make_pair(seed: int = 1, **options: Any) -> tuple[Any, Any]:
    """Megatron's layer and uniep's, with the same weights."""
    layout = options.pop("layout", "stacked")
    torch.manual_seed(seed)
    theirs, ours = (
        make_layer(make_config(**options)),
        make_layer(make_config(**options), layout=layout),
    )
    draw_biases(theirs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def draw_biases(layer: Any) -> None:
    """Megatron begins with zeros, which are not seen."""
    with torch.no_grad():
        for name, param in layer.experts.named_parameters():
            if "bias" in name:
                param.normal_(0, 0.2)


def of_experts(layer: Any, attribute: str) -> list[Tensor]:
    """`attribute` of fc1's and fc2's weights, or the weights themselves, as [experts, ...].

    And of their biases, where they have some.
    """
    found = []
    kinds = ("weight", "bias") if layer.config.add_bias_linear else ("weight",)
    for kind, name in ((kind, name) for kind in kinds for name in ("linear_fc1", "linear_fc2")):
        if hasattr(layer.experts, "local_experts"):
            params = [getattr(getattr(e, name), kind) for e in layer.experts.local_experts]
            stacked = False
        else:
            named = getattr(layer.experts, name).named(kind)
            params, stacked = list(named.values()), kind in named
        tensors = [p.detach() if attribute == "data" else getattr(p, attribute) for p in params]
        found.append(tensors[0] if stacked else torch.stack(tensors))
    return [tensor.clone() for tensor in found]


def make_tokens(seed: int = 0, length: int = 16) -> Tensor:
    torch.manual_seed(100 * seed + dist.get_rank())
    return torch.randn(length, 2, HIDDEN, dtype=torch.bfloat16)


def run_layer(layer: Any, x: Tensor) -> list[Tensor]:
    """Output and gradient of the input."""
    x = x.clone().requires_grad_()
    out, bias = layer(x)
    assert bias is None
    out.backward(_gradient(x))
    assert x.grad is not None
    return [out.detach(), x.grad]


def _gradient(x: Tensor) -> Tensor:
    return (0.5 + x.detach().float().roll(1, 0)).bfloat16()


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def expect_close(found: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    distance = _distance(found, wanted)
    assert distance < limit, f"{what}: relative L2 distance {distance:.2e}, at most {limit:.0e}"
    figures.append((what, distance))


def expect_same(found: Any, wanted: Any, what: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), f"{what}: distance {_distance(one, other):.2e}"


figures: list[tuple[str, float]] = []  # distances of this process, for the guide


def expect_raises(
    kind: type[BaseException], sentence: str, call: Any, *args: Any, **kw: Any
) -> str:
    try:
        call(*args, **kw)
    except kind as error:
        assert sentence in str(error), f"{sentence!r} is not in {error}"
        return str(error)
    raise AssertionError(f"nothing was raised; wanted was {sentence!r}")


def other_experts() -> dict[str, dict[str, Any]]:
    """Experts that are not SwiGLU without biases, by what uniep calls their activation."""
    from megatron.core.activations import quick_gelu, squared_relu

    return {
        "gpt_oss": {
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "add_bias_linear": True,
        },
        "swiglu_clamped": {"activation_func_clamp_value": 10.0},
        "geglu": {"activation_func": F.gelu},
        "reglu": {"activation_func": F.relu},
        "swiglu": {"add_bias_linear": True},
        "relu2": {"activation_func": squared_relu, "gated_linear_unit": False},
        "gelu": {"activation_func": F.gelu, "gated_linear_unit": False, "add_bias_linear": True},
        "silu": {"gated_linear_unit": False},
    }


def gathered(tensors: list[Tensor]) -> list[Tensor]:
    """Of the experts of all ranks of the expert-parallel group."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    found = []
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        found.append(torch.cat(parts))
    return found


def text(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(100 * seed + dist.get_rank())
    tokens = torch.randint(0, 128, (2, 32))
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(32).expand(2, 32),
        "attention_mask": torch.ones(1, 1, 32, 32).tril() < 0.5,
        "labels": tokens.roll(-1, 1),
    }


def wrapped(
    layer: Any, *, fp32: bool, distributed: bool, delay: bool = False, overlap: bool = True
) -> Any:
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(layer.config)
            self.mlp = layer

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.mlp(x)[0]
            return out

    return in_ddp(Model(), fp32=fp32, distributed=distributed, delay=delay, overlap=overlap)


def in_ddp(module: Any, *, fp32: bool, distributed: bool, delay: bool, overlap: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=fp32,
        overlap_grad_reduce=overlap,  # then its hooks assert that there is a gradient
        use_distributed_optimizer=distributed,
        bucket_size=20000,
        delay_wgrad_compute=delay,
    )
    return DistributedDataParallel(module.config, options, module)


def train(model: Any, *, steps: int = 2, delay: bool = False) -> None:
    """Two microbatches, into the main gradients."""
    model.zero_grad_buffer()
    for step in range(steps):
        with contextlib.nullcontext() if step == steps - 1 else model.no_sync():
            x = make_tokens(step)
            out = model(x)
            out.backward(_gradient(x))
            if delay:
                model.module.mlp.backward_dw()
    model.finish_grad_sync()
