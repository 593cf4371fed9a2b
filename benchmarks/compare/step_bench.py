"""Steps of one layer, computed in several ways that take turns: bytes kept, peaks and times.

A step is a forward and its backward, or those of several layers: all forwards, and all backwards in
the reverse order. Layers have the same tensors, and a gradient goes when the next one comes.

Bytes are PyTorch's own counts: what a forward keeps beside its output, and the most that is
allocated during forward and backward beside weights, their gradients, inputs and the workspace.
"""

from __future__ import annotations

import datetime
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compare.calls import synchronize
from compare.figures import Times
from compare.package_records import as_record
from compare.shapes import Shape

MoE = Callable[..., Tensor]  # x, ids, probs, w1, w2
Step = dict[str, Tensor]  # out, dx, dprobs, dw1 and dw2 by name
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Way:
    """A way to compute the layer."""

    name: str
    moe: MoE


@dataclass
class Inputs:
    """One rank's tensors."""

    x: Tensor
    dy: Tensor
    ids: Tensor
    probs: Tensor
    w1: Tensor
    w2: Tensor
    main_grads: tuple[Tensor, Tensor] | None

    @classmethod
    def make(
        cls, shape: Shape, ranks: int, device: torch.device, main_grad: torch.dtype | None = None
    ) -> Inputs:
        local, hidden, inter = shape.experts // ranks, shape.hidden, shape.intermediate

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*sizes, dtype=BF16, device=device).mul_(scale)

        scores = torch.softmax(torch.randn(shape.tokens, shape.experts, device=device), -1)
        probs, ids = torch.topk(scores, shape.topk)
        w1 = normal(local, 2 * inter, hidden, scale=hidden**-0.5)
        w2 = normal(local, hidden, inter, scale=inter**-0.5)
        return cls(
            x=normal(shape.tokens, hidden).requires_grad_(),
            dy=normal(shape.tokens, hidden),
            ids=ids.int(),
            probs=(probs / probs.sum(-1, keepdim=True)).requires_grad_(),
            w1=w1.requires_grad_(main_grad is None),
            w2=w2.requires_grad_(main_grad is None),
            main_grads=None
            if main_grad is None
            else (torch.zeros_like(w1, dtype=main_grad), torch.zeros_like(w2, dtype=main_grad)),
        )

    @property
    def layer(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What a layer is called with."""
        return self.x, self.ids, self.probs, self.w1, self.w2

    def weight_gradients(self) -> tuple[Tensor, Tensor]:
        """Of the last step."""
        if self.main_grads is not None:
            return self.main_grads
        assert self.w1.grad is not None and self.w2.grad is not None
        return self.w1.grad, self.w2.grad

    def forget_gradients(self) -> None:
        """Main gradients keep their memory, which is no part of what is measured."""
        for tensor in self.main_grads or ():
            tensor.zero_()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Of the leaves, as if the next call had leaves of its own."""
        for leaf in (self.x, self.probs, self.w1, self.w2):
            leaf.grad = None


@dataclass
class Measured:
    """Of one way: bytes of a step, and times of all turns."""

    kept: int = 0
    peak_forward: int = 0
    peak_backward: int = 0
    forward: list[float] = field(default_factory=list)  # milliseconds
    backward: list[float] = field(default_factory=list)


class Memory:
    """PyTorch's counts on a device; on a CPU, which has none, 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.empty(1, device=self.device)  # lets go of what other streams were done with
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]  # type: ignore[no-any-return]

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"]  # type: ignore[no-any-return]


class Stopwatch:
    """Milliseconds between two points of the work on a device.

    With `lead_cycles` a GPU waits so long before the first of them. Whatever the host puts on the
    stream meanwhile costs nothing, as in a step whose host is ahead.
    """

    def __init__(self, device: torch.device, lead_cycles: int = 0) -> None:
        self.device, self.lead_cycles = device, lead_cycles
        kind = torch.cuda.Event if device.type == "cuda" else torch.Event
        self.begin, self.end = (kind(enable_timing=True) for _ in range(2))

    def time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        if self.device.type != "cuda":
            begin = datetime.datetime.now()
            result = call()
            return result, (datetime.datetime.now() - begin).total_seconds() * 1e3
        if self.lead_cycles:
            torch.cuda._sleep(self.lead_cycles)
        self.begin.record()
        result = call()
        self.end.record()
        torch.cuda.synchronize(self.device)
        return result, self.begin.elapsed_time(self.end)


class StepBench:
    """Ways to compute the layer of one shape, on the same tensors."""

    def __init__(
        self,
        shape: Shape,
        inputs: Inputs,
        group: Any = None,
        *,
        layers: int = 1,
        lead_cycles: int = 0,
    ) -> None:
        self.shape, self.inputs, self.group, self.layers = shape, inputs, group, layers
        self.device = inputs.x.device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.memory, self.stopwatch = Memory(self.device), Stopwatch(self.device, lead_cycles)

    def together(self) -> None:
        synchronize(self.device)
        if self.ranks > 1:
            dist.barrier(group=self.group)
            synchronize(self.device)

    def forward(self, way: Way) -> list[Tensor]:
        """Outputs of all layers."""
        return [way.moe(*self.inputs.layer) for _ in range(self.layers)]

    def backward(self, outs: list[Tensor]) -> None:
        while outs:
            self.inputs.drop_gradients()
            outs.pop().backward(self.inputs.dy)

    def turn(self, way: Way, measured: Measured) -> Step:
        """One step; what the first layer has, whose backward is the last."""
        i = self.inputs
        i.forget_gradients()
        self.together()
        before = self.memory.now()
        self.memory.forget_peak()
        outs, ms = self.stopwatch.time(lambda: self.forward(way))
        out = outs[0].detach()
        measured.forward.append(ms)
        measured.kept = self.memory.now() - before - self.layers * out.numel() * out.element_size()
        measured.peak_forward = self.memory.peak() - before
        self.together()
        self.memory.forget_peak()
        _, ms = self.stopwatch.time(lambda: self.backward(outs))
        measured.backward.append(ms)
        measured.peak_backward = self.memory.peak() - before
        assert i.x.grad is not None and i.probs.grad is not None
        dw1, dw2 = i.weight_gradients()
        if i.main_grads is None:
            measured.peak_backward -= sum(g.numel() * g.element_size() for g in (dw1, dw2))
        return dict(out=out, dx=i.x.grad, dprobs=i.probs.grad, dw1=dw1, dw2=dw2)

    def turns(self, ways: list[Way], count: int) -> Iterator[Way]:
        """In an order of its own each time, the same on all ranks.

        A GPU at its power limit is faster behind work that heats it less.
        """
        order = random.Random(1)
        for _ in range(count):
            yield from order.sample(ways, len(ways))

    def measure(self, ways: list[Way], turns: int) -> dict[str, Measured]:
        """By name. The ways have run before, so that all are warm."""
        gc.collect()
        found = {way.name: Measured() for way in ways}
        for way in self.turns(ways, turns):
            self.turn(way, found[way.name])
        return found

    def sums_of_ranks(self, counts: dict[str, int]) -> dict[str, int]:
        """Collective."""
        all_ranks = [counts] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(all_ranks, counts, group=self.group)
        return {name: sum(of_rank[name] for of_rank in all_ranks) for name in counts}

    def records(self, name: str, measured: Measured, **figures: Any) -> list[dict[str, Any]]:
        """Of forward and backward, of the rank with the most; `figures` are added to both."""
        all_ranks: list[Measured] = [measured] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(all_ranks, measured, group=self.group)
        of_step = {
            "way": name,
            "kept_bytes": max(m.kept for m in all_ranks),
            "peak_bytes": max(max(m.peak_forward, m.peak_backward) for m in all_ranks),
            "forward_peak_bytes": max(m.peak_forward for m in all_ranks),
        }
        rows = []
        for direction in ("forward", "backward"):
            times = Times.of_slowest([getattr(m, direction) for m in all_ranks])
            row = as_record(self.shape.name, direction, self.shape.tokens, times, None, **of_step)
            rows.append({**row, "ranks": self.ranks, **figures})
        return rows


def wrong_bits(step: Step, reference: Step) -> int:
    """Elements that differ. Plain PyTorch sums dprobs in another order, which is not compared."""
    return sum(
        int((step[name].view(torch.int16) != reference[name].view(torch.int16)).sum())
        for name in step
        if name != "dprobs"
    )


def measure(bench: StepBench, ways: list[Way], turns: int) -> list[dict[str, Any]]:
    """Records of all ways, two each; `wrong`: elements that differ from those of the first."""
    wrong: dict[str, int] = {}  # of this rank
    reference: Step = {}
    for way in ways:  # makes workspaces, warms up, and compares
        step = bench.turn(way, Measured())
        reference = reference or {name: tensor.clone() for name, tensor in step.items()}
        wrong[way.name] = wrong_bits(step, reference)
        del step
    reference.clear()
    wrong = bench.sums_of_ranks(wrong)
    found = bench.measure(ways, turns)
    return [
        record
        for way in ways
        for record in bench.records(
            way.name, found[way.name], wrong=wrong[way.name], layers=bench.layers
        )
    ]
