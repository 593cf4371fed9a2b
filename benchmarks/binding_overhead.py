#!/usr/bin/env python3
"""What a call of uniep.moe costs beside the same call of the C API, by direction.

    python benchmarks/binding_overhead.py [--device cpu|cuda] [--tokens N] [--json FILE]

A few tokens of small layers, so that the host's time counts. All ways have the same workspace and
weights, and take turns: the C API, uniep.moe, and `nothing`, a function of as many tensors that
computes nothing, which is what PyTorch takes for autograd alone. `host` is the time until calls
return, a layer of 20 that follow one another, as in a model; `alone` that of one layer and its end
on the device. Replays of CUDA graphs have no host in them. docs/step_times.md explains the figures,
docs/results.md the file.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from compare import records
from compare.calls import synchronize, time_replays
from compare.figures import Times
from compare.package_records import as_record, header
from torch import Tensor

import uniep
from uniep import _library
from uniep._calls import BackwardCall, ForwardCall, RowMemory

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 128, 8, 2
WAYS = ("c", "nothing", "uniep.moe")
LAYERS = 20  # of which a GPU's queue holds all launches, so that the host never waits


class Layer:
    """One of several layers on one workspace, called in two ways."""

    def __init__(self, workspace: uniep.Workspace) -> None:
        self.workspace, tokens = workspace, workspace.max_tokens
        bf16 = {"dtype": torch.bfloat16, "device": workspace.device}
        self.x, self.dy = torch.randn(2, tokens, HIDDEN, **bf16).unbind()
        self.w1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, **bf16) * HIDDEN**-0.5
        self.w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, **bf16) * INTERMEDIATE**-0.5
        scores = torch.softmax(torch.randn(tokens, EXPERTS, device=workspace.device), -1)
        probs, ids = scores.topk(TOPK)
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
        self.forward_memory = bf16.new_empty(self.workspace.forward_bytes, dtype=torch.uint8)
        self.backward_memory = bf16.new_empty(self.workspace.backward_bytes, dtype=torch.uint8)
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
            tokens=self.workspace.max_tokens,
            topk_ids=self.ids.data_ptr(),
            topk_probs=self.probs.data_ptr(),
            memory=RowMemory(**addresses(["x_rows", "h", "row_probs", "forward_memory"])),
            **addresses(["x", "w1", "w2", "out", "plan"]),
        )
        self.backward_call = BackwardCall(
            tokens=self.workspace.max_tokens,
            **addresses(["dy", "w1", "w2", "dx", "dprobs", "dw1", "dw2", "backward_memory"]),
            **addresses(saved),
        )

    def _stream(self) -> int | None:
        device = self.workspace.device
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None

    def c_forward(self) -> None:
        self.forward_call.stream = self._stream()
        layer = self.workspace.library_layer.handle
        _library.check(_library.library.uniep_forward(layer, ctypes.byref(self.forward_call)))

    def c_backward(self) -> None:
        self.backward_call.stream = self._stream()
        layer = self.workspace.library_layer.handle
        _library.check(_library.library.uniep_backward(layer, ctypes.byref(self.backward_call)))

    def forward(self, x: Tensor) -> Tensor:
        return uniep.moe(x, self.ids, self.probs, self.w1, self.w2, workspace=self.workspace)


class Nothing(torch.autograd.Function):
    """What PyTorch takes for any function of four tensors with gradients, written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ctx.save_for_backward(probs, w1, w2)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        probs, w1, w2 = ctx.saved_tensors
        return dy, probs, w1, w2


class Layers:
    """Layers one after another, as in a model."""

    def __init__(self, count: int, workspace: uniep.Workspace) -> None:
        self.device = workspace.device
        self.layers = [Layer(workspace) for _ in range(count)]
        first, *others = self.layers
        self.leaves = first.leaves + [leaf for layer in others for leaf in layer.leaves[1:]]
        self.outputs: dict[str, Tensor] = {}
        run = self.run
        self.functions: dict[str, Callable[[], Tensor]] = {
            "nothing": lambda: run(lambda at, x: Nothing.apply(x, at.probs, at.w1, at.w2)),
            "uniep.moe": lambda: run(Layer.forward),
        }

    def run(self, call: Callable[[Layer, Tensor], Tensor]) -> Tensor:
        out = self.layers[0].x
        for layer in self.layers:
            out = call(layer, out)
        return out

    def forward(self, way: str) -> None:
        if way == "c":
            for layer in self.layers:
                layer.c_forward()
        else:
            self.outputs[way] = self.functions[way]()

    def backward(self, way: str) -> None:
        if way == "c":
            for layer in reversed(self.layers):
                layer.c_backward()
        else:
            for leaf in self.leaves:
                leaf.grad = None
            self.outputs.pop(way).backward(self.layers[0].dy)

    def measure(self, turns: int, whole: bool) -> dict[tuple[str, str], list[float]]:
        """Microseconds a layer of each turn, by direction and way.

        With the end of all work on the device where `whole`.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(turns):
            for way in WAYS:
                for direction, call in (("forward", self.forward), ("backward", self.backward)):
                    synchronize(self.device)
                    begin = time.perf_counter()
                    call(way)
                    if whole:
                        synchronize(self.device)
                    taken = 1e6 * (time.perf_counter() - begin) / len(self.layers)
                    found.setdefault((direction, way), []).append(taken)
        return found

    def measure_replay(self, way: str, count: int) -> float:
        """Microseconds a layer of replays of a forward and a backward."""

        def both() -> None:
            self.forward(way)
            self.backward(way)

        return time_replays(both, count, self.device).whole / len(self.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--tokens", type=int, default=8)
    add("--turns", type=int, default=50)
    add("--json", metavar="FILE")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(1)
    shape = (HIDDEN, INTERMEDIATE, EXPERTS, TOPK, args.tokens)
    workspace = uniep.Workspace(uniep.Group(device=device), *shape)
    found: list[dict[str, Any]] = []

    def note(direction: str, what: str, way: str, times: list[float], c: list[float]) -> None:
        us, share = Times.of(times), statistics.median(map(float.__sub__, times, c))
        print(f"{what:6s} {direction:9s} {way:9s} {us.ms:8.1f} us, beside C {share:+8.1f} us")
        in_ms = Times(*(1e-3 * value for value in (us.ms, us.p10, us.p90)))
        figures = {"time": what, "way": way, "beside_c_us": share}
        found.append(
            as_record(
                "binding_overhead", direction, args.tokens, in_ms, 1e-3 * Times.of(c).ms, **figures
            )
        )

    for what, count in (("host", LAYERS), ("alone", 1)):
        layers = Layers(count, workspace)
        layers.measure(5, what == "alone")  # warm
        times = layers.measure(args.turns, what == "alone")
        for (direction, way), taken in sorted(times.items(), reverse=True):
            note(direction, what, way, taken, times[direction, "c"])
    if device.type == "cuda":
        layers = Layers(LAYERS, workspace)
        replays = {way: layers.measure_replay(way, args.turns) for way in ("c", "uniep.moe")}
        for way, us in replays.items():
            note("both", "graph", way, [us], [replays["c"]])
    workspace.close()
    about = header(device, 1, args.turns)
    print(f"# {about['machine']}; {about['commit']}")
    if args.json:
        records.write(args.json, about, found)


if __name__ == "__main__":
    main()
