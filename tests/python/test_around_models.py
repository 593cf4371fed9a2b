"""Around modules of a model whose experts are uniep's: adapters, hooks, FSDP2, pickle."""

from __future__ import annotations

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import cpu_mesh, run_ranks
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

pytest.importorskip("transformers", reason="transformers is not installed")
from model_cases import (
    GRADIENT,
    LOGITS,
    assert_same,
    distance,
    distances,
    fused,
    never,
    router_choices,
    shared_module,
    small,
    step,
    tokens,
)

import uniep.transformers
from uniep._transformers_experts import is_packed
from uniep._transformers_shared import names_of_shared
from uniep.checkpoint import distributed_state_dict

IN_PASS = {"shared_experts": "fused"}


@pytest.fixture(autouse=True)
def registered() -> None:
    uniep.transformers.register()


def adapted(model: Any, **targets: Any) -> Any:
    """With the same adapters in every call."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **targets))


def test_adapters_of_shared_experts_run_apart() -> None:
    """Whether they come before use or after it; their weights alone would be others."""
    ids, words = tokens(), "gate_proj of Qwen2MoeMLP is a peft.tuners.lora.layer.Linear"
    last = adapted(small("qwen2_moe"), target_modules="all-linear")
    with pytest.raises(NotImplementedError, match=words) as refused:
        uniep.transformers.use(last, shared_experts="fused")
    assert "torch.nn.Linear is accepted" in str(refused.value) and len(str(refused.value)) < 600
    uniep.transformers.use(last)
    first = adapted(fused("qwen2_moe"), target_modules="all-linear")
    with pytest.raises(NotImplementedError, match=words):
        first(input_ids=ids)
    uniep.transformers.use(first)
    assert_same(step(first, ids), step(last, ids))

    model = small("qwen2_moe")
    shared_module(model).down_proj.__class__ = type("Scaled", (torch.nn.Linear,), {})
    with pytest.raises(NotImplementedError, match=r"down_proj of Qwen2MoeMLP is a .*Scaled, of"):
        uniep.transformers.use(model, shared_experts="fused")


def test_adapters_of_routed_experts_run_in_the_pass() -> None:
    ids, choices = tokens(), list[Tensor]()
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    own, last = (
        adapted(small("deepseek_v3"), target_modules=[], target_parameters=targets)
        for _ in range(2)
    )
    with router_choices(record=choices):
        wanted = step(own, ids, "eager")
    uniep.transformers.use(last, shared_experts="fused")
    first = adapted(fused("deepseek_v3"), target_modules=[], target_parameters=targets)
    found = []
    for model in (first, last):
        hook = shared_module(model).register_forward_pre_hook(never)
        with hook, router_choices(replay=list(choices)):
            found.append(step(model, ids))
    assert_same(*found)
    logits, grads = distances(found[0], wanted)
    assert logits < LOGITS
    assert max(grads.values()) < GRADIENT
    apart = step(own, ids, "uniep")
    for model in (first, last):
        uniep.transformers.use(model)
        assert_same(step(model, ids), apart)


# Blocks with a forward among their own attributes.


@pytest.mark.parametrize(("kind", "options"), [("llama4", {}), ("deepseek_v3", IN_PASS)])
def test_hooks_of_accelerate_stay_around_a_block(kind: str, options: dict[str, Any]) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    called: set[int] = set()

    class Hook(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(id(module))
            return args, kwargs

    def logits_of(model: Any, options: dict[str, Any]) -> Tensor:
        uniep.transformers.use(model, **options)
        called.clear()
        found: Tensor = model(input_ids=tokens()).logits
        return found

    model, plain = small(kind), small(kind)
    wanted, apart = (logits_of(plain, case).detach() for case in (options, {}))
    for module in model.modules():
        hooks.add_hook_to_module(module, Hook())
    found = logits_of(model, options)
    assert torch.equal(found, wanted)
    found.sum().backward()
    block = next(module for module in model.modules() if names_of_shared(module))
    assert id(block) in called
    assert (id(shared_module(model)) in called) == (not options)
    assert torch.equal(logits_of(model, {}), apart)
    assert id(shared_module(model)) in called
    copied = copy.deepcopy(model)
    assert torch.equal(logits_of(copied, options), wanted)
    hooks.remove_hook_from_module(copied, recurse=True)
    assert torch.equal(logits_of(copied, {}), apart)
    assert torch.equal(logits_of(copied, options), wanted) and not called


def test_a_forward_that_something_else_has_set_is_refused() -> None:
    words = r"forward of this \w+ is an attribute of the module, \S*other, which would run"

    def other(x: Tensor) -> Tensor:
        return x

    llama: Any = small("llama4")
    llama.model.layers[1].feed_forward.forward = other
    with pytest.raises(NotImplementedError, match=words):
        uniep.transformers.use(llama)
    assert not any(is_packed(module) for module in llama.modules())

    before, after = small("deepseek_v3"), fused("deepseek_v3")
    for model in (before, after):
        model.model.layers[2].mlp.forward = other
    with pytest.raises(NotImplementedError, match=words):
        uniep.transformers.use(before, shared_experts="fused")
    with pytest.raises(NotImplementedError, match=words):
        uniep.transformers.use(after)
    uniep.transformers.use(before)


# Weights that are elsewhere, or others.


def offloaded(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.cpu_offload(model, execution_device="cpu")


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_use_after_accelerate_has_offloaded_weights(kind: str) -> None:
    model, plain = offloaded(small(kind)), small(kind)
    for each in (model, plain):
        uniep.transformers.use(each)
    with torch.no_grad():
        found, wanted = (each(input_ids=tokens()).logits for each in (model, plain))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "options", "before", "after"),
    [
        ("gpt_oss", {}, "", "call use after cpu_offload"),
        ("llama4", {}, *2 * ["offloaded the experts of Llama4TextMoe"]),
        ("deepseek_v3", IN_PASS, *2 * ["offloaded gate_proj of DeepseekV3MLP.*'apart' is"]),
    ],
)
def test_offloaded_weights_that_uniep_would_not_see_are_refused(
    kind: str, options: dict[str, Any], before: str, after: str
) -> None:
    if before:
        with pytest.raises(NotImplementedError, match=before):
            uniep.transformers.use(offloaded(small(kind)), **options)
    model = small(kind)
    uniep.transformers.use(model, **options)
    layer = offloaded(model).model.layers[-1]
    block = layer.feed_forward if kind == "llama4" else layer.mlp
    with pytest.raises((RuntimeError, NotImplementedError), match=after) as refused:
        block(torch.randn(1, 4, 64).bfloat16())
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("name", ["finegrained_fp8.FP8Experts", "mxfp4.Mxfp4GptOssExperts"])
def test_quantised_experts_are_refused(name: str) -> None:
    model: Any = small("gpt_oss")
    module, kind = name.split(".")
    experts = importlib.import_module(f"transformers.integrations.{module}").__dict__[kind]
    model.config.hidden_act = "silu"
    model.model.layers[1].mlp.experts = experts(model.config)
    with pytest.raises(NotImplementedError, match=f"{kind} .* has quantised weights.*dequantize"):
        uniep.transformers.use(model)


# Classes that are made for blocks.


@pytest.mark.parametrize(
    ("kind", "options"), [("llama4", {}), ("gpt_oss", {}), ("deepseek_v3", IN_PASS)]
)
def test_a_pickled_model_gives_the_same_bits(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = small(kind)
    uniep.transformers.use(model, **options)
    torch.save(model, tmp_path / "model")
    loaded: Any = torch.load(tmp_path / "model", weights_only=False)
    assert [type(module) for module in loaded.modules()] == [type(m) for m in model.modules()]
    wanted = step(model, tokens())
    assert_same(step(loaded, tokens()), wanted)
    assert torch.equal(run_ranks(1, logits_elsewhere, tmp_path / "model")[0], wanted[0])


def logits_elsewhere(path: Path) -> Tensor:
    """Of a pickled model, in a process that has not heard of uniep."""
    model: Any = torch.load(path, weights_only=False)
    with pytest.raises(Exception, match="regist"):
        model(input_ids=tokens())
    uniep.transformers.register()
    return step(model, tokens())[0]


def sharded_then_apart() -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What a model gives whose shared experts leave the pass after FSDP2 has changed its blocks."""
    uniep.transformers.register()
    model = fused("deepseek_v3")
    blocks = [module for module in model.modules() if names_of_shared(module)]
    for module in (*blocks, model):
        fully_shard(module, mesh=cpu_mesh()).set_force_sum_reduction_for_comms(True)
    found = [step(model, tokens())]
    uniep.transformers.use(model)
    assert all(isinstance(block, FSDPModule) for block in blocks)
    return [*found, step(model, tokens())]


@pytest.mark.parametrize(("kind", "copied"), [("gpt_oss", True), ("qwen3_moe", False)])
def test_what_a_checkpoint_loads_reaches_a_model(kind: str, copied: bool, tmp_path: Path) -> None:
    """Or a warning says what is missing: a state dict has copies of rearranged weights."""

    def used() -> Any:
        model = small(kind)
        uniep.transformers.use(model)
        return model

    model, other = used(), used()
    for parameter in other.parameters():
        torch.nn.init.ones_(parameter)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dcp.save(distributed_state_dict(model), checkpoint_id=tmp_path, no_dist=True)
        state = distributed_state_dict(other)
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert any("load_state_dict" in str(w.message) for w in told) == copied
    if copied:
        other.load_state_dict(state)
    wanted = dict(model.named_parameters())
    assert all(torch.equal(own, wanted[name]) for name, own in other.named_parameters())


def test_shared_experts_leave_the_pass_after_fsdp() -> None:
    apart: Any = small("deepseek_v3")
    uniep.transformers.use(apart)
    wanted = [step(model, tokens()) for model in (fused("deepseek_v3"), apart)]
    for found in run_ranks(2, sharded_then_apart):
        for (logits, grads), (own_logits, own_grads) in zip(found, wanted, strict=True):
            assert torch.equal(logits, own_logits)
            assert max(distance(grads[name], own_grads[name]) for name in own_grads) < GRADIENT
