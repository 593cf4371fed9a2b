"""What compilers are told of functions, by name. To be imported once there is a compiler."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from ._compiler_registry import CONSTANT, OUTSIDE

for _name, (_function, _reason) in OUTSIDE.items():
    globals()[_name] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        _function, reason=_reason
    )

for _name, _function in CONSTANT.items():
    globals()[_name] = torch.compiler.assume_constant_result(  # type: ignore[no-untyped-call]
        _function
    )

# How PyTorch's compiler names what it traces a checkpoint's function with.
_TRACES_CHECKPOINT = "CheckpointHigherOrderVariable"


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint is being traced: PyTorch says so nowhere but in its own stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Of its own frames alone: before Python 3.13 who looks at a frame's locals keeps them as
        # long as the frame, and those of a training loop are whole graphs.
        is_own = frame.f_globals.get("__name__", "").startswith("torch._dynamo.")
        if is_own and type(frame.f_locals.get("self")).__name__ == _TRACES_CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def _may_run_again() -> bool:
    """Of what is being traced, in backward: under a checkpoint, or to keep to a memory budget."""
    from torch._functorch import config

    return config.activation_memory_budget < 1 or _is_in_checkpoint()


# A constant of each graph, as those above.
may_run_again = torch.compiler.assume_constant_result(  # type: ignore[no-untyped-call]
    _may_run_again
)
