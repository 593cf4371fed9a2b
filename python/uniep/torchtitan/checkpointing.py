"""torchtitan's selective activation checkpointing, which keeps what uniep computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC


class UniepSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing, which also keeps what :func:`uniep.moe` computed."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's."""

    def get_save_ops(self) -> set[Any]:
        """Torchtitan's ops, and uniep's forward."""
        ops: set[Any] = super().get_save_ops()
        return ops | {
            torch.ops.uniep.forward.default,
            torch.ops.uniep.forward_exact.default,
        }
