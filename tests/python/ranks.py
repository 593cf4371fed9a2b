"""Processes that form a group: a function or a script in each, or torchrun as on several hosts."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes

# Ranks are forks of a process that has done what takes longest to import, and nothing else.
multiprocessing.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.device_mesh", "transformers", "megatron.core"]
)


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


def cpu_mesh() -> DeviceMesh:
    """Of all ranks. Without one FSDP2 takes GPUs where there are some, in tests of CPUs, too."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def run_script(
    arguments: list[str], ranks: int = 1, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` came to, or with several ranks torchrun of these.

    Only the processes are others: forks, which begin in a tenth of the time. `environment` is
    beside that of this process. The first rank that fails ends the others.
    """
    context = multiprocessing.get_context("forkserver")
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        started: list[BaseProcess] = []
        for rank in range(ranks):
            of_rank = _variables(rank, ranks, port) if ranks > 1 else {}
            given = ({**os.environ, **of_rank, **environment}, arguments, f"{folder}/{rank}")
            started.append(context.Process(target=_run_script, args=given))
            for name in ("out", "err"):
                Path(f"{folder}/{rank}.{name}").touch()  # it may be ended before it begins
        for process in started:
            process.start()
        code = _first_failure(started, timeout)
        output, errors = (
            "".join(Path(f"{folder}/{rank}.{name}").read_text() for rank in range(ranks))
            for name in ("out", "err")
        )
    return subprocess.CompletedProcess(arguments, code, output, errors)


def launch_hosts(
    arguments: list[str], hosts: int = 2, **environment: str
) -> list[subprocess.Popen[str]]:
    """torchrun of a script and its arguments as on each of so many hosts, two ranks each.

    uniep finds the hosts. `environment` is beside that of this process.
    """
    port = _free_port()
    common = {**os.environ, "UNIEP_SOCKET_IFNAME": "lo", **environment}
    agents = []
    for host in range(hosts):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"]
        command += [f"--node-rank={host}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        agents.append(
            subprocess.Popen(
                [*command, "--nproc-per-node=2", *arguments],
                env={**common, "UNIEP_HOST_ID": f"host {host}"},
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


def _first_failure(processes: list[BaseProcess], timeout: float) -> int:
    """The exit code of the first of them to fail, behind which the others are ended; or 0."""
    code, deadline, running = 0, time.monotonic() + timeout, processes
    while running and code == 0 and time.monotonic() < deadline:
        wait([process.sentinel for process in running], deadline - time.monotonic())
        code = next((p.exitcode for p in running if p.exitcode), 0)
        running = [process for process in running if process.exitcode is None]
    for process in running:
        process.kill()
        process.join()
    if running and code == 0:
        raise TimeoutError(f"{len(running)} of {len(processes)} processes run on after {timeout} s")
    return code


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Those that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _take_environment(environment: dict[str, str]) -> None:
    """In place of that of the process that is forked, from when it began."""
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()  # a rank that ends by a signal says where


def _run_script(environment: dict[str, str], arguments: list[str], output: str) -> None:
    for name, number in {"out": 1, "err": 2}.items():
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY), number)
    _take_environment(environment)
    if "RANK" in environment:
        torch.set_num_threads(1)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


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
    _take_environment({**environment, **_variables(rank, ranks, port)})
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
