#!/usr/bin/env python3
"""Whole training steps of one model with several MoE layers, and what a call of each costs.

    python benchmarks/train_step.py [--json FILE] [--layers uniep plain transformers:grouped_mm]
    python benchmarks/train_step.py --tiny        # seconds, on a CPU too: does it run?

The model is a transformer in bf16 whose MoE layers are those of qwen3-30b: 2.6 B parameters at the
default sizes. Layers take turns, each from the same weights, on the same batches. `plain` is
uniep.plain, products by torch._grouped_mm; `transformers:NAME` is an experts implementation of the
installed transformers. Calls are timed with few tokens, when a GPU waits for the host: one after
another, and replayed from a CUDA graph. docs/step_times.md explains the figures, docs/results.md
the file.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compare import records
from compare.calls import synchronize, time_calls, time_replays
from compare.figures import Times
from compare.package_records import as_record, header
from torch import Tensor, nn

import uniep
from uniep import plain

MoE = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # x, ids, probs, w1, w2
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a batch."""

    layers: int = 4
    hidden: int = 2048
    heads: int = 16
    intermediate: int = 768
    experts: int = 128
    topk: int = 8
    vocabulary: int = 32768
    texts: int = 8
    length: int = 2048


TINY = Sizes(layers=2, hidden=64, heads=2, intermediate=48, experts=4, topk=2, vocabulary=64,
             texts=2, length=16)  # fmt: skip


class Block(nn.Module):
    """Attention and a MoE layer, whose routed experts are computed by `moe`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, inter, experts = sizes.hidden, sizes.intermediate, sizes.experts
        self.heads, self.topk = sizes.heads, sizes.topk
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(experts, 2 * inter, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, inter))

    def forward(self, x: Tensor, moe: MoE) -> Tensor:
        texts, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(texts, length, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        tokens = self.norm2(x).flatten(0, 1)
        probs, ids = torch.topk(torch.softmax(self.router(tokens).float(), -1), self.topk)
        probs = probs / probs.sum(-1, keepdim=True)
        return x + moe(tokens, ids, probs, self.w1, self.w2).view_as(x)


class Model(nn.Module):
    """A language model without positions, which cost nothing worth measuring."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, text: Tensor, moe: MoE) -> Tensor:
        x = self.embedding(text[:, :-1])
        for block in self.blocks:
            x = block(x, moe)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())


def transformers_layer(name: str, sizes: Sizes) -> MoE:
    """One of transformers' experts implementations, on given weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.topk,
        hidden_act="silu",
    )
    config._experts_implementation = name
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    del experts.gate_up_proj, experts.down_proj

    def moe(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        experts.gate_up_proj, experts.down_proj = w1, w2
        out: Tensor = experts(x, ids, probs.to(x.dtype))  # its models hand in probabilities so
        return out

    return moe


def require_layers(names: list[str]) -> None:
    """Said before anything is measured."""
    for name in names:
        if name not in ("uniep", "plain") and not name.startswith("transformers:"):
            sys.exit(f"--layers has '{name}'; accepted are uniep, plain and transformers:NAME")
        if name.startswith("transformers:") and importlib.util.find_spec("transformers") is None:
            sys.exit(
                f"--layers has '{name}', and transformers is not installed (pip install "
                "transformers); --layers uniep plain do without"
            )


class Layer:
    """A MoE layer by its name, and what it holds until it is closed."""

    def __init__(self, name: str, sizes: Sizes, tokens: int, device: torch.device) -> None:
        self.workspace: uniep.Workspace | None = None
        if name == "uniep":
            shape = (sizes.hidden, sizes.intermediate, sizes.experts, sizes.topk, tokens)
            workspace = uniep.Workspace(uniep.Group(device=device), *shape)
            self.workspace = workspace
            self.moe: MoE = lambda *tensors: uniep.moe(*tensors, workspace=workspace)
        elif name == "plain":
            self.moe = plain.moe
        else:
            self.moe = transformers_layer(name.removeprefix("transformers:"), sizes)

    def close(self) -> None:
        if self.workspace is not None:
            self.workspace.close()


# Whole steps.


@dataclass
class Turn:
    """What one layer did in one turn."""

    ms: list[float]
    losses: list[float]
    peak_bytes: int | None
    reserved_bytes: int | None


def take_turn(name: str, sizes: Sizes, args: argparse.Namespace, device: torch.device) -> Turn:
    torch.manual_seed(1)
    with device:
        model = Model(sizes).to(BF16)
        for weight in model.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    layer = Layer(name, sizes, sizes.texts * sizes.length, device)
    forward = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    shape = (sizes.texts, sizes.length + 1)
    ms, losses = [], []
    for step in range(args.warmups + args.steps):
        text = torch.randint(sizes.vocabulary, shape, device=device)
        synchronize(device)
        begin = time.perf_counter()
        loss = forward(text, layer.moe)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        if step >= args.warmups:
            ms.append(1e3 * (time.perf_counter() - begin))
        losses.append(float(loss.detach()))
    layer.close()
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Turn(ms, losses, peak, torch.cuda.max_memory_reserved() if on_gpu else None)


def measure_steps(
    sizes: Sizes, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    turns: dict[str, list[Turn]] = {name: [] for name in args.layers}
    for _ in range(args.turns):
        for name in args.layers:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            turns[name].append(take_turn(name, sizes, args, device))
    tokens = sizes.texts * sizes.length
    times_of = {
        name: Times.of([ms for turn in taken for ms in turn.ms]) for name, taken in turns.items()
    }
    plain_ms = times_of["plain"].ms if "plain" in times_of else None
    found = []
    for name, taken in turns.items():
        times = times_of[name]
        figures: dict[str, Any] = {
            "layer": name,
            "tokens_per_s": round(1e3 * tokens / times.ms),
            "peak_bytes": taken[0].peak_bytes,
            "reserved_bytes": taken[0].reserved_bytes,
            "losses": [loss.hex() for loss in taken[0].losses],
            "same_losses_each_turn": all(turn.losses == taken[0].losses for turn in taken),
        }
        found.append(as_record("train_step", "step", tokens, times, plain_ms, **figures))
        peak = f"{taken[0].peak_bytes / 2**30:8.2f} GiB" if taken[0].peak_bytes else ""
        print(f"{name:24s} step {times.ms:10.2f} ms {1e3 * tokens / times.ms:10.0f} tokens/s {peak}"
              f"  loss {taken[0].losses[0]:.6f} -> {taken[0].losses[-1]:.6f}")  # fmt: skip
    return found


# Single calls with few tokens.


def measure_calls(
    sizes: Sizes, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Forward and backward of one layer, eagerly and from graphs."""
    tokens, hidden, inter = args.tokens, sizes.hidden, sizes.intermediate
    torch.manual_seed(2)
    with device:
        x, dy = torch.randn(2, tokens, hidden, dtype=BF16).unbind()
        w1 = torch.randn(sizes.experts, 2 * inter, hidden, dtype=BF16) * hidden**-0.5
        w2 = torch.randn(sizes.experts, hidden, inter, dtype=BF16) * inter**-0.5
        logits = torch.randn(tokens, sizes.experts)
    probs, ids = torch.topk(torch.softmax(logits, -1), sizes.topk)
    probs, ids = probs.contiguous(), ids.int()
    leaves = [leaf.requires_grad_() for leaf in (x, probs, w1, w2)]
    found = []
    for name in args.layers:
        layer = Layer(name, sizes, tokens, device)

        def forward(layer: Layer = layer) -> Tensor:
            return layer.moe(x, ids, probs, w1, w2)

        def both(layer: Layer = layer) -> object:
            return torch.autograd.grad(layer.moe(x, ids, probs, w1, w2), leaves, dy)

        for direction, call in (("forward", forward), ("forward and backward", both)):
            eager = time_calls(call, args.calls, device)
            figures: dict[str, Any] = {"layer": name, "host_us": eager.host, "graph_us": None}
            text = f"{eager.whole:8.1f} us, of which the host {eager.host:8.1f} us"
            if device.type == "cuda":
                try:
                    figures["graph_us"] = time_replays(call, args.calls, device).whole
                    text += f"; from a graph {figures['graph_us']:8.1f} us"
                except RuntimeError as error:
                    text += f"; cannot be captured: {str(error).splitlines()[0]}"
            print(f"{name:24s} {direction}, {tokens} tokens: {text}")
            times = Times(*[eager.whole / 1e3] * 3)
            found.append(as_record("train_step", direction, tokens, times, None, **figures))
        layer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--layers", nargs="+", default=["uniep", "plain", "transformers:grouped_mm"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--compile", action="store_true", help="torch.compile the model")
    add("--deterministic", action="store_true", help="attention too: then losses can be compared")
    add("--turns", type=int, default=2, help="how often each layer has its turn")
    add("--steps", type=int, default=10, help="timed steps of a turn")
    add("--warmups", type=int, default=3)
    add("--tokens", type=int, default=64, help="of the calls that are timed one by one")
    add("--calls", type=int, default=200)
    add("--tiny", action="store_true", help="a model of a few thousand parameters")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    require_layers(args.layers)
    device = torch.device(args.device)
    torch.use_deterministic_algorithms(args.deterministic)
    sizes = TINY if args.tiny else Sizes()
    with torch.device("meta"):
        count = sum(weight.numel() for weight in Model(sizes).parameters())
    print(f"# {count / 1e9:.3f} B parameters, {sizes.texts} texts of {sizes.length} tokens")
    found = measure_steps(sizes, args, device) + measure_calls(sizes, args, device)
    about = {
        **header(device, 1, args.turns * args.steps),
        "parameters": count,
        "sizes": vars(sizes),
    }
    print(f"# {about['machine']}; {about['commit']}")
    if args.json:
        records.write(args.json, about, found)


if __name__ == "__main__":
    main()
