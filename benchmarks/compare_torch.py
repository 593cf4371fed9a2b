#!/usr/bin/env python3
"""uniep beside the same MoE layer of PyTorch, NCCL and Triton: one run, the same tensors.

    torchrun --nproc_per_node=4 benchmarks/compare_torch.py
        --library build/cuda/benchmarks/libuniep_bridge.so [--check] [--json FILE]
        [--cases all all,tokens=64 qwen3-30b,skew=1]

Prints, for each case and schedule, the times of both, the floor that their products and the wire
set, and the stages of uniep beside bare products. --check counts elements whose bits are not those
of a plain PyTorch layer. Needs a Hopper GPU per rank; docs/benchmarks.md explains the figures,
docs/results.md the file. Exit code 1 where bits differ or anything failed, 3 where time was up.
"""
import argparse
import datetime
import math
import os
import shlex
import subprocess
import sys
import time
import traceback

os.environ["NCCL_NVLS_ENABLE"] = "0"  # uniep makes no use of NVLink multicast, and asks for this

import torch
import torch.distributed as dist
from compare import bridge, group, records, shapes, timing
from compare.comparison import Comparison
from compare.report import Report
from compare.uniep_layer import AUTO

SCHEDULES = ["sequential", "single"]


def positive(text):
    """Of an argument: medians and loops need at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}'; an integer of 1 or more is accepted")
    return int(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--library", required=True, help="libuniep_bridge.so of a CUDA build")
    parser.add_argument("--cases", nargs="+", default=[shapes.ALL], metavar="CASE",
                        help="MODEL[,tokens=T][,skew=Z] each, or the same of `all` models: T "
                             "tokens a rank instead of the model's; expert e's logit lowered by "
                             "Z log(1 + e), so that 0 is even and 1 like Zipf's law. Models: " +
                             ", ".join(shapes.MODELS))
    parser.add_argument("--forward", nargs="+", default=SCHEDULES, metavar="SCHEDULE",
                        help="what to measure side by side: a preset, key=value pairs, a preset "
                             f"and then pairs, or {AUTO}, what the layer has if it is given none "
                             f"(default: {' '.join(SCHEDULES)})")
    parser.add_argument("--backward", nargs="+", default=SCHEDULES, metavar="SCHEDULE",
                        help="the same")
    parser.add_argument("--iterations", type=positive, default=15, metavar="N")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--no-stages", action="store_true", help="do not list stages")
    parser.add_argument("--trace", action="store_true",
                        help="time every schedule with its timeline on, too")
    parser.add_argument("--sustain", type=float, default=0, metavar="MS",
                        help="repeat every call without a pause for so long, and half of that "
                             "before, as training does, instead of timing the second of two: at "
                             "the clocks that the power limit leaves in the long run")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="N",
                        help="begin no case that would not be done after N seconds if it took as "
                             "long as the longest before it; exit with 3 where one is left")
    parser.add_argument("--check", action="store_true", help="count elements with wrong bits")
    args = parser.parse_args()
    if args.sustain and args.trace:
        parser.error("--sustain repeats passes, of which --trace keeps a timeline each; one of "
                     "them is accepted")
    return args


def say(*lines):
    if group.rank() == 0:
        for line in lines:
            print(line, flush=True)


def machine():
    """The GPU as nvidia-smi sees it, and the libraries; for rank 0, which alone reports it."""
    if group.rank() != 0:
        return ""
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
            "iterations": args.iterations, "sustain_ms": args.sustain, "copy_gbps": copy_gbps}


def how_timed(sustain_ms):
    if sustain_ms:
        return f"mean of the calls that take {sustain_ms:g} ms together, behind half as many"
    return "events around the second of two calls, which all ranks begin together"


def printed_header(header, table):
    return [f"# {records.SCHEMA}: an MoE layer by uniep and by torch + NCCL on the same tensors",
            f"# uniep    {header['commit'] or 'of an unknown commit'}",
            f"# machine  {header['machine']}; copies at {header['copy_gbps']:.0f} GB/s",
            f"# date     {header['date']}",
            f"# command  {header['command']}",
            f"# times    medians of {header['iterations']} turns after {timing.WARMUPS}, slowest "
            "rank; " + how_timed(header["sustain_ms"]),
            "# load     rows of the busiest rank over the mean",
            "# floor    the products alone of the rank with the longest, or the wire at 370 GB/s "
            "where that takes longer; eff: floor / ms",
            "# trace    what recording the timeline adds to uniep's time (--trace)",
            "#", table.header()]


def compare_case(library, shape, args, weights, report, copy_gbps):
    """Returns the weights, which serve for other shapes of the same model."""
    torch.cuda.empty_cache()  # uniep allocates beside PyTorch
    comparison = Comparison(library, shape, args, weights)
    report.add_shape(comparison, copy_gbps)
    comparison.close()
    return comparison.weights


class Deadline:
    """Whether there is time for another case; by rank 0's clock, so that all ranks agree."""

    def __init__(self, seconds):
        self.begin = self.last = time.monotonic()
        self.seconds, self.longest = seconds, 0

    def allows_another(self):
        now = time.monotonic()
        self.longest = max(self.longest, now - self.last)
        self.last = now
        return group.gather_numbers([now + self.longest - self.begin])[0][0] <= self.seconds


def compare_all(library, chosen, args, report, header, deadline):
    """Returns the shapes for which there was no time."""
    weights = None
    for number, shape in enumerate(chosen):
        if not deadline.allows_another():
            return chosen[number:]
        if weights is not None and weights.model != shape.model:
            weights = None
        weights = compare_case(library, shape, args, weights, report, header["copy_gbps"])
        if args.json and group.rank() == 0:
            records.write(args.json, header, report.all)
    return []


def run(args):
    """The exit code."""
    deadline = Deadline(args.seconds)
    chosen = shapes.parse_cases(args.cases, group.size())
    library = bridge.Library(args.library)
    for text in args.forward + args.backward:
        if text != AUTO:
            library.full_schedule(text)  # throws where it is none
    header = file_header(library, args, timing.copy_gbps(args.iterations))
    report = Report(args, group.size(), chosen, say)
    say(*printed_header(header, report.table))
    left = compare_all(library, chosen, args, report, header, deadline)
    report.finish()
    if left:
        say("# no time was left for " + " ".join(shape.name for shape in left))
    say(f"# {time.monotonic() - deadline.begin:.0f} s, without starting PyTorch")
    if not report.passed():
        return 1
    return 3 if left else 0


def main():
    args = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("compare_torch.py: LOCAL_RANK is not set; run it under torchrun")
    local_rank = int(os.environ["LOCAL_RANK"])
    try:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device(group.DEVICE, local_rank))
        code = run(args)
        dist.destroy_process_group()
    except Exception as error:
        if not isinstance(error, (bridge.UniepError, OSError, ValueError)):
            traceback.print_exc()
        print(f"compare_torch.py: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        # Peers may be waiting in a collective call, for which an orderly end would wait in turn.
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    main()
