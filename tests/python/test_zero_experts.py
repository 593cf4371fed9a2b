"""Experts that compute nothing: beside plain PyTorch, LongCat's layer, and by what is promised."""

from __future__ import annotations

import pytest
import torch
from cases import Case, gradients, make_case, relative, workspace
from ranks import run_ranks

import uniep
import uniep.plain
from uniep import RouterConfig

ZERO = 4  # behind 8 real ones


def with_zero_experts(case: Case, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    of_zero = torch.rand(case.ids.shape, generator=g) < 0.4
    others = torch.randint(8, 8 + ZERO, case.ids.shape, generator=g, dtype=torch.int32)
    case.ids = torch.where(of_zero, others, case.ids)
    case.ids[:2] = 8  # a token whose slots name one identity twice
    case.ids[2:4] = -1
    return case


def make(**options) -> Case:
    return with_zero_experts(make_case(topk=4, dropped=True, **options))


def run(case: Case, function=uniep.moe, **options):
    case.requires_grad()
    out = function(case.x, case.ids, case.probs, case.w1, case.w2, zero_experts=ZERO, **options)
    return gradients(case, out)


@pytest.mark.parametrize("kind", ["identity", "zero"])
@pytest.mark.parametrize("hidden", [64, 1096])
def test_is_plain_pytorch(kind, hidden):
    case = make(hidden=hidden)
    found = run(case, zero_expert_type=kind)
    wanted = run(case, uniep.plain.moe, zero_expert_type=kind, ascending=True)
    identity = case.ids >= 8
    for name, a, b in zip(("out", "dx", "dprobs", "dw1", "dw2"), found, wanted, strict=True):
        if name == "dprobs" and kind == "identity":
            assert torch.equal(a[~identity], b[~identity])
            assert relative(a[identity], b[identity]) < 1e-6
        else:
            assert torch.equal(a, b), name
    assert bool(found[2][identity].any()) == (kind == "identity")
    assert not found[0][2:4].any() and not found[1][2:4].any() and not found[2][2:4].any()


@pytest.mark.parametrize("kind", ["identity", "zero"])
def test_shared_experts_come_ahead_of_identities(kind):
    case = make()
    g = torch.Generator().manual_seed(1)
    shared = [
        torch.randn(2, *w.shape[1:], generator=g).mul(0.3).bfloat16() for w in (case.w1, case.w2)
    ]
    options = {"zero_expert_type": kind, "shared_w1": shared[0], "shared_w2": shared[1]}
    found = run(case, **options)
    wanted = run(case, uniep.plain.moe, ascending=True, **options)
    for i in (0, 1, 3, 4):
        assert torch.equal(found[i], wanted[i])


def test_the_gradient_of_a_weight_has_the_documented_order():
    case = make(hidden=2088)
    dprobs = run(case)[2]
    dy, x = case.dy.float(), case.x.detach().float()
    for t in range(10):
        lanes = [torch.tensor(0.0)] * 1024
        for c in range(2088):
            lanes[c % 1024] = lanes[c % 1024] + dy[t, c] * x[t, c]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        for k in range(4):
            if case.ids[t, k] >= 8:
                assert dprobs[t, k] == lanes[0]


def test_tokens_without_such_slots_are_left_alone():
    case = make()
    others = (case.ids < 8).all(-1)
    case.x[others] = torch.randn(int(others.sum()), 64).bfloat16()
    case.x[5] = case.dy[5] = torch.inf
    case.ids[5] = -1
    case.requires_grad()
    wanted = uniep.moe(case.x, case.ids.where(case.ids < 8, -1), case.probs, case.w1, case.w2)
    found = run(case)
    assert torch.equal(found[0][others], wanted[others])
    assert not any(tensor[5].any() for tensor in found[:3])


def test_bits_do_not_depend_on_how_tokens_are_split():
    whole = run(make(tokens=61))
    for parts in (2, 61):
        case = make(tokens=61)
        found = [[], [], []]
        for piece in zip(
            *(t.chunk(parts) for t in (case.x, case.ids, case.probs, case.dy)), strict=True
        ):
            x, ids, probs, dy = (t.detach().clone() for t in piece)
            for store, tensor in zip(
                found, run(Case(x, ids, probs, case.w1, case.w2, dy))[:3], strict=True
            ):
                store.append(tensor)
        for a, b in zip(found, whole[:3], strict=True):
            assert torch.equal(torch.cat(a), b)


def _ranks() -> list[torch.Tensor]:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    case = make(tokens=61).part(rank, size)
    return run(case, group=dist.group.WORLD, max_tokens=61)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_do_not_depend_on_ranks(ranks):
    parts = run_ranks(ranks, _ranks)
    for found, wanted in zip(zip(*parts, strict=True), run(make(tokens=61)), strict=True):
        assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_has_the_same_bits(backend):
    case = make()
    space = workspace(case)

    def layer(x, ids, probs, w1, w2):
        return uniep.moe(x, ids, probs, w1, w2, workspace=space, zero_experts=ZERO)

    wanted = run(case, workspace=space)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = gradients(case, compiled(case.x, case.ids, case.probs, case.w1, case.w2))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_operators():
    routed = torch.randn(5, 24).bfloat16()
    x, d_out = (torch.randn(24, 5).bfloat16().T for _ in range(2))
    share, has = torch.rand(5), torch.tensor([True, False, True, True, False])
    routed, x, share = (t.requires_grad_() for t in (routed, x, share))
    torch.library.opcheck(torch.ops.uniep.add_share, (routed, x, share, has))
    with torch.no_grad():
        torch.library.opcheck(torch.ops.uniep.add_share_backward, (d_out, x, share, has))


def test_under_autocast():
    case = make()
    wanted = run(case)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = uniep.moe(case.x.float(), case.ids, case.probs, case.w1, case.w2, zero_experts=ZERO)
    assert torch.equal(found, wanted)


def test_longcat():
    """Its experts of transformers, which add up in bf16 by expert: so to tolerance."""
    longcat = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    from transformers.models.longcat_flash.configuration_longcat_flash import LongcatFlashConfig

    torch.manual_seed(0)
    config = LongcatFlashConfig(
        hidden_size=64,
        expert_ffn_hidden_size=32,
        n_routed_experts=8,
        zero_expert_num=ZERO,
        moe_topk=4,
        num_experts_per_tok=4,
        routed_scaling_factor=6.0,
    )
    theirs = longcat.LongcatFlashMoE(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.1)
        theirs.router.e_score_correction_bias.normal_(std=0.02)
    layer = uniep.MoELayer(
        64,
        32,
        8,
        4,
        router=RouterConfig(bias=True, normalize=False, scaling_factor=6.0),
        zero_experts=ZERO,
    )
    with torch.no_grad():
        layer.router.weight.copy_(theirs.router.classifier.weight)
        layer.router.bias.copy_(theirs.router.e_score_correction_bias)
        layer.w1.copy_(theirs.experts.gate_up_proj[:8])
        layer.w2.copy_(theirs.experts.down_proj)
        theirs.experts.gate_up_proj.copy_(theirs.experts.gate_up_proj.bfloat16())
        theirs.experts.down_proj.copy_(theirs.experts.down_proj.bfloat16())
    x = torch.randn(100, 64).bfloat16()
    mine, original = x.clone().requires_grad_(), x.float().requires_grad_()
    out, found = layer.forward_with_routing(mine)
    assert (found.ids >= 8).any() and (found.ids < 8).any()
    wanted = theirs(original)
    assert relative(out.detach(), wanted.detach()) < 5e-3
    dy = torch.randn(100, 64).bfloat16()
    out.backward(dy)
    wanted.backward(dy.float())
    assert relative(mine.grad, original.grad) < 1e-2
    assert relative(layer.w1.grad, theirs.experts.gate_up_proj.grad[:8]) < 1e-2
    assert relative(layer.w2.grad, theirs.experts.down_proj.grad) < 1e-2
    assert relative(layer.router.weight.grad, theirs.router.classifier.weight.grad) < 1e-2


def test_refuses():
    case = make()
    for options, words in (
        ({"zero_experts": -1}, "zero_experts is -1"),
        ({"zero_experts": 1, "zero_expert_type": "copy"}, "zero_expert_type is 'copy'"),
    ):
        with pytest.raises(ValueError, match=words):
            uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, **options)
        with pytest.raises(ValueError, match=words):
            uniep.MoELayer(64, 32, 8, 4, **options)
    case.ids[7, 1] = 8 + ZERO
    with pytest.raises(RuntimeError, match="is 12"):
        run(case)
    with pytest.raises(ValueError, match=r"zero_experts is 2 and capacity_factor is 1\.5"):
        uniep.MoELayer(64, 32, 8, 4, zero_experts=2, router=RouterConfig(capacity_factor=1.5))
