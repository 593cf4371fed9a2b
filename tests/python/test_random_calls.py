"""Random layers, called in random ways that change no bit, with several calls under way."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import uniep
import uniep.plain
from uniep.arithmetic import ACTIVATIONS, Arithmetic

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SIZES = (8, 24, 64, 72, 136)
OF_TOKENS = ("x", "probs", "shared_probs")
OF_EXPERTS = ("w1", "w2", "b1", "b2")


@dataclass
class Layer:
    """What decides the bits of a call: tensors that have gradients, by name, and the rest."""

    tensors: dict[str, Tensor]
    ids: Tensor
    dy: Tensor
    arithmetic: dict[str, Any]

    @property
    def gated(self) -> bool:
        return Arithmetic(activation=self.arithmetic["activation"]).halves() == 2

    def of_tokens(self, tokens: slice) -> Layer:
        cut = {n: t[tokens] if n in OF_TOKENS else t for n, t in self.tensors.items()}
        return Layer(cut, self.ids[tokens], self.dy[tokens], self.arithmetic)

    def of_experts(self, experts: slice) -> Layer:
        cut = {n: t[experts] if n in OF_EXPERTS else t for n, t in self.tensors.items()}
        return Layer(cut, self.ids, self.dy, self.arithmetic)


def draw_layer(
    r: random.Random, device: str = "cpu", experts: tuple[int, ...] = (1, 3, 4, 8)
) -> Layer:
    g = torch.Generator().manual_seed(r.randrange(1 << 30))

    def normal(*shape: int, scale: float = 0.15) -> Tensor:
        return torch.randn(*shape, generator=g).mul(scale).bfloat16().to(device)

    tokens, hidden, inner = r.choice((0, 1, 7, 33, 100, 150)), r.choice(SIZES), r.choice(SIZES)
    count = r.choice(experts)
    topk = r.randint(1, min(count, 4))
    activation = r.choice(("swiglu", *ACTIVATIONS))
    width = inner * Arithmetic(activation=activation).halves()
    zero_experts = r.choice((0, 0, 0, 2))
    groups = r.choice([1, 1, *(n for n in range(2, count + 1) if count % n == 0)])
    arithmetic = {
        "activation": activation,
        "probs": r.choice(("before", "after")),
        "combine_groups": groups,
        "combine_partials": r.choice(("fp32", "bf16")),
        "zero_experts": zero_experts,
        "zero_expert_type": r.choice(("identity", "zero")),
    }
    ids = torch.rand(tokens, count + zero_experts, generator=g).argsort(-1)[:, :topk]
    if r.random() < 0.3:
        ids[torch.rand(tokens, topk, generator=g) < 0.3] = -1
    tensors = {
        "x": normal(tokens, hidden, scale=1),
        "probs": torch.rand(tokens, topk, generator=g).to(device),
        "w1": normal(count, width, hidden),
        "w2": normal(count, hidden, inner),
    }
    if r.random() < 0.3:
        tensors |= {"b1": normal(count, width), "b2": normal(count, hidden)}
    if r.random() < 0.3:
        shared = r.randint(1, 3)
        tensors |= {
            "shared_w1": normal(shared, width, hidden),
            "shared_w2": normal(shared, hidden, inner),
            "shared_probs": torch.rand(tokens, shared, generator=g).to(device),
        }
    return Layer(tensors, ids.to(device), normal(tokens, hidden, scale=1), arithmetic)


def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}


def results(
    layer: Layer, function: Callable[..., Tensor] = uniep.moe, **options: Any
) -> dict[str, Tensor]:
    """Out and all gradients of a call without choices."""
    leaves = leaves_of(layer.tensors)
    given = dict(leaves)
    first = [given.pop(name) for name in ("x", "probs", "w1", "w2")]
    x, probs, *weights = first
    out = function(x, layer.ids, probs, *weights, **given, **layer.arithmetic, **options)
    out.backward(layer.dy)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}  # type: ignore[dict-item]


@dataclass
class Form:
    """Weights as a call is given them, and how their gradients become those of the usual form."""

    w1: Any
    w2: Any
    options: dict[str, str] = field(default_factory=dict)
    turned: bool = False

    @staticmethod
    def parts(weight: Any) -> list[Tensor]:
        return [weight] if isinstance(weight, Tensor) else list(weight)

    def usual(self, weight: Any, gradients: list[Tensor]) -> Tensor:
        assert all(gradient is not None for gradient in gradients)
        if self.turned:
            gradients = [gradient.transpose(-1, -2) for gradient in gradients]
        if isinstance(weight, list):
            return torch.stack(gradients)
        whole = torch.cat(gradients, 1)
        if "w1_layout" in self.options and weight is self.w1:
            whole = whole.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return whole


def draw_form(r: random.Random, layer: Layer) -> Form:
    w1, w2 = layer.tensors["w1"], layer.tensors["w2"]
    name = r.choice(
        ("tensor", "list", "interleaved", "pair") if layer.gated else ("tensor", "list")
    )
    turned = r.random() < 0.3
    if w1.is_cuda and (name == "interleaved" or (name == "pair" and w2.shape[2] % 64)):
        turned = False  # no tensor map tells such columns apart

    def leaf(weight: Tensor) -> Tensor:
        weight = weight.transpose(-1, -2) if turned else weight
        return weight.detach().clone(memory_format=torch.contiguous_format).requires_grad_()

    options = {"weights_layout": "in_out"} if turned else {}
    if name == "list":
        return Form([leaf(w) for w in w1], [leaf(w) for w in w2], options, turned)
    if name == "pair":
        return Form(tuple(leaf(half) for half in w1.chunk(2, 1)), leaf(w2), options, turned)
    if name == "interleaved":
        options["w1_layout"] = name
        w1 = w1.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return Form(leaf(w1), leaf(w2), options, turned)


def draw_options(r: random.Random, cuda: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if r.random() < 0.5:
        options["save"] = r.choice(("rows", "tokens", "none"))
    if r.random() < 0.4:
        options["recompute_h"] = True
    if r.random() < 0.3:
        options["backward_rows"] = r.choice((256, 512))
    elif r.random() < 0.3:
        options["deferred"] = uniep.DeferredWeights()
    keeps = r.random()
    if keeps < 0.2:
        options["exact_rows"] = True
    elif keeps < 0.5:
        options["row_pool"] = 1 << 24
    if r.random() < 0.5:
        own = () if cuda else ("single,tile_m=32,lag=2", "sequential,tile_m=16")
        named = ("sequential", "pipelined:3", "two-kernel", "single,dispatch_workers=4")
        options["schedule"] = r.choice((*named, *own))
    return options


def call(r: random.Random, layer: Layer, **group: Any) -> Iterator[dict[str, Tensor] | None]:
    """A call in some way: None where other calls may come between, and its results at last."""
    leaves = leaves_of({n: t for n, t in layer.tensors.items() if n not in ("w1", "w2")})
    form, options = draw_form(r, layer), draw_options(r, layer.ids.is_cuda)
    weights = {n: [leaves[n]] for n in ("b1", "b2", "shared_w1", "shared_w2") if n in leaves}
    weights = {"w1": form.parts(form.w1), "w2": form.parts(form.w2)} | weights
    main: list[Tensor] = []
    if not isinstance(form.w1, (tuple, list)) and r.random() < 0.25:
        dtype = r.choice((torch.float32, torch.bfloat16))
        main = [torch.zeros_like(tensor, dtype=dtype) for (tensor,) in weights.values()]
        options["main_grads"] = tuple(main)
    frozen = [name for name in (*leaves, *weights) if r.random() < 0.1] if not main else []
    for name in frozen:
        for tensor in weights.get(name, [leaves.get(name)]):
            tensor.requires_grad_(False)
    given = {n: leaves[n] for n in leaves if n not in ("x", "probs")} | form.options

    def run(x: Tensor, probs: Tensor) -> Tensor:
        if strided:
            x = torch.stack((x, x), 1)[:, 0]
        return uniep.moe(
            x, ids, probs, form.w1, form.w2, **given, **layer.arithmetic, **options, **group
        )

    strided, ids = r.random() < 0.2, layer.ids.int() if r.random() < 0.5 else layer.ids
    way = r.random()
    if way < 0.3:
        out = checkpoint(run, leaves["x"], leaves["probs"], use_reentrant=False)
    else:
        with uniep.Offload() if way < 0.4 else contextlib.nullcontext():
            out = run(leaves["x"], leaves["probs"])
    yield None
    if not out.requires_grad:
        yield {"out": out.detach()}
        return
    out.backward(layer.dy)
    if "deferred" in options:
        yield None
        uniep.backward_weights(options["deferred"])
    found = {name: leaf.grad for name, leaf in leaves.items()}
    gradients = (
        dict(zip(weights, ([m.bfloat16()] for m in main), strict=True))
        if main
        else {name: [tensor.grad for tensor in tensors] for name, tensors in weights.items()}
    )
    for name, parts in gradients.items():
        if name not in frozen:
            whole = {"w1": form.w1, "w2": form.w2}.get(name)
            found[name] = parts[0] if whole is None else form.usual(whole, parts)
    yield {"out": out.detach()} | {n: t for n, t in found.items() if n not in frozen}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], where: Any) -> None:
    for name, tensor in found.items():
        assert tensor is not None, (where, name)
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), (
            where,
            name,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_calls_under_way_have_the_bits_of_simple_ones(seed: int, device: str) -> None:
    r = random.Random(seed)
    layers = [draw_layer(r, device) for _ in range(12)]
    wanted = [results(layer) for layer in layers]
    started: list[tuple[int, int, Iterator[Any]]] = []
    for number in range(300):
        which = r.randrange(len(layers))
        started.append((number, which, call(random.Random(f"{seed} {number}"), layers[which])))
        for _ in range(r.randrange(5)):
            if started:
                at = r.randrange(len(started))
                done, which, steps = started[at]
                if (found := next(steps)) is not None:
                    assert_same(found, wanted[which], done)
                    started.pop(at)
        if len(started) > 6:  # nobody runs their backward
            started.pop(r.randrange(len(started)))


@pytest.mark.parametrize("device", DEVICES)
def test_layers_have_the_bits_of_plain_pytorch(device: str) -> None:
    r = random.Random(5)
    for number in range(80):
        layer = draw_layer(r, device)
        wanted = results(layer, uniep.plain.moe, ascending=True)
        del wanted["probs"]  # of identity experts: to tolerance
        found = {name: t for name, t in results(layer).items() if name in wanted}
        assert_same(found, wanted, number)


def _parts(ranks: int, layers: int) -> list[str]:
    """On each rank: what differs from one process."""
    r, rank = random.Random(6), dist.get_rank()
    wrong: list[str] = []
    for number in range(layers):
        layer = draw_layer(r, experts=(ranks, 3 * ranks))
        edges = sorted(r.randint(0, len(layer.ids)) for _ in range(ranks - 1))
        edges = [0, *edges, len(layer.ids)]
        tokens = slice(edges[rank], edges[rank + 1])
        local = len(layer.tensors["w1"]) // ranks
        experts = slice(rank * local, (rank + 1) * local)
        wanted = results(layer)
        wanted |= {n: wanted[n][tokens] for n in ("out", *OF_TOKENS) if n in wanted}
        wanted |= {n: wanted[n][experts] for n in OF_EXPERTS if n in wanted}
        if "shared_w1" in wanted:  # of the tokens of this rank
            alone = results(layer.of_tokens(tokens))
            wanted |= {n: alone[n] for n in ("shared_w1", "shared_w2")}
        part = layer.of_tokens(tokens).of_experts(experts)
        group = {"group": dist.group.WORLD, "max_tokens": 150}
        *_, found = call(random.Random(number), part, **group)
        for name, tensor in found.items():
            if not torch.equal(tensor, wanted[name]):
                wrong.append(f"{number} {name}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one_process(ranks: int) -> None:
    assert run_ranks(ranks, _parts, ranks, 60) == [[]] * ranks
