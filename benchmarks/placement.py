#!/usr/bin/env python3
"""What placing experts by what tokens use together saves between hosts, predicted and measured.

    python benchmarks/placement.py [--ranks 8] [--hosts 4] [--gbps 0.001] [--json FILE]

A made-up routing: every token is of a family of experts, scattered over all numbers, whose
popularity falls as Zipf's law; a share of its slots strays. Half of the tokens are recorded, the
other half is what is measured. `uniep bench` runs the layer on the CPU backend, on hosts that it
makes of one machine, over an emulated network. docs/hosts.md shows the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import uniep
from uniep import cli, placement
from uniep.placement import Placement

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 64, 64, 8
FAMILIES, STRAYS = 8, 0.02
ELEMENT, PROB = 2, 4  # bytes: bf16, as partial sums are here, and a probability


def routing(tokens: int, skew: float, rng: torch.Generator) -> Tensor:
    """Ids [tokens, K] of tokens that each belong to a family."""
    members = torch.randperm(EXPERTS, generator=rng).view(FAMILIES, -1)
    popularity = torch.arange(1.0, FAMILIES + 1).pow(-skew)
    family = torch.multinomial(popularity, tokens, replacement=True, generator=rng)
    scores = torch.rand(tokens, EXPERTS, generator=rng)
    favoured = torch.zeros(tokens, EXPERTS).scatter_(1, members[family], 1.0)
    strays = torch.rand(tokens, EXPERTS, generator=rng) < STRAYS
    return (scores + torch.where(strays, 1.0 - favoured, favoured)).topk(TOPK, -1).indices


def write_layer(path: Path, ids: Tensor, placed: Placement) -> None:
    """A layer file of these tokens, whose experts lie where `placed` says."""
    rng = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(torch.bfloat16)

    uniep.write_layer(
        path,
        random(ids.shape[0], HIDDEN),
        placed.ids(ids),
        torch.rand(ids.shape, generator=rng),
        placed.permute(random(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 0.1),
        placed.permute(random(EXPERTS, HIDDEN, INTERMEDIATE) * 0.1),
    )


@dataclass(frozen=True)
class Row:
    """One placement with one number of combine groups."""

    placement: str
    groups: int
    crossing_tokens: int
    crossing_rows: int
    imbalance: float
    network_ms: float  # of the predicted bytes, on average over ports
    measured_ms: float  # of a forward pass


def measured_ms(path: Path, groups: int, args: argparse.Namespace) -> float:
    """The median of forward passes under `uniep bench`."""
    file = path.with_suffix(".json")
    cli.run(
        *("bench", "--input", str(path), "--pass", "forward", "--no-check"),
        *("--ranks", str(args.ranks), "--hosts", str(args.hosts), "--combine-groups", str(groups)),
        *("--combine-partials", "bf16"),
        *("--iterations", str(args.iterations), "--warmup", "1", "--json", str(file)),
    )
    records: list[dict[str, Any]] = json.loads(file.read_text())["records"]
    return float(records[0]["ms"])


def rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Before and after, with rows that cross and with sums."""
    tokens = args.tokens * args.ranks
    ids = routing(2 * tokens, args.skew, torch.Generator().manual_seed(0))
    how = {"hosts": args.hosts, "ranks": args.ranks}
    found = placement.place_experts(ids[:tokens], num_experts=EXPERTS, slack=args.slack, **how)
    for name, placed in (("by number", Placement.identity(EXPERTS)), ("placed", found)):
        path = folder / name.replace(" ", "_")
        write_layer(path, ids[tokens:], placed)
        traffic = placement.predict_traffic(ids[tokens:], placed, **how)
        there = traffic.crossing_tokens * HIDDEN * ELEMENT + traffic.crossing_rows * PROB
        for groups in (1, args.hosts):
            # Sums: one of each token that a host has rows of.
            back = traffic.crossing_rows * HIDDEN * ELEMENT
            if groups > 1:
                back = traffic.crossing_tokens * HIDDEN * ELEMENT
            yield Row(
                name,
                groups,
                traffic.crossing_tokens,
                traffic.crossing_rows,
                traffic.imbalance,
                1e3 * (there + back) / args.ranks / (args.gbps * 1e9),
                measured_ms(path, groups, args),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank (default 256)")
    parser.add_argument("--skew", type=float, default=0.5, help="of families (default 0.5)")
    parser.add_argument("--slack", type=float, default=0.1, help="of place_experts (default 0.1)")
    parser.add_argument("--gbps", type=float, default=0.001, help="of a port, 1e9 bytes/s")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["UNIEP_CPU_NETWORK_GBPS"] = str(args.gbps)
    print(
        f"# uniep {uniep.__version__}: {args.ranks} ranks on {args.hosts} hosts, "
        f"{args.tokens} tokens each, {EXPERTS} experts, top-{TOPK}, hidden {HIDDEN}, "
        f"{args.gbps} GB/s a port"
    )
    print("# experts     groups  tokens    rows  fullest/mean  network ms  forward ms")
    all_rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(args, Path(folder)):
            all_rows.append(vars(row))
            print(
                f"  {row.placement:10}  {row.groups:6}  {row.crossing_tokens:6}  "
                f"{row.crossing_rows:6}  {row.imbalance:12.2f}  {row.network_ms:10.1f}  "
                f"{row.measured_ms:10.1f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(all_rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
