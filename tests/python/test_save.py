"""What a forward keeps for its backward: less memory, the same bits."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same, gradients, make_case, step, workspace

import uniep

CHOICES = [
    {"save": save, "recompute_h": recompute_h}
    for save in ("rows", "tokens", "none")
    for recompute_h in (False, True)
]
WITH_EXACT = [*CHOICES, *({**choice, "exact_rows": True} for choice in CHOICES)]


@pytest.mark.parametrize("choice", WITH_EXACT[1:], ids=str)
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
        of_x = {"rows": own.rows, "tokens": case.x.shape[0], "none": 0}[choice["save"]]
        h = 0 if choice["recompute_h"] else 4 * intermediate
        assert own.rows_of_x == of_x
        assert own.saved_bytes - own.plan_bytes == of_x * 2 * hidden + own.rows * (h + 4)


@pytest.mark.parametrize("choice", WITH_EXACT[1:], ids=str)
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


@pytest.mark.parametrize("choice", WITH_EXACT[1:], ids=str)
def test_main_grads(choice):
    case = make_case(tokens=64).requires_grad()
    found = []
    for options in ({}, choice):
        main = tuple(torch.ones_like(w, dtype=torch.float32) for w in (case.w1, case.w2))
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, main_grads=main, **options)
        out.backward(case.dy)
        found.append(main)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def padded_rows(ids, experts):
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=experts)
    return int(((counts + 127) // 128 * 128).sum())


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_exact_rows_keep_what_came(choice):
    case = make_case(tokens=130, dropped=True).requires_grad()
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with workspace(case, exact_rows=True, capacity_rows=4096, **choice) as own:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
        inputs = {t.untyped_storage().data_ptr() for t in (case.x, case.w1, case.w2)}
        new = [t for t in kept if t.untyped_storage().data_ptr() not in inputs]
        rows = padded_rows(case.ids, case.shape[2])
        assert rows < own.rows
        bytes_kept = sum(t.numel() * t.element_size() for t in new)
        if choice["save"] == "tokens":
            # Room for all of them, but only those that have a row came.
            came = int((case.ids >= 0).any(dim=1).sum())
            assert 0 < came < case.x.shape[0] == own.rows_of_x
            bytes_kept += (own.rows_of_x - came) * 2 * case.shape[0]
        assert bytes_kept == own.saved_bytes_of(rows)
        assert own.saved_bytes_of(own.rows) == own.saved_bytes


def test_exact_rows_are_a_choice_of_each_call():
    case = make_case(tokens=64).requires_grad()
    wanted = step(case)
    with workspace(case) as own:
        assert_same(step(case, workspace=own, exact_rows=True), wanted)
        assert_same(step(case, workspace=own), wanted)
        assert_same(step(case, workspace=own, exact_rows=False), wanted)


def test_exact_rows_of_no_rows_and_of_a_routing_that_does_not_fit():
    case = make_case(tokens=40).requires_grad()
    out = uniep.moe(
        case.x, torch.full_like(case.ids, -1), case.probs, case.w1, case.w2, exact_rows=True
    )
    out.backward(case.dy)
    assert not out.any() and not case.w1.grad.any()
    small = workspace(case, capacity_rows=128, exact_rows=True)
    with small as own, pytest.raises(RuntimeError, match="capacity_rows"):
        uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
    flagging = {"capacity_rows": 128, "exact_rows": True, "on_overflow": "flag"}
    with workspace(case, **flagging) as own:
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
        assert own.overflow[0] == uniep.Overflow.ROWS and own.needed_rows() > 128
        out.backward(case.dy)
        assert out.isnan().all() and case.x.grad.isnan().all()


@pytest.mark.parametrize("overflow", ["raise", "flag"])
def test_exact_rows_that_take_all_the_room_there_is(overflow):
    # Tokens that came are fewer than there is room for, though their rows are not.
    case = make_case(tokens=60, experts=2, topk=2).requires_grad()
    wanted = step(case)
    choice = {"save": "tokens", "exact_rows": True, "on_overflow": overflow}
    rows = padded_rows(case.ids, 2)
    with uniep.Workspace(None, *case.shape, 200, capacity_rows=rows, device="cpu", **choice) as own:
        assert own.rows == rows == 256 and own.rows_of_x == 200
        assert_same(step(case, workspace=own), wanted)


def test_exact_rows_break_a_graph():
    case = make_case(tokens=16).requires_grad()

    def call(x):
        return uniep.moe(x * 2, case.ids, case.probs, case.w1, case.w2, exact_rows=True) + 1

    with pytest.raises(Exception, match="exact_rows=True"):
        torch.compile(call, fullgraph=True, backend="eager")(case.x)
    torch.compiler.reset()
    wanted = gradients(case, call(case.x))
    assert_same(gradients(case, torch.compile(call, backend="aot_eager")(case.x)), wanted)


def test_passes_take_their_memory_for_the_call_alone():
    case = make_case()
    with workspace(case) as own, workspace(case, recompute_h=True) as less:
        assert own.forward_bytes < own.backward_bytes
        # An h that is made again lies where dh will be.
        assert less.backward_bytes == own.backward_bytes
        assert own.bytes == less.bytes


def test_a_layer_passes_its_choice_on():
    torch.manual_seed(0)
    choices = (CHOICES[0], WITH_EXACT[-1])
    layers = [uniep.MoELayer(64, 32, 8, 2, **choice) for choice in choices]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(40, 64).bfloat16()
    for layer in layers:
        layer(x).float().square().sum().backward()
    assert torch.equal(layers[0].w1.grad, layers[1].w1.grad)
    assert torch.equal(layers[0].router.weight.grad, layers[1].router.weight.grad)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="save is 'all'; it must be 'rows', 'tokens' or 'none'"):
        workspace(make_case(), save="all")


def test_a_workspace_has_its_own_choice():
    case = make_case()
    with workspace(case) as own, pytest.raises(ValueError, match="save is given beside a"):
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
            *(own.key, own.overflow, case.x, case.ids, case.probs, [case.w1], [case.w2]),
            *(own.rows, own.rows_of_x, own.rows_of_h, own.plan_bytes, own.flag, None),
        )[1:]
        with pytest.raises(RuntimeError, match="x is None"):
            torch.ops.uniep.backward(
                *(own.key, *saved, case.dy, [case.w1], [case.w2], None, 2, own.flag, None)
            )
