"""The router beside those of transformers: the same experts, weights and gradients."""

from __future__ import annotations

import importlib

import pytest
import torch

from uniep import Router, RouterConfig

pytest.importorskip("transformers")

HIDDEN, EXPERTS, TOPK = 32, 16, 4

SIGMOID = RouterConfig("sigmoid", bias=True, scaling_factor=2.5)
GROUPS = {"n_group": 4, "topk_group": 2}

# Model, its configuration in transformers, ours.
MODELS = {
    "deepseek_v3": (
        "deepseek_v3.DeepseekV3",
        {**GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_routed_experts": 16},
        RouterConfig("sigmoid", bias=True, scaling_factor=2.5, **GROUPS),
    ),
    "kimi_k2": (  # DeepSeek-V3's code with one group
        "deepseek_v3.DeepseekV3",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_routed_experts": 16,
        },
        SIGMOID,
    ),
    "glm4_moe": (
        "glm4_moe.Glm4Moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_routed_experts": 16,
        },
        SIGMOID,
    ),
    "deepseek_v2": (
        "deepseek_v2.DeepseekV2",
        {
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_routed_experts": 16,
        },
        RouterConfig(normalize=False, group_score="max", scaling_factor=16.0, **GROUPS),
    ),
    "deepseek_v4": (
        "deepseek_v4.DeepseekV4",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "n_routed_experts": 16},
        RouterConfig("sqrtsoftplus", bias=True, scaling_factor=1.5),
    ),
    "longcat_flash": (  # 12 experts and 4 that compute nothing
        "longcat_flash.LongcatFlash",
        {"n_routed_experts": 12, "zero_expert_num": 4, "routed_scaling_factor": 6.0},
        RouterConfig(bias=True, normalize=False, scaling_factor=6.0),
    ),
    "qwen3_moe": (
        "qwen3_moe.Qwen3Moe",
        {"norm_topk_prob": True, "num_experts": 16},
        RouterConfig(),
    ),
    "olmoe": (
        "olmoe.Olmoe",
        {"norm_topk_prob": False, "num_experts": 16},
        RouterConfig(normalize=False),
    ),
    "mixtral": ("mixtral.Mixtral", {"num_local_experts": 16}, RouterConfig()),
    "gpt_oss": ("gpt_oss.GptOss", {"num_local_experts": 16}, RouterConfig(logit_bias=True)),
    "granitemoe": ("granitemoe.GraniteMoe", {"num_local_experts": 16}, RouterConfig()),
}


def original(name):
    """A model's own router, with random weights."""
    family, options, _ = MODELS[name]
    package, prefix = family.split(".")
    config = getattr(
        importlib.import_module(f"transformers.models.{package}.configuration_{package}"),
        prefix + "Config",
    )(hidden_size=HIDDEN, num_experts_per_tok=TOPK, moe_topk=TOPK, **options)
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    router = getattr(module, f"{prefix}TopkRouter", None) or getattr(module, f"{prefix}TopKRouter")
    router = router(config)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.normal_(std=0.3)
    return router


def ours(name, router):
    """uniep's, with the same weights."""
    found = Router(HIDDEN, EXPERTS, TOPK, MODELS[name][2])
    linear = getattr(router, "classifier", router)
    with torch.no_grad():
        found.weight.copy_(linear.weight)
        if found.logit_bias is not None:
            found.logit_bias.copy_(router.bias)
        if found.bias is not None:
            found.bias.copy_(router.e_score_correction_bias)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_is_the_models_router(name):
    torch.manual_seed(3)
    theirs = original(name)
    mine = ours(name, theirs)
    x = torch.randn(200, HIDDEN)
    _, weights, indices = theirs(x)
    found = mine(x)
    torch.testing.assert_close(found.ids.sort(-1).values, indices.sort(-1).values)
    dense = torch.zeros(200, EXPERTS)
    wanted = dense.scatter(1, indices, weights.float())
    got = dense.scatter(1, found.ids, found.probs)
    torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-7)
    direction = torch.randn(200, EXPERTS)
    (wanted * direction).sum().backward()
    (got * direction).sum().backward()
    their_weight = getattr(theirs, "classifier", theirs).weight
    torch.testing.assert_close(mine.weight.grad, their_weight.grad, rtol=1e-4, atol=1e-5)
    if mine.logit_bias is not None:
        torch.testing.assert_close(mine.logit_bias.grad, theirs.bias.grad, rtol=1e-4, atol=1e-5)
