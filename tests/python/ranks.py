"""Runs a function in several processes that form a gloo group, and brings back what it returns."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returned in each of `ranks` processes: tensors in plain containers.

    `function` is one of a module: the processes import it by name. They have a process group and
    torchrun's variables. The first that fails ends the others, and its traceback is raised here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run, (ranks, port, folder, function, args), nprocs=ranks)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / str(rank)) for rank in range(ranks)]


def _run(rank: int, ranks: int, port: int, folder: str, function: Any, args: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = function(*args)
    torch.save(result, Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()
