"""On a GPU: torchtitan's trainer with uniep's experts, as users call it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/torchtitan_qwen3.py"
# Its trainer imports these two; the tests on CPUs have stand-ins for them.
NEEDED = ("torchtitan", "datasets", "torchdata")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(  # without a GPU it is skipped for that, whatever is installed
        torch.cuda.is_available()
        and any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="torchtitan, datasets or torchdata is not installed",
    ),
]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--checkpointing", "full"],
        ["--checkpointing", "none"],
        ["--compile"],
        ["--shared", "--model", "deepseek_v3:deepseek_v3_debugmodel"],
    ],
    ids=str,
)
def test_the_example_trains_as_torchtitans_own_experts_do(flags: list[str]) -> None:
    small = ["--model", "qwen3:qwen3_moe_debug", "--layers", "2", "--steps", "4", "--length", "128"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLE), *small, *flags],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = {
        line.split()[0]: [float(x) for x in line.split("losses")[1].split()]
        for line in done.stdout.splitlines()
        if "losses" in line
    }
    assert losses["uniep"] == pytest.approx(losses["torchtitan"], rel=5e-3)
    assert len(set(losses["uniep"])) == 4
