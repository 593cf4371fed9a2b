"""Layers that tests run: random tensors from a seed, the same on every process."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import uniep


@dataclass
class Case:
    """One layer's tensors, of all ranks together."""

    x: Tensor
    ids: Tensor
    probs: Tensor
    w1: Tensor
    w2: Tensor
    dy: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """H, I, E, K."""
        experts, double, hidden = self.w1.shape
        return hidden, double // 2, experts, self.ids.shape[1]

    def part(self, rank: int, size: int) -> Case:
        """The tokens and experts of a rank; ranks have different numbers of tokens."""
        tokens, experts = self.x.shape[0], self.w1.shape[0]
        # Uneven: the first rank has more, the last one fewer.
        edges = [(tokens * r * (2 * size - r)) // (size * size) for r in range(size + 1)]
        t = slice(edges[rank], edges[rank + 1])
        e = slice(experts * rank // size, experts * (rank + 1) // size)
        return Case(
            *(v[t].clone() for v in (self.x, self.ids, self.probs)),
            *(v[e].clone() for v in (self.w1, self.w2)),
            self.dy[t].clone(),
        )

    def to(self, device: str | torch.device) -> Case:
        return Case(*(v.to(device) for v in vars(self).values()))

    def requires_grad(self) -> Case:
        for tensor in (self.x, self.probs, self.w1, self.w2):
            tensor.requires_grad_()
        return self


def make_case(
    tokens: int = 48,
    hidden: int = 64,
    intermediate: int = 32,
    experts: int = 8,
    topk: int = 2,
    *,
    seed: int = 0,
    dropped: bool = False,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :topk].to(torch.int32)
    if dropped:
        ids[torch.rand(tokens, topk, generator=g) < 0.2] = -1
    probs = torch.rand(tokens, topk, generator=g)
    w1 = (torch.randn(experts, 2 * intermediate, hidden, generator=g) * 0.1).bfloat16()
    w2 = (torch.randn(experts, hidden, intermediate, generator=g) * 0.1).bfloat16()
    dy = torch.randn(tokens, hidden, generator=g).bfloat16()
    return Case(x, ids.contiguous(), probs, w1, w2, dy)


def gradients(case: Case, out: Tensor) -> list[Tensor]:
    """Out, dx, dprobs, dw1 and dw2 after a backward from dy."""
    for tensor in (case.x, case.probs, case.w1, case.w2):
        tensor.grad = None
    out.backward(case.dy)
    found = [out.detach()]
    for tensor in (case.x, case.probs, case.w1, case.w2):
        assert tensor.grad is not None
        found.append(tensor.grad.clone())
    return found


def step(case: Case, **options: object) -> list[Tensor]:
    """A forward and backward of uniep.moe."""
    case.requires_grad()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, **options)  # type: ignore[arg-type]
    return gradients(case, out)


def workspace(case: Case, **options: object) -> uniep.Workspace:
    hidden, intermediate, experts, topk = case.shape
    return uniep.Workspace(
        None,
        hidden,
        intermediate,
        experts,
        topk,
        max(case.x.shape[0], 1),
        device=case.x.device,
        **options,  # type: ignore[arg-type]
    )


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Bit by bit."""
    for name, a, b in zip(("out", "dx", "dprobs", "dw1", "dw2"), found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        wrong = int((a != b).sum())
        assert wrong == 0, f"{name}: {wrong} of {a.numel()} elements differ"


class CountPasses(TorchDispatchMode):
    """How often each of uniep's passes runs, wherever it keeps rows.

    Not seen is what is compiled, and what selective checkpointing has kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("uniep::"):
            name = func.name().removeprefix("uniep::")
            if name == "backward_pages" and args[9]:  # data_only
                name = "backward_data"
            self.ran[name.replace("_pages", "")] += 1
        return func(*args, **(kwargs or {}))


def relative(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of a from b."""
    return float((a.double() - b.double()).norm() / b.double().norm())
