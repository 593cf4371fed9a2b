"""Capacity, dropped slots and padding of the router."""

from __future__ import annotations

import math

import pytest
import torch

import uniep
from uniep import Router, RouterConfig


def routing(tokens=200, experts=8, topk=3, seed=0, *, repeats=False):
    g = torch.Generator().manual_seed(seed)
    if repeats:
        ids = torch.randint(experts, (tokens, topk), generator=g)
    else:
        ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :topk]
    ids[torch.rand(tokens, topk, generator=g) < 0.1] = -1
    # Few different values, so that many are equal.
    return ids, torch.randint(1, 6, (tokens, topk), generator=g) / 5


def drop_plainly(ids, probs, capacity, policy):
    """Slot by slot."""
    slots = [(t, k) for t in range(ids.shape[0]) for k in range(ids.shape[1])]
    if policy == "probs":
        slots.sort(key=lambda s: -float(probs[s].detach()))  # stable
    room = {}
    kept = torch.full_like(ids, -1)
    weights = torch.zeros_like(probs)
    for slot in slots:
        expert = int(ids[slot])
        if expert < 0 or room.setdefault(expert, capacity) == 0:
            continue
        room[expert] -= 1
        kept[slot], weights[slot] = expert, probs[slot]
    return kept, weights


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("capacity", [0, 1, 30, 67, 1000])
@pytest.mark.parametrize("repeats", [False, True])
def test_drops_as_a_loop_does(policy, capacity, repeats):
    ids, probs = routing(repeats=repeats)
    found = uniep.drop_over_capacity(ids, probs, capacity, policy)
    wanted = drop_plainly(ids, probs, capacity, policy)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(uniep.drop_over_capacity(ids.int(), probs, capacity, policy)[0], wanted[0])


def test_gradients_pass_what_stays():
    ids, probs = routing()
    probs.requires_grad_()
    kept, weights = uniep.drop_over_capacity(ids, probs, 30)
    weights.sum().backward()
    assert torch.equal(probs.grad, (kept >= 0).float())
    assert 0 < (kept >= 0).sum() < (ids >= 0).sum()


def test_dropped_slots_may_hold_anything():
    ids, probs = routing()
    wanted = uniep.drop_over_capacity(ids, probs, 30)
    found = uniep.drop_over_capacity(ids, torch.where(ids < 0, math.nan, probs), 30)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 3.0])
def test_is_megatrons_dropping(policy, factor):
    """Without equal probabilities: which of those its topk takes is not said.

    For the same reason its policy "position" takes any slots of an expert, not the first; there
    only the numbers agree.
    """
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    torch.manual_seed(1)
    tokens, experts, topk = 50, 8, 3
    scores = torch.randn(tokens, experts).softmax(-1)
    probs, ids = scores.topk(topk)
    dense = torch.zeros(tokens, experts)
    final, final_map = moe_utils.apply_router_token_dropping(
        dense.scatter(1, ids, probs), dense.scatter(1, ids, 1).bool(), topk, factor, policy
    )
    capacity = uniep.expert_capacity(tokens, topk, experts, factor)
    kept, weights = uniep.drop_over_capacity(ids, probs, capacity, policy)
    if policy == "probs":
        places = torch.where(kept < 0, experts, kept)
        found = torch.zeros(tokens, experts + 1).scatter(1, places, weights)[:, :experts]
        assert torch.equal(found, final)
    counts = torch.bincount(kept[kept >= 0], minlength=experts)
    wanted = dense.scatter(1, ids, 1).sum(0).clamp(max=capacity)
    assert torch.equal(counts.float(), wanted)
    if policy == "probs":
        assert torch.equal(final_map.sum(0).float(), wanted)


def make(config, experts=16, topk=4, hidden=32, tokens=64):
    torch.manual_seed(0)
    router = Router(hidden, experts, topk, config)
    with torch.no_grad():
        router.weight.normal_()
    return router, torch.randn(tokens, hidden)


def test_of_a_router():
    router, x = make(RouterConfig())
    every = router(x)
    router.config = RouterConfig(capacity_factor=1.0, drop_policy="position", aux_loss=0.5)
    found = router(x)
    wanted = drop_plainly(every.ids, every.probs, 16, "position")
    assert torch.equal(found.ids, wanted[0]) and torch.equal(found.probs, wanted[1])
    assert (found.ids < 0).any()
    # What the router wanted is what is counted and balanced.
    assert torch.equal(found.tokens_per_expert, every.tokens_per_expert)
    router.config = RouterConfig(aux_loss=0.5)
    assert torch.equal(found.loss, router(x).loss)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_padding_counts_nowhere(score):
    config = RouterConfig(score, aux_loss=0.5, z_loss=0.25)
    router, x = make(config)
    mask = torch.rand(64) < 0.6
    wanted = router(x[mask])
    router.load.zero_()
    found = router(x, mask)
    assert torch.equal(found.ids[mask], wanted.ids) and torch.equal(found.probs[mask], wanted.probs)
    assert (found.ids[~mask] == -1).all() and not found.probs[~mask].any()
    assert torch.equal(found.tokens_per_expert, wanted.tokens_per_expert)
    assert torch.equal(router.load, wanted.tokens_per_expert)
    torch.testing.assert_close(found.loss, wanted.loss)
    gradients = []
    for result in (found, wanted):
        router.weight.grad = None
        (result.loss + result.probs.square().sum()).backward()
        gradients.append(router.weight.grad)
    torch.testing.assert_close(*gradients)
    assert router(x, torch.zeros(64, dtype=torch.bool)).loss == 0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_takes_no_room(policy):
    router, x = make(RouterConfig(capacity_factor=1.0, drop_policy=policy))
    mask = torch.arange(64) >= 20
    found = router(x, mask)
    router.config = RouterConfig()
    every = router(x[mask])
    wanted = drop_plainly(every.ids, every.probs, 16, policy)
    assert torch.equal(found.ids[mask], wanted[0])


def test_of_a_layer():
    torch.manual_seed(0)
    layer = uniep.MoELayer(32, 16, 8, 2, router=RouterConfig(capacity_factor=0.3))
    x = torch.randn(40, 32).bfloat16().requires_grad_()
    mask = torch.arange(40) < 30
    out, found = layer.forward_with_routing(x, token_mask=mask)
    alone = (found.ids < 0).all(-1)
    assert alone[:30].any() and not alone.all()
    assert not out[alone].any() and out[~alone].any(-1).all()
    out.float().square().sum().backward()
    assert not x.grad[30:].any()
    assert torch.equal(out, layer(x, token_mask=mask))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_padding_may_hold_anything(score):
    config = RouterConfig(score=score, n_group=2, topk_group=1, normalize=True, aux_loss=0.1,
                          z_loss=0.01)  # fmt: skip
    layer = uniep.MoELayer(32, 16, 8, 2, router=config)
    tokens = torch.randn(40, 32).bfloat16()
    mask = torch.arange(40) < 30
    found = []
    for padding in (0.0, math.nan, math.inf):
        x = tokens.masked_fill(~mask.unsqueeze(-1), padding).requires_grad_()
        layer.zero_grad()
        out, routing = layer.forward_with_routing(x, token_mask=mask)
        (out.float().square().sum() + routing.loss).backward()
        weights = [p.grad.clone() for p in layer.parameters()]
        assert all(w.isfinite().all() for w in weights)
        found.append([out, routing.ids, routing.probs, routing.loss, x.grad, *weights])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_compiles():
    for policy in ("probs", "position"):
        config = RouterConfig(capacity_factor=0.8, drop_policy=policy, aux_loss=0.1)
        router, x = make(config)
        mask = torch.arange(64) < 50
        wanted = router.eval()(x, mask)
        found = torch.compile(router, fullgraph=True, backend="aot_eager")(x, mask)
        assert torch.equal(found.ids, wanted.ids) and torch.equal(found.probs, wanted.probs)


def test_refuses():
    ids, probs = routing()
    with pytest.raises(ValueError, match="capacity is -1"):
        uniep.drop_over_capacity(ids, probs, -1)
    with pytest.raises(ValueError, match="policy is 'last'"):
        uniep.drop_over_capacity(ids, probs, 1, "last")
    with pytest.raises(ValueError, match=r"\[200, 3\] and topk_probs \[200, 2\]"):
        uniep.drop_over_capacity(ids, probs[:, :2], 1)
    for factor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="capacity_factor is"):
            uniep.expert_capacity(8, 2, 4, factor)
        with pytest.raises(ValueError, match="capacity_factor is"):
            Router(32, 8, 2, RouterConfig(capacity_factor=factor))
    with pytest.raises(ValueError, match="policy is 'last'"):
        Router(32, 8, 2, RouterConfig(drop_policy="last"))
    with pytest.raises(TypeError, match="capacity_factor is '1', a str"):
        uniep.expert_capacity(8, 2, 4, "1")
    with pytest.raises(TypeError, match=r"tokens is 8\.0, a float"):
        uniep.expert_capacity(8.0, 2, 4, 1.0)
    with pytest.raises(ValueError, match="num_experts is 0; it must be at least 1"):
        uniep.expert_capacity(8, 2, 0, 1.0)
    with pytest.raises(TypeError, match="topk_ids is a list"):
        uniep.drop_over_capacity(ids.tolist(), probs, 1)
    with pytest.raises(TypeError, match=r"topk_ids is torch\.float32"):
        uniep.drop_over_capacity(ids.float(), probs, 1)
    with pytest.raises(TypeError, match=r"topk_probs is torch\.int32"):
        uniep.drop_over_capacity(ids, probs.int(), 1)
    with pytest.raises(TypeError, match="capacity is '1', a str"):
        uniep.drop_over_capacity(ids, probs, "1")
    router, x = make(RouterConfig())
    with pytest.raises(TypeError, match=r"token_mask is torch\.int64"):
        router(x, torch.ones(64, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"token_mask has shape \[63\]"):
        router(x, torch.ones(63, dtype=torch.bool))
