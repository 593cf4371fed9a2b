#!/usr/bin/env python3
"""What each choice of save, recompute_h and exact_rows keeps, takes at its peak, and costs.

    python benchmarks/memory_choices.py [--cases qwen3-30b ...] [--divide 4] [--json FILE]
    torchrun --nproc_per_node=2 benchmarks/memory_choices.py
    python benchmarks/memory_choices.py --layers 8 --offload      # and uniep.Offload, with each
    python benchmarks/memory_choices.py --tiny        # seconds, on a CPU too: does it run?

One layer, forward and backward, on the same tensors for all, which take turns
(compare/step_bench.py). `plain` is uniep.plain, without and with torch.utils.checkpoint. Results of
every choice of uniep are compared with the first one's, bit by bit. docs/memory.md shows the
figures, docs/results.md explains the file.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from compare import records
from compare.package_records import header
from compare.shapes import MODELS, OLMOE, TINY, Shape, divided
from compare.step_bench import Inputs, MoE, StepBench, Way, measure
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import uniep
from uniep import plain

CASES = {**MODELS, OLMOE.name: OLMOE}
MAIN_GRADS = {"none": None, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Choice:
    """A way to run the layer."""

    name: str
    options: dict[str, Any] | None = None  # of uniep.moe; None: uniep.plain
    checkpointed: bool = False
    offload: bool = False

    @property
    def offloaded(self) -> Choice:
        return replace(self, name=f"{self.name},offload", offload=True)


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


def within(offload: uniep.Offload, moe: MoE) -> MoE:
    def offloaded(*tensors: Tensor) -> Tensor:
        with offload:
            return moe(*tensors)

    return offloaded


@dataclass(frozen=True)
class Layers:
    """What all choices of one shape are called with."""

    group: Any  # a process group, or None
    members: uniep.Group
    max_tokens: int
    schedule: str | None
    main_grads: tuple[Tensor, Tensor] | None

    def way(self, choice: Choice) -> Way:
        return Way(choice.name, self.moe(choice))

    def moe(self, choice: Choice) -> MoE:
        if choice.options is not None:
            moe: MoE = partial(
                uniep.moe,
                group=self.members,
                max_tokens=self.max_tokens,
                schedule=self.schedule,
                main_grads=self.main_grads,
                **choice.options,
            )
            return within(uniep.Offload(), moe) if choice.offload else moe
        layer: Callable[..., Tensor] = partial(
            plain.moe, group=self.group, main_grads=self.main_grads
        )
        if not choice.checkpointed:
            return layer
        return lambda *tensors: checkpoint(layer, *tensors, use_reentrant=False)


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
    names = [c.name for c in CHOICES]
    add("--choices", nargs="+", default=names, choices=names)
    add("--schedule", default="auto", help="of uniep, in both directions")
    add("--turns", type=int, default=15)
    add("--layers", type=int, default=1, help="forwards, all before the first backward")
    add("--offload", action="store_true", help="besides, each choice of uniep with uniep.Offload")
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
    if args.offload:
        choices += [c.offloaded for c in choices if c.options is not None]
    shapes = [TINY] if args.tiny else [CASES[name] for name in args.cases]
    ranks = dist.get_world_size() if group is not None else 1
    about = header(device, ranks, args.turns)
    if rank == 0:
        print(f"# {about['machine']}; {about['commit']}")
    found: list[dict[str, Any]] = []
    for whole in shapes:
        shape = divided(whole, args.divide) if args.divide > 1 else whole
        inputs = Inputs.make(shape, ranks, device, MAIN_GRADS[args.main_grad])
        layers = Layers(
            group=group,
            members=uniep.Group(group, device=device),
            max_tokens=shape.tokens,
            schedule=None if args.schedule == "auto" else args.schedule,
            main_grads=inputs.main_grads,
        )
        bench = StepBench(shape, inputs, group, layers=args.layers)
        rows = measure(bench, [layers.way(choice) for choice in choices], args.turns)
        found += rows
        if rank == 0:
            print_table(shape, rows)
            if args.json:
                records.write(args.json, about, found)
        del bench, inputs, layers
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
