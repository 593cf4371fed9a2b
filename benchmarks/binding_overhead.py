#!/usr/bin/env python3
"""What a call of uniep.moe costs beside the same call of the C API, by direction.

    python benchmarks/binding_overhead.py [--device cpu|cuda] [--tokens N] [--json FILE]

A few tokens of a small layer, so that the host's time counts. Both ways are on the same workspace,
tensors and stream, and take turns. `host` is the time until a call returns, of bursts that a GPU's
queue holds; `alone` is the time of a call and its end on the device. The binding's share is the
difference: checks, tensors for what is returned and saved, and autograd. Replays of CUDA graphs of
both calls have no host in them. docs/training.md explains the figures, docs/results.md the file.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from compare import records
from compare.figures import Times
from torch import Tensor
from train_step import as_record, commit, machine, synchronize, time_replays

import uniep
from uniep import _library

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 128, 8, 2
BURST = 20  # calls that a GPU's queue holds without making the host wait


class ForwardCall(ctypes.Structure):
    """``uniep_forward_call`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("tokens", c_int64),
        *((name, c_void_p) for name in ("topk_ids", "topk_probs", "x", "w1", "w2", "out")),
        *((name, c_void_p) for name in ("plan", "x_rows", "h", "row_probs", "overflow")),
        ("schedule", c_char_p),
        ("stream", c_void_p),
    ]


class BackwardCall(ctypes.Structure):
    """``uniep_backward_call`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("part", c_int32),
        ("weight_grad", c_int32),
        ("tokens", c_int64),
        *((name, c_void_p) for name in ("plan", "x_rows", "h", "row_probs", "dy", "w1", "w2")),
        *((name, c_void_p) for name in ("dx", "dprobs", "dw1", "dw2", "backward_rows")),
        ("ignore_overflow", c_int32),
        ("schedule", c_char_p),
        ("stream", c_void_p),
    ]


class Layer:
    """One layer, called in two ways."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        torch.manual_seed(1)
        self.device, self.tokens = device, tokens
        shape = (HIDDEN, INTERMEDIATE, EXPERTS, TOPK, tokens)
        self.workspace = uniep.Workspace(uniep.Group(device=device), *shape)
        bf16 = {"dtype": torch.bfloat16, "device": device}
        self.x, self.dy = torch.randn(2, tokens, HIDDEN, **bf16).unbind()
        self.w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, **bf16) * HIDDEN**-0.5
        self.w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, **bf16) * INTERMEDIATE**-0.5
        probs, ids = torch.softmax(torch.randn(tokens, EXPERTS, device=device), -1).topk(TOPK)
        self.probs, self.ids = probs.contiguous(), ids.int()
        self.leaves = [t.requires_grad_() for t in (self.x, self.probs, self.w1, self.w2)]
        self._allocate()
        self._prepare()

    def _allocate(self) -> None:
        """What a caller of the C API has allocated once."""
        rows, bf16 = self.workspace.rows, self.x.detach()
        self.plan = bf16.new_empty(self.workspace.plan_bytes, dtype=torch.uint8)
        self.x_rows = bf16.new_empty(rows, HIDDEN)
        self.h = bf16.new_empty(rows, 2 * INTERMEDIATE)
        self.row_probs = bf16.new_empty(rows, dtype=torch.float32)
        self.results = {
            "out": torch.empty_like(bf16),
            "dx": torch.empty_like(bf16),
            "dprobs": torch.empty_like(self.probs, requires_grad=False),
            "dw1": torch.empty_like(self.w1, requires_grad=False),
            "dw2": torch.empty_like(self.w2, requires_grad=False),
        }

    def _prepare(self) -> None:
        """The arguments of the C API, which a caller there has ready too."""
        found = {**vars(self), **self.results}
        saved = ["plan", "x_rows", "h", "row_probs"]

        def addresses(names: list[str]) -> dict[str, int]:
            return {name: found[name].data_ptr() for name in names}

        self.forward_call = ForwardCall(
            tokens=self.tokens,
            topk_ids=self.ids.data_ptr(),
            topk_probs=self.probs.data_ptr(),
            **addresses(["x", "w1", "w2", "out", *saved]),
        )
        self.backward_call = BackwardCall(
            tokens=self.tokens,
            **addresses(["dy", "w1", "w2", "dx", "dprobs", "dw1", "dw2", *saved]),
        )

    def _stream(self) -> int | None:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device).cuda_stream if on_gpu else None

    def c_forward(self) -> None:
        self.forward_call.stream = self._stream()
        _library.check(
            _library.library.uniep_forward(self.workspace._layer, ctypes.byref(self.forward_call))
        )

    def c_backward(self) -> None:
        self.backward_call.stream = self._stream()
        _library.check(
            _library.library.uniep_backward(self.workspace._layer, ctypes.byref(self.backward_call))
        )

    def forward(self) -> Tensor:
        return uniep.moe(self.x, self.ids, self.probs, self.w1, self.w2, workspace=self.workspace)


Ways = dict[tuple[str, str], list[float]]


def measure(layer: Layer, turns: int, burst: int, whole: bool) -> Ways:
    """Microseconds a call, by direction and way, of each turn of `burst` calls.

    With the end of its work on the device where `whole`.
    """
    found: Ways = {}
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(layer.forward())

    def backward() -> None:
        torch.autograd.grad(outputs.pop(), layer.leaves, layer.dy)

    for _ in range(turns):
        for direction, way, call in (
            ("forward", "c", layer.c_forward),
            ("backward", "c", layer.c_backward),
            ("forward", "python", forward),
            ("backward", "python", backward),
        ):
            synchronize(layer.device)
            begin = time.perf_counter()
            for _ in range(burst):
                call()
            if whole:
                synchronize(layer.device)
            taken = 1e6 * (time.perf_counter() - begin) / burst
            found.setdefault((direction, way), []).append(taken)
    return found


def replays(layer: Layer, count: int) -> dict[str, float]:
    """Microseconds of a replay of a forward and a backward, by way."""
    ways: dict[str, Callable[[], object]] = {
        "c": lambda: (layer.c_forward(), layer.c_backward()),
        "python": lambda: torch.autograd.grad(layer.forward(), layer.leaves, layer.dy),
    }
    return {way: time_replays(call, count, layer.device).whole for way, call in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--tokens", type=int, default=8)
    add("--turns", type=int, default=50)
    add("--json", metavar="FILE")
    args = parser.parse_args()
    device = torch.device(args.device)
    layer = Layer(args.tokens, device)
    found = []
    for what, burst in (("host", BURST), ("alone", 1)):
        measure(layer, 5, burst, what == "alone")  # warm
        times = measure(layer, args.turns, burst, what == "alone")
        for direction in ("forward", "backward"):
            c, python = (Times.of(times[direction, way]) for way in ("c", "python"))
            pairs = zip(times[direction, "python"], times[direction, "c"], strict=True)
            share = statistics.median(p - c for p, c in pairs)
            print(f"{what:6s} {direction:9s} C {c.ms:8.1f} us, uniep.moe {python.ms:8.1f} us, "
                  f"binding {share:8.1f} us")  # fmt: skip
            in_ms = Times(*(1e-3 * us for us in (python.ms, python.p10, python.p90)))
            figures = {"time": what, "c_us": c.ms, "python_us": python.ms, "binding_us": share}
            found.append(as_record(direction, args.tokens, in_ms, 1e-3 * c.ms, **figures))
    if device.type == "cuda":
        us = replays(layer, 10 * args.turns)
        print(f"graph  both      C {us['c']:8.1f} us, uniep.moe {us['python']:8.1f} us")
        in_ms = Times(*[1e-3 * us["python"]] * 3)
        figures = {"time": "graph", "c_us": us["c"], "python_us": us["python"]}
        found.append(as_record("both", args.tokens, in_ms, 1e-3 * us["c"], **figures))
    layer.workspace.close()
    header = {
        "commit": commit(),
        "machine": machine(device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": f"python {shlex.join(sys.argv)}",
        "iterations": args.turns,
    }
    print(f"# {header['machine']}; {header['commit']}")
    if args.json:
        records.write(args.json, header, [{**r, "shape": "binding_overhead"} for r in found])


if __name__ == "__main__":
    main()
