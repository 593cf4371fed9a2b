#!/usr/bin/env python3
"""Two builds of uniep by turns on the same GPUs: whether a change costs time.

    python benchmarks/by_turns.py OLD/bin/uniep NEW/bin/uniep --turns 5 --json by_turns.json

Each turn runs `uniep bench` of both, in alternating order; what counts is the median over turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# A rank's load of four; and few tokens, whose tiles of weight gradients are done before the next is
# drawn, so that every instruction of a draw shows.
LOADS = (
    "deepseek-v3,experts=64",
    "qwen3-235b,experts=32",
    "qwen3-30b,experts=32",
    "mixtral-8x7b,experts=2",
    "gpt-oss-120b,experts=32",
)
SHAPES = (*LOADS, *(f"{load},tokens=64" for load in LOADS))
BUILDS = ("old", "new")


def measure(program: Path, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [str(program.resolve()), "bench", "--backend", "cuda", "--shape", shape]
        command += ["--ranks", str(options.ranks), "--schedule", options.schedule, "--no-check"]
        command += ["--iterations", str(options.iterations), "--warmup", "4", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        file: dict[str, Any] = json.loads(path.read_text())
        return file


def compare(shape: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    programs = dict(zip(BUILDS, (options.old, options.new), strict=True))
    ms: dict[str, dict[str, list[float]]] = {}
    machine = ""
    for turn in range(options.turns):
        for build in BUILDS if turn % 2 == 0 else BUILDS[::-1]:
            file = measure(programs[build], shape, options)
            machine = file["machine"]
            for record in file["records"]:
                times = ms.setdefault(record["direction"], {b: [] for b in BUILDS})
                times[build].append(record["ms"])
    records = []
    for direction in ("forward", "backward"):
        median = {build: statistics.median(ms[direction][build]) for build in BUILDS}
        ratio = median["new"] / median["old"]
        print(f"{shape:35} {direction:9} {median['old']:8.3f} {median['new']:8.3f} {ratio:7.4f}")
        records.append({"shape": shape, "direction": direction, "ratio": ratio, **ms[direction]})
    return records, machine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("old", type=Path, help="the uniep of the build before the change")
    parser.add_argument("new", type=Path, help="that of the build with it")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--schedule", default="single")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    print(f"{'shape':35} {'pass':9} {'old, ms':>8} {'new, ms':>8} {'new/old':>7}")
    records: list[dict[str, Any]] = []
    machine = ""
    for shape in options.shapes:
        of_shape, machine = compare(shape, options)
        records += of_shape
    if options.json:
        header = {
            "schema": "uniep-by-turns-1",
            "machine": machine,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "command": " ".join(sys.argv),
        }
        options.json.write_text(json.dumps({**header, "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
