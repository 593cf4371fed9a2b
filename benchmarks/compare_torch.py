#!/usr/bin/env python3
"""uniep beside the same MoE layer of PyTorch, NCCL and Triton: one run, the same tensors.

    torchrun --nproc_per_node=4 benchmarks/compare_torch.py
        --library build/cuda/benchmarks/libuniep_bridge.so [--check] [--json FILE]

Prints, for each shape and schedule, the times of both, the floor that their products and the wire
set, and the stages of uniep beside bare products. --check counts elements whose bits are not those
of a plain PyTorch layer. Needs a Hopper GPU per rank; docs/performance.md explains the figures,
docs/results.md the file. Exit code 1 where bits differ or anything failed.
"""
import argparse
import datetime
import os
import shlex
import subprocess
import sys
import traceback

os.environ["NCCL_NVLS_ENABLE"] = "0"  # uniep makes no use of NVLink multicast, and asks for this

import torch
import torch.distributed as dist

from compare import bridge, group, records, shapes, tables, timing
from compare.figures import PRODUCTS, Times, direction_floor_ms, stage_figures
from compare.plain_layer import PlainLayer
from compare.torch_layer import Exchange, Inputs, TorchLayer
from compare.uniep_layer import UniepLayer, check_backward, check_forward

SCHEDULES = ["sequential", "single"]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--library", required=True, help="libuniep_bridge.so of a CUDA build")
    parser.add_argument("--shapes", default=",".join(shapes.SHAPES), metavar="A,B,...")
    parser.add_argument("--forward", nargs="+", default=SCHEDULES, metavar="SCHEDULE")
    parser.add_argument("--backward", nargs="+", default=SCHEDULES, metavar="SCHEDULE")
    parser.add_argument("--iterations", type=int, default=15, metavar="N")
    parser.add_argument("--skew", type=float, default=0.0, metavar="Z",
                        help="expert e's logit is lowered by Z log(1 + e)")
    parser.add_argument("--tokens", type=int, metavar="T", help="of a rank, for every shape")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--no-stages", action="store_true")
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


def make_inputs(shape, skew):
    """Random tensors of order 1, and a router's choice among random logits."""
    generator = torch.Generator(group.DEVICE).manual_seed(1 + group.rank())

    def normal(*sizes, scale=1.0):
        tensor = torch.randn(*sizes, device=group.DEVICE, dtype=torch.bfloat16,
                             generator=generator)
        return tensor.mul_(scale)

    local, hidden, inter = shape.experts // group.size(), shape.hidden, shape.intermediate
    logits = torch.randn(shape.tokens, shape.experts, device=group.DEVICE, generator=generator)
    logits -= skew * torch.log1p(torch.arange(shape.experts, device=group.DEVICE))
    probs, ids = torch.topk(torch.softmax(logits, -1), shape.topk, -1)
    return Inputs(ids=ids.int(), probs=probs / probs.sum(-1, keepdim=True),
                  x=normal(shape.tokens, hidden), dy=normal(shape.tokens, hidden),
                  w1=normal(local, 2 * inter, hidden, scale=hidden**-0.5),
                  w2=normal(local, hidden, inter, scale=inter**-0.5))


class Comparison:
    """Both layers of one shape."""

    def __init__(self, library, shape, args):
        self.shape, self.args = shape, args
        self.inputs = make_inputs(shape, args.skew)
        self.exchange = Exchange(self.inputs.ids, shape.experts)
        all_ids = group.all_gather(self.inputs.ids)
        self.wire = shapes.wire_of(all_ids, shape)
        rows = torch.bincount(all_ids.flatten(), minlength=shape.experts).tolist()
        self.torch = TorchLayer(self.inputs, self.exchange)
        self.uniep = UniepLayer(library, shape, self.inputs,
                                shapes.capacity_rows(shape, group.size(), rows))
        self.uniep.plan()
        self.uniep.synchronize()

    def check(self):
        """What a record says about the bits, by (direction, schedule)."""
        plain, checks = PlainLayer(self.inputs, self.exchange), {}
        want, offsets = plain.forward(), self.exchange.offsets.tolist()
        for schedule in self.args.forward:
            wrong = check_forward(self.uniep, self.shape, schedule, want, offsets)
            checks["forward", schedule] = {"wrong": wrong}
        want = plain.backward()
        for schedule in self.args.backward:
            wrong, distance = check_backward(self.uniep, schedule, want)
            checks["backward", schedule] = {"wrong": wrong, "dprobs_rel_l2": distance}
        return checks

    def time_products(self):
        self.torch.forward()
        self.torch.backward()
        return timing.time_products(self.torch.products(), self.exchange.offsets,
                                    self.args.iterations)

    def time_plan(self):
        times, = timing.measure([self.uniep.plan], self.args.iterations)
        self.uniep.synchronize()
        return times

    def time_direction(self, direction, schedules):
        """Times of the torch layer and of each schedule, and each one's stages by name."""
        call_uniep = getattr(self.uniep, direction)
        calls = [getattr(self.torch, direction)]
        calls += [lambda schedule=schedule: call_uniep(schedule) for schedule in schedules]
        stages = [[] for _ in schedules]

        def note_stages(number):
            if number > 0:
                stages[number - 1].append(self.uniep.last_pass())

        times = timing.measure(calls, self.args.iterations,
                               None if self.args.no_stages else note_stages)
        self.uniep.synchronize()
        return times[0], times[1:], [stage_times(turns) for turns in stages]


def stage_times(turns):
    """Times of each stage on its slowest rank; `turns` has every stage's milliseconds by name."""
    if not turns:
        return {}
    ranks = group.gather_numbers([list(turn.values()) for turn in turns])
    times = {stage: Times.of_slowest([[turn[i] for turn in rank] for rank in ranks])
             for i, stage in enumerate(turns[0])}
    return {stage: t for stage, t in times.items() if t.ms > 0}


class Report:
    """Measures and collects; all ranks have the same records, and rank 0 prints them."""

    def __init__(self, args, full_schedules, chosen):
        self.args, self.full_schedules = args, full_schedules
        self.directions, self.all, self.stages, self.products = [], [], [], []
        self.table = tables.direction_table(chosen, args.forward + args.backward)

    def add_shape(self, comparison, copy_gbps):
        shape, wire = comparison.shape, comparison.wire
        checks = comparison.check() if self.args.check else {}
        products = comparison.time_products()
        self.products += [(shape, name, product) for name, product in products.items()]
        self.add("plan", None, shape, comparison.time_plan())
        for direction in PRODUCTS:
            schedules = getattr(self.args, direction)
            torch_times, times, stages = comparison.time_direction(direction, schedules)
            floor_ms = direction_floor_ms(direction, products, wire)
            for schedule, its_times, its_stages in zip(schedules, times, stages):
                self.add_direction(direction, schedule, shape, its_times, torch_times, floor_ms,
                                   checks.get((direction, schedule), {}))
                for stage, t in its_stages.items():
                    figures = stage_figures(stage, t.ms, shape, products, wire, copy_gbps)
                    self.add_stage(direction, schedule, shape, stage, t, figures)

    def add_direction(self, direction, schedule, shape, times, torch_times, floor_ms, check):
        record = self.add(direction, schedule, shape, times, baseline_ms=torch_times.ms,
                          baseline_p10=torch_times.p10, baseline_p90=torch_times.p90,
                          floor_ms=floor_ms, **check)
        self.directions.append(record)
        say(tables.direction_line(self.table, record, schedule))

    def add_stage(self, direction, schedule, shape, stage, times, figures):
        record = self.add(stage, schedule, shape, times, **{"pass": direction}, **figures)
        self.stages.append((record, schedule))

    def add(self, direction, schedule, shape, times, **figures):
        full = self.full_schedules.get(schedule)  # a plan has none
        self.all.append(records.record(shape, group.size(), direction, full, times, **figures))
        return self.all[-1]

    def verdict(self):
        speedups = [r["baseline_ms"] / r["ms"] for r in self.directions]
        text = f"uniep is {min(speedups):.2f} to {max(speedups):.2f} times as fast as torch + NCCL"
        if not self.args.check:
            return f"# not checked (--check does); {text}"
        wrong = sum(r["wrong"] for r in self.directions)
        return f"# check {'PASSED' if wrong == 0 else 'FAILED'}: {wrong} elements are wrong; {text}"

    def passed(self):
        return all(not r["wrong"] for r in self.directions)


def say(*lines):
    if group.rank() == 0:
        for line in lines:
            print(line, flush=True)


def machine():
    """The GPU as nvidia-smi sees it, and the libraries."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    try:
        line = subprocess.run(["nvidia-smi", "--id=0", f"--query-gpu={query}",
                               "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=30, check=True).stdout.strip()
        gpu, driver, clock, max_clock, power = line.split(", ")
        device = f"{gpu}, driver {driver}, SM clock {clock} of {max_clock}, {power}"
    except (OSError, ValueError, subprocess.SubprocessError):
        device = torch.cuda.get_device_name()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (f"{group.size()} x {device}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
            f"NCCL {nccl}")


def file_header(library, args, copy_gbps):
    ranks = group.size()
    return {"commit": library.commit, "machine": machine(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": f"torchrun --nproc_per_node={ranks} {shlex.join(sys.argv)}",
            "iterations": args.iterations, "skew": args.skew, "copy_gbps": copy_gbps}


def printed_header(header, table):
    return [f"# {records.SCHEMA}: an MoE layer by uniep and by torch + NCCL on the same tensors",
            f"# uniep    {header['commit'] or 'of an unknown commit'}",
            f"# machine  {header['machine']}; copies at {header['copy_gbps']:.0f} GB/s",
            f"# date     {header['date']}",
            f"# command  {header['command']}",
            f"# times    medians of {header['iterations']} turns after {timing.WARMUPS}, slowest "
            "rank; events around the second of two calls, which all ranks begin together",
            "# floor    the products alone, or the wire at 370 GB/s where that takes longer; "
            "eff: floor / ms",
            "#", table.header()]


def compare_shape(library, shape, args, report, copy_gbps):
    comparison = Comparison(library, shape, args)
    report.add_shape(comparison, copy_gbps)
    comparison.uniep.close()


def run(args):
    library = bridge.Library(args.library)
    full_schedules = {text: library.full_schedule(text) for text in args.forward + args.backward}
    chosen = shapes.choose_shapes(args.shapes, args.tokens, group.size())
    copy_gbps = timing.copy_gbps(args.iterations)
    torch.cuda.empty_cache()
    header = file_header(library, args, copy_gbps)
    report = Report(args, full_schedules, chosen)
    say(*printed_header(header, report.table))
    for shape in chosen:
        compare_shape(library, shape, args, report, copy_gbps)
        torch.cuda.empty_cache()
        if args.json and group.rank() == 0:
            records.write(args.json, header, report.all)
    say(*tables.stage_lines(report.stages), *tables.product_lines(report.products), "#",
        report.verdict())
    return report.passed()


def main():
    args = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("compare_torch.py: LOCAL_RANK is not set; run it under torchrun")
    local_rank = int(os.environ["LOCAL_RANK"])
    try:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device(group.DEVICE, local_rank))
        passed = run(args)
        dist.destroy_process_group()
    except Exception as error:
        if not isinstance(error, (bridge.UniepError, OSError, ValueError)):
            traceback.print_exc()
        print(f"compare_torch.py: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        # Peers may be waiting in a collective call, for which an orderly end would wait in turn.
        os._exit(1)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
