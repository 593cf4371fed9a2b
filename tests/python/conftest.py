"""What the tests of the Python package share."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest
import torch

# No test sees what was tuned on this machine.
os.environ.setdefault("UNIEP_TUNE_CACHE", "/nonexistent/nothing_was_tuned.json")

import uniep

# As ranks have one: with another number of threads PyTorch's own products may have other bits.
torch.set_num_threads(1)

# Of what runs side by side, a file at a time, these begin: else one is left over at the end, alone.
LONGEST = (
    "test_torchtitan_trainer.py",
    "test_megatron.py",
    "test_compile.py",
    "test_transformers.py",
    "test_mesh.py",
    "test_layer.py",
    "test_models.py",
    "test_hosts.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-packages",
        action="store_true",
        help="fail what would be skipped since a package is not installed",
    )


def require_packages(config: pytest.Config, report: Any) -> None:
    """What was skipped for a package that is missing has failed, where all are to be there."""
    if not (report.skipped and config.getoption("--all-packages")):
        return
    if hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    reason = report.longrepr[2]
    if re.search("not installed|could not import", reason):
        report.outcome, report.longrepr = "failed", f"{reason}, and --all-packages asks for all"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    require_packages(collector.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    require_packages(item.config, report)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    begin = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: begin.get(item.path.name, len(LONGEST)))
    if torch.cuda.is_available() and uniep.has_cuda():
        return
    skip = pytest.mark.skip(reason="needs a Hopper GPU, and a uniep with the CUDA backend")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()
