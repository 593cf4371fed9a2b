#!/usr/bin/env python3
"""What activations, biases and the place of probabilities cost, beside SwiGLU and PyTorch.

    python benchmarks/arithmetic.py [--cases gpt-oss-120b ...] [--divide 4] [--json FILE]
    python benchmarks/arithmetic.py --tiny        # seconds, on a CPU too: does it run?

One layer of one rank, forward and backward, on the same tensors for all ways, which take turns
(compare/step_bench.py). A way is ACTIVATION[,after][,bias]; with `torch:` ahead of it, the same
experts in PyTorch: sorted rows, torch._grouped_mm, functions of torch.nn.functional, a sum by
index_add. docs/research/measurements.md shows the figures, docs/results.md explains the file.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from compare import records
from compare.package_records import header
from compare.shapes import MODELS, TINY, Shape, divided
from compare.step_bench import Inputs, Measured, StepBench, Way
from torch import Tensor

import uniep
from uniep.arithmetic import Arithmetic

WAYS = ["swiglu", "swiglu,after", "swiglu,bias", "gpt_oss", "gpt_oss,after,bias"]
OF_TORCH = ["torch:swiglu,after", "torch:gpt_oss,after,bias"]
TOLERANCE = 2e-2


def arithmetic_of(text: str) -> Arithmetic:
    activation, *rest = text.split(",")
    if unknown := set(rest) - {"after", "bias"}:
        raise ValueError(
            f"way '{text}': {sorted(unknown)} are unknown; after and bias are accepted"
        )
    return Arithmetic(activation, "after" if "after" in rest else "before", "bias" in rest)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Biases:
    """Of all experts, one tensor for each place."""

    b1: Tensor
    b2: Tensor

    @classmethod
    def make(cls, w1: Tensor, w2: Tensor) -> Biases:
        made = (torch.randn(*w.shape[:2], dtype=w.dtype, device=w.device) for w in (w1, w2))
        b1, b2 = (bias.mul_(0.1).requires_grad_() for bias in made)
        return cls(b1, b2)

    def drop_gradients(self) -> None:
        self.b1.grad = self.b2.grad = None


def activate(h: Tensor, activation: str) -> Tensor:
    ungated = {"relu2": lambda z: F.relu(z).square(), "gelu": F.gelu, "silu": F.silu}
    if activation in ungated:
        return ungated[activation](h)
    gate, up = h.chunk(2, dim=-1)
    if activation == "gpt_oss":
        gate, up = gate.clamp(max=7), up.clamp(min=-7, max=7)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    if activation == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}[activation](gate) * up


def torch_layer(
    x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, *, way: Arithmetic, of: Biases
) -> Tensor:
    """The experts by PyTorch's own operations."""
    order = torch.argsort(ids.flatten(), stable=True)
    experts = ids.flatten()[order].long()
    offsets = torch.searchsorted(
        experts, torch.arange(w1.shape[0], device=x.device), right=True, out_int32=True
    )
    token, p = order // ids.shape[1], probs.flatten()[order, None]
    h = torch._grouped_mm(x[token], w1.transpose(1, 2), offs=offsets)
    a = activate(h + of.b1[experts] if way.bias else h, way.activation)
    if way.probs == "before":
        a = (a * p).to(a.dtype)
    y = torch._grouped_mm(a, w2.transpose(1, 2), offs=offsets)
    if way.bias:
        b2 = of.b2[experts]
        y = y + (b2 if way.probs == "after" else (p * b2).to(y.dtype))
    rows = p * y if way.probs == "after" else y.float()
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, rows).to(x.dtype)


def uniep_layer(group: uniep.Group, tokens: int, way: Arithmetic, of: Biases) -> Any:
    biases = {"b1": of.b1, "b2": of.b2} if way.bias else {}
    return partial(
        uniep.moe,
        group=group,
        max_tokens=tokens,
        activation=way.activation,
        probs=way.probs,
        **biases,
    )


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, in norms; by parts, as fp64 copies of weight gradients are large."""
    parts = list(zip(found.split(1024), wanted.split(1024), strict=True))
    if found.dim() == 3:  # weight gradients, by experts
        parts = list(zip(found, wanted, strict=True))
    off = torch.stack([(f.double() - w.double()).norm() for f, w in parts]).norm()
    return float(off / torch.stack([w.double().norm() for _, w in parts]).norm().clamp_min(1e-30))


def measure(shape: Shape, names: list[str], device: torch.device, turns: int) -> list[Any]:
    inputs = Inputs.make(shape, 1, device)
    bench = StepBench(shape, inputs, lead_cycles=8_000_000)
    biases = Biases.make(inputs.w1, inputs.w2)
    members = uniep.Group(device=device)
    ways, steps = [], {}
    for name in names:
        text = name.removeprefix("torch:")
        way = arithmetic_of(text)
        if way.halves() == 1:
            raise ValueError(
                f"way '{name}': w1 of these shapes has a gate; one with it is accepted"
            )
        layer = uniep_layer(members, shape.tokens, way, biases)
        if name.startswith("torch:"):
            layer = partial(torch_layer, way=way, of=biases)
        ways.append(Way(name, layer))
        biases.drop_gradients()
        step = bench.turn(ways[-1], Measured())
        if text in steps:
            far = {t: d for t in step if (d := distance(step[t], steps[text][t])) > TOLERANCE}
            if far:
                raise SystemExit(f"{shape.name}: {name} is not near uniep's results: {far}")
        elif f"torch:{text}" in names:
            steps[text] = {t: tensor.clone() for t, tensor in step.items()}
    steps.clear()
    found = bench.measure(ways, turns)
    return [row for way in ways for row in bench.records(way.name, found[way.name])]


def print_table(shape: Shape, found: list[dict[str, Any]]) -> None:
    print(f"# {shape.name}")
    print(f"{'':26s} {'fwd ms':>9s} {'bwd ms':>9s} {'fwd':>7s} {'bwd':>7s}   of the first line")
    first = found[:2]
    for pair in zip(found[::2], found[1::2], strict=True):
        ms = " ".join(f"{row['ms']:9.3f}" for row in pair)
        ratios = " ".join(
            f"{row['ms'] / own['ms']:7.3f}" for row, own in zip(pair, first, strict=True)
        )
        print(f"{pair[0]['way']:26s} {ms} {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", default=list(MODELS), choices=list(MODELS))
    add("--divide", type=int, default=4, help="experts by this: the share of one of so many ranks")
    add("--ways", nargs="+", default=WAYS + OF_TORCH)
    add("--turns", type=int, default=15)
    add("--tiny", action="store_true")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    about = header(device, 1, args.turns)
    print(f"# {about['machine']}; {about['commit']}")
    shapes = [TINY]
    if not args.tiny:
        shapes = [divided(MODELS[name], args.divide) for name in args.cases]
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        found = measure(shape, args.ways, device, args.turns)
        print_table(shape, found)
        rows += found
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.json:
        records.write(args.json, about, rows)


if __name__ == "__main__":
    main()
