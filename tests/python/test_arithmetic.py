"""Activations, probabilities behind fc2, biases, combine groups: plain PyTorch and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import make_case, relative
from torch import Tensor

import uniep
import uniep.plain
from uniep import workspace
from uniep.arithmetic import ACTIVATIONS, PROBS, Arithmetic

EVERY = [
    Arithmetic(activation, probs, bias)
    for activation in ACTIVATIONS
    for probs in PROBS
    for bias in (False, True)
]

GROUPED = [
    Arithmetic(probs=probs, combine_groups=groups, combine_partials=partials)
    for probs in PROBS
    for groups, partials in ((2, "fp32"), (2, "bf16"), (8, "bf16"))
]


def name_of(arithmetic: Arithmetic) -> str:
    name = f"{arithmetic.activation}-{arithmetic.probs}{'-bias' if arithmetic.bias else ''}"
    groups = arithmetic.combine_groups
    return name if groups == 1 else f"{name}-{groups}-{arithmetic.combine_partials}"


# Fields of Arithmetic that are arguments of calls, too; tensors say the rest.
_OF_CALLS = ("activation", "probs", "combine_groups", "combine_partials")


class Layer:
    """The tensors of a layer, whose h reaches gpt-oss's limits; one probability is 0."""

    def __init__(
        self, arithmetic: Arithmetic, tokens: int = 48, device: str = "cpu", cancels: bool = False
    ) -> None:
        topk = 6 if arithmetic.combine_groups > 1 or cancels else 2
        self.case = make_case(tokens, intermediate=40, topk=topk, dropped=True)
        self.arithmetic = arithmetic
        g = torch.Generator().manual_seed(1)
        case, width = self.case, arithmetic.halves() * 40
        case.w1 = (torch.randn(8, width, 64, generator=g) * 0.5).bfloat16()
        if cancels:  # what stands between two large rows that cancel loses most of its bits
            case.ids[:, 2] = case.ids[:, 0]
            case.probs[:, 0], case.probs[:, 2] = 2.0**18, -(2.0**18)
        case.probs[3, 0] = 0
        self.leaves = {"x": case.x, "topk_probs": case.probs, "w1": case.w1, "w2": case.w2}
        if arithmetic.bias:
            self.leaves["b1"] = torch.randn(8, width, generator=g).bfloat16()
            self.leaves["b2"] = torch.randn(8, 64, generator=g).bfloat16()
        self.case = self.case.to(device)
        self.leaves = {name: t.to(device) for name, t in self.leaves.items()}

    @property
    def options(self) -> dict[str, str]:
        own = self.arithmetic._asdict().items()
        return {name: value for name, value in own if name in _OF_CALLS}

    def run(self, function, dtype=None, **options) -> dict[str, Tensor]:
        """The output, and gradients by every leaf."""
        leaves = {
            name: (t if dtype is None else t.to(dtype)).clone().requires_grad_()
            for name, t in self.leaves.items()
        }
        out = function(topk_ids=self.case.ids, **leaves, **options)
        out.backward(self.case.dy.to(out.dtype))
        return {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items()}}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    wrong = {name: int((found[name] != wanted[name]).sum()) for name in found}
    assert wrong == dict.fromkeys(wrong, 0)


def torch_activation(h: Tensor, activation: str) -> Tensor:
    """By PyTorch's own functions, so that gradients are those of autograd."""
    ungated = {"relu2": lambda z: F.relu(z).square(), "gelu": F.gelu, "silu": F.silu}
    if activation in ungated:
        return ungated[activation](h)
    gate, up = h.chunk(2, dim=-1)
    if activation == "gpt_oss":  # as transformers has it
        gate, up = gate.clamp(max=7), up.clamp(min=-7, max=7)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    if activation == "swiglu_clamped":
        return F.silu(gate.clamp(max=10)) * up.clamp(min=-10, max=10)
    if activation == "swiglu_softcapped":  # likewise
        return torch.tanh(gate / 4) * 4 * torch.sigmoid(gate) * (torch.tanh(up / 25) * 25)
    gated = {
        "swiglu": F.silu,
        "geglu": F.gelu,
        "geglu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "reglu": F.relu,
    }
    return gated[activation](gate) * up


def exact(x, topk_ids, topk_probs, w1, w2, b1=None, b2=None, *, activation, probs, **_):
    """The layer in float64, written down as its definition; differentiated by autograd.

    In exact arithmetic it makes no difference how rows are grouped.
    """
    out = torch.zeros_like(x)
    for k in range(topk_ids.shape[1]):
        for e in range(w1.shape[0]):
            rows = (topk_ids[:, k] == e).nonzero().flatten()
            p = topk_probs[rows, k, None]
            a = torch_activation(x[rows] @ w1[e].T + (0 if b1 is None else b1[e]), activation)
            # In exact arithmetic it makes no difference where p is multiplied.
            y = (p * a) @ w2[e].T if probs == "before" else p * (a @ w2[e].T)
            out = out.index_add(0, rows, y + (0 if b2 is None else p * b2[e]))
    return out


@pytest.mark.parametrize("arithmetic", EVERY + GROUPED, ids=name_of)
def test_has_the_bits_of_plain_pytorch_and_lies_near_float64(arithmetic):
    layer = Layer(arithmetic)
    found = layer.run(uniep.moe, **layer.options)
    assert_same(found, layer.run(uniep.plain.moe, ascending=True, **layer.options))
    wanted = layer.run(exact, dtype=torch.float64, **layer.options)
    for name, tensor in found.items():
        assert relative(tensor, wanted[name]) < 1e-2, name


@pytest.mark.parametrize("arithmetic", EVERY[3::4] + GROUPED[1::3], ids=name_of)
def test_what_is_kept_and_the_schedule_change_no_bit(arithmetic):
    layer = Layer(arithmetic, tokens=130)
    wanted = layer.run(uniep.moe, **layer.options)
    for other in (
        {"save": "none", "recompute_h": True},
        {"exact_rows": True},
        {"schedule": "pipelined:4,tile_m=32"},
        {"save": "none", "recompute_h": True, "exact_rows": True, "schedule": "two-kernel"},
    ):
        assert_same(layer.run(uniep.moe, **layer.options, **other), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arithmetic", [EVERY[1], EVERY[19], EVERY[21]], ids=name_of)
def test_main_grads_and_deferred_weights(arithmetic, dtype):
    layer = Layer(arithmetic)
    wanted = layer.run(uniep.moe, **layer.options)
    names = [name for name in ("w1", "w2", "b1", "b2") if name in layer.leaves]
    deferred = uniep.DeferredWeights()
    for options in ({}, {"deferred": deferred}):
        grads = tuple(torch.zeros_like(layer.leaves[name], dtype=dtype) for name in names)
        found = layer.run(uniep.moe, main_grads=grads, **options, **layer.options)
        uniep.backward_weights(deferred)
        for name, grad in zip(names, grads, strict=True):
            assert found[f"d{name}"] is None
            assert torch.equal(grad.bfloat16(), wanted[f"d{name}"]), name


def test_deferred_weights_reach_grad_of_biases():
    layer = Layer(Arithmetic("gpt_oss", "after", True))
    wanted = layer.run(uniep.moe, **layer.options)
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves.items()}
    deferred = uniep.DeferredWeights()
    out = uniep.moe(topk_ids=layer.case.ids, **leaves, deferred=deferred, **layer.options)
    out.backward(layer.case.dy)
    assert leaves["b1"].grad is None
    uniep.backward_weights(deferred)
    for name in ("w1", "w2", "b1", "b2"):
        assert torch.equal(leaves[name].grad, wanted[f"d{name}"]), name


def test_combine_groups_are_arithmetic():
    layers = [Layer(a, cancels=True) for a in (Arithmetic(), *GROUPED[:3])]
    results = [layer.run(uniep.moe, **layer.options) for layer in layers]
    for name in ("out", "dx"):
        for i, one in enumerate(results):
            assert not any(torch.equal(one[name], other[name]) for other in results[:i]), name
    for name in ("dtopk_probs", "dw1", "dw2"):
        assert all(torch.equal(results[0][name], other[name]) for other in results), name


def test_with_one_group_there_are_no_partial_sums():
    layer = Layer(Arithmetic())
    assert_same(
        layer.run(uniep.moe, combine_partials="bf16"), layer.run(uniep.moe, combine_groups=1)
    )


@pytest.mark.parametrize("function", [uniep.moe, uniep.plain.moe])
def test_refuses_groups_that_there_cannot_be(function):
    layer = Layer(Arithmetic())
    for groups in (0, -2):
        with pytest.raises(ValueError, match=f"combine_groups is {groups}; it must be a divisor"):
            layer.run(function, combine_groups=groups)
    with pytest.raises((ValueError, uniep.Error), match=r"combine_groups is 3; .*8"):
        layer.run(function, combine_groups=3)
    with pytest.raises(ValueError, match="combine_partials is 'fp16'; it must be 'fp32' or 'bf16'"):
        layer.run(function, combine_partials="fp16")


@pytest.mark.parametrize("arithmetic", [EVERY[19], EVERY[22], GROUPED[1]], ids=name_of)
def test_a_workspace_has_an_arithmetic_of_its_own(arithmetic):
    layer = Layer(arithmetic)
    wanted = layer.run(uniep.moe, **layer.options)
    topk = layer.case.ids.shape[1]
    with uniep.Workspace(None, 64, 40, 8, topk, 48, **arithmetic._asdict()) as own:
        assert_same(layer.run(uniep.moe, workspace=own), wanted)
        h = arithmetic.halves() * 40
        assert own.saved_bytes == own.plan_bytes + own.rows * (2 * (64 + h) + 4)
        with pytest.raises(ValueError, match="probs is given beside a workspace"):
            layer.run(uniep.moe, workspace=own, probs="before")
        with pytest.raises(ValueError, match="combine_groups is given beside"):
            layer.run(uniep.moe, workspace=own, combine_groups=1)


def test_a_module_has_them_too():
    torch.manual_seed(2)
    groups = {"combine_groups": 4, "combine_partials": "bf16"}
    layer = uniep.MoELayer(64, 40, 8, 2, activation="gpt_oss", probs="after", bias=True, **groups)
    assert layer.b1.shape == (8, 80) and layer.b2.shape == (8, 64)
    with torch.no_grad():
        for bias in (layer.b1, layer.b2):
            assert not bias.any()
            bias.normal_()
    x = torch.randn(20, 64).bfloat16()
    out, routing = layer.forward_with_routing(x)
    wanted = uniep.plain.moe(
        *(x, routing.ids, routing.probs, layer.w1, layer.w2),
        **{"b1": layer.b1, "b2": layer.b2, "activation": "gpt_oss", "probs": "after"},
        **groups,
        ascending=True,
    )
    assert torch.equal(out, wanted)
    out.float().square().mean().backward()
    assert layer.b1.grad is not None and layer.b2.grad.abs().sum() > 0
    assert "b1" in layer.state_dict()
    ungated = uniep.MoELayer(64, 40, 8, 2, activation="relu2", main_grad=torch.float32)
    assert ungated.w1.shape == (8, 40, 64) and ungated.b1 is None
    ungated(x).sum().backward()
    assert ungated.w1.main_grad.abs().sum() > 0


def test_autocast_casts_biases():
    layer = Layer(Arithmetic("swiglu", "before", True))
    wanted = layer.run(uniep.moe)["out"]
    wide = {n: t.float() if n != "topk_probs" else t for n, t in layer.leaves.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(uniep.moe(topk_ids=layer.case.ids, **wide), wanted)


@pytest.mark.parametrize("arithmetic", [Arithmetic("gpt_oss", "after", True), GROUPED[5]])
def test_compiled_calls_have_the_same_bits(arithmetic):
    layer = Layer(arithmetic)
    wanted = layer.run(uniep.moe, **layer.options)
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    assert_same(layer.run(compiled, **layer.options), wanted)


def refused(error, sentence, layer, **options):
    with pytest.raises(error, match=sentence):
        uniep.moe(**{**layer.leaves, "topk_ids": layer.case.ids, **layer.options, **options})


def test_errors_name_what_is_accepted():
    layer = Layer(Arithmetic("geglu", "before", True))
    names = "'swiglu_clamped', 'swiglu_softcapped', 'relu2', 'gelu', 'silu'"
    sentence = f"activation is 'swish'; it must be one of 'swiglu', .*{names}"
    refused(ValueError, sentence, layer, activation="swish")
    refused(ValueError, "probs is 'behind'; it must be 'before' or 'after'", layer, probs="behind")
    refused(ValueError, "b1 is given without b2; give both, or neither", layer, b2=None)
    refused(ValueError, "b2 is given without b1; give both, or neither", layer, b1=None)
    refused(TypeError, "b2 is torch.float32; it must be", layer, b2=torch.zeros(8, 64))
    short = torch.zeros(8, 40).bfloat16()
    refused(ValueError, r"b1 is \[8, 40\]; it must be \[8, 80\]", layer, b1=short)
    refused(ValueError, r"w2 has shape .*'relu2' has no gate", layer, activation="relu2")
    grads = (torch.zeros_like(layer.leaves["w1"]), torch.zeros_like(layer.leaves["w2"]))
    sentence = "main_grads has 2 tensors; it must have 4"
    refused(ValueError, sentence, layer, main_grads=grads)
    with uniep.Workspace(None, 64, 40, 8, 2, 48) as own:
        sentence = "b1 and b2 are given; the workspace is for bias=False"
        nothing = dict.fromkeys(layer.options)
        refused(ValueError, sentence, layer, workspace=own, **nothing)
        with pytest.raises(ValueError, match="bias is given beside a workspace"):
            uniep.MoELayer(64, 40, 8, 2, workspace=own, bias=True)
        memory = {
            "max_tokens": 3,
            "capacity_rows": 512,
            "save": "none",
            "recompute_h": False,
            "backward_rows": 0,
            "row_pool": True,
        }
        for name, value in memory.items():
            with pytest.raises(ValueError, match=f"{name} is given beside a workspace"):
                uniep.MoELayer(64, 40, 8, 2, workspace=own, **{name: value})


@pytest.mark.parametrize(
    ("version", "newer"),
    [(None, 0), ("12.8", 0), ("13.0", 0), ("13.1", 0), ("13.2", 1), ("13.10", 1), ("14.0", 1)],
)
def test_gelu_has_the_erf_of_pytorchs_cuda(
    version: str | None, newer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    given = []
    config = workspace._library.LayerConfig

    def layer_config(**figures: object) -> object:
        given.append(figures["erf_since_13_2"])
        return config(**figures)

    monkeypatch.setattr(workspace._library, "LayerConfig", layer_config)
    uniep.Workspace(None, 64, 32, 8, 2, 48, device="cpu", activation="geglu").close()
    assert given == [newer]
