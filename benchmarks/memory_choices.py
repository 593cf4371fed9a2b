#!/usr/bin/env python3
"""What each choice of save, recompute_h and exact_rows keeps, takes at its peak, and costs.

    python benchmarks/memory_choices.py [--cases qwen3-30b ...] [--divide 4] [--json FILE]
    torchrun --nproc_per_node=2 benchmarks/memory_choices.py
    python benchmarks/memory_choices.py --tiny        # seconds, on a CPU too: does it run?

One layer, forward and backward, on the same tensors for all, which take turns. Bytes are PyTorch's
own counts: what a forward keeps beside its output, and the most that is allocated during forward
and backward beside weights, their gradients, inputs and the workspace. `plain` is uniep.plain,
without and with torch.utils.checkpoint. Results of every choice of uniep are compared with the
first one's, bit by bit. docs/memory.md shows the figures, docs/results.md explains the file.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from compare import records
from compare.calls import synchronize
from compare.figures import Times
from compare.package_records import as_record, header
from compare.shapes import MODELS, Shape
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import uniep
from uniep import plain

CASES = {**MODELS, "olmoe": Shape("olmoe", 16384, 2048, 1024, 64, 8)}
TINY = Shape("tiny", 96, 64, 48, 8, 2)
MoE = Callable[..., Tensor]  # x, ids, probs, w1, w2, main_grads=
BF16 = torch.bfloat16
MAIN_GRADS = {"none": None, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Choice:
    """A way to run the layer."""

    name: str
    options: dict[str, Any] | None = None  # of uniep.moe; None: uniep.plain
    checkpointed: bool = False


CHOICES = [
    Choice("rows", {}),
    Choice("rows,exact", {"exact_rows": True}),
    Choice("tokens", {"save": "tokens"}),
    Choice("tokens,exact", {"save": "tokens", "exact_rows": True}),
    Choice("none", {"save": "none"}),
    Choice("none,exact", {"save": "none", "exact_rows": True}),
    Choice("rows,recompute_h", {"recompute_h": True}),
    Choice("none,recompute_h", {"save": "none", "recompute_h": True}),
    Choice("none,recompute_h,exact", {"save": "none", "recompute_h": True, "exact_rows": True}),
    Choice("plain"),
    Choice("plain,checkpoint", checkpointed=True),
]


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
        cls, shape: Shape, ranks: int, device: torch.device, main_grad: torch.dtype | None
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

    def weight_gradients(self) -> list[Tensor]:
        """Of the last step."""
        if self.main_grads is not None:
            return list(self.main_grads)
        assert self.w1.grad is not None and self.w2.grad is not None
        return [self.w1.grad, self.w2.grad]

    def forget_gradients(self) -> None:
        """Those of weights keep their memory, which is no part of what is measured."""
        for tensor in self.main_grads or ():
            tensor.zero_()
        for leaf in (self.x, self.probs, self.w1, self.w2):
            leaf.grad = None


@dataclass
class Measured:
    """Of one choice: bytes of a step, and times of all turns."""

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
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]  # type: ignore[no-any-return]

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"]  # type: ignore[no-any-return]


class Stopwatch:
    """Milliseconds between two points of the work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        kind = torch.cuda.Event if device.type == "cuda" else torch.Event
        self.begin, self.end = (kind(enable_timing=True) for _ in range(2))

    def time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        if self.device.type != "cuda":
            begin = datetime.datetime.now()
            result = call()
            return result, (datetime.datetime.now() - begin).total_seconds() * 1e3
        self.begin.record()
        result = call()
        self.end.record()
        torch.cuda.synchronize(self.device)
        return result, self.begin.elapsed_time(self.end)


class Bench:
    """The choices on one shape."""

    def __init__(
        self,
        shape: Shape,
        group: Any,
        device: torch.device,
        main_grad: torch.dtype | None,
        schedule: str | None,
    ) -> None:
        self.shape, self.device, self.group, self.schedule = shape, device, group, schedule
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.memory, self.stopwatch = Memory(device), Stopwatch(device)
        self.inputs = Inputs.make(shape, self.ranks, device, main_grad)
        self.members = uniep.Group(group, device=device)
        self.reference: list[Tensor] | None = None

    def layer(self, choice: Choice) -> MoE:
        if choice.options is not None:
            return lambda *tensors, main_grads: uniep.moe(
                *tensors,
                group=self.members,
                max_tokens=self.shape.tokens,
                schedule=self.schedule,
                main_grads=main_grads,
                **choice.options,
            )
        if not choice.checkpointed:
            return lambda *tensors, main_grads: plain.moe(
                *tensors, group=self.group, main_grads=main_grads
            )
        return lambda *tensors, main_grads: checkpoint(
            lambda *t: plain.moe(*t, group=self.group, main_grads=main_grads),
            *tensors,
            use_reentrant=False,
        )

    def together(self) -> None:
        synchronize(self.device)
        if self.ranks > 1:
            dist.barrier(group=self.group)
            synchronize(self.device)

    def turn(self, choice: Choice, measured: Measured) -> list[Tensor]:
        """One step; returns out, dx and the weight gradients."""
        i, moe = self.inputs, self.layer(choice)
        i.forget_gradients()
        self.together()
        before = self.memory.now()
        self.memory.forget_peak()
        tensors = (i.x, i.ids, i.probs, i.w1, i.w2)
        out, ms = self.stopwatch.time(lambda: moe(*tensors, main_grads=i.main_grads))
        measured.forward.append(ms)
        measured.kept = self.memory.now() - before - out.numel() * out.element_size()
        measured.peak_forward = self.memory.peak() - before
        self.together()
        self.memory.forget_peak()
        _, ms = self.stopwatch.time(lambda: out.backward(i.dy))
        measured.backward.append(ms)
        measured.peak_backward = self.memory.peak() - before
        assert i.x.grad is not None
        gradients = i.weight_gradients()
        if i.main_grads is None:
            measured.peak_backward -= sum(g.numel() * g.element_size() for g in gradients)
        return [out.detach(), i.x.grad, *gradients]

    def wrong_bits(self, results: list[Tensor]) -> int:
        """Elements that differ from the first choice's."""
        if self.reference is None:
            self.reference = [t.clone() for t in results]
        pairs = zip(results, self.reference, strict=True)
        return sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)

    def turns(self, choices: list[Choice], count: int) -> Iterator[Choice]:
        """In an order of its own each time, the same on all ranks.

        A GPU at its power limit is faster behind work that heats it less.
        """
        order = random.Random(1)
        for _ in range(count):
            yield from order.sample(choices, len(choices))

    def run(self, choices: list[Choice], turns: int) -> list[dict[str, Any]]:
        found = {choice.name: Measured() for choice in choices}
        wrong = {}
        for choice in choices:  # makes workspaces, warms up, and compares
            results = self.turn(choice, found[choice.name])
            wrong[choice.name] = self.wrong_bits(results)
            del results
        self.reference = None
        gc.collect()
        for measured in found.values():
            measured.forward.clear()
            measured.backward.clear()
        for choice in self.turns(choices, turns):
            self.turn(choice, found[choice.name])
        return [
            record
            for choice in choices
            for record in self.records(choice, found[choice.name], wrong[choice.name])
        ]

    def records(self, choice: Choice, measured: Measured, wrong: int) -> list[dict[str, Any]]:
        all_ranks: list[Measured] = [measured] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(all_ranks, measured, group=self.group)
        figures = {
            "way": choice.name,
            "kept_bytes": max(m.kept for m in all_ranks),
            "peak_bytes": max(max(m.peak_forward, m.peak_backward) for m in all_ranks),
            "forward_peak_bytes": max(m.peak_forward for m in all_ranks),
        }
        rows = []
        for direction in ("forward", "backward"):
            times = Times.of_slowest([getattr(m, direction) for m in all_ranks])
            row = as_record(self.shape.name, direction, self.shape.tokens, times, None, **figures)
            # Plain PyTorch sums dprobs in another order, which is not compared.
            rows.append({**row, "ranks": self.ranks, "wrong": wrong})
        return rows


def minimum_bytes(shape: Shape) -> int:
    """Of a balanced rank: h and the probabilities of its rows; x is there anyway."""
    return shape.tokens * shape.topk * (4 * shape.intermediate + 4)


def print_table(shape: Shape, found: list[dict[str, Any]]) -> None:
    least = minimum_bytes(shape) / 1e9
    print(f"# {shape.name}: h and probabilities of a balanced rank: {least:.2f} GB")
    print(f"{'':24s} {'kept GB':>8s} {'peak GB':>8s} {'fwd ms':>8s} {'bwd ms':>8s} {'wrong':>6s}")
    for forward, backward in zip(found[::2], found[1::2], strict=True):
        print(
            f"{forward['way']:24s} {forward['kept_bytes'] / 1e9:8.3f} "
            f"{forward['peak_bytes'] / 1e9:8.3f} {forward['ms']:8.3f} {backward['ms']:8.3f} "
            f"{forward['wrong']:6d}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", default=list(MODELS), choices=list(CASES))
    add("--divide", type=int, default=1, help="experts by this: the share of one of so many ranks")
    add("--choices", nargs="+", default=[c.name for c in CHOICES])
    add("--schedule", default="auto", help="of uniep, in both directions")
    add("--turns", type=int, default=15)
    add("--main-grad", default="none", choices=list(MAIN_GRADS), help="to which weights are added")
    add("--tiny", action="store_true")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    group = None
    if "RANK" in os.environ:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
        group = dist.group.WORLD
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rank = dist.get_rank() if group is not None else 0
    torch.manual_seed(1 + rank)
    choices = [c for c in CHOICES if c.name in args.choices]
    shapes = [TINY] if args.tiny else [CASES[name] for name in args.cases]
    ranks = dist.get_world_size() if group is not None else 1
    about = header(device, ranks, args.turns)
    if rank == 0:
        print(f"# {about['machine']}; {about['commit']}")
    found: list[dict[str, Any]] = []
    for whole in shapes:
        shape = whole
        if args.divide > 1:
            experts = whole.experts // args.divide
            shape = replace(whole, name=f"{whole.name},experts={experts}", experts=experts)
        schedule = None if args.schedule == "auto" else args.schedule
        bench = Bench(shape, group, device, MAIN_GRADS[args.main_grad], schedule)
        rows = bench.run(choices, args.turns)
        found += rows
        if rank == 0:
            print_table(shape, rows)
            if args.json:
                records.write(args.json, about, found)
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
