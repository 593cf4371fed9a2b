"""Around modules of a model whose experts are uniep's: adapters, hooks, FSDP2, ties, pickle."""

from __future__ import annotations

import copy
import functools
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
from uniep.checkpoint import distributed_state_dict
from uniep.transformers.experts import is_packed
from uniep.transformers.shared import names_of_shared

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


def test_adapters_of_routed_experts_run_in_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
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
        with monkeypatch.context() as patched, router_choices(replay=list(choices)):
            patched.setattr(shared_module(model), "forward", never)
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


# Hooks of modules that uniep's forward of a block does not call.

REGISTER = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def hook_of_a_test(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("kind", "options", "hooked"),
    [
        ("llama4", {}, "feed_forward.experts"),
        ("llama4", {}, "feed_forward.experts.act_fn"),
        ("deepseek_v3", IN_PASS, "mlp.shared_experts"),
        ("deepseek_v3", IN_PASS, "mlp.shared_experts.up_proj"),
    ],
)
def test_hooks_that_would_never_run_are_refused(
    kind: str, options: dict[str, Any], hooked: str
) -> None:
    """Before `use` has changed anything; those that come later, by the forward."""
    model: Any = small(kind)
    name = f"model.layers.1.{hooked}"
    module, classes = model.get_submodule(name), [type(m) for m in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    words = r" has a hook, test_around_models.hook_of_a_test, which would never run"
    for register in REGISTER:
        with (
            getattr(module, register)(hook_of_a_test),
            pytest.raises(NotImplementedError, match=f"^{name}{words}") as refused,
        ):
            uniep.transformers.use(model, **options)
        assert ("'apart'" in str(refused.value)) == bool(options)
    assert [type(m) for m in model.modules()] == classes
    assert not any(is_packed(m) for m in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    uniep.transformers.use(model, **options)
    wanted = model(input_ids=tokens()).logits
    block, _, own_name = hooked.partition(".")
    of_block = f"^{own_name} of this {type(model.model.layers[1].get_submodule(block)).__name__}"
    for register in REGISTER:
        with (
            getattr(module, register)(hook_of_a_test),
            pytest.raises(NotImplementedError, match=of_block + words),
        ):
            model(input_ids=tokens())
    assert torch.equal(model(input_ids=tokens()).logits, wanted)
    if options:
        uniep.transformers.use(model)
        called = list[int]()
        with module.register_forward_hook(lambda *_: called.append(1)):
            model(input_ids=tokens())
        assert called


@pytest.mark.parametrize(
    ("kind", "options", "called", "uncalled"),
    [
        ("llama4", {}, ["", "router", "shared_expert"], "experts"),
        ("qwen2_moe", IN_PASS, ["", "gate", "experts", "shared_expert_gate"], "shared_expert"),
    ],
)
def test_hooks_of_modules_that_are_called_run(
    kind: str, options: dict[str, Any], called: list[str], uncalled: str
) -> None:
    """And those of libraries that gather weights stand where nobody calls them."""
    model: Any = small(kind)
    block = model.model.layers[0].feed_forward if kind == "llama4" else model.model.layers[0].mlp
    found = list[str]()
    for name in called:
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: found.append(name))

    def gather(*_: Any) -> None:
        pytest.fail("nobody calls this module")

    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    block.get_submodule(uncalled).register_forward_pre_hook(functools.partial(gather, "stage 3"))
    uniep.transformers.use(model, **options)
    uniep.transformers.use(model, **options)  # with hooks of uniep's own
    model(input_ids=tokens())
    assert sorted(found) == sorted(called)


# Parameters that others have, too.

REARRANGED = ("gpt_oss", "llama4")


def all_experts(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("experts")]


def tied(kind: str) -> Any:
    """A model whose two layers share the parameters of experts."""
    model = small(kind)
    first, second = all_experts(model)
    for name, _ in list(first.named_parameters()):
        setattr(second, name, getattr(first, name))
    return model


@pytest.mark.parametrize("kind", REARRANGED)
def test_parameters_of_two_layers_are_rearranged_once(kind: str) -> None:
    model, apart = tied(kind), small(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    apart.load_state_dict(before)
    for each in (model, apart):
        uniep.transformers.use(each)
    after = model.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    found, wanted = (each(input_ids=tokens(), labels=tokens()) for each in (model, apart))
    assert torch.equal(found.logits, wanted.logits)
    for loss in (found.loss, wanted.loss):
        loss.backward()
    for name, param in all_experts(model)[0].named_parameters():
        grads = [getattr(experts, name).grad.float() for experts in all_experts(apart)]
        assert distance(param.grad, grads[0] + grads[1]) < 1e-2  # a sum that is rounded

    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    model.load_state_dict(before)
    assert torch.equal(model(input_ids=tokens()).logits, found.logits)


def test_a_parameter_that_is_rearranged_already_stays() -> None:
    model: Any = small("gpt_oss")
    uniep.transformers.use(model)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = all_experts(model)
    new = copy.deepcopy(all_experts(small("gpt_oss"))[1])
    new.config, new.down_proj = second.config, first.down_proj
    model.model.layers[1].mlp.experts = new
    uniep.transformers.use(model)
    name = "model.layers.{}.mlp.experts.down_proj"
    for layer in (0, 1):
        assert torch.equal(model.state_dict()[name.format(layer)], wanted[name.format(0)])


def test_a_parameter_that_something_else_reads_is_refused() -> None:
    model: Any = small("gpt_oss")
    model.other = torch.nn.Module()
    model.other.weight = all_experts(model)[1].down_proj
    words = r"down_proj of model.layers.1.mlp.experts, .* is weight of other \(Module\), too"
    with pytest.raises(NotImplementedError, match=words):
        uniep.transformers.use(model)
    assert not any(is_packed(module) for module in model.modules())
    assert all_experts(model)[0].config._experts_implementation != "uniep"


# Modules that hold a model, or are a part of one.


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4"])
def test_use_of_a_module_that_holds_models(kind: str) -> None:
    model, reference, plain = small(kind), small(kind), small(kind)
    both = torch.nn.ModuleDict({"policy": model, "more": torch.nn.Sequential(reference)})
    assert uniep.transformers.use(both) == uniep.transformers.check(both)
    uniep.transformers.use(plain)
    wanted = step(plain, tokens())
    for each in (model, reference):
        assert_same(step(each, tokens()), wanted)
    assert sum(is_packed(module) for module in both.modules()) == (4 if kind in REARRANGED else 0)


def test_a_part_whose_model_is_elsewhere_is_refused() -> None:
    """Its configuration is the model's, whose other layers would change with it."""
    layer: Any = small("gpt_oss").model.layers[0]  # type: ignore[union-attr]
    for part, name in ((layer, "mlp.experts"), (layer.mlp.experts, "experts")):
        with pytest.raises(ValueError, match=f" has {name} outside of any model of transformers"):
            uniep.transformers.use(part)
    assert layer.mlp.experts.config._experts_implementation != "uniep"
    assert not is_packed(layer.mlp.experts)
    llama: Any = small("llama4").model.layers[0]  # type: ignore[union-attr]
    assert uniep.transformers.use(llama) == ["feed_forward"]
    assert is_packed(llama.feed_forward.experts)


def wrapped() -> list[str]:
    """What is said of models that wrappers have already; of Qwen3-MoE's, nothing."""
    uniep.transformers.register()
    ids = tokens()
    plain = small("qwen3_moe")
    uniep.transformers.use(plain)
    found: Any = torch.nn.parallel.DistributedDataParallel(small("qwen3_moe"))
    uniep.transformers.use(found)
    assert torch.equal(found(input_ids=ids).logits, plain(input_ids=ids).logits)
    words = list[str]()
    for kind in REARRANGED:
        own: Any = torch.nn.parallel.DistributedDataParallel(small(kind))
        with pytest.raises(NotImplementedError) as refused:
            uniep.transformers.use(own)
        assert not any(is_packed(module) for module in own.modules())
        words.append(str(refused.value))

    llama: Any = small("llama4")
    uniep.transformers.use(llama)
    for experts in all_experts(llama):
        fully_shard(experts, mesh=cpu_mesh())
    fully_shard(llama, mesh=cpu_mesh())
    with pytest.raises(RuntimeError) as sharded:
        llama(input_ids=ids)
    return [*words, str(sharded.value)]


def test_wrappers_that_have_weights_already() -> None:
    gpt_oss, llama, sharded = run_ranks(1, wrapped)[0]
    assert gpt_oss.startswith("use would rearrange the weights of module.model.layers.0.mlp.exp")
    assert "Llama4TextExperts" in llama and llama.endswith("call use before that")
    assert "the experts of Llama4TextMoe are sharded by themselves" in sharded
    assert "call fully_shard on the block or its layer" in sharded


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
