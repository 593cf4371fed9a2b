"""A model and its optimizer in distributed checkpoints, as docs/checkpoints.md has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from uniep import checkpoint


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": checkpoint.distributed_state_dict(model),
        "optimizer": checkpoint.distributed_optimizer_state_dict(model, optimizer),
    }


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    checkpoint.load_optimizer_state_dict(model, optimizer, state["optimizer"])
