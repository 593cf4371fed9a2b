#!/usr/bin/env python3
"""What a shared expert costs in the pass, beside it, and as bare products.

    python benchmarks/shared_experts.py [--cases deepseek-v3 ...] [--divide 4] [--json FILE]
    torchrun --nproc_per_node=2 benchmarks/shared_experts.py
    python benchmarks/shared_experts.py --tiny       # seconds, on a CPU too: does it run?

One layer on the same tensors, forward and backward of the slowest rank, in ways that take turns:

    routed    uniep's experts without any shared ones
    fused     the same with S shared experts in the pass
    apart     `routed`, and the shared experts by PyTorch behind it, added to its output
    products  the matrix products of the shared experts alone

So `fused` - `routed` is what they cost in the pass. docs/research/measurements.md has the figures.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import records
from compare.calls import synchronize
from compare.figures import Times
from compare.package_records import as_record, header
from compare.shapes import MODELS, TINY, Shape, divided
from compare.step_bench import Inputs, Stopwatch
from torch import Tensor

import uniep

WAYS = ["routed", "fused", "apart", "products"]
Layer = Callable[..., Tensor]  # x, ids, probs, w1, w2


class Products(torch.autograd.Function):
    """Of one SwiGLU expert that has all tokens, without its activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = x @ w1.t()
        ctx.save_for_backward(x, w1, w2, h)
        return h[:, : w2.shape[1]] @ w2.t()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w1, w2, h = ctx.saved_tensors
        (dy,) = dys
        da = dy @ w2
        return h @ w1, h.t() @ x, dy.t() @ da  # h and da in place of dh and a, as large


class Bench:
    """The ways for one shape, each with its times."""

    def __init__(self, shape: Shape, shared: int, probs: str, device: torch.device) -> None:
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.device, self.ranks = device, dist.get_world_size() if self.group is not None else 1
        self.inputs = Inputs.make(shape, self.ranks, device)
        self.stopwatch = Stopwatch(device, lead_cycles=8_000_000)
        sizes = (2 * shape.intermediate, shape.hidden)
        make = partial(torch.randn, dtype=torch.bfloat16, device=device)
        self.w1 = make(shared, *sizes).mul_(shape.hidden**-0.5).requires_grad_()
        self.w2 = make(shared, shape.hidden, shape.intermediate)
        self.w2 = self.w2.mul_(shape.intermediate**-0.5).requires_grad_()
        members = uniep.Group(self.group, device=device)
        routed = partial(uniep.moe, group=members, max_tokens=shape.tokens, probs=probs)
        fused = partial(routed, shared_w1=self.w1, shared_w2=self.w2)
        self.layers: dict[str, Layer] = {
            "routed": routed,
            "fused": fused,
            "apart": lambda x, *rest: routed(x, *rest) + self.beside(x),
            "products": lambda x, *_: self.sum_of(x, Products.apply),
        }

    def sum_of(self, x: Tensor, expert: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        first, *others = (expert(x, w1, w2) for w1, w2 in zip(self.w1, self.w2, strict=True))
        return sum(others, first)

    def beside(self, x: Tensor) -> Tensor:
        def expert(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
            gate, up = F.linear(x, w1).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, w2)

        return self.sum_of(x, expert)

    def together(self) -> None:
        synchronize(self.device)
        if self.group is not None:
            dist.barrier(group=self.group)
            synchronize(self.device)

    def turn(self, way: str) -> tuple[Tensor, float, float]:
        self.inputs.drop_gradients()
        self.w1.grad = self.w2.grad = None
        self.together()
        out, forward = self.stopwatch.time(lambda: self.layers[way](*self.inputs.layer))
        self.together()
        _, backward = self.stopwatch.time(lambda: out.backward(self.inputs.dy))
        return out.detach(), forward, backward

    def measure(self, turns: int) -> dict[str, tuple[Times, Times]]:
        """Forward and backward of each way, which have run before."""
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        order = random.Random(1)
        gc.collect()
        for _ in range(turns):
            for way in order.sample(WAYS, len(WAYS)):
                times[way].append(self.turn(way)[1:])
        return {way: self.of_slowest(found) for way, found in times.items()}

    def of_slowest(self, found: list[tuple[float, float]]) -> tuple[Times, Times]:
        of_ranks = [found] * self.ranks
        if self.group is not None:
            dist.all_gather_object(of_ranks, found, group=self.group)
        forward, backward = ([[t[i] for t in rank] for rank in of_ranks] for i in range(2))
        return Times.of_slowest(forward), Times.of_slowest(backward)


def measure(
    shape: Shape, shared: int, probs: str, device: torch.device, turns: int
) -> list[dict[str, Any]]:
    bench = Bench(shape, shared, probs, device)
    outs = {way: bench.turn(way)[0] for way in WAYS}
    far = (outs["fused"].float() - outs["apart"].float()).norm() / outs["apart"].float().norm()
    if not far < 1e-2:
        raise SystemExit(f"{shape.name}: fused and apart differ by {far:.1e}")
    outs.clear()
    found = bench.measure(turns)
    rows = []
    for way, times in found.items():
        for direction, of_way in zip(("forward", "backward"), times, strict=True):
            row = as_record(shape.name, direction, shape.tokens, of_way, None, way=way)
            rows.append({**row, "ranks": bench.ranks, "shared_experts": shared, "probs": probs})
    if is_first():
        print_table(shape, shared, found)
    return rows


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def print_table(shape: Shape, shared: int, found: dict[str, tuple[Times, Times]]) -> None:
    print(f"# {shape.name}, {shared} shared")
    for way, (forward, backward) in found.items():
        print(f"{way:10s} forward {forward.ms:8.3f} ms, backward {backward.ms:8.3f} ms")
    for i, direction in enumerate(("forward", "backward")):
        ms = {way: times[i].ms for way, times in found.items()}
        ratios = {way: (ms[way] - ms["routed"]) / ms["products"] for way in ("fused", "apart")}
        said = ", ".join(f"{way} {ratio:.3f}" for way, ratio in ratios.items())
        print(f"{direction:10s} cost in bare products: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", default=list(MODELS), choices=list(MODELS))
    add("--divide", type=int, default=1, help="experts by this: the share of one of so many ranks")
    add("--shared", type=int, default=1, help="shared experts, as wide as the others")
    add("--probs", default="before", choices=["before", "after"], help="where they are multiplied")
    add("--turns", type=int, default=15)
    add("--tiny", action="store_true")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda" if cuda else "cpu")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(1 if is_first() else 2 + dist.get_rank())
    about = header(device, ranks, args.turns)
    if is_first():
        print(f"# {about['machine']}; {about['commit']}")
    shapes = [TINY]
    if not args.tiny:
        shapes = [divided(MODELS[name], args.divide) for name in args.cases]
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        rows += measure(shape, args.shared, args.probs, device, args.turns)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.json and is_first():
        records.write(args.json, about, rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
