"""What test_megatron.py runs in the processes of an expert-parallel group, on CPUs over gloo.

Importing Megatron-Core takes seconds, so a process runs all cases, one after another: the functions
of its modules whose names begin with `case_`. Results are compared with Megatron's own layer, which
has the same weights and the allgather dispatcher.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_cases import (
    checkpoints,
    layer,
    main_grads,
    megakernel,
    options,
    schedules,
    shared,
)
from megatron_cases.on_cpu import patch_cuda
from megatron_cases.support import figures, make_groups

_MODULES = (layer, main_grads, schedules, checkpoints, options, megakernel, shared)


def run_all(folder: str, only: tuple[str, ...] = ()) -> None:
    """Runs the cases, or only some.

    A file of this rank in `folder` has the names of those that are done.
    """
    warnings.simplefilter("ignore")
    patch_cuda()
    make_groups(dist.get_world_size())
    done = Path(folder) / f"done{dist.get_rank()}"
    for name, case in cases().items():
        if only and name not in only:
            continue
        try:
            arguments = [folder] if case.__code__.co_argcount else []
            outcome = case(*arguments) or "passed"
        except BaseException:
            outcome = traceback.format_exc()
        with done.open("a") as file:
            file.write(f"{name}\0{outcome}\0\n")
        failed = outcome != "passed" and not outcome.startswith("skipped")
        if failed and dist.get_world_size() > 1:
            for child in multiprocessing.active_children():  # Megatron's, of checkpoints
                child.kill()
            os._exit(1)  # the other ranks wait for this one; their launcher ends them
        dist.barrier()
    lines = [f"{what} {distance}\n" for what, distance in figures]
    (Path(folder) / f"figures{dist.get_rank()}").write_text("".join(lines))


def cases() -> dict[str, Callable[..., str | None]]:
    """All cases by name."""
    return {
        n.removeprefix("case_"): f
        for m in _MODULES
        for n, f in vars(m).items()
        if n.startswith("case_")
    }
