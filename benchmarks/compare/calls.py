"""Times of calls, one by one and replayed from CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class CallTime:
    """Microseconds of one call among many without a pause."""

    host: float  # until the host may go on
    whole: float  # until the last one's work is done


def time_calls(call: Callable[[], object], count: int, device: torch.device) -> CallTime:
    for _ in range(3):
        call()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    issued = time.perf_counter()
    synchronize(device)
    return CallTime(1e6 * (issued - begin) / count, 1e6 * (time.perf_counter() - begin) / count)


def time_replays(call: Callable[[], object], count: int, device: torch.device) -> CallTime:
    """The same of a CUDA graph of the call."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_calls(graph.replay, count, device)
