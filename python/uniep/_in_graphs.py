"""What compilers are told of functions, by name. To be imported once there is a compiler."""

from __future__ import annotations

import torch

from . import _shared_workspaces
from ._outside_graphs import OUTSIDE

for _name, (_function, _reason) in OUTSIDE.items():
    globals()[_name] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        _function, reason=_reason
    )

# Called while a graph is made, which their results are constants of.
prepare = torch.compiler.assume_constant_result(  # type: ignore[no-untyped-call]
    _shared_workspaces.prepare
)
room = torch.compiler.assume_constant_result(  # type: ignore[no-untyped-call]
    _shared_workspaces.room
)
