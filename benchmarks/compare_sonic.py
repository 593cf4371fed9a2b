#!/usr/bin/env python3
"""One GPU's layer beside SonicMoE: time of forward and backward, bytes kept, bytes at the peak.

    pip install sonic-moe==0.1.2 quack-kernels==0.4.1
    python benchmarks/compare_sonic.py [--cases qwen3-30b ...] [--json FILE]

All ways have the same tensors and take turns (compare/step_bench.py), behind a pause in which the
host gets ahead: what a host needs to launch kernels is not measured. Before that every way's
results are compared with uniep's; one that is further from them than --tolerance, or that fails, is
not timed, and its row says why. docs/results.md explains the file.

SonicMoE tunes its products for every shape when it first meets them. What its tuner tries is
compiled before, on all cores (compare/sonic_compile.py); QUACK_CACHE_DIR and
QUACK_CACHE_AUTOTUNING=1 keep kernels and choices for later runs. --usual-tiles leaves its tuner the
tiles that it has chosen for these shapes before.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from compare import records
from compare.package_records import header
from compare.shapes import MODELS, OLMOE, TINY, Shape
from compare.step_bench import Inputs, Measured, Step, StepBench, Way

import uniep

INSTALL = "pip install sonic-moe==0.1.2 quack-kernels==0.4.1"
CASES = {
    **MODELS,
    OLMOE.name: OLMOE,
    # The load of one of four ranks.
    "deepseek-v3": replace(MODELS["deepseek-v3"], name="deepseek-v3,experts=64", experts=64),
}
CHOICES: dict[str, dict[str, Any]] = {
    "uniep": {},
    "uniep,tokens": {"save": "tokens"},
    "uniep,none": {"save": "none"},
    "uniep,none,recompute_h": {"save": "none", "recompute_h": True},
}
BASELINE = "sonic"
LEAD_CYCLES = 8_000_000  # 4 ms of a GPU: longer than any way's host needs for a backward


def uniep_ways(shape: Shape, device: torch.device) -> list[Way]:
    group = uniep.Group(device=device)
    return [
        Way(name, partial(uniep.moe, group=group, max_tokens=shape.tokens, **options))
        for name, options in CHOICES.items()
    ]


def sonic_ways(shape: Shape, device: torch.device) -> list[Way]:
    from compare import sonic_layer

    return [
        Way(BASELINE, sonic_layer.moe),
        Way("sonic,general", sonic_layer.general_moe(shape.tokens, shape.topk, device)),
    ]


def compile_sonic(shape: Shape, device: torch.device) -> None:
    """What its tuner will try, which does not depend on the shape."""
    from compare.sonic_compile import compile_ahead

    inputs = Inputs.make(shape, 1, device)
    compile_ahead(
        [
            lambda way=way: way.moe(*inputs.layer).backward(inputs.dy)
            for way in sonic_ways(shape, device)
        ]
    )


def versions() -> str:
    """SonicMoE's; exits where there is none."""
    try:
        from compare.sonic_layer import VERSIONS
    except ImportError as error:
        sys.exit(f"compare_sonic.py needs SonicMoE ({error}); install it: {INSTALL}")
    return VERSIONS


def relative_l2(step: Step, reference: Step) -> dict[str, float]:
    """Distance of each tensor from the reference's."""
    return {
        name: float((step[name].float() - wanted.float()).norm() / wanted.float().norm())
        for name, wanted in reference.items()
    }


def fault(distances: dict[str, float], tolerance: float) -> str | None:
    """What is wrong with results so far from the reference; NaN is far from all."""
    far = [f"{name} {value:.2g}" for name, value in distances.items() if not value <= tolerance]
    return f"relative L2 above {tolerance:g}: {', '.join(far)}" if far else None


def nvidia_smi(fields: str) -> list[str]:
    """Of the current GPU; nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        command += ["-i", str(torch.cuda.get_device_properties().uuid)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip().split(", ") if done.returncode == 0 else []
    except (OSError, AssertionError, RuntimeError):
        return []


class Comparison:
    """The ways on one shape."""

    def __init__(self, bench: StepBench, tolerance: float) -> None:
        self.bench, self.tolerance = bench, tolerance
        self.distances: dict[str, dict[str, float]] = {}
        self.faults: dict[str, str] = {}

    def check(self, ways: list[Way]) -> None:
        """Runs each once, which warms up and tunes, and compares it with the first."""
        reference: Step = {}
        for way in ways:
            try:
                step = self.bench.turn(way, Measured())
            except Exception as error:
                if not reference:
                    raise
                self.faults[way.name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            reference = reference or {name: tensor.clone() for name, tensor in step.items()}
            self.distances[way.name] = relative_l2(step, reference)
            far = fault(self.distances[way.name], self.tolerance)
            if far is not None:
                self.faults[way.name] = far
            del step

    def run(self, ways: list[Way], turns: int) -> list[dict[str, Any]]:
        self.check(ways)
        measured = self.bench.measure([w for w in ways if w.name not in self.faults], turns)
        clock = nvidia_smi("clocks.sm")
        rows = [row for way in ways for row in self.rows(way.name, measured.get(way.name))]
        for row in rows:
            row["clock_mhz"] = float(clock[0]) if clock and clock[0] else None
            row["baseline_ms"] = next(
                (
                    other["ms"]
                    for other in rows
                    if (other["way"], other["direction"]) == (BASELINE, row["direction"])
                ),
                None,
            )
        return rows

    def rows(self, name: str, measured: Measured | None) -> list[dict[str, Any]]:
        figures = {"relative_l2": self.distances.get(name), "fault": self.faults.get(name)}
        if measured is not None:
            return self.bench.records(name, measured, **figures)
        shape = self.bench.shape
        missing = dict.fromkeys(("schedule", "ms", "p10", "p90", "floor_ms", "efficiency", "wrong"))
        of_step = dict.fromkeys(("kept_bytes", "peak_bytes", "forward_peak_bytes"))
        about = {"shape": shape.name, "tokens": shape.tokens, "ranks": 1, "way": name}
        return [
            {**about, "direction": direction, **missing, **of_step, **figures}
            for direction in ("forward", "backward")
        ]


def table(shape: Shape, found: list[dict[str, Any]]) -> str:
    lines = [
        f"# {shape.name}: T {shape.tokens}, H {shape.hidden}, I {shape.intermediate}, "
        f"E {shape.experts}, K {shape.topk}",
        f"{'':24s} {'kept GB':>8s} {'peak GB':>8s} {'fwd ms':>8s} {'bwd ms':>8s} {'far':>8s}",
    ]
    for forward, backward in zip(found[::2], found[1::2], strict=True):
        if forward["fault"] is not None:
            lines.append(f"{forward['way']:24s} not timed: {forward['fault']}")
            continue
        lines.append(
            f"{forward['way']:24s} {forward['kept_bytes'] / 1e9:8.3f} "
            f"{forward['peak_bytes'] / 1e9:8.3f} {forward['ms']:8.3f} {backward['ms']:8.3f} "
            f"{max(forward['relative_l2'].values()):8.1e}"
        )
    return "\n".join(lines)


def about_run(device: torch.device, turns: int, sonic: str) -> dict[str, Any]:
    about = header(device, 1, turns)
    about["machine"] += f", {sonic}"
    limits = nvidia_smi("clocks.max.sm,power.limit")
    if len(limits) == 2:
        about["machine"] += f"; at most {limits[0]} MHz, {limits[1]} W"
    return about


def compare(
    shape: Shape,
    device: torch.device,
    args: argparse.Namespace,
    others: Callable[[Shape, torch.device], list[Way]],
) -> list[dict[str, Any]]:
    """Rows of uniep's ways and the others'."""
    bench = StepBench(shape, Inputs.make(shape, 1, device), lead_cycles=LEAD_CYCLES)
    ways = [*uniep_ways(shape, device), *others(shape, device)]
    return Comparison(bench, args.tolerance).run(ways, args.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    add("--tolerance", type=float, default=0.01, help="relative L2 of a tensor that is accepted")
    add("--turns", type=int, default=15)
    add("--tiny", action="store_true", help="a small layer in seconds: does it run?")
    add("--usual-tiles", action="store_true", help="SonicMoE tunes over 6 tiles a product, not all")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    sonic = versions()
    if not torch.cuda.is_available():
        sys.exit("compare_sonic.py needs a GPU, since SonicMoE does; PyTorch sees none")
    if args.usual_tiles:
        from compare.sonic_layer import tune_over_usual_tiles

        sonic += f" tuned over {tune_over_usual_tiles()} candidates"
    device = torch.device("cuda")
    torch.manual_seed(1)
    about = about_run(device, args.turns, sonic)
    print(f"# {about['machine']}; {about['commit']}", flush=True)
    found: list[dict[str, Any]] = []
    shapes = [TINY] if args.tiny else [CASES[name] for name in args.cases]
    compile_sonic(shapes[0], device)
    for shape in shapes:
        rows = compare(shape, device, args, sonic_ways)
        found += rows
        print(table(shape, rows), flush=True)
        if args.json:
            records.write(args.json, about, found)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
