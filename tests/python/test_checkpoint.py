"""Distributed checkpoints of modules whose names or weights are not those of a plain model."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from training_state import load, state_of

import uniep
from uniep import checkpoint

Model = tuple[nn.Module, torch.optim.Optimizer]


def new_layer(group: Any = None) -> uniep.MoELayer:
    group = dist.group.WORLD if group is None else group
    return uniep.MoELayer(64, 32, 8, 2, group=group, bias=True)


def new_model(**group: Any) -> nn.Module:
    return nn.Sequential(OrderedDict(moe=new_layer(**group), dense=nn.Linear(64, 64)))


def plain() -> nn.Module:
    return new_model()


def with_ddp() -> nn.Module:
    model = new_model()
    experts = [f"moe.{key}" for key in ("w1", "w2", "b1", "b2")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    return DistributedDataParallel(model)


def compiled() -> nn.Module:
    return torch.compile(new_model(), backend="eager")


def compiled_ddp() -> nn.Module:
    return torch.compile(with_ddp(), backend="eager")


def compiled_child() -> nn.Module:
    model = new_model()
    model.moe = torch.compile(model.moe, backend="eager")
    return model


def with_checkpoint_wrapper() -> nn.Module:
    model = new_model()
    model.moe = checkpoint_wrapper(model.moe)
    return model


def compiled_within_checkpoint_wrapper() -> nn.Module:
    model = new_model()
    model.moe = checkpoint_wrapper(torch.compile(model.moe, backend="eager"))
    return model


def checkpoint_wrapper_around_all() -> nn.Module:
    return checkpoint_wrapper(new_model())


def in_two_places() -> nn.Module:
    layer = new_layer()
    return nn.ModuleList([layer, layer])


def tied() -> nn.Module:
    """Two layers with one parameter in common."""
    layers = nn.ModuleList([new_layer(), new_layer()])
    layers[1].w1 = layers[0].w1
    return layers


def beside_its_layer() -> nn.Module:
    """A weight that has a second name outside its layer."""
    model = new_model()
    model.of_mine = model.moe.w1
    return model


WRAPPERS = (
    plain,
    with_ddp,
    compiled,
    compiled_ddp,
    compiled_child,
    with_checkpoint_wrapper,
    compiled_within_checkpoint_wrapper,
    checkpoint_wrapper_around_all,
)
SHARED = (in_two_places, tied, beside_its_layer)


def trained(
    make: Callable[[], nn.Module],
    seed: int,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Model:
    """A model and its optimizer after a step, for which any gradients do."""
    torch.manual_seed(seed)
    model = make()
    optimizer = kind(model.parameters(), lr=0.01)
    torch.manual_seed(100 * seed)
    for name, weight in model.named_parameters():
        weight.grad = torch.randn_like(weight)
        if name.split(".")[-1] in ("w1", "w2", "b1", "b2", "of_mine"):
            weight.grad *= 1 + dist.get_rank() % 2  # two ranks share experts everywhere here
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments of this rank."""
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, weight in model.named_parameters():
        for what, value in optimizer.state[weight].items():
            found[f"{name} {what}"] = value.clone()
    return found


def assert_restored(folder: Path, make: Callable[[], nn.Module]) -> None:
    saved = trained(make, seed=3)
    state = state_of(*saved)
    assert state["model"].keys() == saved[0].state_dict().keys()
    named = {name for group in state["optimizer"]["param_groups"] for name in group["params"]}
    assert state["optimizer"]["state"].keys() == named
    dcp.save(state, checkpoint_id=folder)
    other = trained(make, seed=4)
    load(*other, folder)
    wanted, found = tensors_of(*saved), tensors_of(*other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{make.__name__}: {name}"


def restored(folder: Path, ways: tuple[Callable[[], nn.Module], ...]) -> None:
    for make in ways:
        assert_restored(folder / make.__name__, make)
        torch.compiler.reset()


def test_wrappers_change_nothing(tmp_path: Path) -> None:
    run_ranks(2, restored, tmp_path, WRAPPERS)


def test_weights_of_several_names(tmp_path: Path) -> None:
    run_ranks(2, restored, tmp_path, SHARED)


def from_one_wrapper_to_another(folder: Path) -> None:
    model, optimizer = trained(with_ddp, seed=3)
    saved = checkpoint.distributed_optimizer_state_dict(model, optimizer)
    dcp.save(saved, checkpoint_id=folder)
    wanted = optimizer.state[model.module.moe.w1]["exp_avg"]
    model, optimizer = trained(with_checkpoint_wrapper, seed=4)
    state = checkpoint.distributed_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    checkpoint.load_optimizer_state_dict(model, optimizer, state)
    assert torch.equal(optimizer.state[model.moe.w1]["exp_avg"], wanted)


def test_moments_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    run_ranks(2, from_one_wrapper_to_another, tmp_path)


def without_state(folder: Path) -> None:
    model, optimizer = trained(plain, seed=3, kind=torch.optim.SGD)
    state = state_of(model, optimizer)
    assert state["optimizer"]["state"] == {}
    dcp.save(state, checkpoint_id=folder)
    model, optimizer = trained(plain, seed=4, kind=torch.optim.SGD)
    optimizer.param_groups[0]["lr"] = 0.5
    load(model, optimizer, folder)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_an_optimizer_without_state(tmp_path: Path) -> None:
    run_ranks(2, without_state, tmp_path)


def frozen(folder: Path) -> None:
    """Experts that the optimizer has no state of."""
    torch.manual_seed(3)
    model = new_model()
    model.moe.w1.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    state = state_of(model, optimizer)
    assert "moe.w2" in state["optimizer"]["state"]
    assert "moe.w1" not in state["optimizer"]["state"]
    dcp.save(state, checkpoint_id=folder)
    load(model, optimizer, folder)


def test_frozen_experts(tmp_path: Path) -> None:
    run_ranks(2, frozen, tmp_path)


def without_first(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {key: of for key, of in state["state"].items() if key > 0}}


def with_copies(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.update({name: tensor.detach().clone() for name, tensor in state.items()})


def all_refuse(
    error: type[Exception], words: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    with pytest.raises(error, match=words):
        checkpoint.distributed_state_dict(model)
    with pytest.raises(error, match=words):
        checkpoint.distributed_optimizer_state_dict(model, optimizer)
    with pytest.raises(error, match=words):
        state = {"state": {}, "param_groups": []}
        checkpoint.load_optimizer_state_dict(model, optimizer, state)


def moments_that_a_hook_takes_out() -> None:
    model, optimizer = trained(plain, seed=3)
    optimizer.register_state_dict_post_hook(without_first)
    with pytest.raises(ValueError, match=r"the optimizer has state of moe\.w1 that its state dict"):
        checkpoint.distributed_optimizer_state_dict(model, optimizer)


def factors_of_moments() -> None:
    model, optimizer = trained(plain, seed=3, kind=torch.optim.Adafactor)
    with pytest.raises(ValueError, match=r"the optimizer's row_var of moe\.w1 has shape \["):
        checkpoint.distributed_optimizer_state_dict(model, optimizer)


def copies_of_experts() -> None:
    model = new_model()
    model._register_state_dict_hook(with_copies)
    with pytest.raises(ValueError, match=r"lacks the parameters moe\.b1, moe\.b2, moe\.w1, "):
        checkpoint.distributed_state_dict(model)


def parametrized_experts() -> None:
    model = new_model()
    parametrize.register_parametrization(model.moe, "w1", nn.Identity())
    optimizer = torch.optim.AdamW(model.parameters())
    all_refuse(ValueError, r"moe\.w1 is no parameter of its layer.*a plain", model, optimizer)


def experts_of_fsdp() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    model = new_model(group=mesh["ep"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    all_refuse(NotImplementedError, r"moe\.w1 is a DTensor.*ignored_params", model, optimizer)


@pytest.mark.parametrize(
    "refused",
    [
        moments_that_a_hook_takes_out,
        factors_of_moments,
        copies_of_experts,
        parametrized_experts,
        experts_of_fsdp,
    ],
)
def test_what_cannot_be_saved_is_refused(refused: Callable[[], None]) -> None:
    run_ranks(2, refused)


def sharded_but_for_experts(folder: Path) -> None:
    """What refusals point to: FSDP2 has all that is no expert's."""

    def make() -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = new_model(group=mesh["ep"])
        layer = model.moe
        fully_shard(model, mesh=mesh["dp"], ignored_params={layer.w1, layer.w2, layer.b1, layer.b2})
        return model

    saved = trained(make, seed=3)
    dcp.save(state_of(*saved), checkpoint_id=folder)
    other = trained(make, seed=4)
    load(*other, folder)
    for key in ("w1", "b2"):
        mine, its = (getattr(model.moe, key) for model, _ in (saved, other))
        assert torch.equal(mine, its), key
        for what in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[1].state[mine][what], other[1].state[its][what]), key
    mine, its = (optimizer.state[model.dense.weight] for model, optimizer in (saved, other))
    assert torch.equal(mine["exp_avg"].full_tensor(), its["exp_avg"].full_tensor())


def test_fsdp_beside_experts(tmp_path: Path) -> None:
    run_ranks(4, sharded_but_for_experts, tmp_path)


def new_beside_fsdp(folder: Path) -> None:
    """An optimizer that has not stepped, some of whose moments are DTensors of FSDP2."""

    def make(seed: int) -> Model:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = new_model(group=mesh["ep"])
        layer = model.moe
        fully_shard(model, mesh=mesh["dp"], ignored_params={layer.w1, layer.w2, layer.b1, layer.b2})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        return model, optimizer

    saved, other = make(3), make(4)
    dcp.save(state_of(*saved), checkpoint_id=folder)
    load(*other, folder)
    for model, optimizer in (saved, other):
        assert len(optimizer.state) == 0
        optimizer.step()
        for weight in model.parameters():  # not damped, as it is the first
            buffer = optimizer.state[weight]["momentum_buffer"]
            assert torch.equal(buffer, torch.ones_like(weight))


def test_a_new_optimizer_beside_fsdp(tmp_path: Path) -> None:
    run_ranks(4, new_beside_fsdp, tmp_path)


def ended(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("hosts", "ranks"))
    layers = [new_layer(), new_layer(group=mesh)]
    dist.destroy_process_group()
    for layer in layers:
        with pytest.raises(ValueError, match="process group of the layer has ended"):
            checkpoint.distributed_state_dict(layer)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    with pytest.raises(ValueError, match="process group of the layer has ended"):
        checkpoint.distributed_state_dict(layers[0])
    checkpoint.distributed_state_dict(new_layer())


def test_a_group_that_has_ended(tmp_path: Path) -> None:
    run_ranks(2, ended, tmp_path)
