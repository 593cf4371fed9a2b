"""uniep.moe on one process: values, shapes, types, and what it may be given."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same, make_case, relative, step, workspace

import uniep
import uniep.plain


def exact(case, dy=None):
    """The layer in float64, written down as its definition."""
    x, probs, w1, w2 = (
        t.detach().double().requires_grad_() for t in (case.x, case.probs, case.w1, case.w2)
    )
    out = torch.zeros_like(x)
    for k in range(case.ids.shape[1]):
        for e in range(w1.shape[0]):
            rows = (case.ids[:, k] == e).nonzero().flatten()
            gate, up = (x[rows] @ w1[e].T).chunk(2, dim=-1)
            y = (probs[rows, k, None] * torch.nn.functional.silu(gate) * up) @ w2[e].T
            out = out.index_add(0, rows, y)
    out.backward(case.dy.double())
    return [out.detach(), x.grad, probs.grad, w1.grad, w2.grad]


@pytest.mark.parametrize("dropped", [False, True])
def test_is_close_to_float64(dropped):
    case = make_case(dropped=dropped)
    for found, wanted in zip(step(case), exact(case), strict=True):
        assert relative(found, wanted) < 1e-2


def test_is_the_plain_layer_to_tolerance_and_to_the_bit_where_sums_ascend():
    case = make_case(dropped=True)
    found = step(case)
    for ascending in (False, True):
        plain = case.requires_grad()
        from cases import gradients

        out = uniep.plain.moe(
            plain.x, plain.ids, plain.probs, plain.w1, plain.w2, ascending=ascending
        )
        wanted = gradients(plain, out)
        if ascending:
            assert_same(found, wanted)
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) < 1e-2


def test_every_schedule_gives_the_same_bits():
    case = make_case(tokens=130, dropped=True)
    wanted = step(case)
    for schedule in ("sequential", "pipelined:4", "two-kernel", "single,tile_m=32,lag=2"):
        assert_same(step(case, schedule=schedule), wanted)
        with workspace(case, schedule=schedule) as own:
            assert_same(step(case, workspace=own), wanted)


def test_takes_batches_and_int64_ids():
    case = make_case(tokens=48)
    wanted = step(case)
    for tensor in (case.x, case.probs):
        tensor.requires_grad_(False)
    x = case.x.view(4, 12, -1).requires_grad_()
    probs = case.probs.view(4, 12, -1).requires_grad_()
    out = uniep.moe(x, case.ids.long().view(4, 12, -1), probs, case.w1, case.w2)
    assert out.shape == x.shape
    case.w1.grad = case.w2.grad = None
    out.backward(case.dy.view_as(out))
    found = [out.detach().view(48, -1), x.grad.view(48, -1), probs.grad.view(48, -1)]
    assert_same([*found, case.w1.grad, case.w2.grad], wanted)


def test_activations_need_not_be_contiguous():
    case = make_case()
    wanted = step(case)
    x = case.x.detach().T.contiguous().T.requires_grad_()
    probs = case.probs.detach().T.contiguous().T.requires_grad_()
    out = uniep.moe(x, case.ids.T.contiguous().T, probs, case.w1, case.w2)
    case.w1.grad = case.w2.grad = None
    out.backward(case.dy.T.contiguous().T)
    assert_same([out.detach(), x.grad, probs.grad, case.w1.grad, case.w2.grad], wanted)


def test_no_tokens():
    case = make_case(tokens=0)
    found = step(case)
    assert found[0].shape == (0, 64)
    assert not found[3].any() and not found[4].any()


def test_outstanding_forwards_share_a_workspace():
    cases = [make_case(seed=s) for s in range(3)]
    wanted = [step(case) for case in cases]
    from cases import gradients

    with workspace(cases[0]) as own:
        outs = [uniep.moe(c.x, c.ids, c.probs, c.w1, c.w2, workspace=own) for c in cases]
        for index in (1, 0, 2):
            assert_same(gradients(cases[index], outs[index]), wanted[index])


def test_frozen_weights_get_no_gradient():
    case = make_case()
    wanted = step(case)
    case.w1.requires_grad_(False).grad = None
    case.w2.requires_grad_(False).grad = None
    case.x.grad = case.probs.grad = None
    uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2).backward(case.dy)
    assert torch.equal(case.x.grad, wanted[1]) and torch.equal(case.probs.grad, wanted[2])
    assert case.w1.grad is None and case.w2.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_added_to(dtype):
    case = make_case()
    wanted = step(case)
    dw1, dw2 = (torch.full_like(w, 2.0, dtype=dtype) for w in (case.w1, case.w2))
    case.w1.grad = case.w2.grad = case.x.grad = case.probs.grad = None
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, main_grads=(dw1, dw2))
    out.backward(case.dy)
    assert case.w1.grad is None and case.w2.grad is None
    assert torch.equal(case.x.grad, wanted[1]) and torch.equal(case.probs.grad, wanted[2])
    for found, plain in ((dw1, wanted[3]), (dw2, wanted[4])):
        assert relative(found.float() - 2, plain) < (0.02 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_deferred_weights_have_the_bits_of_those_at_once(dtype):
    cases = [make_case(seed=s) for s in range(3)]
    for case in cases[1:]:
        case.w1, case.w2 = cases[0].w1, cases[0].w2

    def run(deferred):
        w1, w2 = cases[0].w1.requires_grad_(), cases[0].w2.requires_grad_()
        w1.grad = w2.grad = None
        main = None
        if dtype is not None:
            main = tuple(torch.ones_like(w, dtype=dtype) for w in (w1, w2))
        for case in cases:
            case.x.grad = case.probs.grad = None
            case.requires_grad()
            out = uniep.moe(
                case.x, case.ids, case.probs, w1, w2, main_grads=main, deferred=deferred
            )
            out.backward(case.dy)
        if deferred is not None:
            assert len(deferred) == 3 and w1.grad is None
            uniep.backward_weights(deferred)
            assert len(deferred) == 0
        dw = main if main is not None else (w1.grad.clone(), w2.grad.clone())
        return [cases[2].x.grad, cases[2].probs.grad, *dw]

    for a, b in zip(run(None), run(uniep.DeferredWeights()), strict=True):
        assert torch.equal(a, b)


def test_deferred_gradients_of_one_weight_are_added_one_by_one():
    """Those of several calls in one backward: autograd would add them up ahead of grad."""
    cases = [make_case(seed=s).requires_grad() for s in range(3)]
    w1 = cases[0].w1
    before = torch.randn_like(w1.detach())
    deferred, wanted, dw1 = uniep.DeferredWeights(), before.clone(), []

    def run(case, **options):
        return uniep.moe(case.x, case.ids, case.probs, w1, case.w2, **options)

    for case in cases:
        dw1 += torch.autograd.grad(run(case), w1, case.dy)
    for gradient in reversed(dw1):  # as backward comes to them
        wanted += gradient
    w1.grad = before
    outs = [run(case, deferred=deferred) for case in cases]
    torch.autograd.backward(outs, [case.dy for case in cases])
    uniep.backward_weights(deferred)
    assert torch.equal(w1.grad, wanted)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="PyTorch has no grad_dtype")
@pytest.mark.parametrize("dtype", [torch.float32, None], ids=str)
def test_deferred_weights_have_the_type_of_gradients_that_was_asked_for(dtype):
    case = make_case().requires_grad()
    case.w1.grad_dtype = case.w2.grad_dtype = dtype
    wanted = step(case)
    assert wanted[3].dtype == wanted[4].dtype == (dtype or torch.bfloat16)
    case.w1.grad = case.w2.grad = None
    deferred = uniep.DeferredWeights()
    for times in (1, 2):
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, deferred=deferred)
        out.backward(case.dy)
        uniep.backward_weights(deferred)
        for weight, gradient in ((case.w1, wanted[3]), (case.w2, wanted[4])):
            assert weight.grad.dtype == gradient.dtype
            assert torch.equal(weight.grad, times * gradient)


@pytest.mark.parametrize("form", ["tensors", "pages", "plain", "layer"])
@pytest.mark.parametrize("power", [1, 2])
def test_twice_differentiable_is_refused(form, power):
    """Also behind a sum, whose gradient is a constant."""
    case = make_case().requires_grad()
    if form == "layer":
        layer = uniep.MoELayer(64, 32, 8, 4)
        out = layer(case.x)
        asked = [case.x, layer.w1]
    else:
        function = uniep.plain.moe if form == "plain" else uniep.moe
        options = {"row_pool": True} if form == "pages" else {}
        out = function(case.x, case.ids, case.probs, case.w1, case.w2, **options)
        asked = [case.x, case.w1]
    found = torch.autograd.grad(out.float().pow(power).sum(), asked, create_graph=True)
    for gradient in found:
        assert gradient.abs().max() > 0
        with pytest.raises(RuntimeError, match="differentiable once"):
            gradient.float().square().sum().backward(retain_graph=True)


def test_transforms_of_torch_func_are_refused():
    case = make_case(tokens=5)
    layer = uniep.MoELayer(64, 32, 8, 4)

    def loss(x):
        return uniep.moe(x, case.ids, case.probs, case.w1, case.w2).float().sum()

    for run in (
        lambda: torch.func.grad(loss)(case.x),
        lambda: torch.func.vjp(loss, case.x),
        lambda: torch.func.jvp(loss, (case.x,), (case.x,)),
        lambda: torch.func.vmap(loss)(case.x[None]),
        lambda: torch.func.vmap(layer)(case.x[None]),
    ):
        with pytest.raises(RuntimeError, match=r"transform of torch\.func"):
            run()


def test_twice_differentiable_is_refused_of_identity_experts():
    case = make_case().requires_grad()
    case.ids[:, 1] = 8
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, zero_experts=1)
    (dx,) = torch.autograd.grad(out.float().square().sum(), case.x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.float().square().sum(), case.x)


def test_a_functional_call_has_the_weights_that_it_is_given():
    torch.manual_seed(2)
    layer, other = (uniep.MoELayer(64, 32, 8, 2).bfloat16() for _ in range(2))
    x = torch.randn(24, 64).bfloat16()
    given = {name: weight.detach().requires_grad_() for name, weight in other.named_parameters()}
    out = torch.func.functional_call(layer, given, x)
    wanted = other(x)
    assert torch.equal(out, wanted) and not torch.equal(out, layer(x))
    for result in (out, wanted):
        result.float().square().sum().backward()
    for name, weight in other.named_parameters():
        assert torch.equal(given[name].grad, weight.grad), name


def test_a_call_without_gradients_keeps_nothing():
    case = make_case()
    wanted = step(case)
    with torch.no_grad():
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2)
    assert out.grad_fn is None
    assert torch.equal(out, wanted[0])
    with torch.inference_mode():
        case2 = make_case()
        out = uniep.moe(case2.x, case2.ids, case2.probs, case2.w1, case2.w2)
        assert out.is_inference() and torch.equal(out, wanted[0])


def test_a_workspace_of_inference_mode_serves_training():
    case = make_case(hidden=72)  # a shape of its own, so that the workspace is made here
    with torch.inference_mode():
        uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2)
    step(case)


def test_autocast_takes_fp32():
    case = make_case()
    wanted = step(case)
    x, w1, w2 = (t.detach().float().requires_grad_() for t in (case.x, case.w1, case.w2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = uniep.moe(x, case.ids, case.probs, w1, w2)
    assert out.dtype == torch.bfloat16
    case.probs.grad = None
    out.backward(case.dy)
    assert x.grad.dtype == torch.float32
    assert_same(
        [out.detach(), x.grad.bfloat16(), case.probs.grad, w1.grad.bfloat16(), w2.grad.bfloat16()],
        wanted,
    )
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(TypeError, match="float16"):
        uniep.moe(x, case.ids, case.probs, w1, w2)


def test_deterministic_algorithms():
    case = make_case()
    wanted = step(case)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(step(case), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def test_profiler_names_the_ops():
    case = make_case()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(case)
    names = {event.name for event in profile.events()}
    assert {"uniep::forward", "uniep::backward"} <= names
