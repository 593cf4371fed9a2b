"""torchtitan's MoE layer with shared experts in uniep's pass, on CPUs."""

from __future__ import annotations

import copy
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import make_case, relative
from titan_cases import GRADIENT, OUTPUT, config_of
from torch import Tensor, nn
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_router_config,
)
from torchtitan.models.common.feed_forward import SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE

import uniep
import uniep.plain

HIDDEN, INTERMEDIATE = 128, 64


def moe_config(shared: int = 1, gate: bool = False) -> Any:
    """torchtitan's config of a layer; its shared experts are `shared` times as wide as others."""
    case = make_case(tokens=96, hidden=HIDDEN, intermediate=INTERMEDIATE, topk=3)
    initial = {"weight": lambda weight: nn.init.normal_(weight, std=0.1)}
    ffn: Any = make_ffn_config(
        dim=HIDDEN,
        hidden_dim=shared * INTERMEDIATE,
        w1_param_init=initial,
        w2w3_param_init=initial,
    )
    if gate:
        linear = Linear.Config(in_features=HIDDEN, out_features=1, param_init=initial)
        ffn = SigmoidGatedFeedForward.Config(w1=ffn.w1, w2=ffn.w2, w3=ffn.w3, gate=linear)
    return make_moe_config(
        router=make_router_config(dim=HIDDEN, num_experts=8, gate_param_init=initial, top_k=3),
        routed_experts=config_of(case),
        shared_experts=ffn,
    )


def layers(shared: int = 1, gate: bool = False) -> tuple[Any, Any]:
    """torchtitan's and uniep's, which loads what torchtitan's saved."""
    torch.manual_seed(3)
    config = moe_config(shared, gate)
    own = copy.deepcopy(config).build()
    own.init_states()
    layer = uniep.torchtitan.uniep_moe(config).build()
    layer.load_state_dict(own.state_dict())
    return own.bfloat16(), layer.bfloat16()


def step(layer: Any) -> dict[str, Tensor]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 24, HIDDEN, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(4, 24, HIDDEN, generator=generator).bfloat16()
    layer.zero_grad()
    out = layer(x)
    out.backward(dy)
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, **grads}


@pytest.mark.parametrize(("shared", "gate"), [(1, False), (1, True), (2, True)])
def test_the_layer_is_torchtitans(shared: int, gate: bool) -> None:
    own, layer = layers(shared, gate)
    wanted, found = step(own), step(layer)
    assert found.keys() == wanted.keys()
    away = {name: relative(found[name], wanted[name]) for name in wanted}
    print({name: f"{distance:.1e}" for name, distance in away.items()})
    assert away.pop("out") < OUTPUT
    assert {name: distance for name, distance in away.items() if not distance < GRADIENT} == {}


@pytest.mark.parametrize(("shared", "gate"), [(1, False), (2, True)])
def test_bits_are_those_of_plain_pytorch(
    shared: int, gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, layer = layers(shared, gate)
    found = step(layer)
    counts: list[int] = []

    def plain_moe(
        x: Tensor, ids: Tensor, scores: Tensor, w1: Any, w2: Tensor, **options: Any
    ) -> Tensor:
        counts.append(options["shared_w1"].shape[0])
        own = {n: options[n] for n in options if n in ("probs",) or n.startswith("shared_")}
        return uniep.plain.moe(x, ids, scores, torch.cat(list(w1), 1), w2, ascending=True, **own)

    with monkeypatch.context() as patched:
        patched.setattr(uniep, "moe", plain_moe)
        plain = step(layer)
    assert counts == [shared]
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor), name


def test_a_layer_without_shared_experts() -> None:
    config = replace(moe_config(), shared_experts=None)
    assert uniep.torchtitan.uniep_moe(config, schedule="sequential").build().shared_experts is None


def test_what_cannot_be_in_the_pass_is_refused() -> None:
    def refused(config: Any, sentence: str) -> None:
        with pytest.raises(NotImplementedError, match=sentence):
            uniep.torchtitan.uniep_moe(config)

    class Other(MoE.Config):
        __slots__ = ()

    good = moe_config()
    parts = {
        name: getattr(good, name)
        for name in ("num_experts", "routed_experts", "router", "shared_experts")
    }
    refused(Other(**parts), "is not torchtitan's own MoE.Config")
    wide = replace(good.shared_experts, w1=replace(good.shared_experts.w1, out_features=96))
    refused(replace(good, shared_experts=wide), "shared experts have 96 columns")
    biased = replace(good.shared_experts, w1=replace(good.shared_experts.w1, bias=True))
    refused(replace(good, shared_experts=biased), "FeedForward and SigmoidGated")
    _, layer = layers()
    with pytest.raises(NotImplementedError, match="tensor_parallel_degree is 2, which splits"):
        layer.parallelize(types.SimpleNamespace(tp=2, ep=2))


def test_lora_of_torchtitan_is_refused() -> None:
    """Ahead of uniep, as in its trainer, and behind, where adapters had no effect."""
    converter = LoRAConverter(LoRAConverter.Config())
    config = converter.convert(moe_config())
    for refuses, part in (
        (uniep.torchtitan.uniep_moe, config),
        (uniep.torchtitan.uniep_routed_experts, config.routed_experts),
    ):
        with pytest.raises(NotImplementedError, match=r"LoRAConverter has made a Frozen.*take the"):
            refuses(part)
    behind = converter.convert(uniep.torchtitan.uniep_moe(moe_config()))
    with pytest.raises(NotImplementedError, match="w1 of the shared experts is a LoRALinear, of"):
        behind.build()
