"""One sentence for everything that does not fit."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from cases import make_case, step, workspace
from ranks import cpu_mesh, run_ranks
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import uniep
from uniep import clip_grad_norm_


def call(case, **options):
    return uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, **options)


def changed(**tensors):
    case = make_case()
    for name, tensor in tensors.items():
        setattr(case, name, tensor(getattr(case, name)))
    return case


@pytest.mark.parametrize(
    ("error", "words", "tensors"),
    [
        (TypeError, "x is torch.float32", {"x": torch.Tensor.float}),
        (TypeError, "w1 is torch.float16", {"w1": torch.Tensor.half}),
        (TypeError, "w2 is torch.float32", {"w2": torch.Tensor.float}),
        (TypeError, "topk_ids is torch.int16", {"ids": torch.Tensor.short}),
        (TypeError, "topk_probs is torch.bfloat16", {"probs": torch.Tensor.bfloat16}),
        (ValueError, "w1 has shape", {"x": lambda x: x[:, :32]}),
        (ValueError, "w1 has shape", {"w1": lambda w: w[0]}),
        (ValueError, "w1 has shape", {"w1": lambda w: w[:, :63]}),
        (ValueError, r"w1 has shape .* it must be \[8, 64, 64\]", {"w1": lambda w: w[:, :32]}),
        (ValueError, "w2 has shape", {"w2": lambda w: w[:, :, :16]}),
        (ValueError, "w2 has shape", {"w2": lambda w: w[:4]}),
        (
            ValueError,
            r"topk_ids has shape .* it must be \[48, K\], K experts",
            {"ids": lambda i: i[:47]},
        ),
        (ValueError, "topk_probs has shape", {"probs": lambda p: p[:, :1]}),
        (
            ValueError,
            "w1 is not contiguous .*, or its transpose and weights_layout='in_out'",
            {"w1": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2)},
        ),
        (
            ValueError,
            r"w2 is not contiguous .*; pass w2.contiguous\(\)$",
            {"w2": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1)},
        ),
        (ValueError, "w1 is on 'meta'", {"w1": lambda w: w.to("meta")}),
        (ValueError, "topk_ids is on 'meta'", {"ids": lambda i: i.to("meta")}),
    ],
)
def test_tensors(error, words, tensors):
    call(make_case())  # what has fitted is not looked at again in detail
    with pytest.raises(error, match=words) as raised:
        call(changed(**tensors))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        ("w1 is a int", {"w1": 3}),
        (r"w1\[0\] is a str", {"w1": "w1"}),
        (r"w1\[1\] is a NoneType", {"w1": [torch.zeros(64, 64), None]}),
        (r"w2\[0\] is a list", {"w2": [[1.0]]}),
        ("b1 is a float", {"b1": 0.0, "b2": 0.0}),
        ("shared_w1 is a list", {"shared_w1": [], "shared_w2": []}),
    ],
)
def test_weights_that_are_no_tensors(words, weights):
    case = make_case()
    named = {"w1": case.w1, "w2": case.w2, **weights}
    with pytest.raises(TypeError, match=words):
        uniep.moe(case.x, case.ids, case.probs, **named)


@pytest.mark.parametrize("bad", [8, -2, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_impossible_ids(bad, dtype):
    case = make_case()
    case.ids = case.ids.to(dtype)
    case.ids[5, 1] = bad
    with pytest.raises(uniep.Error, match=str(bad)) as raised:
        call(case)
    assert raised.value.code == "argument"
    step(make_case())  # the workspace still serves


def test_ids_that_only_int64_holds_stay_impossible():
    case = make_case()
    case.ids = case.ids.long()
    case.ids[0, 0] = 2**32
    with pytest.raises(RuntimeError):
        call(case)


def test_errors_of_a_forward_and_a_backward_have_their_code():
    case = make_case()
    case.ids[:] = torch.tensor([0, 1])
    with pytest.raises(uniep.Error, match="capacity_rows") as raised:
        call(case, capacity_rows=128, max_tokens=case.x.shape[0])
    assert raised.value.code == "capacity"
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.code, str(copy)) == ("capacity", str(raised.value))

    def damaged(tensor):
        return torch.zeros_like(tensor) if tensor.dtype == torch.uint8 else tensor

    for options in ({}, {"deferred": uniep.DeferredWeights()}):
        case = make_case()
        case.requires_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, damaged):
            out = call(case, **options)
        with pytest.raises(uniep.Error, match="plan") as raised:
            out.sum().backward()
        assert raised.value.code == "argument"


def test_other_devices():
    with pytest.raises(ValueError, match="x is on 'meta'"):
        call(changed(**{n: lambda t: t.to("meta") for n in ("x", "ids", "probs", "w1", "w2")}))
    for module in (uniep.MoELayer(64, 32, 8, 2), uniep.Router(64, 8, 2)):
        with pytest.raises(ValueError, match="x is on 'meta'"):
            module.to("meta")(make_case().x.to("meta"))
    with pytest.raises(ValueError, match="device is 'xpu'"):
        uniep.Group(device="xpu")
    if not uniep.has_cuda():
        with pytest.raises(ValueError, match="no CUDA backend"):
            uniep.Group(device="cuda:0")


def test_group_and_workspace():
    case = make_case()
    with pytest.raises(TypeError, match="group is of type str"):
        call(case, group="world")
    with workspace(case) as own:
        for options in ({"group": own.group}, {"max_tokens": 5}, {"capacity_rows": 512}):
            with pytest.raises(ValueError, match="given beside a workspace"):
                call(case, workspace=own, **options)
        for words, other in (
            ("hidden", make_case(hidden=32)),
            ("intermediate", make_case(intermediate=16)),
            ("experts of a rank", make_case(experts=4)),
            ("topk", make_case(topk=3)),
            ("49 tokens", make_case(tokens=49)),
        ):
            with pytest.raises(ValueError, match=words):
                call(other, workspace=own)
    with pytest.raises(ValueError, match="closed"):
        call(case, workspace=own)
    with pytest.raises(ValueError, match="closed"):
        own.schedule("forward")
    with pytest.raises(ValueError, match="closed"):
        own.synchronize()


def test_schedules():
    case = make_case()
    with pytest.raises(RuntimeError, match="singel"):
        call(case, schedule="singel")
    with pytest.raises(uniep.Error, match="singel") as raised:
        workspace(case, schedule="singel")
    assert raised.value.code == "argument"
    with workspace(case) as own, pytest.raises(ValueError, match="sideways"):
        own.schedule("sideways")


def test_figures_of_a_workspace():
    for bad, words in (
        ((60, 32, 8, 2, 16), "hidden"),
        ((64, 30, 8, 2, 16), "intermediate"),
        ((64, 32, 0, 2, 16), "num_experts"),
        ((64, 32, 8, 17, 16), "topk"),
        ((64, 32, 8, 2, -1), "max_tokens"),
    ):
        with pytest.raises(uniep.Error, match=words):
            uniep.Workspace(None, *bad, device="cpu")
    # Fields of 32 bits would hold 7 of it.
    for make in (uniep.Group, partial(uniep.Workspace, None, 64, 32, 8, 2, 16)):
        with pytest.raises(ValueError, match="timeout_ms is 4294967303; a number of 32 bits"):
            make(device="cpu", timeout_ms=2**32 + 7)
    with pytest.raises(ValueError, match="on_overflow is 'ignore'"):
        uniep.Workspace(None, 64, 32, 8, 2, 16, device="cpu", on_overflow="ignore")


def test_main_grads():
    case = make_case()
    fp32 = [torch.zeros_like(w, dtype=torch.float32) for w in (case.w1, case.w2)]
    for main, error, words in (
        ((fp32[0].double(), fp32[1].double()), TypeError, "float64"),
        ((fp32[0], fp32[1].bfloat16()), TypeError, "bfloat16"),
        ((fp32[1], fp32[0]), ValueError, "as its weight is"),
        ((fp32[0].transpose(1, 2).contiguous().transpose(1, 2), fp32[1]), ValueError, "contiguous"),
    ):
        with pytest.raises(error, match=words):
            call(case, main_grads=main)
    tied = [[fp32[0][0]] * len(fp32[0]), list(fp32[1])]
    with pytest.raises(
        ValueError, match=r"main_grads\[0\]\[1\] has memory of main_grads\[0\]\[0\]"
    ):
        call(case, main_grads=tied)
    size = fp32[0].numel()
    buffer = torch.zeros(size + fp32[1].numel() - 1)
    shifted = buffer[:size].view_as(fp32[0]), buffer[size - 1 :].view_as(fp32[1])
    with pytest.raises(ValueError, match=r"main_grads\[1\] has memory of main_grads\[0\]"):
        call(case, main_grads=shifted)


@pytest.mark.parametrize("name", ["x", "ids", "probs", "w1", "w2"])
@pytest.mark.parametrize("other", [None, 3])
def test_what_is_no_tensor(name, other):
    with pytest.raises(TypeError, match=f"{name} is a {type(other).__name__}; it must be a torch"):
        call(changed(**{name: lambda _: other}))


def test_what_is_no_workspace_and_no_configuration():
    with pytest.raises(TypeError, match="workspace is a Group"):
        call(make_case(), workspace=uniep.Group(device="cpu"))
    with pytest.raises(TypeError, match=r"is a dict; it must be a uniep\.RouterConfig"):
        uniep.MoELayer(64, 32, 8, 2, router={"score": "softmax"})
    with pytest.raises(TypeError, match="x is a list"):
        uniep.MoELayer(64, 32, 8, 2)([1.0])


SPACE = partial(uniep.Workspace, None, 64, 32, 8, 2, device="cpu")
POOL = partial(uniep.RowPool, None, 64, 32, device="cpu")
LAYER = partial(uniep.MoELayer, 64, 32, topk=2)


def masked(mask):
    return LAYER(num_experts=8)(make_case().x, token_mask=mask)


def with_shared(case, **options):
    shared = {"shared_w1": case.w1[:2].contiguous(), "shared_w2": case.w2[:2].contiguous()}
    return call(case, **(shared | options))


@pytest.mark.parametrize(
    ("words", "error", "wrong"),
    [
        ("schedule is 5, a int; it must be a str", TypeError, {"schedule": 5}),
        ("schedule is True, a bool; it must be", TypeError, {"schedule": True}),
        ("main_grads is a int; it must be a tuple", TypeError, {"main_grads": 5}),
        ("main_grads is a Tensor; it must be", TypeError, {"main_grads": torch.zeros(2)}),
        (r"main_grads\[0\] is a NoneType", TypeError, {"main_grads": (None, None)}),
        (r"main_grads\[0\]\[0\] is a int", TypeError, {"main_grads": ([5], [5])}),
        ("combine_groups is '2', a str", TypeError, {"combine_groups": "2"}),
        ("combine_groups is nan, a float", TypeError, {"combine_groups": float("nan")}),
        (r"combine_groups is \[\], a list", TypeError, {"combine_groups": []}),
        ("zero_experts is '8', a str; it must be an int", TypeError, {"zero_experts": "8"}),
        (r"zero_experts is 1\.5, a float", TypeError, {"zero_experts": 1.5}),
        ("zero_experts is nan, a float", TypeError, {"zero_experts": float("nan")}),
        (f"zero_experts is {2**63}; it must be 0 to", ValueError, {"zero_experts": 2**63}),
        (f"zero_experts is {2**31}; it must be 0 to", ValueError, {"zero_experts": 2**31}),
        (r"capacity_rows is \[\], a list", TypeError, {"capacity_rows": []}),
        (r"backward_rows is \[\], a list", TypeError, {"backward_rows": []}),
        ("recompute_h is 'no', a str; it must be True or", TypeError, {"recompute_h": "no"}),
        (r"exact_rows is \[\], a list; it must be True or", TypeError, {"exact_rows": []}),
        ("exact_hosts is 2, a int; it must be True or", TypeError, {"exact_hosts": 2}),
    ],
)
def test_arguments_of_another_type(words, error, wrong):
    with pytest.raises(error, match=words) as raised:
        call(make_case(), **wrong)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "error", "make"),
    [
        ("token_mask is a list; it must be", TypeError, lambda: masked([True] * 48)),
        ("schedule is 5, a int", TypeError, lambda: SPACE(48, schedule=5)),
        ("row_pool is True, a bool; .* uniep.RowPool", TypeError, lambda: SPACE(48, row_pool=True)),
        ("max_tokens is None, a NoneType", TypeError, lambda: SPACE(None)),
        ("shared_experts is 'a', a str", TypeError, lambda: SPACE(48, shared_experts="a")),
        ("save is 'None'; it must be 'rows'", ValueError, lambda: SPACE(48, save=None)),
        (r"bytes is 1\.5, a float; it must be an int", TypeError, lambda: POOL(bytes=1.5)),
        ("bytes is 'x', a str", TypeError, lambda: POOL(bytes="x")),
        ("workspace is a int; it must be", TypeError, lambda: LAYER(num_experts=8, workspace=5)),
        ("num_experts is 0; 1 or more", ValueError, lambda: LAYER(num_experts=0)),
        ("num_experts is -4; 1 or more", ValueError, lambda: LAYER(num_experts=-4, zero_experts=8)),
        ("num_experts is 0; 1 or more", ValueError, lambda: uniep.Router(64, 0, 2)),
        ("max_norm is None, a NoneType", TypeError, lambda: clip_grad_norm_(LAYER(8), None)),
        ("max_norm is '1', a str", TypeError, lambda: clip_grad_norm_(LAYER(8), "1")),
        ("bias is 'no', a str; it must be True or", TypeError, lambda: LAYER(8, bias="no")),
        ("shared_gate is 'no', a str", TypeError, lambda: LAYER(8, shared_gate="no")),
        ("recompute_h is 'no', a str", TypeError, lambda: LAYER(8, recompute_h="no")),
        ("recompute_h is 'no', a str", TypeError, lambda: SPACE(48, recompute_h="no")),
        ("exact_rows is 'no', a str", TypeError, lambda: SPACE(48, exact_rows="no")),
        ("recompute_h is 'no', a str", TypeError, lambda: POOL(recompute_h="no")),
        ("main_grad is 5; torch.float32", TypeError, lambda: LAYER(8, main_grad=5)),
        (
            "shared_intermediate is -8; it must",
            ValueError,
            lambda: LAYER(8, shared_intermediate=-8),
        ),
        ("save is 'all'; it must be 'rows'", ValueError, lambda: LAYER(8, save="all")),
        ("schedule is 5, a int", TypeError, lambda: LAYER(8, schedule=5)),
        ("max_tokens is 'a', a str", TypeError, lambda: LAYER(8, max_tokens="a")),
    ],
)
def test_what_is_made_of_another_type(words, error, make):
    with pytest.raises(error, match=words) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_workspace_stays_open_where_it_cannot_grow():
    case = make_case()
    with workspace(case) as own:
        with pytest.raises(TypeError, match="capacity_rows is 'x', a str"):
            own.grow(capacity_rows="x")
        with pytest.raises(uniep.Error, match="capacity_rows"):
            own.grow(capacity_rows=-3)
        call(case, workspace=own)


def test_shared_experts_of_another_type_and_without_a_shape():
    case = make_case()
    probs = torch.ones(48, 2)
    with_shared(case, shared_probs=probs)
    for wrong in ([probs], list(probs), (probs, probs)):
        with pytest.raises(TypeError, match=r"shared_probs is a (list|tuple); it must be a torch"):
            with_shared(case, shared_probs=wrong)
    for name in ("shared_w1", "shared_w2"):
        with pytest.raises(
            ValueError, match=rf"{name} has shape \[\]; it must be \[shared experts"
        ):
            with_shared(case, **{name: case.w1.sum()})


def test_weights_that_are_no_tensors_under_autocast():
    case = make_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for weights in ({"b1": [case.w1], "b2": [case.w2]}, {"w1": [5] * 8}, {"w2": [None] * 8}):
            named = {"w1": case.w1, "w2": case.w2, **weights}
            with pytest.raises(TypeError, match=r"it must be a torch\.Tensor"):
                uniep.moe(case.x, case.ids, case.probs, **named)


@pytest.mark.parametrize("shape", [(16, 32), (64,), ()])
def test_a_layer_names_the_hidden_size(shape):
    layer = uniep.MoELayer(48, 32, 8, 2)
    with pytest.raises(ValueError, match="must be hidden, which is 48") as raised:
        layer(torch.zeros(shape, dtype=torch.bfloat16))
    assert str(list(shape)) in str(raised.value) and "\n" not in str(raised.value)


def test_deferred_needs_parameters():
    case = make_case().requires_grad()
    case.w1 = case.w1 * 1
    with pytest.raises(ValueError, match="w1 is computed from other tensors"):
        call(case, deferred=uniep.DeferredWeights())


@pytest.mark.parametrize("row_pool", [None, 1 << 22])
def test_deferred_takes_no_copies_of_weights(row_pool):
    """Their gradients would be lost: nothing waits, and nobody has them."""
    case = make_case()
    weights = [torch.nn.Parameter(weight) for weight in (case.w1, case.w2)]
    case.x.requires_grad_()
    deferred = uniep.DeferredWeights()

    def run(x, w1, w2, **options):
        options |= {"deferred": deferred, "row_pool": row_pool}
        return uniep.moe(x, case.ids, case.probs, w1, w2, **options)

    out = checkpoint(run, case.x, *weights, use_reentrant=True)
    with pytest.raises(ValueError, match=r"w1 is no nn\.Parameter.* use_reentrant=False") as what:
        out.backward(case.dy)
    assert "\n" not in str(what.value) and not len(deferred)

    def gradients(function, *given, reentrant):
        checkpoint(function, case.x, *given, use_reentrant=reentrant).backward(case.dy)
        assert len(deferred) == 1
        uniep.backward_weights(deferred)
        found = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        return found

    wanted = gradients(run, *weights, reentrant=False)
    # Parameters that the function has itself, and leaves of any kind where the graph stays whole.
    found = [gradients(lambda x: run(x, *weights), reentrant=True)]
    weights = [weight.detach().requires_grad_() for weight in weights]
    found.append(gradients(run, *weights, reentrant=False))
    main = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    gradients(partial(run, main_grads=main), *weights, reentrant=True)
    found.append([gradient.bfloat16() for gradient in main])
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one, wanted, strict=True))


@pytest.mark.parametrize("wrong", [True, [], set(), (), object()])
def test_deferred_is_a_collection_of_weights(wrong):
    with pytest.raises(TypeError, match=f"deferred is a {type(wrong).__name__}; it must be a "):
        call(make_case(), deferred=wrong)
    for other in (wrong, None):
        with pytest.raises(TypeError, match=r"it must be a uniep\.DeferredWeights"):
            uniep.backward_weights(other)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_deferred_takes_no_weights_with_hooks(hook):
    case = make_case().requires_grad()
    handle = getattr(case.w2, hook)(lambda gradient: None)
    with pytest.raises(ValueError, match="w2 has hooks, which autograd runs in backward"):
        call(case, deferred=uniep.DeferredWeights())
    handle.remove()
    deferred = uniep.DeferredWeights()
    call(case, deferred=deferred).backward(case.dy)
    uniep.backward_weights(deferred)
    assert case.w2.grad.any()


@pytest.mark.parametrize("pool", [None, 1 << 22])
def test_deferred_takes_no_hooks_that_come_before_backward(pool):
    case, deferred = make_case().requires_grad(), uniep.DeferredWeights()
    out = call(case, deferred=deferred, row_pool=pool)
    handle = case.w1.register_hook(lambda gradient: None)
    with pytest.raises(ValueError, match="w1 has hooks, which autograd runs in backward"):
        out.backward(case.dy, retain_graph=True)
    assert not len(deferred) and case.x.grad is None
    handle.remove()
    out.backward(case.dy)
    assert len(deferred) == 1


def test_max_tokens_is_checked_in_every_call():
    case = make_case()
    call(case)  # which has made a workspace that is large enough
    with pytest.raises(ValueError, match="x has 48 tokens, and max_tokens is 8"):
        call(case, max_tokens=8)
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=f"max_tokens is {wrong}; 1 or more is accepted"):
            call(case, max_tokens=wrong)
    with pytest.raises(TypeError, match="max_tokens is '8', a str"):
        call(case, max_tokens="8")


def test_ops_check_for_themselves():
    case = make_case()
    with workspace(case) as own:
        figures = (own.rows, own.rows_of_x, own.rows_of_h, own.plan_bytes, False, None)
        good = (own.key, own.overflow, case.x, case.ids, case.probs, [case.w1], [case.w2])
        torch.ops.uniep.forward(*good, *figures)
        for index, bad, words in (
            (2, case.x.float(), "x is torch.float32; it must be torch.bfloat16"),
            (2, case.x[:, :32], r"x has shape \[48, 32\]; it must be \[48, 64\]"),
            (2, case.x.T.contiguous().T, "x is not contiguous"),
            (3, case.ids.long(), "topk_ids is torch.int64"),
            (4, case.probs[:7], r"topk_probs has shape \[7, 2\]"),
            (5, [case.w1[:2]], "w1 has shape"),
            (5, list(case.w1[:2]), "w1 is a list of 2 tensors"),
            (6, list(case.w2.chunk(2, 1)), "w2 is a list of 2 tensors; it must be one tensor, or"),
            (0, torch.tensor([10**6]), "closed"),
        ):
            arguments = list(good)
            arguments[index] = bad
            with pytest.raises(RuntimeError, match=words):
                torch.ops.uniep.forward(*arguments, *figures)
        with pytest.raises(RuntimeError, match="grown"):
            torch.ops.uniep.forward(*good, own.rows + 1, *figures[1:])


def test_weights_whose_hooks_would_have_no_gradient():
    case = make_case().requires_grad()
    main_grads = (torch.zeros(case.w1.shape), torch.zeros(case.w2.shape))
    handle = case.w1.register_hook(lambda gradient: gradient * 2)
    call(case)
    with pytest.raises(ValueError, match=r"w1 has hooks .*leave out main_grads"):
        call(case, main_grads=main_grads)
    handle.remove()
    handle = case.w1.register_post_accumulate_grad_hook(lambda weight: None)
    call(case, main_grads=main_grads)
    handle.remove()
    for name in ("x", "w1", "w2"):
        setattr(case, name, getattr(case, name).detach().float().requires_grad_())
    case.w2.register_hook(lambda gradient: gradient * 2)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast, pytest.raises(ValueError, match="w2 has hooks"):  # its bf16 copy has none
        call(case, main_grads=main_grads)


def refused_dtensor(name, call_with_it):
    """Asserts that `name` is called a DTensor."""
    with pytest.raises(TypeError) as raised:
        call_with_it()
    sentence = str(raised.value)
    assert sentence.startswith(f"{name} is a DTensor"), sentence
    assert sentence.endswith(f"{name}.to_local() is"), sentence


def one_rank():
    mesh = cpu_mesh()  # which makes any tensor a DTensor
    case = make_case()
    call(case)  # whose shapes fit, and those of DTensors are the same

    def spread(tensor):
        return distribute_tensor(tensor, mesh, [Replicate()])

    names = {"x": "x", "topk_ids": "ids", "topk_probs": "probs", "w1": "w1", "w2": "w2"}
    for argument, name in names.items():
        refused_dtensor(argument, partial(call, changed(**{name: spread})))
    main_grads = tuple(spread(torch.zeros(w.shape)) for w in (case.w1, case.w2))
    refused_dtensor("main_grads[0]", partial(call, case, main_grads=main_grads))
    each = [spread(matrix) for matrix in case.w1]
    refused_dtensor("w1[0]", partial(call, changed(w1=lambda _: each)))
    shared = {"shared_w1": case.w1[:1].clone(), "shared_w2": case.w2[:1].clone()}
    call(case, **shared)
    for argument, weight in shared.items():
        refused_dtensor(argument, partial(call, case, **shared | {argument: spread(weight)}))
    layer = uniep.MoELayer(64, 32, 8, 2, device="cpu")
    refused_dtensor("x", partial(layer, spread(case.x)))
    mask = spread(torch.ones(case.x.shape[:-1], dtype=torch.bool))
    refused_dtensor("token_mask", partial(layer, case.x, token_mask=mask))


def test_dtensors_are_refused_by_name():
    run_ranks(1, one_rank)
