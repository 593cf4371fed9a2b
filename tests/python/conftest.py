"""What the tests of the Python package share."""

from __future__ import annotations

import os

import pytest
import torch

# No test sees what was tuned on this machine.
os.environ.setdefault("UNIEP_TUNE_CACHE", "/nonexistent/nothing_was_tuned.json")

import uniep


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and uniep.has_cuda():
        return
    skip = pytest.mark.skip(reason="needs a Hopper GPU, and a uniep with the CUDA backend")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()
