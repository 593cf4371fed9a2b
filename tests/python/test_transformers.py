"""uniep.transformers with the transformers of the package index: small random models."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from ranks import run_ranks, run_script
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_cases import (  # noqa: E402
    GRADIENT,
    LOGITS,
    MODELS,
    Distances,
    Result,
    assert_close,
    distance,
    distances,
    distances_of,
    root_mean_square,
    router_choices,
    small,
    step,
    tokens,
)

import uniep.transformers  # noqa: E402

ON_RANKS = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")


@pytest.fixture(autouse=True)
def registered() -> None:
    uniep.transformers.register()


def test_the_limits_tell_a_wrong_layer_from_a_right_one() -> None:
    model, ids = small("qwen3_moe"), tokens()
    choices: list[Tensor] = []
    with router_choices(record=choices):
        own = step(model, ids, "eager")
    for name, weight in model.named_parameters():
        if name.endswith("gate_up_proj"):
            with torch.no_grad():  # up, then gate
                weight.copy_(weight.roll(weight.shape[1] // 2, 1))
    with router_choices(replay=choices):
        wrong = step(model, ids, "uniep")
    logits, grads = distances(wrong, own)
    assert logits > 4 * LOGITS
    assert min(d for name, d in grads.items() if "experts" in name) > 4 * GRADIENT


def test_what_register_was_given_changes_no_bit() -> None:
    model, ids = small("mixtral"), tokens()
    model.set_experts_implementation("uniep")  # type: ignore[operator]
    first = step(model, ids)
    uniep.transformers.register(
        schedule="sequential", max_tokens=64, capacity_rows=1024, save="none", recompute_h=True
    )
    second = step(model, ids)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    uniep.transformers.register(schedule="no such preset")
    with pytest.raises(RuntimeError, match="no such preset"):
        step(model, ids)


def test_combine_groups_are_passed_on() -> None:
    model, ids = small("mixtral"), tokens()
    first = step(model, ids, "uniep")
    uniep.transformers.register(combine_groups=4, combine_partials="bf16")
    second = step(model, ids)
    assert not torch.equal(first[0], second[0])
    logits, _ = distances(second, first)
    assert logits < LOGITS
    with pytest.raises(ValueError, match="combine_partials is 'fp16'"):
        uniep.transformers.register(combine_partials="fp16")
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    experts._is_expert_parallel = True  # as transformers marks those in EP of its own
    with pytest.raises(ValueError, match="combine_groups is 4, but transformers' own EP"):
        model(ids)


def test_a_row_pool_changes_no_bit() -> None:
    """All layers share it, under gradient checkpointing too, which makes it no emptier."""
    model, ids = small("mixtral"), tokens()
    first = step(model, ids, "uniep")
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    _, width, hidden = experts.gate_up_proj.shape
    pool = uniep.RowPool(None, hidden, width // 2, bytes=1 << 24, save="tokens", device="cpu")
    uniep.transformers.register(save="tokens", row_pool=pool)
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        second = step(model, ids)
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
        assert pool.free_pages == pool.pages > pool.fewest_free_pages


def test_backward_rows_change_no_bit() -> None:
    model, ids = small("mixtral"), tokens()
    first = step(model, ids, "uniep")
    uniep.transformers.register(backward_rows=256)
    second = step(model, ids)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    uniep.transformers.register(backward_rows=100)
    with pytest.raises(RuntimeError, match="backward_rows is 100"):
        step(model, ids)


def test_gradient_checkpointing_changes_no_bit() -> None:
    model, ids = small("olmoe"), tokens()
    first = step(model, ids, "uniep")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    second = step(model, ids)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.parametrize(
    "adapted",
    [
        {"target_modules": ["q_proj", "v_proj"]},  # experts are frozen
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ],
    ids=["attention", "experts"],
)
def test_low_rank_adapters(adapted: dict[str, list[str]]) -> None:
    """LoRA of peft; with experts' parameters adapted, uniep is given what they come to."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **adapted)
    model: Any = peft.get_peft_model(small("qwen3_moe"), config)
    ids = tokens()
    choices: list[Tensor] = []
    found = []
    for implementation, mode in (("eager", {"record": choices}), ("uniep", {"replay": choices})):
        model.base_model.model.set_experts_implementation(implementation)
        model.zero_grad()
        with router_choices(**mode):
            out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        assert all("lora_" in name for name in grads)
        found.append((out.logits.detach(), grads))
    own, ours = found
    assert any("experts" in name for name in own[1]) == ("target_parameters" in adapted)
    assert distance(ours[0], own[0]) < LOGITS
    for name, gradient in own[1].items():
        assert distance(ours[1][name], gradient) < GRADIENT, name
    assert any(not torch.equal(ours[1][name], gradient) for name, gradient in own[1].items())


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_that_peft_trains_whole(kind: str) -> None:
    """Its copies of them have configurations of their own; `use` may come before or after."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ids = tokens()
    found = []
    for use_last in (False, True):
        model: Any = small(kind)
        if not use_last:
            uniep.transformers.use(model)
        config = peft.LoraConfig(
            r=4, init_lora_weights=False, target_modules=["q_proj"], modules_to_save=["experts"]
        )
        torch.manual_seed(1)
        wrapped: Any = peft.get_peft_model(model, config)
        if use_last:
            uniep.transformers.use(wrapped)
        out = wrapped(input_ids=ids, labels=ids)
        out.loss.backward()
        grads = {
            name: p.grad
            for name, p in wrapped.named_parameters()
            if p.requires_grad and "experts" in name
        }
        assert grads
        found.append((out.logits.detach(), grads))
    (first, wanted), (second, got) = found
    assert torch.equal(first, second)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("use_last", [True, False])
def test_low_rank_adapters_of_weights_that_lie_otherwise(use_last: bool) -> None:
    """gpt-oss: adapters know the weights as transformers has them, and so must uniep."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=4,
        init_lora_weights=False,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    ids = tokens()
    other = adapted(small("gpt_oss"))
    other.base_model.model.set_experts_implementation("uniep")
    own: Any = small("gpt_oss")
    if not use_last:
        uniep.transformers.use(own)
        with pytest.raises(RuntimeError, match=r"is adapted \(LoRA\), and use\(model\) has"):
            adapted(own)(input_ids=ids)
        return
    model = adapted(own)
    uniep.transformers.use(model.base_model.model)
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    llama = peft.get_peft_model(
        small("llama4"),
        peft.LoraConfig(
            r=4, target_modules=[], target_parameters=["feed_forward.experts.down_proj"]
        ),
    )
    with pytest.raises(NotImplementedError, match="the experts of Llama4TextMoe are adapted"):
        uniep.transformers.use(llama.base_model.model)


def test_generation() -> None:
    model: Any = small("qwen3_moe").eval()
    ids = tokens()
    model.set_experts_implementation("uniep")
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cached = model.generate(ids, output_logits=True, **options)
    with torch.no_grad():
        once = model(cached.sequences[:, :-1]).logits[:, -5:]
    assert cached.sequences.shape == (2, 28)
    assert distance(torch.stack(cached.logits, 1), once) < LOGITS


def test_experts_compile_in_one_graph() -> None:
    model, ids = small("qwen3_moe"), tokens()
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    model.set_experts_implementation("uniep")  # type: ignore[operator]
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    x = torch.randn(ids.numel(), 64).bfloat16()
    choice = torch.rand(ids.numel(), 8).topk(2)
    assert torch.equal(
        compiled(x, choice.indices, choice.values), experts(x, choice.indices, choice.values)
    )


# What is refused.


def test_models_in_other_types_are_refused() -> None:
    ids = tokens()
    with pytest.raises(TypeError, match=r"hidden_states of OlmoeExperts is torch.float32; it must"):
        step(small("olmoe").float(), ids, "uniep")
    with pytest.raises(TypeError, match=r"hidden_states of OlmoeExperts is torch.float16; it must"):
        step(small("olmoe").half(), ids, "uniep")
    with (
        pytest.raises(TypeError, match=r"autocast is to torch.float16"),
        torch.autocast("cpu", torch.float16),
    ):
        step(small("olmoe").float(), ids, "uniep")


def test_fp32_weights_under_autocast() -> None:
    model, ids = small("qwen3_moe").float(), tokens()
    choices: list[Tensor] = []
    with router_choices(record=choices):
        exact = step(copy.deepcopy(model).double(), ids, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        with router_choices(replay=list(choices)):
            own = step(model, ids, "eager")
        with router_choices(replay=list(choices)):
            found = step(model, ids, "uniep")
    assert all(grad.dtype == torch.float32 for grad in found[1].values())
    ours, theirs = distances(found, exact), distances(own, exact)
    assert ours[0] < 1.2 * theirs[0]
    assert root_mean_square(ours[1]) < 1.2 * root_mean_square(theirs[1])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "norm": ({"has_post_expert_norm": True}, "Qwen3MoeExperts normalises each expert's output;"),
    "mish": ({"act_fn": nn.Mish()}, "has activation Mish with a gate; uniep computes silu, gelu"),
    "no gate": (
        {"has_gate": False, "act_fn": nn.ReLU()},
        "has activation ReLU without a gate; uniep computes silu, gelu, relu2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_experts_are_refused(case: str) -> None:
    attributes, sentence = REFUSED[case]
    model: Any = small("qwen3_moe")
    for name, value in attributes.items():
        setattr(model.model.layers[1].mlp.experts, name, value)
    model.set_experts_implementation("uniep")
    with pytest.raises(NotImplementedError, match=sentence):
        model(input_ids=tokens())
    with pytest.raises(NotImplementedError, match=sentence):
        uniep.transformers.check(model)


@pytest.mark.parametrize(
    ("kind", "option", "accepted"),
    [
        ("gpt_oss", "swiglu_limit", "7.0"),
        ("deepseek_v4", "swiglu_limit", "10.0"),
        ("minimax_m3", "swiglu_alpha", "1.702"),
        ("minimax_m3", "swiglu_limit", "7.0"),
    ],
)
def test_gates_with_other_numbers_are_refused(kind: str, option: str, accepted: str) -> None:
    """docs/models.md has those that are accepted."""
    model: Any = small(kind, **{option: 5.0})
    with pytest.raises(NotImplementedError, match=rf"Experts has \w+ 5.0; it must be {accepted},"):
        uniep.transformers.use(model)
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert f"{float(accepted):g}" in page.partition("## Clamps and alphas")[2]


def test_a_gate_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = small("qwen3_moe")
    monkeypatch.setattr(type(model.model.layers[0].mlp.experts), "_apply_gate", lambda self, x: x)
    with pytest.raises(NotImplementedError, match="has a gate of its own"):
        uniep.transformers.check(model)


def test_check_names_the_experts() -> None:
    assert uniep.transformers.check(small("deepseek_v3")) == [
        "model.layers.1.mlp.experts",
        "model.layers.2.mlp.experts",
    ]
    assert uniep.transformers.check(small("llama4")) == [
        "model.layers.0.feed_forward",
        "model.layers.1.feed_forward",
    ]
    with pytest.raises(ValueError, match="Linear has no experts"):
        uniep.transformers.check(nn.Linear(2, 2))


# Several ranks.


def part_of_batch(case: dict[str, int]) -> slice:
    """Ranks of a TP group hold the same tokens."""
    first = dist.get_rank() // case.get("tp_size", 1)
    return slice(first, first + 1)


Compared = list[tuple[str, dict[str, Any], tuple[Distances, ...]]]


def compare(kinds: dict[str, str], cases: dict[str, list[dict[str, Any]]]) -> Compared:
    """On each rank, for the cases of every model: see `distances_of`.

    Ranks of a TP group have 12 and 11 of 23 tokens, and nobody says so to a workspace of their own.
    """
    ids = torch.randint(256, (4, 23), generator=torch.Generator().manual_seed(1))
    results = []
    for kind, path in kinds.items():
        load = functools.partial(
            getattr(transformers, MODELS[kind].classes[1]).from_pretrained,
            path,
            dtype=torch.bfloat16,
        )
        for case in cases[kind]:
            most: dict[str, Any] = {"save": "tokens"} if "tp_size" in case else {"max_tokens": 23}
            uniep.transformers.register(**most)
            own_ids = ids[part_of_batch(case)]
            choices: list[Tensor] = []
            alone = load(experts_implementation="eager").train()
            with router_choices(record=choices):
                exact = mean_over_ranks(step(copy.deepcopy(alone).double(), own_ids))
            with router_choices(replay=list(choices)):
                own = mean_over_ranks(step(alone, own_ids))
            config = {"ep_size": 2, "ep_implementation": "uniep", **case}
            implementation = config.pop("experts_implementation", "eager")
            model = load(
                distributed_config=transformers.distributed.DistributedConfig(**config),
                experts_implementation=implementation,
            ).train()
            experts = [m.num_experts for m in model.modules() if hasattr(type(m), "_apply_gate")]
            assert experts and set(experts) == {4}  # of 8
            with router_choices(replay=choices):
                found = step(model, own_ids)
            results.append((kind, case, distances_of(found, own, exact)))
    return results


def mean_over_ranks(result: Result) -> Result:
    """The gradients of a mean over all batches."""
    for grad in result[1].values():
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
    return result


def compared(ranks: int, cases: dict[str, list[dict[str, Any]]], folder: Path) -> list[Compared]:
    for kind in cases:
        small(kind).save_pretrained(folder / kind)  # type: ignore[operator]
    return run_ranks(ranks, compare, {kind: str(folder / kind) for kind in cases}, cases)


def assert_all_close(ranks: list[Compared], **only: str) -> int:
    """Checks the cases with these options on every rank, and returns how many there are."""
    checked = 0
    for kind, case, found in (one for rank in ranks for one in rank):
        if all(case.get(name, "uniep") == value for name, value in only.items()):
            print(kind, case)
            # With TP the attention's sums are rounded once more, in each of the ranks' parts.
            assert_close(found, 1.5 if "tp_size" in case else 1.2)
            checked += 1
    return checked


OWN = [
    {"fsdp_size": 2, "ep_implementation": "all_to_all", "experts_implementation": "uniep"},
    {"tp_size": 2, "ep_implementation": "all_reduce", "experts_implementation": "uniep"},
]


@pytest.fixture(scope="module")
def on_2_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Compared]:
    """Starting processes that import transformers takes longer than what they compute."""
    cases: dict[str, list[dict[str, Any]]] = {
        kind: [{"fsdp_size": 2}, {"tp_size": 2}] for kind in ON_RANKS
    }
    cases["mixtral"] += OWN
    return compared(2, cases, tmp_path_factory.mktemp("models"))


def test_expert_parallel_over_2_ranks(on_2_ranks: list[Compared]) -> None:
    assert assert_all_close(on_2_ranks, ep_implementation="uniep") == 2 * 2 * len(ON_RANKS)


@pytest.mark.parametrize("implementation", ["all_to_all", "all_reduce"])
def test_experts_in_transformers_own_expert_parallelism(
    on_2_ranks: list[Compared], implementation: str
) -> None:
    """It hands experts rows with local ids, and marks those of other ranks."""
    assert assert_all_close(on_2_ranks, ep_implementation=implementation) == 2


def with_trainers(folder: str, implementations: list[str]) -> list[list[dict[str, Any]]]:
    """One after another: starting processes takes longer."""
    return [with_trainer(folder, name) for name in implementations]


def with_trainer(folder: str, implementation: str) -> list[dict[str, Any]]:
    """What transformers' Trainer logs, with its default clipping; its weights are saved, too."""
    uniep.transformers.register(max_tokens=46)
    size = dist.get_world_size()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        distributed_config=transformers.distributed.DistributedConfig(
            ep_size=size, fsdp_size=size, ep_implementation=implementation
        ),
    )
    ids = torch.randint(256, (32, 23), generator=torch.Generator().manual_seed(1))
    options = transformers.TrainingArguments(
        f"{folder}/{implementation}",
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_only_model=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model=model, args=options, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_transformers_trainer(tmp_path: Path) -> None:
    """Losses and norms are close to those with its own experts, and so is what is saved."""
    folder = tmp_path / "qwen3_moe"
    small("qwen3_moe").save_pretrained(folder)  # type: ignore[operator]
    names = ["all_to_all", "uniep"]
    first, second = run_ranks(2, with_trainers, str(folder), names)
    assert first == second
    logs, saved = {}, {}
    for name, log in zip(names, first, strict=True):
        logs[name] = [(entry["loss"], entry["grad_norm"]) for entry in log]
        saved[name] = safetensors.torch.load_file(folder / name / "model.safetensors")
    for (loss, norm), (own_loss, own_norm) in zip(logs["uniep"], logs["all_to_all"], strict=True):
        assert loss == pytest.approx(own_loss, rel=1e-3)
        assert norm == pytest.approx(own_norm, rel=GRADIENT)
    start = safetensors.torch.load_file(folder / "model.safetensors")
    assert saved["uniep"].keys() == saved["all_to_all"].keys() == start.keys()
    for name, own in saved["all_to_all"].items():
        if "experts" in name:
            moved, away = (t.float() - own.float() for t in (start[name], saved["uniep"][name]))
            assert away.norm() < 0.5 * moved.norm(), name


class Trained(NamedTuple):
    begun: dict[str, Tensor]  # the state dict that training begins with
    ended: dict[str, Tensor]
    losses: dict[int, float]  # by step


def trained(model: Any, folder: Path, steps: int, resume: Path | None = None) -> Trained:
    begun: dict[str, Tensor] = {}

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            begun.update({name: value.clone() for name, value in model.state_dict().items()})

    ids = torch.randint(256, (8, 23), generator=torch.Generator().manual_seed(1))
    options = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        save_steps=2,
        logging_steps=1,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model, options, train_dataset=data, callbacks=[Watch()])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return Trained(begun, model.state_dict(), losses)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_training_goes_on_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """As docs/transformers.md says: with a model that is loaded from it; any other only here."""

    def used(path: Path) -> Any:
        model = getattr(transformers, MODELS[kind].classes[1]).from_pretrained(
            path, dtype=torch.bfloat16
        )
        uniep.transformers.use(model)
        return model.train()

    first, checkpoint = tmp_path / "first", tmp_path / "run" / "checkpoint-2"
    small(kind).save_pretrained(first)  # type: ignore[operator]
    whole = trained(used(first), tmp_path / "run", 4)
    again = trained(used(checkpoint), tmp_path / "again", 4, checkpoint)
    assert again.losses == whole.losses and len(whole.losses) == 4
    assert [n for n, value in whole.ended.items() if not torch.equal(again.ended[n], value)] == []
    other = trained(used(first), tmp_path / "other", 3, checkpoint)
    lost = [
        name for name, value in again.begun.items() if not torch.equal(other.begun[name], value)
    ]
    assert any("experts" in name for name in lost) == (kind != "gpt_oss")


def test_the_example_trains_as_transformers_own_experts_do() -> None:
    example = Path(__file__).parents[2] / "examples/transformers_qwen3.py"
    done = run_script([str(example)], ranks=2, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    losses = {
        line.split()[0]: [float(x) for x in line.split("losses")[1].split()]
        for line in done.stdout.splitlines()
        if "losses" in line
    }
    assert losses["uniep"] == pytest.approx(losses["all_to_all"], rel=2e-4)
    assert len(losses["uniep"]) == 12 and len(set(losses["uniep"])) > 1


def test_2_copies_of_experts_over_4_ranks(tmp_path: Path) -> None:
    """FSDP shards what ranks of different expert-parallel groups hold in common."""
    cases: dict[str, list[dict[str, Any]]] = {
        "qwen3_moe": [{"fsdp_size": 4}, {"fsdp_size": 2, "tp_size": 2}]
    }
    assert assert_all_close(compared(4, cases, tmp_path)) == 8
