"""Open MoE models, small and random, of transformers' own classes, with their experts in uniep."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import cpu_mesh, run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule, fully_shard

import uniep
import uniep.plain

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_cases import (  # noqa: E402
    GRADIENT,
    LOGITS,
    MODELS,
    assert_close,
    assert_same,
    distance,
    distances_of,
    experts_of,
    fused,
    never,
    router_choices,
    shared_module,
    small,
    step,
    tokens,
    whole,
)

import uniep.transformers  # noqa: E402
from uniep.transformers.experts import facts_of, gate_first, is_packed, to_uniep, weights_of  # noqa: E402
from uniep.transformers.shared import names_of_shared  # noqa: E402

# How far losses may part where a rounding turns a router's choice, in parts of what steps gain.
LOSS = 0.05
REARRANGED = ("gpt_oss", "llama4")


@pytest.fixture(autouse=True)
def registered() -> None:
    uniep.transformers.register()


plain_calls: list[int] = []


def plain_moe(*args: Tensor, **options: Any) -> Tensor:
    """The same layer in plain PyTorch, with products summed as the contract says."""
    plain_calls.append(args[0].shape[0])
    kept = ("activation", "probs", "b1", "b2", "group")
    own = {name: options[name] for name in kept}
    own |= {name: options[name] for name in options if name.startswith("shared_")}
    return uniep.plain.moe(*args, ascending=True, **own)


@pytest.mark.parametrize("kind", MODELS)
def test_bits_are_those_of_plain_pytorch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, and gradients of all parameters: embeddings, routers, experts, shared experts."""
    model, ids = small(kind), tokens()
    names = uniep.transformers.use(model)
    found = step(model, ids)
    plain_calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(uniep, "moe", plain_moe)
        plain = step(model, ids)
    assert plain_calls == [ids.numel()] * len(names)  # every layer's experts
    assert_same(found, plain)


def assert_results_are_the_models_own(model: Any, **options: Any) -> None:
    """Beside the model in fp64, with the same choices of its routers; `options`: how it is used."""
    ids = tokens()
    exact_model = copy.deepcopy(model).double()
    choices: list[Tensor] = []
    with router_choices(record=choices):
        exact = step(exact_model, ids, "eager")
    with router_choices(replay=list(choices)):
        own = step(model, ids, "eager")
    uniep.transformers.use(model, **options)
    with router_choices(replay=list(choices)):
        found = step(model, ids)
    assert_close(distances_of(found, own, exact))


@pytest.mark.parametrize("kind", MODELS)
def test_results_are_the_models_own(kind: str) -> None:
    assert_results_are_the_models_own(small(kind))


@pytest.mark.parametrize("kind", MODELS)
def test_training_follows_the_models_own(kind: str) -> None:
    own, ids = small(kind), tokens()
    model = copy.deepcopy(own)
    uniep.transformers.use(model)
    wanted, found = losses(own, ids, "eager"), losses(model, ids)
    print(wanted, found)
    gain = wanted[0] - wanted[-1]
    assert gain > 1
    assert found == pytest.approx(wanted, abs=LOSS * gain)


def losses(model: Any, ids: Tensor, implementation: str | None = None) -> list[float]:
    """Of a few steps of plain gradient descent."""
    if implementation is not None:
        model.set_experts_implementation(implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    found = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize(
    ("kind", "hidden_act", "activation"),
    [
        ("mixtral", "gelu", "geglu"),
        ("mixtral", "gelu_pytorch_tanh", "geglu_tanh"),
        ("mixtral", "gelu_new", "geglu_tanh"),
        ("mixtral", "relu", "reglu"),
        ("nemotron_h", "silu", "silu"),
        ("nemotron_h", "gelu", "gelu"),
    ],
)
def test_other_activations(kind: str, hidden_act: str, activation: str) -> None:
    option = "mlp_hidden_act" if kind == "nemotron_h" else "hidden_act"
    model: Any = small(kind, **{option: hidden_act})
    experts = next(m for m in model.modules() if hasattr(type(m), "_apply_gate"))
    assert facts_of(experts).activation == activation
    x = 4 * torch.randn(46, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids = tokens().view(46)[:, None] % torch.tensor([7, 1]) + torch.tensor([0, 7])
    weights = torch.full((46, 2), 0.5).bfloat16()
    with torch.no_grad():
        model.set_experts_implementation("eager")
        wanted = experts(x, ids, weights)
        model.set_experts_implementation("uniep")
        assert distance(experts(x, ids, weights), wanted) < 1e-2


# Shared experts in the pass.

# Models whose shared experts can be part of it, with widths that make them one expert or two.
IN_PASS: dict[str, list[dict[str, Any]]] = {
    "qwen2_moe": [{}],
    "qwen3_next": [{"shared_expert_intermediate_size": 32}],
    "deepseek_v3": [{}, {"n_shared_experts": 2}],
    "deepseek_v4": [{}, {"mlp_layer_types": ["hash_moe", "moe"]}],
    "kimi_k2": [{}],
    "glm4_moe": [{}],
    "nemotron_h": [{}, {"moe_shared_expert_intermediate_size": 64}],
    "minimax_m3": [{"shared_intermediate_size": 32}, {"shared_intermediate_size": 64}],
}
in_pass = pytest.mark.parametrize(
    ("kind", "changes"), [(kind, changes) for kind in IN_PASS for changes in IN_PASS[kind]], ids=str
)


@in_pass
def test_bits_in_the_pass_are_those_of_plain_pytorch(
    kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = fused(kind, **changes), tokens()
    found = step(model, ids)
    assert all(param.grad is not None for param in shared_module(model).parameters())
    with monkeypatch.context() as patched:
        patched.setattr(shared_module(model), "forward", never)
        patched.setattr(uniep, "moe", plain_moe)
        assert_same(found, step(model, ids))


@in_pass
def test_results_in_the_pass_are_the_models_own(kind: str, changes: dict[str, Any]) -> None:
    assert_results_are_the_models_own(small(kind, **changes), shared_experts="fused")


def test_training_in_the_pass_follows_the_models_own() -> None:
    own, ids = small("deepseek_v3"), tokens()
    model = copy.deepcopy(own)
    uniep.transformers.use(model, shared_experts="fused")
    wanted, found = losses(own, ids, "eager"), losses(model, ids)
    assert found == pytest.approx(wanted, abs=LOSS * (wanted[0] - wanted[-1]))


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "nemotron_h", "minimax_m3"])
def test_one_shared_expert_is_read_where_it_lies(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused(kind, **IN_PASS[kind][0])
    module = shared_module(model)
    given: list[dict[str, Any]] = []

    def watched(*args: Tensor, **options: Any) -> Tensor:
        given.append(options)
        return uniep.functional.moe(*args, **options)

    monkeypatch.setattr(uniep, "moe", watched)
    step(model, tokens())
    names = ("gate_up_proj", "gate_proj", "up_proj")
    first = next(getattr(module, name) for name in names if hasattr(module, name))
    assert given[0]["shared_w1"].data_ptr() == first.weight.data_ptr()
    assert given[0]["shared_w2"].data_ptr() == module.down_proj.weight.data_ptr()


def test_parameters_in_the_pass_stay_the_models(tmp_path: Path) -> None:
    """Objects, names, values, files; and copies, whose weights lie apart, have the same bits."""
    model: Any = small("deepseek_v3")
    before = dict(model.named_parameters())
    own = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, tokens(), "eager")
    uniep.transformers.use(model, shared_experts="fused")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in after)
    assert [n for n, value in model.state_dict().items() if not torch.equal(value, own[n])] == []
    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert [n for n, value in loaded.state_dict().items() if not torch.equal(value, own[n])] == []

    first = step(model, tokens())
    copied: Any = copy.deepcopy(model)
    assert_same(step(copied, tokens()), first)
    copied.gradient_checkpointing_enable()
    assert_same(step(copied, tokens()), first)
    uniep.transformers.use(model)
    apart = fused("deepseek_v3")
    uniep.transformers.use(apart)
    assert_same(step(model, tokens()), step(apart, tokens()))
    assert not torch.equal(step(model, tokens())[0], first[0]), "nothing ran apart"


def shard_in_pass() -> dict[str, Tensor]:
    """Gradients of a model whose layers FSDP2 shards after `use`."""
    uniep.transformers.register()
    model = fused("deepseek_v3")
    for layer in model.model.layers:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo multiplies nothing while it sums
            module.set_force_sum_reduction_for_comms(True)
    return {name: whole(value) for name, value in step(model, tokens())[1].items()}


def test_fsdp_in_the_pass() -> None:
    wanted = step(fused("deepseek_v3"), tokens())[1]
    for grads in run_ranks(2, shard_in_pass):
        assert max(distance(grads[name], wanted[name]) for name in wanted) < GRADIENT


def test_a_fused_block_compiles_in_one_graph() -> None:
    model = fused("deepseek_v3")
    block = model.model.layers[1].mlp
    x = torch.randn(2, 23, 64).bfloat16()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), block(x))


def test_what_cannot_be_in_the_pass_is_refused() -> None:
    for kind, changes, words in (
        ("llama4", {}, "Llama4TextMoe gives its shared expert x"),
        ("qwen3_next", {}, "the shared experts have 24 columns, and each routed one has 32"),
        ("nemotron_h", {"mlp_bias": True}, "NemotronHMoE has biases"),
        ("minimax_m3", {"shared_intermediate_size": 15 * 32}, "480 columns, which are 15 of the"),
    ):
        with pytest.raises(NotImplementedError, match=words) as refused:
            fused(kind, **changes)
        assert "apart" in str(refused.value)
    fused("minimax_m3", shared_intermediate_size=14 * 32)(input_ids=tokens())  # 16 with K = 2
    with pytest.raises(ValueError, match="MixtralForCausalLM has no shared experts"):
        fused("mixtral")
    with pytest.raises(ValueError, match="shared_experts is 'within'; it must be 'apart' or"):
        uniep.transformers.use(small("mixtral"), shared_experts="within")  # type: ignore[arg-type]
    model = fused("deepseek_v3")
    with pytest.raises(RuntimeError, match="experts_implementation is 'eager'; it must be one of"):
        step(model, tokens(), "eager")


# Weights that uniep reads in another order.


@pytest.mark.parametrize("kind", REARRANGED)
def test_state_dicts_keep_the_models_names_shapes_and_order(kind: str, tmp_path: Path) -> None:
    model: Any = small(kind)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    uniep.transformers.use(model)
    assert model.state_dict().keys() == own.keys()
    assert [n for n, value in model.state_dict().items() if not torch.equal(value, own[n])] == []

    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert [n for n, value in loaded.state_dict().items() if not torch.equal(value, own[n])] == []

    other = small(kind, initializer_range=0.05)
    uniep.transformers.use(other)
    other.load_state_dict(own)
    assert_same(step(other, tokens()), step(model, tokens()))


@pytest.mark.parametrize("kind", REARRANGED)
def test_parameters_stay_those_that_an_optimizer_knows(kind: str) -> None:
    model = small(kind)
    before = dict(model.named_parameters())
    step(model, tokens(), "eager")
    uniep.transformers.use(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in after)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in after.values())


def test_weights_read_where_they_lie_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small("gpt_oss"), tokens()
    given: list[Tensor] = []

    def watched(*args: Tensor, **options: Any) -> Tensor:
        given.extend(args[3:5])
        return uniep.functional.moe(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(uniep, "moe", watched)
        in_place = step(model, ids, "uniep")
    own = {id(param) for param in model.parameters()}
    assert given
    assert all(id(weight) in own for weight in given)
    uniep.transformers.use(model)
    assert any(is_packed(module) for module in model.modules())
    assert_same(step(model, ids), in_place)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", REARRANGED)
def test_weights_of_experts_are_the_parameters(kind: str, device: str) -> None:
    """But w1 of gpt-oss on GPUs, whose columns of gate and up take turns."""
    model: Any = small(kind)
    (name, *_) = uniep.transformers.check(model)
    found = model.get_submodule(name)
    experts = getattr(found, "experts", found)
    facts = facts_of(experts)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for param in facts.names if device != "cpu" else ():
            on_gpu = torch.empty_like(getattr(experts, param), device=device)
            setattr(experts, param, torch.nn.Parameter(on_gpu))
        weights = weights_of(experts, facts)
    by_turns = kind == "gpt_oss" and device == "cpu"
    in_place = kind != "gpt_oss" or device == "cpu"
    assert (weights.w1 is getattr(experts, facts.names[0])) == in_place
    assert weights.w1.is_contiguous()
    assert weights.w1.shape == getattr(experts, facts.names[0]).shape
    assert weights.w2 is getattr(experts, facts.names[1])
    assert weights.weights_layout == "in_out"
    assert weights.w1_layout == ("interleaved" if by_turns else "halves")


def test_columns_by_turns_become_halves() -> None:
    model: Any = small("gpt_oss")
    experts = model.model.layers[0].mlp.experts
    w1 = gate_first(experts.gate_up_proj, 2)
    assert w1.is_contiguous()
    assert torch.equal(w1.mT, to_uniep(experts.gate_up_proj, 0, facts_of(experts)))


def test_experts_that_the_choice_does_not_reach_are_refused() -> None:
    """The configuration of a part is one of its own, and the part no model."""
    model: Any = small("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.config = copy.deepcopy(experts.config)
    with pytest.raises(
        ValueError, match=r"leaves model.layers.1.mlp.experts with 'grouped_mm'; it"
    ):
        uniep.transformers.use(model)


def test_another_implementation_refuses_rearranged_weights() -> None:
    model: Any = small("gpt_oss")
    uniep.transformers.use(model)
    with pytest.raises(RuntimeError, match="weights of this GptOssExperts lie as uniep takes them"):
        step(model, tokens(), "eager")
    uniep.transformers.register("other name", schedule="sequential")
    step(model, tokens(), "other name")


def shard(kind: str) -> list[dict[str, Tensor]]:
    """State dicts and gradients of a model that FSDP2 shards after `use`."""
    uniep.transformers.register()
    model: Any = small(kind)
    uniep.transformers.use(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo multiplies nothing while it sums
            module.set_force_sum_reduction_for_comms(True)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: torch.zeros_like(value) for name, value in saved.items()})
    model.load_state_dict(saved)
    again = model.state_dict()
    grads = step(model, tokens())[1]
    return [
        {name: whole(value) for name, value in state.items()} for state in (saved, again, grads)
    ]


@pytest.mark.parametrize("kind", REARRANGED)
def test_fsdp_after_use(kind: str) -> None:
    model = small(kind)
    own = model.state_dict()
    for saved, again, grads in run_ranks(2, shard, kind):
        for state in (saved, again):
            assert state.keys() == own.keys()
            assert [name for name in own if not torch.equal(state[name], own[name])] == []
        wanted = step(model, tokens(), "uniep" if kind == "gpt_oss" else None)[1]
        assert max(distance(grads[name], wanted[name]) for name in wanted) < GRADIENT


def test_rearranged_experts_compile_in_one_graph() -> None:
    model = small("gpt_oss")
    uniep.transformers.use(model)
    experts = next(module for module in model.modules() if is_packed(module))
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    x, choice = torch.randn(46, 64).bfloat16(), torch.rand(46, 8).topk(2)
    inputs = (x, choice.indices, choice.values)
    assert torch.equal(compiled(*inputs), experts(*inputs))


@pytest.mark.parametrize("kind", REARRANGED)
def test_copies_and_checkpointing_give_the_same_bits(kind: str) -> None:
    model, ids = small(kind), tokens()
    uniep.transformers.use(model)
    first = step(model, ids)
    copied: Any = copy.deepcopy(model)
    assert_same(step(copied, ids), first)
    copied.gradient_checkpointing_enable()
    assert_same(step(copied, ids), first)


def test_llama4_with_several_experts_of_a_token() -> None:
    model, ids = small("llama4", num_experts_per_tok=3), tokens()
    choices: list[Tensor] = []
    with router_choices(record=choices):
        exact = step(copy.deepcopy(model).double(), ids)
    with router_choices(replay=list(choices)):
        own = step(model, ids)
    uniep.transformers.register(max_tokens=ids.numel())
    uniep.transformers.use(model)
    with router_choices(replay=list(choices)):
        found = step(model, ids)
    assert_close(distances_of(found, own, exact))


def test_probabilities_before_the_second_projection() -> None:
    """The same but for roundings, biases included."""
    model, ids = small("gpt_oss"), tokens()
    uniep.transformers.use(model)
    after = step(model, ids)
    uniep.transformers.register(probs="before")
    before = step(model, ids)
    assert 0 < distance(before[0], after[0]) < LOGITS
    assert max(distance(before[1][name], after[1][name]) for name in after[1]) < GRADIENT
    with pytest.raises(ValueError, match="probs is 'behind'; it must be 'before' or 'after'"):
        uniep.transformers.register(probs="behind")  # type: ignore[arg-type]


# What docs/models.md says.

# Classes of experts in transformers' folder of models.
REFUSED = {
    "Muse Spark": "muse_spark.modeling_muse_spark.MuseSparkExperts",
}


def refusal(title: str) -> str:
    with pytest.raises(NotImplementedError) as refused:
        uniep.transformers.check(experts_of(REFUSED[title]))
    return str(refused.value)


def row(kind: str) -> list[str]:
    """What is true of a model, as the adapter finds it."""
    model: Any = small(kind)
    (name, *_) = uniep.transformers.check(model)
    found = model.get_submodule(name)
    is_block = not hasattr(type(found), "_apply_gate")
    facts = facts_of(found.experts if is_block else found)
    block = found if is_block else model.get_submodule(name.rsplit(".", 1)[0])
    shared = [f"`{own_name}`" for own_name in names_of_shared(block)]
    differs = {"transposed": facts.transposed, "gate and up alternate": facts.interleaved}
    layout = ", ".join(what for what, holds in differs.items() if holds)
    plan = getattr(model.config.get_text_config(), "base_model_ep_plan", None)
    return [
        MODELS[kind].title,
        f"`{type(model).__name__}`",
        f"`{facts.activation}`",
        "yes" if facts.bias else "",
        "x" if is_block else "the output",
        layout,
        ", ".join(shared),
        ("yes" if can_be_in_pass(kind) else "no") if shared else "",
        "yes" if plan else "no",
    ]


def can_be_in_pass(kind: str) -> bool:
    try:
        fused(kind, **IN_PASS.get(kind, [{}])[0])
    except NotImplementedError:
        return False
    return True


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def test_the_page_of_models_says_what_is_true() -> None:
    head = [
        "model",
        "class",
        "activation",
        "biases",
        "probability multiplies",
        "weights rearranged",
        "shared experts",
        "in the pass",
        "over ranks",
    ]
    supported = table(head, [row(kind) for kind in MODELS])
    refused = table(["model", "why it is refused"], [[t, refusal(t)] for t in REFUSED])
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    found = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    for wanted in (supported, refused):
        assert wanted + "\n" in found, f"docs/models.md must have this table:\n\n{wanted}\n"
