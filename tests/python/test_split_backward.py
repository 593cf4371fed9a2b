"""Gradients of data and of weights by two calls of autograd, as pipelines without bubbles do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, CountPasses, make_case
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import uniep

BY_TURNS = {"backward_data": 1, "backward_weights": 1}


class Layer:
    """A layer's tensors: those of data, and weights, which need gradients."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.ids, self.dy = case.ids, case.dy
        self.data = [case.x.requires_grad_(), case.probs.requires_grad_()]
        self.options = options
        names = [name for name in ("b1", "b2", "shared_w1", "shared_w2") if name in options]
        self.named = {name: self.options.pop(name).requires_grad_() for name in names}
        w1 = case.w1.chunk(2, 1) if self.options.pop("pair", False) else (case.w1,)
        self.w1 = [w.detach().contiguous().requires_grad_() for w in w1]
        self.w2 = case.w2.requires_grad_()
        self.weights = [*self.w1, self.w2, *self.named.values()]

    def __call__(self) -> Tensor:
        w1 = tuple(self.w1) if len(self.w1) > 1 else self.w1[0]
        return uniep.moe(
            self.data[0], self.ids, self.data[1], w1, self.w2, **self.named, **self.options
        )

    def whole(self) -> list[Tensor]:
        return list(torch.autograd.grad(self(), self.data + self.weights, self.dy))


def of(out: Tensor, tensors: list[Tensor], dy: Tensor, keep: bool) -> list[Tensor]:
    return list(torch.autograd.grad(out, tensors, dy, retain_graph=keep))


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).mul(0.1).bfloat16()


OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "nothing saved": {"save": "none", "recompute_h": True},
    "pool": {"row_pool": 1 << 22},
    "exact": {"exact_rows": True},
    "pair": {"pair": True},
    "biases": {"b1": drawn(8, 64), "b2": drawn(8, 64)},
    "shared experts": {"shared_w1": drawn(2, 64, 64), "shared_w2": drawn(2, 64, 32)},
    "shared experts, pool": {
        "shared_w1": drawn(2, 64, 64),
        "shared_w2": drawn(2, 64, 32),
        "row_pool": 1 << 22,
    },
}
# One backward computes all where experts take turns in a ring of rows.
OPTIONS |= {
    "ring": {"backward_rows": 256},
    "ring in a pool": {"backward_rows": 256, "row_pool": 1 << 22},
}
IN_PARTS = [name for name in OPTIONS if "ring" not in name]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def layer_on(device: str, name: str = "rows") -> Layer:
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in OPTIONS[name].items()}
    return Layer(make_case().to(device), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IN_PARTS)
def test_each_gradient_is_computed_once(name: str, device: str) -> None:
    layer = layer_on(device, name)
    wanted = layer.whole()
    for _ in range(2):
        out = layer()
        with CountPasses() as passes:
            data = of(out, layer.data, layer.dy, keep=True)
            weights = of(out, layer.weights, layer.dy, keep=False)
        assert passes.ran == BY_TURNS
        same(data + weights, wanted)


def test_an_output_of_three_dimensions() -> None:
    """Each backward has a view of its own of the gradient."""
    layer = uniep.MoELayer(64, 32, 8, 2)
    x = torch.randn(2, 12, 64).bfloat16().requires_grad_()
    dy = torch.randn(2, 12, 64).bfloat16()
    weights = [layer.w1, layer.w2]
    wanted = list(torch.autograd.grad(layer(x), [x, *weights], dy))
    out = layer(x)
    with CountPasses() as passes:
        data = of(out, [x], dy, keep=True)
        found = of(out, weights, dy, keep=True)
    assert passes.ran == BY_TURNS
    same(data + found, wanted)
    of(out, [x], dy, keep=True)
    dy.neg_()  # which is seen, as a view's version is that of its base
    same(of(out, weights, dy, keep=False), list(torch.autograd.grad(layer(x), weights, dy)))


@pytest.mark.parametrize("name", ["rows", "pool"])
def test_a_whole_backward_is_one_pass(name: str) -> None:
    layer = layer_on("cpu", name)
    for run in (layer.whole, lambda: layer().backward(layer.dy)):
        with CountPasses() as passes:
            run()
        assert passes.ran == {"forward": 1, "backward": 1}


def _other_values(layer: Layer) -> Tensor:
    return layer.dy.neg_()


def _other_tensor(layer: Layer) -> Tensor:
    return layer.dy.flip(0)


@pytest.mark.parametrize("name", ["rows", "pool"])
@pytest.mark.parametrize("change", [_other_values, _other_tensor])
def test_another_dy_is_seen(change: Callable[[Layer], Tensor], name: str) -> None:
    layer = layer_on("cpu", name)
    out = layer()
    of(out, layer.data, layer.dy, keep=True)
    dy = change(layer)
    found = of(out, layer.weights, dy, keep=False)
    same(found, list(torch.autograd.grad(layer(), layer.weights, dy)))


@pytest.mark.parametrize("name", ["rows", "pool", "ring", "ring in a pool"])
def test_any_order_and_again(name: str) -> None:
    layer = layer_on("cpu", name)
    wanted = layer.whole()
    data, weights = layer.data, layer.weights
    out = layer()
    for asked in (weights, data, weights, weights, data, data, data + weights, weights):
        found = of(out, asked, layer.dy, keep=True)
        expected = dict(zip(map(id, data + weights), wanted, strict=True))
        same(found, [expected[id(tensor)] for tensor in asked])


@pytest.mark.parametrize("name", ["rows", "pool", "ring", "ring in a pool"])
def test_main_gradients_are_added_once(name: str) -> None:
    layer = layer_on("cpu", name)
    wanted = layer.whole()
    main = [torch.zeros_like(weight, dtype=torch.float32) for weight in layer.weights]
    layer.options["main_grads"] = tuple(main)
    out = layer()
    of(out, layer.data, layer.dy, keep=True)
    assert all(not m.any() for m in main)
    torch.autograd.grad(out, layer.weights, layer.dy, allow_unused=True)
    same([m.bfloat16() for m in main], wanted[2:])


def test_deferred_weights_wait_once() -> None:
    layer = layer_on("cpu")
    wanted = layer.whole()
    deferred = uniep.DeferredWeights()
    layer.options["deferred"] = deferred
    out = layer()
    same(of(out, layer.data, layer.dy, keep=True), wanted[:2])
    assert len(deferred) == 0
    torch.autograd.grad(out, layer.weights, layer.dy, allow_unused=True)
    assert len(deferred) == 1
    uniep.backward_weights(deferred)
    same([weight.grad for weight in layer.weights], wanted[2:])


def node_of(out: Tensor) -> Any:
    """Autograd's node of the layer."""
    nodes: list[Any] = [out.grad_fn]
    while "Moe" not in nodes[0].name():
        nodes += [node for node, _ in nodes.pop(0).next_functions if node is not None]
    return nodes[0]


def test_what_cannot_be_asked_for_is_not_kept() -> None:
    layer = layer_on("cpu")
    out = layer()
    of(out, layer.data, layer.dy, keep=True)
    assert node_of(out).left is not None
    out = layer()
    of(out, layer.data, layer.dy, keep=False)
    assert not hasattr(node_of(out), "left")


@pytest.mark.parametrize("name", ["rows", "pool"])
def test_a_whole_backward_lets_go_of_what_one_before_has_left(name: str) -> None:
    layer = layer_on("cpu", name)
    wanted = layer.whole()
    out = layer()
    same(of(out, layer.data, layer.dy, keep=True), wanted[:2])
    assert node_of(out).left is not None
    same(of(out, layer.data + layer.weights, layer.dy, keep=False), wanted)
    assert node_of(out).left is None


def test_frozen_weights_leave_nothing() -> None:
    layer = layer_on("cpu")
    wanted = layer.whole()
    for weight in layer.weights:
        weight.requires_grad_(False)
    out = layer()
    with CountPasses() as passes:
        same(of(out, layer.data, layer.dy, keep=True), wanted[:2])
    assert passes.ran == {"backward_data": 1}
    assert not hasattr(node_of(out), "left")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["ring", "ring in a pool"])
def test_weights_may_be_frozen_in_a_ring_of_rows(name: str, device: str) -> None:
    layer = layer_on(device, name)
    wanted = layer.whole()
    for weight in layer.weights:
        weight.requires_grad_(False)
    same(of(layer(), layer.data, layer.dy, keep=False), wanted[:2])


def test_pages_go_back_with_the_graph() -> None:
    """Where nobody asks for weight gradients."""
    case = make_case()
    pool = uniep.RowPool(None, 64, 32, bytes=1 << 22, device="cpu")
    layer = Layer(case, row_pool=pool)
    free = pool.free_pages
    out = layer()
    of(out, layer.data, layer.dy, keep=True)
    assert pool.free_pages < free
    of(out, layer.weights, layer.dy, keep=False)
    assert pool.free_pages == free
    out = layer()
    of(out, layer.data, layer.dy, keep=True)
    del out
    assert pool.free_pages == free


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pool", [None, 1 << 22])
def test_weight_gradients_are_those_of_their_own_backward(pool: int | None, device: str) -> None:
    """Behind others of the same forward, whose rows a pool's pages do not hold."""
    layer = Layer(make_case().to(device), row_pool=pool)
    wanted = layer.whole()
    other = layer.dy.flip(0)
    for keep in (True, False):
        out = layer()
        of(out, layer.data, layer.dy, keep=True)
        of(out, layer.data, other, keep=keep)
        same(of(out, layer.weights, layer.dy, keep=False), wanted[2:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pool", [None, 1 << 22])
def test_deferred_weights_of_several_backwards(pool: int | None, device: str) -> None:
    deferred = uniep.DeferredWeights()
    layer = Layer(make_case().to(device), row_pool=pool, deferred=deferred)
    wanted = Layer(make_case().to(device)).whole()[2:]
    out = layer()
    out.backward(layer.dy, retain_graph=True)
    of(out, layer.data, layer.dy.flip(0), keep=True)
    uniep.backward_weights(deferred)
    same([weight.grad for weight in layer.weights], wanted)
    for _ in range(2):
        out.backward(layer.dy, retain_graph=True)
    uniep.backward_weights(deferred)
    same([weight.grad for weight in layer.weights], [w + w + w for w in wanted])


def _frozen_on_one_rank(device: str) -> list[Tensor]:
    case = make_case()
    part = case.part(dist.get_rank(), 2).to(device)
    group = uniep.Group(dist.group.WORLD, device=device, share_device=device != "cpu")
    found: list[Tensor] = []
    for options in ({}, {"row_pool": 1 << 22}, {"backward_rows": 256}):
        layer = Layer(part, group=group, max_tokens=case.x.shape[0], **options)
        whole = layer.whole()
        if dist.get_rank() == 0:
            for weight in layer.weights:
                weight.requires_grad_(False)
        asked = layer.data + [weight for weight in layer.weights if weight.requires_grad]
        same(of(layer(), asked, layer.dy, keep=False), whole[: len(asked)])
        found = [t.cpu() for t in whole[:2]]
    dist.barrier()  # nobody lets go of memory that another still writes
    group.close()
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def test_a_rank_may_have_frozen_all_of_its_experts(device: str) -> None:
    parts = run_ranks(2, _frozen_on_one_rank, device)
    found = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    same(found, [t.cpu() for t in Layer(make_case().to(device)).whole()[:2]])


def test_within_a_checkpoint_forward_runs_again_once() -> None:
    layer = layer_on("cpu")
    wanted = layer.whole()
    out = checkpoint(lambda *_: layer(), *layer.data, use_reentrant=False)
    with CountPasses() as passes:
        data = of(out, layer.data, layer.dy, keep=True)
        weights = of(out, layer.weights, layer.dy, keep=False)
    assert passes.ran == {"forward": 1, **BY_TURNS}
    same(data + weights, wanted)


def _pair() -> list[Tensor]:
    case = make_case()
    layer = Layer(case.part(dist.get_rank(), 2), group=dist.group.WORLD, max_tokens=case.x.shape[0])
    out = layer()
    with CountPasses() as passes:
        data = of(out, layer.data, layer.dy, keep=True)
        weights = of(out, layer.weights, layer.dy, keep=False)
    assert passes.ran == BY_TURNS
    one_has_no_tokens(case)
    return [*data, *weights]


def one_has_no_tokens(case: Case) -> None:
    """Ranks agree on whether a gradient is another, of which one has nothing."""
    case = case.part(dist.get_rank(), 2)
    if dist.get_rank() == 1:
        case.x, case.ids, case.probs, case.dy = (
            t[:0].detach() for t in (case.x, case.ids, case.probs, case.dy)
        )
    layer = Layer(case, group=dist.group.WORLD, max_tokens=48)
    wanted = layer.whole()
    for dy, ran in ((layer.dy, BY_TURNS), (layer.dy.clone(), {"backward_data": 1, "backward": 1})):
        out = layer()
        with CountPasses() as passes:
            data = of(out, layer.data, layer.dy.view(-1, 64), keep=True)
            weights = of(out, layer.weights, dy.view(-1, 64), keep=False)
        assert passes.ran == ran
        same(data + weights, wanted)


def test_two_ranks_have_the_bits_of_one() -> None:
    found = [torch.cat(parts) for parts in zip(*run_ranks(2, _pair), strict=True)]
    same(found, Layer(make_case()).whole())
