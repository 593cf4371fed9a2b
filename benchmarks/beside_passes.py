#!/usr/bin/env python3
"""What messages of NCCL take beside a pass, and what a pass takes beside them.

    export UNIEP_SPARE_SMS=16 NCCL_MAX_CTAS=16 NCCL_CGA_CLUSTER_SIZE=0   # what is to be measured
    torchrun --nproc_per_node=2 benchmarks/beside_passes.py [--case deepseek-v3] [--json FILE]

Every GPU has a layer of its own, with the experts of one of `--divide` ranks, and sends messages to
the next GPU while one comes from the GPU before. Each is as large as the layer's tokens, and begins
when the last has arrived; the first a millisecond behind the begin of a pass. So its time has in it
how long it waits for SMs: without those that the pass leaves (docs/parallelism.md), until the pass
has ended.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from compare import records
from compare.figures import Times
from compare.package_records import as_record, header
from compare.shapes import MODELS, Shape, divided
from compare.step_bench import Inputs
from torch import Tensor

import uniep

MILLISECOND = 1_800_000  # in cycles, about


@dataclass
class Found:
    """Milliseconds of all turns: of the pass, of the first message, and of each of the others."""

    passes: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


class Bench:
    """One layer of this GPU, and its messages."""

    def __init__(self, shape: Shape, device: torch.device, messages: int) -> None:
        self.inputs = Inputs.make(shape, 1, device)
        self.sent = torch.zeros(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        self.received = torch.empty_like(self.sent)
        self.messages, self.side = messages, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def forward(self) -> Tensor:
        with torch.no_grad():
            return uniep.moe(*self.inputs.layer)

    def message(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ways = [
            dist.P2POp(dist.isend, self.sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, self.received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    def turn(self, found: Found, has_pass: bool, has_messages: bool) -> None:
        main = torch.cuda.current_stream()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * MILLISECOND)  # meanwhile the host puts all of it on the streams
        begin = event(main)
        if has_pass:
            self.forward()
        end = event(main)
        times = []
        if has_messages:
            with torch.cuda.stream(self.side):
                self.side.wait_event(begin)
                torch.cuda._sleep(MILLISECOND)
                times = [event(self.side)]
                for _ in range(self.messages):
                    self.message()
                    times.append(event(self.side))
        torch.cuda.synchronize()
        if has_pass:
            found.passes.append(begin.elapsed_time(end))
        taken = [one.elapsed_time(other) for one, other in itertools.pairwise(times)]
        found.first += taken[:1]
        found.others += taken[1:]


def event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    recorded = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    recorded.record(stream)
    return recorded


def rows_of(shape: Shape, ways: dict[str, Found], message_bytes: int) -> list[dict[str, Any]]:
    """Records of what the ways have, of the rank that takes longest."""
    rows = []
    for way, found in ways.items():
        ranks: list[Found] = [found] * dist.get_world_size()
        dist.all_gather_object(ranks, found)
        for what in ("passes", "first", "others"):
            if not getattr(found, what):
                continue
            times = Times.of_slowest([getattr(rank, what) for rank in ranks])
            gbps = None if what == "passes" else message_bytes / times.ms * 1e-6
            row = as_record(shape.name, "forward", shape.tokens, times, None, way=way, what=what)
            rows.append({**row, "ranks": len(ranks), "gbps": gbps})
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        rate = "" if row["gbps"] is None else f", {row['gbps']:5.0f} GB/s"
        print(f"{row['way']:9s} {row['what']:7s} {row['ms']:8.3f} ms{rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--case", default="deepseek-v3", choices=list(MODELS))
    add("--divide", type=int, default=4, help="experts of one of so many ranks")
    add("--messages", type=int, default=3, help="of a turn")
    add("--turns", type=int, default=9)
    add("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this program measures GPUs, and there is none")
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("beside_passes.py: LOCAL_RANK is not set; run it under torchrun")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    about = header(device, dist.get_world_size(), args.turns)
    shape = divided(MODELS[args.case], args.divide)
    bench = Bench(shape, device, args.messages)
    ways = {"pass": (True, False), "messages": (False, True), "both": (True, True)}
    found = {way: Found() for way in ways}
    bench.turn(Found(), True, True)  # the first of everything takes longer
    for _ in range(args.turns):
        for way, has in ways.items():
            bench.turn(found[way], *has)
    rows = rows_of(shape, found, bench.sent.numel() * 2)
    if dist.get_rank() == 0:
        print(f"# {about['machine']}\n# {about['environment']}\n# {shape.name}")
        print_rows(rows)
        if args.json:
            records.write(args.json, about, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
