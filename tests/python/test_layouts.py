"""Weights that lie otherwise than in one tensor: read there, and given gradients there."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same, make_case, step, workspace
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import uniep

FORMS = ("one", "interleaved", "pair", "each")
IN_OUT = tuple(f"{form} in_out" for form in FORMS)


def scattered(weight: Tensor, form: str) -> list[Tensor]:
    """Copies in tensors of that form."""
    weight = weight.detach()
    if form.endswith(" in_out"):
        return [t.transpose(-1, -2).contiguous() for t in scattered(weight, form.split()[0])]
    if form == "interleaved":
        return [torch.stack(weight.chunk(2, 1), 2).flatten(1, 2).contiguous()]
    parts = {"one": [weight], "pair": weight.chunk(2, 1), "each": weight.unbind(0)}[form]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def joined(tensors: list[Tensor], form: str) -> Tensor:
    if form.endswith(" in_out"):
        return joined([tensor.transpose(-1, -2) for tensor in tensors], form.split()[0])
    if form == "interleaved":
        return torch.cat([tensors[0][:, ::2], tensors[0][:, 1::2]], 1)
    if form == "each":
        return torch.stack(tensors)
    return torch.cat(tensors, 1)


def given(tensors: list[Tensor], form: str) -> Tensor | list[Tensor]:
    return tensors[0] if form.split()[0] in ("one", "interleaved") else tensors


class Formed:
    """The weights of a case in two forms, and calls with them."""

    def __init__(self, case, form1: str, form2: str) -> None:
        self.case, self.forms = case, (form1, form2)
        self.tensors = [scattered(case.w1, form1), scattered(case.w2, form2)]
        for tensor in (*self.tensors[0], *self.tensors[1]):
            tensor.requires_grad_()

    def call(self, **options) -> Tensor:
        case = self.case
        for tensor in (case.x, case.probs):
            tensor.requires_grad_().grad = None
        w1, w2 = (given(*pair) for pair in zip(self.tensors, self.forms, strict=True))
        options["w1_layout"] = "interleaved" if "interleaved" in self.forms[0] else "halves"
        options["weights_layout"] = "in_out" if "in_out" in self.forms[0] else "out_in"
        return uniep.moe(case.x, case.ids, case.probs, w1, w2, **options)

    def found(self, out: Tensor, weights: list[Tensor] | None = None) -> list[Tensor]:
        grads = weights or [
            joined([t.grad for t in tensors], form)
            for tensors, form in zip(self.tensors, self.forms, strict=True)
        ]
        return [out.detach(), self.case.x.grad, self.case.probs.grad, *grads]

    def main_grads(self, wanted: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
        """Ones, in the forms of the weights."""
        ones = [torch.ones_like(grad, dtype=dtype) for grad in wanted]
        return [scattered(*pair) for pair in zip(ones, self.forms, strict=True)]


def with_order_of(form1: str, form2: str) -> str:
    return f"{form2} in_out" if "in_out" in form1 else form2


@pytest.mark.parametrize("form2", ["one", "each"])
@pytest.mark.parametrize("form1", FORMS + IN_OUT)
@pytest.mark.parametrize("save", ["rows", "none"])
def test_every_form_gives_the_same_bits(form1, form2, save):
    case = make_case(hidden=48, dropped=True)
    wanted = step(case)
    formed = Formed(case, form1, with_order_of(form1, form2))
    out = formed.call(save=save, recompute_h=save == "none")
    out.backward(case.dy)
    assert_same(formed.found(out), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["at once", "deferred", "row pool", "deferred row pool"])
@pytest.mark.parametrize("form", FORMS + IN_OUT)
def test_gradients_are_added_where_they_lie(form, way, dtype):
    case = make_case(hidden=48, dropped=True)
    wanted = step(case)
    ones = [torch.ones_like(grad, dtype=dtype) for grad in wanted[3:]]
    deferred = uniep.DeferredWeights() if "deferred" in way else None
    options = {"row_pool": True} if "pool" in way else {}
    case.requires_grad()
    out = uniep.moe(
        *(case.x, case.ids, case.probs, case.w1, case.w2),
        main_grads=tuple(ones),
        deferred=deferred,
        **options,
    )
    out.backward(case.dy)
    if deferred is not None:
        uniep.backward_weights(deferred)

    formed = Formed(case, form, with_order_of(form, "each" if "each" in form else "one"))
    main = formed.main_grads(wanted[3:], dtype)
    out = formed.call(
        main_grads=tuple(given(*pair) for pair in zip(main, formed.forms, strict=True)),
        deferred=deferred,
        **options,
    )
    out.backward(case.dy)
    if deferred is not None:
        uniep.backward_weights(deferred)
    for tensors, form_of, one in zip(main, formed.forms, ones, strict=True):
        assert torch.equal(joined(tensors, form_of), one)
    assert all(t.grad is None for tensors in formed.tensors for t in tensors)


@pytest.mark.parametrize("form", FORMS + IN_OUT)
@pytest.mark.parametrize("pool", [None, True])
def test_deferred_gradients_go_to_each_tensor(form, pool):
    case = make_case()
    wanted = step(case)
    formed = Formed(case, form, with_order_of(form, "each"))
    deferred = uniep.DeferredWeights()
    out = formed.call(deferred=deferred, row_pool=pool)
    out.backward(case.dy)
    uniep.backward_weights(deferred)
    assert_same(formed.found(out), wanted)


def test_gradients_need_not_have_the_form_of_their_weight():
    case = make_case()
    wanted = step(case)
    formed = Formed(case, "pair", "each")
    main = [torch.zeros_like(wanted[3]), [torch.zeros_like(w) for w in wanted[4].unbind(0)]]
    formed.call(main_grads=tuple(main)).backward(case.dy)
    assert torch.equal(main[0], wanted[3])
    assert torch.equal(torch.stack(main[1]), wanted[4])


@pytest.mark.parametrize("forms", [("pair", "each"), ("interleaved in_out", "one in_out")])
def test_under_autocast_and_compiled(forms):
    case = make_case()
    wanted = step(case)
    formed = Formed(case, *forms)
    with workspace(case) as own:
        compiled = torch.compile(lambda: formed.call(workspace=own), fullgraph=True)
        out = compiled()
        out.backward(case.dy)
        assert_same(formed.found(out), wanted)
    wide = Formed(case, *forms)
    wide.tensors = [[t.detach().float().requires_grad_() for t in ts] for ts in wide.tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wide.call()
    out.backward(case.dy)
    found = wide.found(out)
    assert_same([*found[:3], *(grad.bfloat16() for grad in found[3:])], wanted)


def test_without_a_gate():
    case = make_case()
    case.w1 = case.w1[:, :32].contiguous()
    wanted = step(case, activation="relu2")
    for order in ("", " in_out"):
        formed = Formed(case, f"each{order}", f"each{order}")
        out = formed.call(activation="relu2")
        out.backward(case.dy)
        assert_same(formed.found(out), wanted)
    with pytest.raises(ValueError, match="w1"):
        Formed(case, "pair", "one").call(activation="relu2")
    with pytest.raises(ValueError, match=r"w1_layout is 'interleaved'.*no gate"):
        Formed(case, "interleaved", "one").call(activation="relu2")


def test_what_cannot_be_read_in_place_is_refused():
    case = make_case()
    call = (case.x, case.ids, case.probs)
    each = list(case.w1.unbind(0))
    with pytest.raises(ValueError, match=r"w1\[0\] is not contiguous"):
        uniep.moe(*call, case.w1.chunk(2, 1), case.w2)
    with pytest.raises(ValueError, match=r"w1 is 7 tensors"):
        uniep.moe(*call, each[:7], case.w2)
    with pytest.raises(ValueError, match=r"w2 is 2 tensors"):
        uniep.moe(*call, case.w1, [case.w2, case.w2])
    with pytest.raises(TypeError, match=r"w1\[3\] is torch.float32"):
        uniep.moe(*call, [*each[:3], each[3].float(), *each[4:]], case.w2)
    with pytest.raises(ValueError, match=r"w1\[1\] is on 'meta'"):
        uniep.moe(*call, [each[0], each[1].to("meta"), *each[2:]], case.w2)
    with pytest.raises(ValueError, match="w1_layout is 'rows'"):
        uniep.moe(*call, case.w1, case.w2, w1_layout="rows")
    with pytest.raises(ValueError, match="w1_layout is 'interleaved', and w1 is several tensors"):
        uniep.moe(*call, each, case.w2, w1_layout="interleaved")


def test_layouts_that_do_not_fit_are_refused():
    case = make_case(hidden=48)
    call = (case.x, case.ids, case.probs)
    with pytest.raises(ValueError, match=r"weights_layout is 'in'; it must be 'out_in' or"):
        uniep.moe(*call, case.w1, case.w2, weights_layout="in")
    with pytest.raises(ValueError, match=r"w1 has shape .*\[experts of this rank, H, 2 I\]"):
        uniep.moe(*call, case.w1, case.w2, weights_layout="in_out")
    formed = Formed(case, "one in_out", "one in_out")
    experts, hidden, intermediate = case.w2.shape
    with pytest.raises(ValueError, match=rf"w2 has shape \[{experts}, {hidden}, {intermediate}\]"):
        uniep.moe(*call, formed.tensors[0][0], case.w2, weights_layout="in_out")
    main = [torch.zeros_like(weight) for weight in (case.w1, case.w2)]  # as out_in
    with pytest.raises(ValueError, match=r"main_grads\[0\]"):
        formed.call(main_grads=tuple(main))


def test_gpus_refuse_columns_by_turns():
    case = make_case()
    given = (case.x, case.ids, case.probs, case.w1, case.w2)
    with FakeTensorMode():
        tensors = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in given]
        with pytest.raises(ValueError, match=r"weights_layout is 'in_out', and x is on 'cuda"):
            uniep.moe(*tensors, w1_layout="interleaved", weights_layout="in_out")
