"""Checkpoints of an optimizer, whose moments of experts ranks have different ones of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from training_state import load, state_of

import uniep

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
