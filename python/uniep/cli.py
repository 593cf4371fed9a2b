"""The command line that the package brings along, and what it is used for from Python."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from uniep_program import main

from . import _library
from .group import GroupLike
from .workspace import Workspace

__all__ = ["main", "run", "schedule", "tune"]


def run(*arguments: str) -> str:
    """Runs the command line and returns what it prints.

    Raises:
        RuntimeError: with its error, without its warnings, where its exit code is not 0.
    """
    done = subprocess.run(
        [str(_library.binary()), *arguments], capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        raise RuntimeError(_error_in(done.stderr) or done.stdout.strip())
    return done.stdout


def _error_in(said: str) -> str:
    """What the command line says at last, from ``uniep COMMAND:`` on; warnings come before."""
    begins = [found.start() for found in re.finditer(r"^uniep\b.*: ", said, re.MULTILINE)]
    return said[begins[-1] if begins else 0 :].strip()


def tune(
    hidden: int,
    intermediate: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    *,
    ranks: int = 1,
    hosts: int = 1,
    backend: Literal["cpu", "cuda"] = "cpu",
    direction: Literal["forward", "backward", "both"] = "both",
    budget: float = 60.0,
    skew: float = 0.0,
    memory: float | None = None,
    layers: int | None = None,
    in_flight: int | None = None,
    weight_bytes: float | None = None,
) -> dict[str, Any]:
    """Searches the fastest schedule for layers of a shape, with ``uniep tune`` in a process aside.

    What it finds is kept on this machine, and is what layers of the shape that are made from then
    on use. It never changes a result.

    Args:
        hidden: H.
        intermediate: I.
        num_experts: E of all ranks.
        topk: K.
        max_tokens: tokens of a rank.
        ranks: how many; with CUDA each takes a GPU.
        hosts: that these are on, with the CPU backend.
        backend: ``"cpu"`` or ``"cuda"``.
        direction: what to tune.
        budget: seconds for each direction, and with ``memory`` for each choice.
        skew: how unevenly tokens load experts, 0 evenly, 1 like Zipf's law.
        memory: 1e9 bytes that a rank has for its MoE layers. Then every choice of ``save`` and
            ``recompute_h`` with which they fit is searched, and the figures' ``memory`` says which
            is the fastest: its ``choices[fastest]`` has the arguments of :class:`MoELayer`.
        layers: MoE layers of a rank; with ``memory``.
        in_flight: microbatches whose forward waits for its backward; likewise. None: 1.
        weight_bytes: bytes for each parameter of the experts; likewise. None: 2.

    Returns:
        The figures of ``uniep tune --json``; docs/results.md describes them.

    Raises:
        RuntimeError: with the command's error.
    """
    shape = (
        f"custom,tokens={max_tokens},hidden={hidden},intermediate={intermediate},"
        f"experts={num_experts},topk={topk}"
    )
    flags: dict[str, object] = {
        "--hosts": hosts if hosts != 1 else None,
        "--memory": memory,
        "--layers": layers,
        "--in-flight": in_flight,
        "--weight-bytes": weight_bytes,
    }
    if memory is None or direction != "both":  # a plan of memory takes both, and no flag for it
        flags["--pass"] = direction
    given = [(flag, str(value)) for flag, value in flags.items() if value is not None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tune.json"
        run(
            *("tune", "--shape", shape, "--ranks", str(ranks), "--backend", backend),
            *("--budget", str(budget), "--skew", str(skew), "--json", str(path)),
            *itertools.chain.from_iterable(given),
        )
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def schedule(
    hidden: int,
    intermediate: int,
    num_experts: int,
    topk: int,
    max_tokens: int,
    *,
    group: GroupLike = None,
    device: torch.device | str | None = None,
    direction: Literal["forward", "backward"] = "forward",
    name: str | None = None,
) -> str:
    """The schedule that layers of a shape run under, with every axis. Collective, as making one is.

    Args:
        hidden: H.
        intermediate: I.
        num_experts: E of all ranks.
        topk: K.
        max_tokens: most tokens of a rank.
        group: the ranks; see :class:`uniep.Workspace`.
        device: where tensors lie.
        direction: which of the two.
        name: a schedule to write out, such as ``"two-kernel,tile_m=32"``. None: what was tuned on
            this machine, else what is shipped or predicted best.

    Raises:
        uniep.Error: for a name that is no schedule, and what :class:`uniep.Workspace` refuses.
    """
    with Workspace(
        group,
        hidden,
        intermediate,
        num_experts,
        topk,
        max_tokens,
        schedule=name,
        device=device,
    ) as workspace:
        return workspace.schedule(direction)
