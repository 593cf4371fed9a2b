"""What a forward keeps for its backward: less memory, the same bits."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same, make_case, step, workspace

import uniep

CHOICES = [
    {"save": save, "recompute_h": recompute_h}
    for save in ("rows", "none")
    for recompute_h in (False, True)
]


@pytest.mark.parametrize("choice", CHOICES[1:], ids=str)
def test_every_choice_gives_the_same_bits(choice):
    case = make_case(tokens=130, dropped=True)
    wanted = step(case)
    assert_same(step(case, **choice), wanted)
    for schedule in ("sequential", "pipelined:3", "two-kernel", "single,tile_m=32,lag=2"):
        with workspace(case, schedule=schedule, **choice) as own:
            assert_same(step(case, workspace=own), wanted)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_only_what_was_chosen_is_kept(choice):
    case = make_case().requires_grad()
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with workspace(case, **choice) as own:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
        inputs = {t.untyped_storage().data_ptr() for t in (case.x, case.w1, case.w2)}
        new = [t for t in kept if t.untyped_storage().data_ptr() not in inputs]
        assert sum(t.numel() * t.element_size() for t in new) == own.saved_bytes
        hidden, intermediate, _, _ = case.shape
        x = 0 if choice["save"] == "none" else 2 * hidden
        h = 0 if choice["recompute_h"] else 4 * intermediate
        assert own.saved_bytes - own.plan_bytes == own.rows * (x + h + 4)


@pytest.mark.parametrize("choice", CHOICES[1:], ids=str)
def test_deferred_weights(choice):
    case = make_case(tokens=64)
    wanted = step(case)
    deferred = uniep.DeferredWeights()
    case.requires_grad()
    for tensor in (case.x, case.probs, case.w1, case.w2):
        tensor.grad = None
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, deferred=deferred, **choice)
    out.backward(case.dy)
    # The memory of this backward is handed on meanwhile.
    step(make_case(tokens=64, seed=1), **choice)
    uniep.backward_weights(deferred)
    found = [t.grad for t in (case.x, case.probs, case.w1, case.w2)]
    assert_same([out.detach(), *found], wanted)


@pytest.mark.parametrize("choice", CHOICES[1:], ids=str)
def test_main_grads(choice):
    case = make_case(tokens=64).requires_grad()
    found = []
    for options in ({}, choice):
        main = tuple(torch.ones_like(w, dtype=torch.float32) for w in (case.w1, case.w2))
        out = uniep.moe(
            case.x, case.ids, case.probs, case.w1, case.w2, main_grads=main, **options
        )
        out.backward(case.dy)
        found.append(main)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_layer_passes_its_choice_on():
    torch.manual_seed(0)
    layers = [uniep.MoELayer(64, 32, 8, 2, **choice) for choice in (CHOICES[0], CHOICES[3])]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(40, 64).bfloat16()
    for layer in layers:
        layer(x).float().square().sum().backward()
    assert torch.equal(layers[0].w1.grad, layers[1].w1.grad)
    assert torch.equal(layers[0].router.weight.grad, layers[1].router.weight.grad)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="save is 'all'; it must be 'rows' or 'none'"):
        workspace(make_case(), save="all")


def test_a_workspace_has_its_own_choice():
    case = make_case()
    with workspace(case) as own, pytest.raises(ValueError, match="a workspace has its own"):
        uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own, save="none")


def test_x_may_not_change_until_backward():
    case = make_case().requires_grad()
    x = case.x.detach().clone().requires_grad_()
    held = x * 1
    out = uniep.moe(held, case.ids, case.probs, case.w1, case.w2, save="none")
    with torch.no_grad():
        held += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(case.dy)


def test_the_op_asks_for_x():
    case = make_case()
    with workspace(case, save="none") as own:
        saved = torch.ops.uniep.forward(
            *(own.key, own.overflow, case.x, case.ids, case.probs, case.w1, case.w2),
            *(own.rows, own.rows_of_x, own.rows_of_h, own.plan_bytes, own.flag, None),
        )[1:]
        with pytest.raises(RuntimeError, match="x is None"):
            torch.ops.uniep.backward(
                *(own.key, *saved, case.dy, case.w1, case.w2, None, 2, own.flag, None)
            )
