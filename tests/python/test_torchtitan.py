"""uniep.torchtitan with the torchtitan of the package index, on CPUs: its layer."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_case
from titan_cases import (
    GRADIENT,
    OUTPUT,
    config_of,
    distances,
    gpt_oss_config,
    layer_step,
    own_layer,
    uniep_layer,
)
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.config_utils import make_routed_experts_config
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

import uniep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_layer_is_torchtitans(dtype: torch.dtype) -> None:
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    case.x = case.x.to(dtype)
    own = layer_step(own_layer(case, dtype), case, (4, 24))
    found = layer_step(uniep_layer(case, dtype), case, (4, 24))
    away = distances(found, own)
    print({name: f"{distance:.1e}" for name, distance in away.items()})
    assert away.pop("out") < OUTPUT
    assert {name: distance for name, distance in away.items() if not distance < GRADIENT} == {}
    assert all(found[name].dtype == own[name].dtype for name in own)


def test_the_limits_tell_a_wrong_layer_from_a_right_one() -> None:
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    own = layer_step(own_layer(case), case, (4, 24))
    turned = replace(case, w1=torch.cat(case.w1.chunk(2, 1)[::-1], 1))  # up, then gate
    away = distances(layer_step(uniep_layer(turned), case, (4, 24)), own)
    assert away.pop("out") > 10 * OUTPUT
    assert min(away.values()) > 10 * GRADIENT


def test_tokens_come_with_or_without_a_batch() -> None:
    case = make_case()
    layer = uniep_layer(case)
    flat, batch = layer_step(layer, case), layer_step(layer, case, (3, 16))
    assert flat.keys() == batch.keys()
    assert all(torch.equal(flat[name], batch[name]) for name in flat)


def test_the_same_seed_draws_torchtitans_weights() -> None:
    case = make_case()
    drawn = []
    for config in (config_of(case), uniep.torchtitan.uniep_routed_experts(config_of(case))):
        layer = config.build()
        torch.manual_seed(7)
        layer.init_states()
        drawn.append(layer.state_dict())
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    gate, up = drawn[1]["inner_experts.w1_EFD"], drawn[1]["inner_experts.w3_EFD"]
    assert not torch.equal(gate, up)


def test_state_dicts_have_torchtitans_names() -> None:
    case = make_case()
    own, layer = own_layer(case), uniep_layer(case)
    assert [name for name, _ in layer.named_parameters()] == [
        "inner_experts.w1_EFD",
        "inner_experts.w2_EDF",
        "inner_experts.w3_EFD",
    ]
    saved = layer.state_dict()
    assert saved.keys() == own.state_dict().keys()
    own.load_state_dict(saved)  # strict: no name is missing, and none too many
    assert torch.equal(own.inner_experts.w1_EFD, case.w1[:, : case.w1.shape[1] // 2])
    assert torch.equal(own.inner_experts.w3_EFD, case.w1[:, case.w1.shape[1] // 2 :])
    with pytest.raises(RuntimeError, match=r"Missing key.*w3_EFD"):
        layer.load_state_dict({name: t for name, t in saved.items() if "w3_EFD" not in name})


def test_options_reach_uniep() -> None:
    """max_tokens is one that EP 2 with uneven ranks needs, below."""

    def step(**options: Any) -> dict[str, Tensor]:
        config = uniep.torchtitan.uniep_routed_experts(config_of(case), **options)
        layer = config.build().bfloat16()
        layer.load_state_dict(own_layer(case).state_dict())
        return layer_step(layer, case)

    case = make_case()
    first, second = step(), step(schedule="sequential", max_tokens=64, capacity_rows=1024)
    assert all(torch.equal(first[name], second[name]) for name in first)
    less = step(save="none", recompute_h=True)
    assert all(torch.equal(first[name], less[name]) for name in first)
    in_turns = step(backward_rows=256)
    assert all(torch.equal(first[name], in_turns[name]) for name in first)
    with pytest.raises(RuntimeError, match="backward_rows is 100"):
        step(backward_rows=100)
    pools = uniep.group.group_of(None, case.x.device).row_pools
    before = set(pools)  # of other tests
    paged = step(save="tokens", row_pool=1 << 22)
    assert all(torch.equal(first[name], paged[name]) for name in first)
    (pool,) = (pool for key, pool in pools.items() if key not in before)
    assert pool.free_pages == pool.pages > pool.fewest_free_pages
    with pytest.raises(ValueError, match="save is 'all'"):
        step(save="all")
    with pytest.raises(RuntimeError, match="no such preset"):
        step(schedule="no such preset")
    case = make_case(tokens=1500)
    with pytest.raises(RuntimeError, match="capacity"):
        step(capacity_rows=1024)


def test_combine_groups_are_passed_on() -> None:
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    one = layer_step(uniep_layer(case), case)
    config = uniep.torchtitan.uniep_routed_experts(
        config_of(case), combine_groups=4, combine_partials="bf16"
    )
    layer = config.build().bfloat16()
    layer.load_state_dict(own_layer(case).state_dict())
    away = distances(layer_step(layer, case), one)
    assert 0 < away["out"] < GRADIENT and 0 < away["dx"] < GRADIENT
    assert away["w1_EFD"] == away["w2_EDF"] == 0


def test_scores_before_the_second_projection() -> None:
    """The same but for roundings."""
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    after = layer_step(uniep_layer(case), case)
    config = uniep.torchtitan.uniep_routed_experts(config_of(case), probs="before")
    layer = config.build().bfloat16()
    layer.load_state_dict(own_layer(case).state_dict())
    away = distances(layer_step(layer, case), after)
    assert min(away.values()) > 0 and max(away.values()) < GRADIENT


def refused(config: Any, sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=sentence):
        uniep.torchtitan.uniep_routed_experts(config)


def test_other_experts_are_refused() -> None:
    @dataclass(kw_only=True, slots=True)
    class Quantised(GroupedExperts.Config):
        pass

    @dataclass(kw_only=True, slots=True)
    class Other(RoutedExperts.Config):
        pass

    config = config_of(make_case())
    sizes = {"dim": 64, "hidden_dim": 32, "num_experts": 8}
    refused(
        replace(config, inner_experts=Quantised(**sizes)),
        "is not torchtitan's own GroupedExperts.Config, nor that of gpt-oss",
    )
    refused(gpt_oss_config(make_case(), swiglu_limit=5.0), "swiglu_limit is 5.0; it must be 7.0")
    parts = {"inner_experts": config.inner_experts, "token_dispatcher": config.token_dispatcher}
    refused(Other(**parts), "is not torchtitan's own RoutedExperts")


def test_dropping_tokens_is_refused() -> None:
    case = make_case()
    config = config_of(case)
    dispatcher = make_routed_experts_config(
        dim=64,
        hidden_dim=32,
        num_experts=8,
        top_k=2,
        param_init={},
        comm_backend="hybridep",
        non_blocking_capacity_factor=0.5,
    ).token_dispatcher
    refused(replace(config, token_dispatcher=dispatcher), "drops tokens, which uniep never does")


def test_tensor_parallelism_inside_experts_is_refused() -> None:
    layer = uniep.torchtitan.uniep_routed_experts(config_of(make_case())).build()
    dims = types.SimpleNamespace(tp=2, ep=1)
    with pytest.raises(NotImplementedError, match="does not split an expert over ranks"):
        layer.parallelize(dims)


def test_compiled_blocks_have_the_same_bits() -> None:
    case = make_case()
    wanted = layer_step(uniep_layer(case), case)
    layer = torch.compile(uniep_layer(case), fullgraph=True, backend="aot_eager")
    found = layer_step(layer, case)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_policy_of_its_own_is_refused() -> None:
    @dataclass(kw_only=True, slots=True)
    class Own(SelectiveAC.Config):
        pass

    with pytest.raises(NotImplementedError, match=r"add torch.ops.uniep.forward.default to what"):
        uniep.torchtitan.uniep_selective_ac(Own())


def test_the_example_is_one_that_torchtitan_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it trains with; test_cuda_torchtitan.py trains."""
    path = Path(__file__).parents[2] / "examples/torchtitan_qwen3.py"
    spec = importlib.util.spec_from_file_location("torchtitan_qwen3", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torchtitan_qwen3", example)
    monkeypatch.setenv("WORLD_SIZE", "4")
    spec.loader.exec_module(example)
    options = example.arguments(["--layers", "3", "--length", "16", "--compile"])
    config = example.configuration([example.EXPERTS, example.KEEP], options)
    assert config.override.imports == [example.EXPERTS, example.KEEP]
    assert config.parallelism.expert_parallel_degree == 4
    assert config.compile.enable and len(config.model_spec.model.layers) == 3
    assert isinstance(config.activation_checkpoint, SelectiveAC.Config)
    tokens = config.dataloader.build(dp_rank=0, seq_len=16, local_batch_size=4, dp_world_size=4)
    inputs, labels = next(iter(tokens))
    assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
    other = config.dataloader.build(dp_rank=1, seq_len=16, local_batch_size=4, dp_world_size=4)
    assert not torch.equal(next(iter(other))[1], labels)
