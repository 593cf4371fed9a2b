"""Experts of transformers whose gate is their own, each class alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_cases import distance, experts_of  # noqa: E402

import uniep.transformers  # noqa: E402
from uniep.transformers.experts import facts_of  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    uniep.transformers.register()


CLAMPED = {"swiglu_limit": 10.0}
OF_GPT_OSS = {"swiglu_limit": 7.0}


@pytest.mark.parametrize(
    ("path", "activation", "options"),
    [
        ("beam.modeling_beam.BeamExperts", "swiglu", {}),
        ("deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts", "swiglu_clamped", CLAMPED),
        ("glm5_next.modeling_glm5_next.Glm5NextTextExperts", "swiglu_clamped", CLAMPED),
        ("hy_v4.modeling_hy_v4.HYV4Experts", "swiglu_clamped", CLAMPED),
        ("hy_v4_vl.modeling_hy_v4_vl.HYV4VLExperts", "swiglu_clamped", CLAMPED),
        ("inkling2.modeling_inkling2.Inkling2Experts", "swiglu_softcapped", {}),
        ("inkling2_loop.modeling_inkling2_loop.Inkling2LoopExperts", "swiglu_softcapped", {}),
        ("minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts", "gpt_oss", OF_GPT_OSS),
        (
            "openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts",
            "gpt_oss",
            OF_GPT_OSS,
        ),
    ],
)
def test_gates_of_a_models_own(path: str, activation: str, options: dict[str, float]) -> None:
    """Weights are so large that many gates and up halves are beyond the limits.

    There bf16 gradients are far from float64 ones, since roundings decide who is beyond; uniep's
    are not much further than the model's own.
    """
    experts = experts_of(path, **options)
    assert facts_of(experts).activation == activation
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=generator)
    x = (1.5 * torch.randn(46, 32, generator=generator)).bfloat16()
    ids = torch.rand(46, 4, generator=generator).topk(2).indices
    dy = torch.randn(46, 32, generator=generator)

    def run(experts: Any, implementation: str) -> list[Tensor]:
        experts.config._experts_implementation = implementation
        dtype = experts.down_proj.dtype
        inputs = x.to(dtype).requires_grad_()
        weights = torch.full(
            (46, 2), 0.5, dtype=max(dtype, torch.float32, key=lambda t: t.itemsize)
        )
        out = experts(inputs, ids, weights.requires_grad_())
        leaves = [inputs, weights, *experts.parameters()]
        return [out.detach(), *torch.autograd.grad((out.to(dy.dtype) * dy).sum(), leaves)]

    exact = run(copy.deepcopy(experts).double(), "eager")
    own, ours = run(experts, "eager"), run(experts, "uniep")
    for of_ours, of_own, of_exact in zip(ours, own, exact, strict=True):
        assert distance(of_ours, of_exact) < max(1.2 * distance(of_own, of_exact), 0.1) < 0.2


def test_gates_with_other_limits_are_refused() -> None:
    deepseek = "deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts"
    inkling = "inkling2.modeling_inkling2.Inkling2Experts"
    limit = "has limit 7.0; it must be 10.0, that of activation 'swiglu_clamped'"
    softcap = "has act_fn.up_softcap.softcap 30.0; it must be 25.0"
    options: dict[str, Any]
    for path, options, words in (
        (deepseek, OF_GPT_OSS, limit),
        (deepseek, {**CLAMPED, "hidden_act": "gelu"}, "has activation GELUAct.*; it must be silu"),
        (inkling, {"mlp_up_softcap": 30.0}, softcap),
    ):
        experts = experts_of(path, **options)
        with pytest.raises(NotImplementedError, match=f"{type(experts).__name__} {words}"):
            uniep.transformers.check(experts)
