"""What result files of the Python package say: where they are from, and a record a figure."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import uniep
from compare.figures import Times


def as_record(
    shape: str, direction: str, tokens: int, times: Times, baseline_ms: float | None, **figures: Any
) -> dict[str, Any]:
    return {
        "shape": shape,
        "tokens": tokens,
        "ranks": 1,
        "direction": direction,
        "schedule": None,
        "ms": times.ms,
        "p10": times.p10,
        "p90": times.p90,
        "baseline_ms": baseline_ms,
        "floor_ms": None,
        "efficiency": None,
        "wrong": None,
        **figures,
    }


def header(device: torch.device, ranks: int, iterations: int) -> dict[str, Any]:
    """What a file of figures that this program took says of all of them."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "commit": commit(),
        "machine": machine(device, ranks),
        "date": now.isoformat(timespec="seconds"),
        "command": f"python {shlex.join(sys.argv)}",
        "environment": environment(),
        "iterations": iterations,
    }


def environment() -> dict[str, str]:
    """Variables that are set, of those that decide how passes and messages share a GPU."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    if "UNIEP_SPARE_SMS" in os.environ:
        kept["UNIEP_SPARE_SMS"] = os.environ["UNIEP_SPARE_SMS"]
    return dict(sorted(kept.items()))


def commit() -> str:
    """Of the sources, with + behind it where files have changed; empty where that is unknown."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if changed.stdout else "")


def machine(device: torch.device, ranks: int = 1) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    versions = f"torch {torch.__version__}, uniep {uniep.__version__}"
    if "transformers" in sys.modules:
        versions += f", transformers {sys.modules['transformers'].__version__}"
    return f"{ranks} x {name}; {versions}"
