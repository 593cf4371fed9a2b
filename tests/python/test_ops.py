"""torch.ops.uniep against PyTorch's own checks of custom ops."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cases import make_case, workspace


@pytest.fixture(
    params=[
        {"on_overflow": "raise"},
        {"on_overflow": "flag"},
        {"save": "none"},
        {"save": "tokens"},
        {"save": "none", "recompute_h": True},
    ],
    ids=["raise", "flag", "none", "tokens", "none-recompute"],
)
def call(request):
    # Every expert gets 128 rows, so that there are no others, which would be NaN.
    case = make_case(tokens=512)
    case.ids = torch.arange(1024, dtype=torch.int32).view(512, 2) % 8
    with workspace(case, capacity_rows=1024, **request.param) as own:
        yield case, own


@pytest.fixture(autouse=True)
def _memory_is_filled():
    """What an op leaves alone in its outputs (gaps, rows that no token fills) has one value."""
    perturb = -6  # M_PERTURB of malloc.h: what malloc returns is filled with this byte's complement
    libc = ctypes.CDLL(None)
    assert libc.mallopt(perturb, 0x55) == 1
    yield
    libc.mallopt(perturb, 0)


def figures(own):
    return own.rows, own.rows_of_x, own.rows_of_h, own.plan_bytes, own.flag, None


def again(case, own):
    """x, where backward is given it once more."""
    return case.x if own.save == "none" else None


def check(op, arguments, named=None):
    found = torch.library.opcheck(op, arguments, named)
    assert set(found.values()) == {"SUCCESS"}


def test_opcheck(call):
    case, own = call
    ops = torch.ops.uniep
    arguments = (
        *(own.key, own.overflow),
        *(case.x, case.ids, case.probs, [case.w1], [case.w2]),
        *figures(own),
    )
    check(ops.forward.default, arguments)
    saved = ops.forward(*arguments)[1:]
    backward = (own.key, *saved, case.dy, [case.w1], [case.w2], again(case, own))
    end = (2, own.flag, "sequential")
    check(ops.backward.default, (*backward, *end))
    for dtype in (torch.float32, torch.bfloat16):
        main = [[torch.zeros_like(w, dtype=dtype)] for w in (case.w1, case.w2)]
        check(ops.backward_main_grad.default, (*backward, *main, *end))
    part = (*backward, 2, own.backward_bytes, own.flag, None)
    check(ops.backward_data.default, part)
    rows = ops.backward_data(*part)[-1]
    weights = (own.key, *saved, rows)
    check(ops.backward_weights.default, (*weights, 512, 8, 32, False, own.flag, None))
    main = [[torch.zeros_like(w, dtype=torch.float32)] for w in (case.w1, case.w2)]
    check(ops.backward_weights_main_grad.default, (*weights, *main, 512, own.flag, None))


def test_a_copy_of_the_key_finds_the_layer(call):
    case, own = call
    tensors = (case.x, case.ids, case.probs, [case.w1], [case.w2])
    wanted = torch.ops.uniep.forward(own.key, own.overflow, *tensors, *figures(own))
    found = torch.ops.uniep.forward(own.key.clone(), own.overflow.clone(), *tensors, *figures(own))
    assert torch.equal(found[0], wanted[0])


def test_what_forward_saves_may_move(call):
    case, own = call
    saved = torch.ops.uniep.forward(
        *(own.key, own.overflow, case.x, case.ids, case.probs, [case.w1], [case.w2]),
        *figures(own),
    )[1:]
    backward = torch.ops.uniep.backward
    end = (case.dy, [case.w1], [case.w2], again(case, own), 2, own.flag, None)
    wanted = backward(own.key, *saved, *end)
    copies = [t.clone() for t in saved]
    for tensor in saved:
        tensor.fill_(0)
    for a, b in zip(backward(own.key, *copies, *end), wanted, strict=True):
        assert all(torch.equal(*pair) for pair in zip(*map(tensors_of, (a, b)), strict=True))


def tensors_of(result):
    return result if isinstance(result, list) else [result]


def test_opcheck_of_other_forms():
    case = make_case(tokens=512)
    case.ids = torch.arange(1024, dtype=torch.int32).view(512, 2) % 8
    ops = torch.ops.uniep
    pair = [half.contiguous() for half in case.w1.chunk(2, 1)]
    each = list(case.w2.unbind(0))
    with workspace(case, capacity_rows=1024) as own:
        arguments = (own.key, own.overflow, case.x, case.ids, case.probs, pair, each)
        check(ops.forward.default, (*arguments, *figures(own)))
        saved = ops.forward(*arguments, *figures(own))[1:]
        backward = (own.key, *saved, case.dy, pair, each, None)
        end = (2, own.flag, None)
        check(ops.backward.default, (*backward, *end))
        main = [[torch.zeros_like(t) for t in weight] for weight in (pair, each)]
        check(ops.backward_main_grad.default, (*backward, *main, *end))
        rows = ops.backward_data(*backward, 2, own.backward_bytes, own.flag, None)[-1]
        kept = (own.key, *saved, rows, 512, 8, 32, False, own.flag, None)
        check(ops.backward_weights.default, (*kept, 0, 1, 2))
        with pytest.raises(RuntimeError, match="the form of w2 is 1"):
            ops.backward_weights(*kept, 0, 1, 1)


@pytest.mark.parametrize(("layout", "forms"), [(3, "one"), (2, "several")])
def test_opcheck_of_layouts(layout, forms):
    case = make_case(tokens=512, hidden=48)
    case.ids = torch.arange(1024, dtype=torch.int32).view(512, 2) % 8
    ops = torch.ops.uniep
    w1, w2 = [case.w1], [case.w2]
    if forms == "several":
        w1, w2 = list(case.w1.chunk(2, 1)), list(case.w2.unbind(0))
    w1, w2 = ([t.transpose(-1, -2).contiguous() for t in weight] for weight in (w1, w2))
    given = {"layout": layout}
    with workspace(case, capacity_rows=1024) as own:
        arguments = (own.key, own.overflow, case.x, case.ids, case.probs, w1, w2)
        check(ops.forward.default, (*arguments, *figures(own)), given)
        saved = ops.forward(*arguments, *figures(own), **given)[1:]
        backward = (own.key, *saved, case.dy, w1, w2, None)
        end = (2, own.flag, None)
        check(ops.backward.default, (*backward, *end), given)
        main = [[torch.zeros_like(t) for t in weight] for weight in (w1, w2)]
        check(ops.backward_main_grad.default, (*backward, *main, *end), given)
        part = (*backward, 2, own.backward_bytes, own.flag, None)
        rows = ops.backward_data(*part, **given)[-1]
        kept = (own.key, *saved, rows, 512, 8, 32, False, own.flag, None)
        forms_of = {"w1_form": 1, "w2_form": 2} if forms == "several" else {}
        check(ops.backward_weights.default, kept, forms_of | given)
        with pytest.raises(RuntimeError, match="layout is 4"):
            ops.backward_weights(*kept, layout=4)


def test_opcheck_of_biases():
    case = make_case(tokens=512)
    case.ids = torch.arange(1024, dtype=torch.int32).view(512, 2) % 8
    biases = torch.randn(8, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    ops = torch.ops.uniep
    with workspace(case, capacity_rows=1024, activation="gpt_oss", probs="after", bias=True) as own:
        tensors = (case.x, case.ids, case.probs, [case.w1], [case.w2])
        arguments = (own.key, own.overflow, *tensors, *figures(own), *biases)
        check(ops.forward.default, arguments)
        saved = ops.forward(*arguments)[1:]
        backward = (own.key, *saved, case.dy, [case.w1], [case.w2], None)
        end = (2, own.flag, "sequential", *biases)
        check(ops.backward.default, (*backward, *end))
        weights = (case.w1, case.w2, *biases)
        main = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        first = [[dw] for dw in main[:2]]
        check(ops.backward_main_grad.default, (*backward, *first, *end, *main[2:]))
        part = (*backward, 2, own.backward_bytes, own.flag, None, *biases)
        check(ops.backward_data.default, part)
        kept = (own.key, *saved, ops.backward_data(*part)[-1])
        check(ops.backward_weights.default, (*kept, 512, 8, 32, True, own.flag, None))
        main_grad = (*kept, *first, 512, own.flag, None, *main[2:])
        check(ops.backward_weights_main_grad.default, main_grad)
        with pytest.raises(RuntimeError, match="b1 and b2 are not both given"):
            ops.forward(*arguments[:-1])


def test_opcheck_of_shared_experts():
    case = make_case(tokens=512)
    shared = case.w1[:2].clone(), case.w2[:2].clone()
    more = (None, None, *shared)
    ops = torch.ops.uniep
    with workspace(case, shared_experts=2) as own:
        tensors = (case.x, case.ids, case.probs, [case.w1], [case.w2])
        saved = ops.forward(own.key, own.overflow, *tensors, *figures(own), *more)[1:]
        given = (own.key, *saved, case.dy, [case.w1], [case.w2])
        end = (2, own.flag, None, *more)
        check(ops.backward.default, (*given, case.x, *end))
        part = (2, own.backward_bytes, own.flag, None, *more)
        for op, after in ((ops.backward, end), (ops.backward_data, part)):
            with pytest.raises(RuntimeError, match="or has shared experts, is given x"):
                op(*given, None, *after)
        kept = (own.key, *saved, ops.backward_data(*given, case.x, *part)[-1])
        figures_of = (512, 8, 32, False, own.flag, None, 2, 0, 0, 0)
        check(ops.backward_weights.default, (*kept, *figures_of, case.dy, case.x))
        with pytest.raises(RuntimeError, match="dy is None"):
            ops.backward_weights(*kept, *figures_of)
        main = [torch.zeros_like(w, dtype=torch.float32) for w in (case.w1, case.w2, *shared)]
        first = [[dw] for dw in main[:2]]
        tail = (512, own.flag, None, None, None, *main[2:], 0, case.dy, case.x)
        check(ops.backward_weights_main_grad.default, (*kept, *first, *tail))
