"""Processes that form a group: run a function in each, or torchrun as on several hosts."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

# Ranks are forks of a process that has done what takes longest to import, and nothing else.
multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.device_mesh"])


def run_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """What `function(*args)` returned in each of `ranks` processes: tensors in plain containers.

    `function` is one of a module: the processes import it by name. They have a process group and
    torchrun's variables; with the backend nccl a GPU each. The first that fails ends the others,
    and its traceback is raised here.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        given = (dict(os.environ), ranks, port, folder, backend, function, args)
        start_processes(_run, given, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / str(rank)) for rank in range(ranks)]


def launch_hosts(
    arguments: list[str], hosts: int = 2, **environment: str
) -> list[subprocess.Popen[str]]:
    """torchrun of a script and its arguments as on each of so many hosts, two ranks each.

    uniep finds the hosts, unless `environment` has UNIEP_HOSTS.
    """
    port = _free_port()
    common = {**os.environ, "UNIEP_SOCKET_IFNAME": "lo", **environment}
    agents = []
    for host in range(hosts):
        name = {} if "UNIEP_HOSTS" in environment else {"UNIEP_HOST_ID": f"host {host}"}
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"]
        command += [f"--node-rank={host}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        agents.append(
            subprocess.Popen(
                [*command, "--nproc-per-node=2", *arguments],
                env={**common, **name},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return agents


def _free_port() -> int:
    """Below those that connections are given, which could take it before it is listened at."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first // 2, first)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _run(
    rank: int,
    environment: dict[str, str],
    ranks: int,
    port: int,
    folder: str,
    backend: str,
    function: Any,
    args: Any,
) -> None:
    os.environ.clear()  # that of the process that is forked, from when it began
    os.environ.update(
        environment,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    faulthandler.enable()  # a rank that ends by a signal says where
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # By a file: nothing can take it, as a port that was free a moment ago.
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    result = function(*args)
    torch.save(result, Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()
