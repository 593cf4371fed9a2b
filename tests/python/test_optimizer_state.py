"""Checkpoints of an optimizer, whose moments of experts ranks have different ones of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from training_state import load, state_of

import uniep
from uniep import checkpoint

TOKENS = 32
LEARNING_RATE = 0.01


def new_model(learning_rate: float = LEARNING_RATE, seed: int = 3) -> tuple[nn.Module, Any]:
    """A layer beside one of PyTorch's, and their optimizer."""
    torch.manual_seed(seed)
    group = dist.group.WORLD if dist.is_initialized() else None
    layer = uniep.MoELayer(64, 32, 8, 2, group=group, bias=True, max_tokens=TOKENS)
    model = nn.ModuleDict({"moe": layer, "dense": nn.Linear(64, 64, dtype=torch.bfloat16)})
    return model, torch.optim.AdamW(model.parameters(), lr=learning_rate)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        g = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(TOKENS, 64, generator=g).bfloat16()
        model["moe"](model["dense"](x)).float().square().mean().backward()
        if dist.is_initialized():
            for weight in (*model["dense"].parameters(), model["moe"].router.weight):
                dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments of this rank, by name."""
    found = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        for what, value in optimizer.state[weight].items():
            found[f"{name} {what}"] = value.clone()
    return found


def of_ranks(folder: Path) -> dict[str, Tensor]:
    """Saves after two steps; what a third makes of them is what it makes once they are loaded."""
    model, optimizer = new_model()
    train(model, optimizer, range(2))
    saved = tensors_of(model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    train(model, optimizer, range(2, 3))
    other = new_model(learning_rate=0.5, seed=4)
    load(*other, folder)
    assert other[1].param_groups[0]["lr"] == LEARNING_RATE
    for name, tensor in tensors_of(*other).items():
        assert torch.equal(tensor, saved[name]), name
    train(*other, range(2, 3))
    for name, tensor in tensors_of(model, optimizer).items():
        assert torch.equal(tensors_of(*other)[name], tensor), name
    return saved


def loaded(folder: Path) -> dict[str, Tensor]:
    found = new_model(seed=4)
    load(*found, folder)
    return tensors_of(*found)


def is_of_experts(name: str) -> bool:
    return name.split()[0] in {f"moe.{w}" for w in ("w1", "w2", "b1", "b2")} and "step" not in name


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.cat([part[name] for part in parts]) if is_of_experts(name) else tensor
        for name, tensor in parts[0].items()
    }


def test_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    wanted = joined(run_ranks(4, of_ranks, tmp_path))
    moments = wanted["moe.w1 exp_avg"]
    assert moments.shape[0] == 8 and not torch.equal(moments[:2], moments[2:4])
    for found in (loaded(tmp_path), joined(run_ranks(2, loaded, tmp_path))):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, {}),
)
of_kinds = pytest.mark.parametrize(("kind", "options"), KINDS)


def new_of(kind: Any, options: dict[str, Any], seed: int = 3) -> tuple[nn.Module, Any]:
    model, _ = new_model(seed=seed)
    return model, kind(model.parameters(), lr=LEARNING_RATE, **options)


def backward(model: nn.Module) -> None:
    """Gradients of no step, which the one that follows does not use."""
    x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(99)).bfloat16()
    model["moe"](model["dense"](x)).float().square().mean().backward()


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@of_kinds
@pytest.mark.parametrize("has_gradients", [False, True])
def test_looking_at_a_new_optimizer_changes_nothing(
    kind: Any, options: dict[str, Any], has_gradients: bool
) -> None:
    wanted, looked_at = (new_of(kind, options) for _ in range(2))
    if has_gradients:
        backward(looked_at[0])
    before = {name: weight.grad for name, weight in looked_at[0].named_parameters()}
    copies = {name: grad.clone() for name, grad in before.items() if grad is not None}
    found = checkpoint.distributed_optimizer_state_dict(*looked_at)
    for name, weight in looked_at[0].named_parameters():
        assert weight.grad is before[name], name
        assert weight.grad is None or torch.equal(weight.grad, copies[name]), name
    assert looked_at[1].param_groups[0]["lr"] == LEARNING_RATE
    if kind is not torch.optim.Adagrad:  # it has state from the beginning
        assert len(looked_at[1].state) == 0
        assert len(found["state"]) == (
            0 if options == {} and kind is torch.optim.SGD else len(before)
        )
        for of in found["state"].values():
            assert all(not value.any() for value in of.values())
    looked_at[1].zero_grad()
    for model, optimizer in (wanted, looked_at):
        train(model, optimizer, range(2))
    assert_same(tensors_of(*looked_at), tensors_of(*wanted))


@of_kinds
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("before", ["nothing", "a backward", "a step and a backward"])
def test_training_goes_on_to_the_bit(
    tmp_path: Path,
    kind: Any,
    options: dict[str, Any],
    steps: int,
    before: str,
) -> None:
    """Whatever was saved, and whatever the optimizer that loads it has done before."""
    wanted, other = (new_of(kind, options, seed) for seed in (3, 4))
    train(*wanted, range(steps))
    dcp.save(state_of(*wanted), checkpoint_id=tmp_path)
    if "step" in before:
        train(*other, range(5, 6))
    if "backward" in before:
        backward(other[0])
    load(*other, tmp_path)
    other[1].zero_grad()
    if steps > 0:
        assert_same(tensors_of(*other), tensors_of(*wanted))
    for model, optimizer in (wanted, other):
        train(model, optimizer, range(steps, steps + 2))
    assert_same(tensors_of(*other), tensors_of(*wanted))


def new_with_gradients(folder: Path, steps: int) -> None:
    options = {"momentum": 0.9, "dampening": 0.5}
    wanted, other = (new_of(torch.optim.SGD, options, seed) for seed in (3, 4))
    train(*wanted, range(steps))
    dcp.save(state_of(*wanted), checkpoint_id=folder)
    backward(other[0])
    load(*other, folder)
    other[1].zero_grad()
    for model, optimizer in (wanted, other):
        train(model, optimizer, range(steps, steps + 2))
    assert_same(tensors_of(*other), tensors_of(*wanted))


@pytest.mark.parametrize("steps", [0, 2])
def test_ranks_load_where_there_are_gradients(tmp_path: Path, steps: int) -> None:
    run_ranks(2, new_with_gradients, tmp_path, steps)


def test_empty_entries_are_no_state(tmp_path: Path) -> None:
    """Reading ``optimizer.state[weight]`` leaves one."""
    wanted, other = (new_of(torch.optim.AdamW, {}, seed) for seed in (3, 4))
    train(*wanted, range(1))
    dcp.save(state_of(*wanted), checkpoint_id=tmp_path)
    assert other[1].state[other[0]["moe"].w1] == {}
    load(*other, tmp_path)
    assert_same(tensors_of(*other), tensors_of(*wanted))


@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_error_leaves_a_new_optimizer_as_it_was(with_gradients: bool) -> None:
    model, optimizer = new_of(torch.optim.AdamW, {})
    if with_gradients:
        backward(model)
    gradients = [weight.grad for weight in model.parameters()]

    def fails(*_: Any) -> None:
        raise RuntimeError("of a hook")

    for register in (optimizer.register_step_post_hook, optimizer.register_state_dict_pre_hook):
        hook = register(fails)
        for act in (
            lambda: checkpoint.distributed_optimizer_state_dict(model, optimizer),
            lambda: checkpoint.load_optimizer_state_dict(model, optimizer, {"state": {}}),
        ):
            with pytest.raises(RuntimeError, match="of a hook"):
                act()
            assert len(optimizer.state) == 0
            assert optimizer.param_groups[0]["lr"] == LEARNING_RATE
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                assert weight.grad is gradient
        hook.remove()


class Factors(torch.optim.SGD):
    """Has a row of factors of a dense weight, which may be of all weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            self.state[group["params"][0]]["factors"] = torch.ones(64)


def refused(kind: str) -> None:
    model, _ = new_model()
    weights = list(model.parameters())
    dense_first = [*model["dense"].parameters(), *model["moe"].parameters()]
    for order in (weights, dense_first):
        if kind == "LBFGS":
            optimizer: Any = torch.optim.LBFGS(order, lr=0.01, max_iter=1)
            words = "an LBFGS, whose state is of all weights"
        else:
            optimizer = Factors(order, lr=0.01, momentum=0.9)
            words = r"factors of .* has shape \[64\], and the weight"
        backward(model)
        for is_new in (True, False):
            if not is_new:
                optimizer.step(lambda: model["moe"].w1.float().sum())
            elif kind != "LBFGS":
                continue
            with pytest.raises(ValueError, match=words):
                checkpoint.distributed_optimizer_state_dict(model, optimizer)
            if kind == "LBFGS":
                with pytest.raises(ValueError, match=words):
                    checkpoint.load_optimizer_state_dict(model, optimizer, {"state": {}})


@pytest.mark.parametrize("kind", ["LBFGS", "factors"])
def test_state_of_all_weights_is_refused(kind: str) -> None:
    run_ranks(2, refused, kind)


def test_one_rank_saves_state_of_any_shape() -> None:
    model, _ = new_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=1)
    backward(model)
    optimizer.step(lambda: model["moe"].w1.float().sum())
    assert checkpoint.distributed_optimizer_state_dict(model, optimizer)["state"]
