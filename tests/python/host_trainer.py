"""Trains a layer under torchrun, until the host LOST is lost: host_trainer.py LOST FOLDER.

FOLDER/died has the time of that, FOLDER/error RANK the time and what that rank raises.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import uniep

STEPS_BEFORE = 3
STEPS = 10000


def processes_of_this_host() -> list[int]:
    """torchrun, and all its ranks, this one last."""
    processes: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(processes, [os.getppid(), os.getpid()])
    ranks = [own for parent, own in processes if parent == os.getppid() and own != os.getpid()]
    return [os.getppid(), *ranks, os.getpid()]


def train(lost: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    host = processes_of_this_host()
    torch.manual_seed(dist.get_rank())
    layer = uniep.MoELayer(64, 32, 8, 2, group=dist.group.WORLD, device="cpu")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    for step in range(STEPS):
        if step == STEPS_BEFORE and dist.get_rank() == 2 * lost:
            (folder / "died").write_text(str(time.time()))
            for process in host:  # as a power cut does
                os.kill(process, signal.SIGKILL)
        (layer(x) - x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    lost, folder = int(sys.argv[1]), Path(sys.argv[2])
    try:
        train(lost, folder)
    except RuntimeError as error:
        (folder / f"error{os.environ['RANK']}").write_text(f"{time.time()} {error}")
        raise


if __name__ == "__main__":
    main()
