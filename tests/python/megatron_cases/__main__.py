"""Figures for the guide: ``python -m megatron_cases [ranks]`` in tests/python."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ranks import run_ranks

from megatron_cases import run_all


def _print_figures(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, run_all, folder)
        largest: dict[str, float] = {}
        for rank in range(ranks):
            for line in (Path(folder) / f"figures{rank}").read_text().splitlines():
                what, distance = line.rsplit(" ", 1)
                what = what.split(",")[0].split(" of ")[0]
                largest[what] = max(largest.get(what, 0), float(distance))
    print(f"# largest relative L2 distance from Megatron's layer, {ranks} ranks")
    for what, most in largest.items():
        print(f"{what:48} {most:.2e}")


if __name__ == "__main__":
    _print_figures(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
