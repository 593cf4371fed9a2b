"""Small random models of transformers' own classes, and what compares two ways to run one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import uniep.transformers
from uniep.transformers.experts import is_packed, to_model

transformers.logging.set_verbosity_error()

# Relative L2 distances from the model's own results; docs/transformers.md states these limits. Both
# sides round to bf16, each in its own order. The model's own logits are up to 1.6e-2 and its own
# gradients up to 3e-2 from float64 (Qwen3-Next: 9.7e-2), and two right roundings differ by at most
# twice that.
LOGITS = 1.5e-2
GRADIENT = 5e-2

Result = tuple[Tensor, dict[str, Tensor]]  # logits, gradients by name


class Model(NamedTuple):
    """A model by its names in transformers."""

    title: str
    name: str  # of the classes, without Config and ForCausalLM
    sizes: dict[str, Any]
    suffixes: tuple[str, str] = ("Config", "ForCausalLM")
    samples: bool = False  # in training its router draws experts at random

    @property
    def classes(self) -> list[str]:
        return [self.name + suffix for suffix in self.suffixes]


SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,  # the experts' part of the logits is not small
}
_DEEPSEEK_V3 = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS = {
    "mixtral": Model("Mixtral", "Mixtral", {"num_local_experts": 8, "intermediate_size": 48}),
    "qwen3_moe": Model(
        "Qwen3-MoE",
        "Qwen3Moe",
        {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen2_moe": Model(
        "Qwen2-MoE",
        "Qwen2Moe",
        {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_next": Model(
        "Qwen3-Next",
        "Qwen3Next",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            "head_dim": 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "olmoe": Model(
        "OLMoE", "Olmoe", {"num_experts": 8, "intermediate_size": 40, "num_experts_per_tok": 4}
    ),
    "deepseek_v3": Model("DeepSeek-V3", "DeepseekV3", _DEEPSEEK_V3),
    "kimi_k2": Model(
        "Kimi-K2",
        "Kimi_K25",
        {
            "text_config": {**SIZES, **_DEEPSEEK_V3, "model_type": "kimi_k2"},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
            },
        },
        ("Config", "ForConditionalGeneration"),
    ),
    "glm4_moe": Model(
        "GLM-4.5",
        "Glm4Moe",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        },
    ),
    "gpt_oss": Model(
        "gpt-oss", "GptOss", {"num_local_experts": 8, "intermediate_size": 40, "head_dim": 16}
    ),
    "phimoe": Model(
        "Phi-3.5-MoE",
        "Phimoe",
        # With little noise the router leaves out all but the nearest experts, and a rounding would
        # decide which.
        {"num_local_experts": 8, "intermediate_size": 48, "router_jitter_noise": 10.0},
        samples=True,
    ),
    "granitemoe": Model(
        "Granite-MoE", "GraniteMoe", {"num_local_experts": 8, "intermediate_size": 40}
    ),
    "llama4": Model(
        "Llama-4",
        "Llama4",
        {
            "num_local_experts": 8,
            "intermediate_size": 48,
            "intermediate_size_mlp": 64,
            "head_dim": 16,
            "num_experts_per_tok": 1,
        },
        ("TextConfig", "ForCausalLM"),
    ),
    "nemotron_h": Model(
        "Nemotron-H",
        "NemotronH",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["attention", "moe", "attention", "moe"],
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        },
    ),
    "deepseek_v4": Model(
        "DeepSeek-V4",
        "DeepseekV4",
        {
            "intermediate_size": None,
            "num_key_value_heads": 1,
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["moe", "moe"],
            "layer_types": ["sliding_attention", "sliding_attention"],
            "sliding_window": 16,
            "head_dim": 16,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "hc_mult": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 8,
        },
    ),
    "minimax_m3": Model(
        "MiniMax-M3",
        "MiniMaxM3VL",
        {"num_local_experts": 8, "intermediate_size": 32, "head_dim": 16},
        ("TextConfig", "ForCausalLM"),
    ),
}


def small(kind: str, **changes: Any) -> nn.Module:
    case = MODELS[kind]
    config_class, model_class = (getattr(transformers, name) for name in case.classes)
    sizes = {**({} if "text_config" in case.sizes else SIZES), **case.sizes, **changes}
    config = config_class(**{name: size for name, size in sizes.items() if size is not None})
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("_bias") and "experts" in name:  # transformers begins with zeros
                param.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by token; likewise
                token, slot = torch.meshgrid(*map(torch.arange, buffer.shape), indexing="ij")
                buffer.copy_((token + 3 * slot) % 8)
    return model.bfloat16().train(not case.samples)


def fused(kind: str, **changes: Any) -> Any:
    model: Any = small(kind, **changes)
    uniep.transformers.use(model, shared_experts="fused")
    return model


def shared_module(model: Any) -> Any:
    """Of the first block that has one."""
    return next(m for n, m in model.named_modules() if n.endswith(("shared_experts", "_expert")))


def never(*_: Any) -> None:
    pytest.fail("a shared expert ran apart")


# Sizes that constructors of experts read, under whichever name.
SIZES_OF_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "hidden_size": 32,
    "moe_hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "hidden_act": "silu",
    "swiglu_alpha": 1.702,
    "post_norm_eps": 1e-6,
    "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 25.0,
}


def experts_of(path: str, **options: Any) -> Any:
    """Experts of a class in transformers' folder of models, in bf16, to be filled."""
    module, name = path.rsplit(".", 1)
    experts_class = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return experts_class(SimpleNamespace(**{**SIZES_OF_EXPERTS, **options})).bfloat16()


def tokens() -> Tensor:
    return torch.randint(256, (2, 23), generator=torch.Generator().manual_seed(1))


def step(model: Any, ids: Tensor, implementation: str | None = None) -> Result:
    """Logits and gradients of one forward and backward."""
    if implementation is not None:
        model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for prefix, module in model.named_modules():
        if is_packed(module):  # as the model's own parameters lie
            for which, name in enumerate(module._uniep_packed.names):
                own_name = f"{prefix}.{name}"
                grads[own_name] = to_model(grads[own_name], which, module._uniep_packed)
    return whole(out.logits.detach()), grads


def assert_same(found: Result, wanted: Result) -> None:
    """Bit by bit."""
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    assert [name for name in found[1] if not torch.equal(found[1][name], wanted[1][name])] == []


def whole(tensor: Tensor) -> Tensor:
    full: Callable[[], Tensor] = getattr(tensor, "full_tensor", tensor.clone)
    return full()


@contextmanager
def router_choices(
    record: list[Tensor] | None = None, replay: list[Tensor] | None = None
) -> Iterator[None]:
    """Keeps the routers' choices, or repeats them: a rounding may turn one of two close experts."""
    choose = torch.topk, Tensor.topk, Tensor.max

    def repeatable(chosen: Callable[..., Any]) -> Any:
        def choice(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            if replay is None:
                found = chosen(scores, *args, **kwargs)
                assert record is not None
                record.append(found[1])
                return found
            ids = replay.pop(0)
            return torch.return_types.topk((scores.gather(-1, ids), ids))  # type: ignore[attr-defined]

        return choice

    def largest(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        # As Phi-3.5-MoE's router does.
        chooses = scores.dim() == 2 and kwargs == {"dim": -1, "keepdim": True}
        return (repeatable(choose[2]) if chooses else choose[2])(scores, *args, **kwargs)

    torch.topk, Tensor.topk = (repeatable(chosen) for chosen in choose[:2])
    Tensor.max = largest  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.topk, Tensor.topk, Tensor.max = choose  # type: ignore[method-assign]
    assert not replay


def distance(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double() - exact.double()).norm() / exact.double().norm())


Distances = tuple[float, dict[str, float]]


def distances(found: Result, exact: Result) -> Distances:
    assert found[1].keys() == exact[1].keys()
    return distance(found[0], exact[0]), {n: distance(found[1][n], exact[1][n]) for n in exact[1]}


def distances_of(found: Result, own: Result, exact: Result) -> tuple[Distances, ...]:
    """Of uniep's from the model's own, and of both from float64."""
    return distances(found, own), distances(found, exact), distances(own, exact)


def assert_close(found: tuple[Distances, ...], room: float = 1.2) -> None:
    """As near the model's own as two right roundings are, and no further from float64.

    Where a model's own gradient is further from float64 than that, both may be as far, each to
    another side.
    """
    from_own, from_exact, own_from_exact = found
    for what, (logits, grads) in zip(
        ("from its own", "from float64", "its own from float64"), found, strict=True
    ):
        worst = max(grads, key=lambda name: grads[name])
        mean = root_mean_square(grads)
        print(f"{what}: {logits:.1e}, gradients {mean:.1e}, at most {grads[worst]:.1e} ({worst})")
    assert from_own[0] < LOGITS
    limits = {name: max(GRADIENT, 2 * d) for name, d in own_from_exact[1].items()}
    assert {name: d for name, d in from_own[1].items() if not d < limits[name]} == {}
    assert from_exact[0] < room * own_from_exact[0]
    assert root_mean_square(from_exact[1]) < room * root_mean_square(own_from_exact[1])


def root_mean_square(values: dict[str, float]) -> float:
    return float(torch.tensor(list(values.values())).square().mean().sqrt())
