#!/usr/bin/env python3
"""What it costs that experts are on several hosts: one layer over a mesh, and in one group.

    torchrun --nproc_per_node=4 benchmarks/over_hosts.py --hosts 2 [--cases deepseek-v3 ...]
    torchrun --nproc_per_node=4 benchmarks/over_hosts.py --sockets   # NCCL sees hosts, too
    NCCL_P2P_DISABLE=1 torchrun --nproc_per_node=4 benchmarks/over_hosts.py --in-turn  # slow links
    torchrun --nproc_per_node=2 benchmarks/over_hosts.py --tiny      # seconds, on CPUs too

Ranks of one machine are taken to be on several hosts. Ways, which take turns:

    group        all ranks in one group: no host is crossed
    group, sums  the same with one combine group for each host, whose sums are rounded to bf16
    mesh         over a mesh of hosts and ranks; its bits are compared with those of `group, sums`
    in turn      with --in-turn, the mesh where gradients of weights wait for what crosses

So `mesh` - `group, sums` is what crossing costs, and `in turn` - `mesh` what of it is hidden. On
several machines, where there is no group of all, only meshes run. docs/hosts.md shows the figures.
"""

from __future__ import annotations

import argparse
import gc
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from compare import records
from compare.package_records import header
from compare.shapes import MODELS, TINY, Shape
from compare.step_bench import Inputs, MoE, StepBench, Way, measure
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import uniep
from uniep import hosts

WAYS = ["group, sums", "group", "mesh", "in turn"]


def in_turn(moe: MoE) -> MoE:
    """The same with nothing begun ahead."""

    def wrapped(*tensors: Any, **options: Any) -> torch.Tensor:
        of = hosts.WayBack.of
        hosts.WayBack.of = lambda _: None
        try:
            return moe(*tensors, **options)
        finally:
            hosts.WayBack.of = of

    return wrapped


def ways_of(shape: Shape, mesh: DeviceMesh, device: torch.device, with_in_turn: bool) -> list[Way]:
    """Those that run here; the first is what the others are compared with."""
    layer = partial(uniep.moe, max_tokens=shape.tokens)
    sums: dict[str, Any] = {"combine_groups": mesh.shape[0], "combine_partials": "bf16"}
    of_mesh = Way("mesh", partial(layer, group=mesh, **sums))
    of_meshes = [of_mesh]
    if with_in_turn:
        of_meshes.append(Way("in turn", in_turn(of_mesh.moe)))
    if int(os.environ["LOCAL_WORLD_SIZE"]) < dist.get_world_size():
        return of_meshes
    members = uniep.Group(dist.group.WORLD, device=device)
    return [
        Way("group, sums", partial(layer, group=members, **sums)),
        Way("group", partial(layer, group=members)),
        *of_meshes,
    ]


def print_table(shape: Shape, found: list[dict[str, Any]]) -> None:
    print(f"# {shape.name}")
    for forward, backward in zip(found[::2], found[1::2], strict=True):
        print(
            f"{forward['way']:12s} forward {forward['ms']:8.3f} ms, "
            f"backward {backward['ms']:8.3f} ms, {forward['wrong']} elements differ",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--cases", nargs="+", default=list(MODELS), choices=list(MODELS))
    add("--sockets", action="store_true", help="tell NCCL that they are hosts (NCCL_HOSTID)")
    add("--in-turn", action="store_true", help="measure what is hidden, too")
    add("--turns", type=int, default=9)
    add("--tiny", action="store_true")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks % args.hosts:
        raise SystemExit(f"--hosts is {args.hosts}; it must divide the {ranks} ranks")
    if args.sockets:
        os.environ["NCCL_HOSTID"] = f"host {rank // (ranks // args.hosts)}"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda" if cuda else "cpu")
    mesh = init_device_mesh(
        device.type, (args.hosts, ranks // args.hosts), mesh_dim_names=("hosts", "ranks")
    )
    torch.manual_seed(1 + rank)
    about = header(device, ranks, args.turns)
    if rank == 0:
        print(f"# {about['machine']}; {about['commit']}; {args.hosts} hosts")
    found: list[dict[str, Any]] = []
    for shape in [TINY] if args.tiny else [MODELS[name] for name in args.cases]:
        inputs = Inputs.make(shape, ranks, device)
        bench = StepBench(shape, inputs, dist.group.WORLD, lead_cycles=8_000_000)
        rows = measure(bench, ways_of(shape, mesh, device, args.in_turn), args.turns)
        found += [{**row, "hosts": args.hosts, "sockets": args.sockets} for row in rows]
        if rank == 0:
            print_table(shape, rows)
            if args.json:
                records.write(args.json, about, found)
        del bench, inputs
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
