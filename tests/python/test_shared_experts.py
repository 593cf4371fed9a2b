"""Shared experts as part of the pass: the bits of plain PyTorch, and models' own modules."""

from __future__ import annotations

import functools
from contextlib import nullcontext as nothing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, make_case, relative
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import uniep
import uniep.plain

TOKENS = 48


class Layer:
    """A layer's tensors with those of its shared experts; a token's slots are all dropped."""

    def __init__(
        self, shared: int = 2, gated: bool = True, activation: str = "swiglu", probs: str = "after"
    ) -> None:
        self.case = make_case(TOKENS, intermediate=40, dropped=True)
        self.case.ids[5] = -1
        halves = 1 if activation == "relu2" else 2
        g = torch.Generator().manual_seed(1)
        weight = functools.partial(torch.randn, generator=g)
        self.case.w1 = (weight(8, halves * 40, 64) * 0.3).bfloat16()
        self.more = {
            "shared_w1": (weight(shared, halves * 40, 64) * 0.3).bfloat16(),
            "shared_w2": (weight(shared, 64, 40) * 0.3).bfloat16(),
        }
        if gated:
            self.more["shared_probs"] = torch.rand(TOKENS, shared, generator=g)
            self.more["shared_probs"][7, 0] = 0
        self.options = {"activation": activation, "probs": probs}

    def to(self, device: str) -> Layer:
        self.case = self.case.to(device)
        self.more = {name: tensor.to(device) for name, tensor in self.more.items()}
        return self

    def part(self, rank: int, size: int) -> Layer:
        """Tokens and experts of a rank."""
        whole = Layer.__new__(Layer)
        whole.case, whole.options = self.case.part(rank, size), self.options
        whole.more = dict(self.more)
        if "shared_probs" in self.more:
            index = Case(*(torch.arange(TOKENS),) * 3, *(torch.zeros(8),) * 2, torch.zeros(TOKENS))
            whole.more["shared_probs"] = self.more["shared_probs"][index.part(rank, size).x]
        return whole

    def run(self, function: Any, **options: Any) -> dict[str, Tensor]:
        """Output and gradients by name; main gradients begin with what they are given."""
        case = self.case
        leaves = {"x": case.x, "topk_probs": case.probs, "w1": case.w1, "w2": case.w2, **self.more}
        leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
        names = ["w1", "w2", "shared_w1", "shared_w2"]
        if options.pop("shared_alone", False):  # their main gradients are not there
            names = names[:2]
        grads: dict[str, Tensor] = {}
        if (dtype := options.pop("main_grad", None)) is not None:
            grads = {n: torch.full_like(leaves[n], 0.75, dtype=dtype) for n in names}
            options["main_grads"] = tuple(grads.values())
        out = function(topk_ids=case.ids, **leaves, **self.options, **options)
        out.backward(case.dy)
        if (deferred := options.get("deferred")) is not None:
            uniep.backward_weights(deferred)
        return {"out": out.detach(), **{n: grads.get(n, t.grad) for n, t in leaves.items()}}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def plain(layer: Layer, **options: Any) -> dict[str, Tensor]:
    return layer.run(uniep.plain.moe, ascending=True, **options)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("probs", ["before", "after"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_bits_are_those_of_plain(activation, probs, shared, gated):
    layer = Layer(shared, gated, activation, probs)
    assert_same(layer.run(uniep.moe), plain(layer))


@pytest.mark.parametrize("probs", ["before", "after"])
def test_a_workspace_may_be_for_no_gate(probs):
    layer = Layer(gated=False, probs=probs)
    wanted = plain(layer)
    figures, options = (None, 64, 40, 8, 2, TOKENS), dict(layer.options)
    layer.options = {}
    for gate in (True, False):
        more = {"device": "cpu", "shared_experts": 2, "shared_gate": gate, **options}
        with uniep.Workspace(*figures, **more) as own:
            assert_same(layer.run(uniep.moe, workspace=own), wanted)
            deferred = uniep.DeferredWeights()
            with pytest.raises(ValueError, match=r"deferred is given.*shared_apart=True"):
                layer.run(uniep.moe, workspace=own, deferred=deferred)
            with pytest.raises(ValueError, match="shared_gate is True") if not gate else nothing():
                uniep.MoELayer(64, 40, 8, 2, workspace=own, shared_gate=True)
    layer = Layer(probs=probs)
    layer.options = {}
    refused = pytest.raises(ValueError, match=r"shared_probs is given.*shared_gate=False")
    with uniep.Workspace(*figures, **more) as own, refused:
        layer.run(uniep.moe, workspace=own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_gradients_are_added_to(dtype):
    layer = Layer()
    wanted = plain(layer, main_grad=dtype)
    assert_same(layer.run(uniep.moe, main_grad=dtype), wanted)
    deferred = uniep.DeferredWeights()
    assert_same(layer.run(uniep.moe, main_grad=dtype, deferred=deferred), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"deferred": True},
        {"row_pool": 1 << 24},
        {"deferred": True, "row_pool": 1 << 24},
        {"exact_rows": True, "save": "none"},
        {"backward_rows": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_main_gradients_beside_others_that_have_them(dtype, options):
    layer = Layer()
    added, new = plain(layer, main_grad=dtype), plain(layer)
    wanted = new | {name: added[name] for name in ("w1", "w2")}
    assert_same(plain(layer, main_grad=dtype, shared_alone=True), wanted)
    if "deferred" in options:
        options = options | {"deferred": uniep.DeferredWeights()}
    found = layer.run(uniep.moe, main_grad=dtype, shared_alone=True, **options)
    assert_same(found, wanted)


@pytest.mark.parametrize("options", [{}, {"combine_groups": 2}, {"row_pool": 1 << 24}], ids=str)
@pytest.mark.parametrize("learner", ["topk_probs", "shared_probs", "w1", "shared_w2"])
def test_main_gradients_are_added_to_whatever_else_learns(learner, options):
    """Whether shared experts are in the pass or beside it, where autograd sees one tensor."""
    layer = Layer()
    wanted = layer.run(uniep.moe, main_grad=torch.float32, **options)
    case = layer.case
    leaves = {"x": case.x, "topk_probs": case.probs, "w1": case.w1, "w2": case.w2, **layer.more}
    leaves[learner] = leaves[learner].clone().requires_grad_()
    names = ["w1", "w2", "shared_w1", "shared_w2"]
    main = {name: torch.full(leaves[name].shape, 0.75) for name in names}
    options = options | layer.options | {"main_grads": tuple(main.values())}
    uniep.moe(topk_ids=case.ids, **leaves, **options).backward(case.dy)
    assert_same(main, {name: wanted[name] for name in names})
    if "probs" in learner:
        assert torch.equal(leaves[learner].grad, wanted[learner])


def test_without_main_gradients_compiled():
    layer = Layer(gated=False)
    wanted = layer.run(uniep.moe, main_grad=torch.float32, shared_alone=True)
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    assert_same(layer.run(compiled, main_grad=torch.float32, shared_alone=True), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"save": "none", "recompute_h": True},
        {"save": "tokens"},
        {"exact_rows": True},
        {"row_pool": 1 << 24},
        {"backward_rows": 128},
        {"schedule": "sequential"},
        {"schedule": "pipelined:2"},
        {"deferred": True},
        {"deferred": True, "row_pool": 1 << 24},
    ],
    ids=str,
)
def test_whatever_is_kept_and_whenever(options):
    layer = Layer()
    if "deferred" in options:
        options = options | {"deferred": uniep.DeferredWeights()}
    assert_same(layer.run(uniep.moe, **options), plain(layer))


@pytest.mark.parametrize("apart", [False, True])
def test_only_weights_of_routed_experts_wait(apart):
    layer = Layer()
    wanted = plain(layer)
    names = ("w1", "w2", "shared_w1", "shared_w2")
    tensors = {"w1": layer.case.w1, "w2": layer.case.w2, **layer.more}
    for name in names:
        tensors[name].requires_grad_()
    # Behind what autograd knows of: they need not be parameters.
    given = tensors | {name: tensors[name] * 1 for name in names[2:]}
    options, deferred = layer.options, uniep.DeferredWeights()
    if apart:
        figures, more = (None, 64, 40, 8, 2, TOKENS), {"shared_experts": 2, "shared_apart": True}
        options = {"workspace": uniep.Workspace(*figures, device="cpu", **more, **options)}
    case = layer.case
    uniep.moe(case.x, case.ids, case.probs, **given, deferred=deferred, **options).backward(case.dy)
    assert [tensors[name].grad is None for name in names] == [True, True, False, False]
    uniep.backward_weights(deferred)
    for name in names:
        assert torch.equal(tensors[name].grad, wanted[name]), name


@pytest.mark.parametrize("change", ["x", "dy"])
@pytest.mark.parametrize("options", [{}, {"row_pool": 1 << 24}], ids=str)
def test_what_is_read_later_may_not_change_before(options, change):
    layer = Layer()
    case, more = layer.case, layer.more
    weights = [case.w1, case.w2, more["shared_w1"], more["shared_w2"]]
    main = tuple(torch.zeros_like(weight.requires_grad_()).float() for weight in weights)
    deferred = uniep.DeferredWeights()
    changed = {"x": case.x, "dy": case.dy}[change]
    words = f"bfloat16 .*{TOKENS}, 64.* has been modified by an inplace operation"

    def out(**options: Any) -> Tensor:
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        return uniep.moe(*tensors, **more, **layer.options, **options)

    out(main_grads=main, deferred=deferred, **options).backward(case.dy)
    changed.zero_()
    with pytest.raises(RuntimeError, match=words):
        uniep.backward_weights(deferred)
    if change == "x":  # another dy is one more backward
        case.probs.requires_grad_()
        found = out(**options)
        torch.autograd.grad(found, [case.probs], case.dy, retain_graph=True)
        changed.zero_()
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(found, weights, case.dy)


def scattered(tensors: dict[str, Tensor], names: tuple[str, str]) -> dict[str, Any]:
    """With gate and up apart in the first, and a tensor for each expert in the second."""
    first, second = (tensors[name] for name in names)
    halves = [half.contiguous() for half in first.chunk(2, 1)]
    return tensors | {names[0]: halves, names[1]: list(second.unbind(0))}


def by_turns(weight: Tensor) -> Tensor:
    return torch.stack(weight.chunk(2, 1), 2).flatten(1, 2).contiguous()


@pytest.mark.parametrize("options", [{}, {"row_pool": 1 << 24}], ids=str)
def test_other_weights_may_lie_anywhere(options):
    layer = Layer()
    wanted = plain(layer)

    def parts(**tensors: Any) -> Tensor:
        return uniep.moe(**scattered(tensors, ("w1", "w2")), **options)

    def turns(**tensors: Any) -> Tensor:
        tensors["w1"] = by_turns(tensors["w1"])
        return uniep.moe(**tensors, **options, w1_layout="interleaved")

    for function in (parts, turns):
        assert_same(layer.run(function), wanted)


@pytest.mark.parametrize("options", [{}, {"row_pool": 1 << 24}], ids=str)
def test_gradients_of_other_weights_may_lie_anywhere_and_wait(options):
    layer = Layer()
    case, more = layer.case, dict(layer.more)
    wanted = plain(layer)
    leaves = scattered({"w1": case.w1, "w2": case.w2} | more, ("w1", "w2"))
    flat = [t.requires_grad_() for t in (*leaves["w1"], *leaves["w2"], *more.values())]
    deferred = uniep.DeferredWeights()
    out = uniep.moe(
        case.x, case.ids, case.probs, **leaves, **layer.options, deferred=deferred, **options
    )
    out.backward(case.dy)
    uniep.backward_weights(deferred)
    gate, up, *each = (t.grad for t in flat[:-3])
    assert torch.equal(torch.cat([gate, up], 1), wanted["w1"])
    assert torch.equal(torch.stack(each), wanted["w2"])
    for name, tensor in more.items():
        assert torch.equal(tensor.grad, wanted[name]), name


def test_compiled_and_checkpointed():
    layer = Layer()
    wanted = plain(layer)
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    assert_same(layer.run(compiled), wanted)
    again = functools.partial(checkpoint, uniep.moe, use_reentrant=False)
    assert_same(layer.run(again), wanted)


def of_rank() -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Layer().part(rank, size).run(uniep.moe, group=dist.group.WORLD, max_tokens=TOKENS)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_gradients_of_their_own_tokens(size):
    wanted = plain(Layer())
    results = run_ranks(size, of_rank)
    for name in ("out", "x", "topk_probs", "shared_probs", "w1", "w2"):
        assert torch.equal(torch.cat([r[name] for r in results]), wanted[name]), name
    for name in ("shared_w1", "shared_w2"):
        total = sum(r[name].float() for r in results)
        assert 0 < relative(total, wanted[name].float()) < 1e-2
    # A rank's are those of its tokens alone.
    for rank, found in enumerate(results):
        part = Layer().part(rank, size)
        part.case.ids = torch.full_like(part.case.ids, -1)
        alone = plain(part)
        assert torch.equal(found["shared_w1"], alone["shared_w1"])
        assert torch.equal(found["shared_w2"], alone["shared_w2"])


def test_what_does_not_fit_is_refused():
    layer = Layer()
    good = dict(layer.more)
    for change, words in (
        ({"shared_w2": None}, "shared_w1 is given alone"),
        ({"shared_w1": good["shared_w1"][:, :8].contiguous()}, r"shared_w1 is \[2, 8, 64\]"),
        ({"shared_w2": good["shared_w2"][:1]}, r"shared_w2 is \[1, 64, 40\]"),
        ({"shared_probs": good["shared_probs"][:, :1]}, r"shared_probs is \[48, 1\]"),
    ):
        layer.more = {n: t for n, t in (good | change).items() if t is not None}
        for function in (uniep.moe, uniep.plain.moe):
            if "shared_w2" not in layer.more and function is uniep.plain.moe:
                continue
            with pytest.raises(ValueError, match=words):
                layer.run(function)
    layer.more = good

    def listed(**tensors: Any) -> Tensor:
        return uniep.moe(**tensors | {"shared_w1": [tensors["shared_w1"]]})

    with pytest.raises(TypeError, match="shared_w1 is a list; it must be one tensor"):
        layer.run(listed)
    own = uniep.Workspace(None, 64, 40, 8, 2, TOKENS, device="cpu", probs="after")
    layer.options = {}
    with pytest.raises(ValueError, match="shared experts of the tensors is 2; the workspace is"):
        layer.run(uniep.moe, workspace=own)


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_of_them(gated):
    torch.manual_seed(0)
    layer = uniep.MoELayer(
        64, 40, 8, 2, probs="after", shared_experts=2, shared_gate=gated, main_grad=torch.float32
    ).bfloat16()
    x = torch.randn(TOKENS, 64).bfloat16()
    out = layer(x)
    routing = layer.router(x)
    probs = torch.sigmoid(layer.shared_gate(x)).float() if gated else None
    wanted = uniep.plain.moe(
        x,
        routing.ids,
        routing.probs,
        layer.w1,
        layer.w2,
        probs="after",
        ascending=True,
        shared_w1=layer.shared_w1,
        shared_w2=layer.shared_w2,
        shared_probs=probs,
    )
    assert torch.equal(out, wanted)
    out.float().square().mean().backward()
    assert all(bool(weight.main_grad.any()) for weight in (layer.w1, layer.w2))
    assert all(bool(weight.grad.any()) for weight in (layer.shared_w1, layer.shared_w2))
    assert not gated or bool(layer.shared_gate.weight.grad.any())
    with pytest.raises(ValueError, match="in the pass or apart"):
        uniep.MoELayer(64, 40, 8, 2, shared_experts=1, shared_intermediate=40)
    with pytest.raises(ValueError, match="shared_gate is True"):
        uniep.MoELayer(64, 40, 8, 2, shared_gate=True)


def test_close_to_a_module_of_deepseek():
    """One shared expert of the width of the others, as DeepseekV3MoE adds it."""
    layer = Layer(shared=1, gated=False)
    found = layer.run(uniep.moe)

    def module(*, x: Tensor, shared_w1: Tensor, shared_w2: Tensor, **routed: Any) -> Tensor:
        gate, up = torch.nn.functional.linear(x, shared_w1[0]).chunk(2, -1)
        shared = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, shared_w2[0])
        return uniep.moe(x, **routed) + shared

    wanted = layer.run(module)
    for name, tensor in wanted.items():
        assert relative(found[name], tensor) < 1e-2, name


def test_a_checkpoint_has_one_of_them():
    layers = [
        uniep.MoELayer(
            64, 40, 8, 2, router=uniep.RouterConfig(score="sigmoid", bias=True), **options
        )
        for options in ({"shared_experts": 1}, {"shared_intermediate": 40})
    ]
    within, apart = (
        uniep.checkpoint.hugging_face_tensors(layer, "deepseek_v3", "mlp") for layer in layers
    )
    assert {name: t.shape for name, t in within.items()} == {n: t.shape for n, t in apart.items()}
    uniep.checkpoint.load_hugging_face(layers[0], apart, "deepseek_v3", "mlp")
    gate, up = layers[1].shared.gate_up.weight.chunk(2)
    assert torch.equal(layers[0].shared_w1[0], torch.cat([gate, up]))
    assert torch.equal(layers[0].shared_w2[0], layers[1].shared.down.weight)
    two = uniep.MoELayer(
        64, 40, 8, 2, router=uniep.RouterConfig(score="sigmoid", bias=True), shared_experts=2
    )
    with pytest.raises(ValueError, match="2 shared experts in its pass"):
        uniep.checkpoint.hugging_face_tensors(two, "deepseek_v3", "mlp")


def with_identity() -> Layer:
    """Some slots name an expert that gives a token itself."""
    layer = Layer()
    layer.case.ids[layer.case.ids == 3] = 8
    return layer


#: Beside which shared experts are no part of the pass.
BESIDE = [
    {"biases": True},
    {"combine_groups": 2},
    {"combine_groups": 4, "combine_partials": "bf16", "biases": True},
]


def run_beside(layer: Layer, function: Any, biases: bool = False, **options: Any) -> Any:
    """Output and gradients, by name, of a layer that may have biases, too."""
    if not biases:
        return layer.run(function, **options)
    g = torch.Generator().manual_seed(2)
    rows = [torch.randn(8, n, generator=g).bfloat16().requires_grad_() for n in (80, 64)]
    main = None
    main_options = {"shared_alone": options.pop("shared_alone", False)}
    if (dtype := options.pop("main_grad", None)) is not None:
        main = [torch.full_like(t, 0.75, dtype=dtype) for t in rows]
        main_options["main_grad"] = dtype

    def with_biases(**tensors: Any) -> Tensor:
        if main is not None:
            own = tensors["main_grads"]
            tensors["main_grads"] = (*own[:2], *main, *own[2:])
        return function(**tensors, b1=rows[0], b2=rows[1])

    found = layer.run(with_biases, **main_options, **options)
    return found | dict(zip(("b1", "b2"), main or [t.grad for t in rows], strict=True))


@pytest.mark.parametrize("beside", BESIDE, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"main_grad": torch.float32},
        {"main_grad": torch.float32, "deferred": True},
        {"main_grad": torch.float32, "shared_alone": True},
        {"main_grad": torch.float32, "shared_alone": True, "deferred": True},
        {"save": "none", "recompute_h": True},
        {"exact_rows": True},
        {"row_pool": 1 << 24},
        {"schedule": "pipelined:2"},
    ],
    ids=str,
)
def test_beside_biases_and_combine_groups(options, beside):
    layer = Layer()
    plainly = {name: options[name] for name in ("main_grad", "shared_alone") if name in options}
    wanted = run_beside(layer, uniep.plain.moe, ascending=True, **plainly, **beside)
    if "deferred" in options:
        options = options | {"deferred": uniep.DeferredWeights()}
    assert_same(run_beside(layer, uniep.moe, **options, **beside), wanted)


def test_beside_combine_groups_compiled_and_in_a_workspace():
    layer = Layer(gated=False)
    wanted = plain(layer, combine_groups=2)
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    assert_same(layer.run(compiled, combine_groups=2), wanted)
    options = dict(layer.options)
    figures = (None, 64, 40, 8, 2, TOKENS)
    own = uniep.Workspace(*figures, device="cpu", shared_experts=2, combine_groups=2, **options)
    layer.options = {}
    assert_same(layer.run(uniep.moe, workspace=own), wanted)
    without = uniep.Workspace(*figures, device="cpu", combine_groups=2, **options)
    assert own.bytes == without.bytes + own.of_shared.bytes
    assert own.saved_bytes == without.saved_bytes + own.of_shared.saved_bytes
    tensors = {"w1": layer.case.w1, "w2": layer.case.w2, **layer.more}
    tuned = uniep.tune_calls(
        layer.case.x,
        layer.case.ids,
        layer.case.probs,
        **tensors,
        workspace=own,
        budget=0.5,
        candidates=2,
        store=False,
    )
    assert tuned.candidates > 0 and tuned.rejected == 0
    own.grow(capacity_rows=own.rows + 128)
    assert_same(layer.run(uniep.moe, workspace=own), wanted)
    more = [torch.cat([t] * 2) for t in (layer.case.x, layer.case.ids, layer.case.probs)]
    with pytest.raises(ValueError, match=f"x has {2 * TOKENS} tokens"):
        uniep.moe(*more, **tensors, workspace=own)
    own.close()
    assert own.of_shared.closed


def of_mesh(hosts: int) -> dict[str, dict[str, Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (hosts, size // hosts)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "ranks"))

    def run(gated: bool = True, function: Any = uniep.moe, **options: Any) -> dict[str, Tensor]:
        layer = with_identity() if "zero_experts" in options else Layer(gated=gated)
        part = layer.part(rank, size)
        return part.run(function, **{"group": mesh, "max_tokens": TOKENS, **options})

    found = {"rows": run(), "without a gate": run(False), "exact": run(exact_hosts=True)}
    found["nothing saved"] = run(save="none", recompute_h=True)
    found["pages"] = run(row_pool=1 << 22)
    found["main"] = run(main_grad=torch.float32)
    found["deferred"] = run(main_grad=torch.float32, deferred=uniep.DeferredWeights())
    found["compiled"] = run(function=torch.compile(uniep.moe, backend="aot_eager"))
    found["identity"] = run(zero_experts=1)
    own = {"device": "cpu", "shared_experts": 2, **Layer().options}
    with uniep.Workspace(mesh, 64, 40, 8, 2, TOKENS, **own) as workspace:
        layer = Layer().part(rank, size)
        layer.options = {}
        found["workspace"] = layer.run(uniep.moe, workspace=workspace)
        of_it = uniep.MoELayer(64, 40, 8, 2, workspace=workspace)
        assert (of_it.size, of_it.w1.shape[0]) == (size, 8 // size)
        assert torch.isfinite(of_it(layer.case.x)).all()
    sums = {"combine_groups": hosts, "combine_partials": "bf16"}
    found["sums"] = run(**sums)
    with uniep.Workspace(mesh, 64, 40, 8, 2, TOKENS, **own, **sums) as workspace:
        found["sums of a workspace"] = layer.run(uniep.moe, workspace=workspace)
    one = {"group": dist.group.WORLD}
    found["one group, rows"] = run(**one)
    found["one group, without a gate"] = run(False, **one)
    found["one group, sums"] = run(**sums, **one)
    found["one group, main"] = run(main_grad=torch.float32, **one)
    found["one group, identity"] = run(zero_experts=1, **one)
    with pytest.raises(ValueError, match=r"main_grads\[2\] is"):
        grads = [torch.zeros(1) for _ in range(4)]
        part = Layer().part(rank, size)
        grads[0], grads[1] = (torch.zeros_like(w).float() for w in (part.case.w1, part.case.w2))
        run(main_grads=tuple(grads))
    return found


@pytest.mark.parametrize("hosts", [2, 4])
def test_over_hosts_bits_are_those_of_one_group(hosts):
    for found in run_ranks(4, of_mesh, hosts):
        of_one = {"pages": "rows", "exact": "rows", "nothing saved": "rows", "compiled": "rows"}
        of_one |= {"rows": "rows", "main": "main", "deferred": "main", "identity": "identity"}
        of_one |= {"without a gate": "without a gate", "workspace": "rows"}
        of_one |= {"sums": "sums", "sums of a workspace": "sums"}
        for name, wanted in of_one.items():
            assert_same(found[name], found[f"one group, {wanted}"])
