#!/usr/bin/env python3
"""What it costs that experts are on several hosts: one layer over a mesh, and in one group.

    torchrun --nproc_per_node=4 benchmarks/over_hosts.py --hosts 2 [--cases deepseek-v3 ...]
    torchrun --nproc_per_node=4 benchmarks/over_hosts.py --sockets   # NCCL sees hosts, too
    NCCL_P2P_DISABLE=1 torchrun --nproc_per_node=4 benchmarks/over_hosts.py --in-turn  # slow links
    UNIEP_SPARE_SMS=16 NCCL_MAX_CTAS=16 NCCL_CGA_CLUSTER_SIZE=0 torchrun ...  # under passes
    torchrun --nproc_per_node=4 benchmarks/over_hosts.py --hosts 4 --limit 2 --exact-hosts
    torchrun --nproc_per_node=2 benchmarks/over_hosts.py --all-rows  # no sums of hosts
    torchrun --nproc_per_node=2 benchmarks/over_hosts.py --tiny      # seconds, on CPUs too

Ranks of one machine are taken to be on several hosts. Ways, which take turns:

    group        all ranks in one group: no host is crossed
    group, sums  the same with one combine group for each host, whose sums are rounded to bf16
    mesh         over a mesh of hosts and ranks; its bits are compared with those of `group, sums`
    in turn      with --in-turn, the mesh where passes wait for what crosses, and it for them
    exact hosts  with --exact-hosts, the mesh where tokens go only to hosts with an expert of them;
                 the host waits for their number, and what it then still has to launch counts

With --limit M the experts of a token are on at most M hosts, as DeepSeek's router chooses them.
So `mesh` - `group, sums` is what crossing costs, and `in turn` - `mesh` what of it is hidden:
without UNIEP_SPARE_SMS only what crosses under gradients of weights. With --all-rows a token's rows
are added up in one group, so that they all cross, and the others are compared with `group`. On
several machines, where there is no group of all, only meshes run. docs/hosts.md shows the figures.
"""

from __future__ import annotations

import argparse
import gc
import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from compare import records
from compare.package_records import header
from compare.shapes import MODELS, TINY, Shape, divided
from compare.step_bench import Inputs, StepBench, Way, measure
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import uniep
from uniep import workspace
from uniep._between_hosts.crossing import Crossing


def limit(inputs: Inputs, shape: Shape, hosts: int, most: int) -> None:
    """Another routing: by a router that takes a token's experts from at most so many hosts."""
    config = uniep.RouterConfig(n_group=hosts, topk_group=most, normalize=True)
    with torch.no_grad():
        router = uniep.Router(shape.hidden, shape.experts, shape.topk, config=config)
        routing = router.to(inputs.x.device)(inputs.x)
    inputs.ids, inputs.probs = routing.ids.int(), routing.probs.requires_grad_()


def way_of(
    name: str, shape: Shape, mesh: DeviceMesh, device: torch.device, sums: dict[str, Any]
) -> Way:
    """Over the mesh, in a workspace of its own; `in turn` with nothing begun ahead."""
    figures = (shape.hidden, shape.intermediate, shape.experts, shape.topk, shape.tokens)
    begins_nothing = name == "in turn"
    waves = patch.object(workspace, "comes_in_waves", lambda *_: False)
    with waves if begins_nothing else nullcontext():
        own = uniep.Workspace(
            mesh, *figures, device=device, exact_hosts=name == "exact hosts", **sums
        )

    def moe(*tensors: Any, **options: Any) -> torch.Tensor:
        crossing = patch.object(Crossing, "of", lambda *_, **__: None)
        with crossing if begins_nothing else nullcontext():
            return uniep.moe(*tensors, workspace=own, **options)

    return Way(name, moe)


def ways_of(
    shape: Shape, mesh: DeviceMesh, device: torch.device, more: list[str], all_rows: bool
) -> list[Way]:
    """Those that run here; the first is what the others are compared with."""
    layer = partial(uniep.moe, max_tokens=shape.tokens)
    sums: dict[str, Any] = {}
    if not all_rows:
        sums = {"combine_groups": mesh.shape[0], "combine_partials": "bf16"}
    of_meshes = [way_of(name, shape, mesh, device, sums) for name in ("mesh", *more)]
    if int(os.environ["LOCAL_WORLD_SIZE"]) < dist.get_world_size():
        return of_meshes
    members = uniep.Group(dist.group.WORLD, device=device)
    group = Way("group", partial(layer, group=members))
    if all_rows:
        return [group, *of_meshes]
    return [Way("group, sums", partial(layer, group=members, **sums)), group, *of_meshes]


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
    add("--exact-hosts", action="store_true", help="send tokens only where they are needed, too")
    add("--all-rows", action="store_true", help="add rows up in one group, so that all cross")
    add("--limit", type=int, metavar="M", help="most hosts that have experts of a token")
    add("--divide", type=int, default=1, help="experts of one of so many times as many GPUs")
    add("--turns", type=int, default=9)
    add("--tiny", action="store_true")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("over_hosts.py: RANK is not set; run it under torchrun")
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
    more = ["in turn"] * args.in_turn + ["exact hosts"] * args.exact_hosts
    whole = [TINY] if args.tiny else [MODELS[name] for name in args.cases]
    for shape in whole if args.divide == 1 else [divided(shape, args.divide) for shape in whole]:
        inputs = Inputs.make(shape, ranks, device)
        if args.limit:
            limit(inputs, shape, args.hosts, args.limit)
        bench = StepBench(shape, inputs, dist.group.WORLD, lead_cycles=8_000_000)
        rows = measure(bench, ways_of(shape, mesh, device, more, args.all_rows), args.turns)
        setting = {"hosts": args.hosts, "sockets": args.sockets, "limit": args.limit}
        setting["all_rows"] = args.all_rows
        found += [{**row, **setting} for row in rows]
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
