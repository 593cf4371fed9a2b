"""Routers against what their models define."""

from __future__ import annotations

import pytest
import torch

import uniep
from uniep import Router, RouterConfig


def make(config, experts=16, topk=4, hidden=32, tokens=64):
    torch.manual_seed(0)
    router = Router(hidden, experts, topk, config)
    with torch.no_grad():
        router.weight.normal_()
    return router, torch.randn(tokens, hidden)


def by_expert(ids, probs, experts=16):
    return torch.zeros(ids.shape[0], experts).scatter(1, ids, probs)


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax(normalize):
    router, x = make(RouterConfig(normalize=normalize))
    found = router(x)
    scores = torch.softmax(x @ router.weight.T, -1)
    probs, ids = scores.topk(4)
    if normalize:
        probs = probs / probs.sum(-1, keepdim=True)
    torch.testing.assert_close(by_expert(found.ids, found.probs), by_expert(ids, probs))
    assert found.loss is None


def test_deepseek_v3():
    config = RouterConfig("sigmoid", bias=True, n_group=4, topk_group=2, scaling_factor=2.5)
    router, x = make(config)
    router.bias.normal_()
    found = router(x)
    scores = torch.sigmoid(x @ router.weight.T)
    for t in range(x.shape[0]):
        choice = scores[t] + router.bias
        best = sorted(range(4), key=lambda g: -choice[4 * g : 4 * g + 4].sort().values[-2:].sum())[
            :2
        ]
        allowed = [e for e in range(16) if e // 4 in best]
        ids = sorted(sorted(allowed, key=lambda e: -choice[e])[:4])
        assert sorted(found.ids[t].tolist()) == ids
        probs = 2.5 * scores[t, ids] / scores[t, ids].sum()
        order = found.ids[t].argsort()
        torch.testing.assert_close(found.probs[t, order], probs)


def test_load_is_counted():
    router, x = make(RouterConfig())
    found = router(x)
    wanted = torch.bincount(found.ids.flatten(), minlength=16)
    assert torch.equal(found.tokens_per_expert, wanted)
    assert torch.equal(router.load, wanted)
    router(x)
    assert torch.equal(router.load, 2 * wanted)
    router.eval()(x)
    assert torch.equal(router.load, 2 * wanted)
    assert "load" not in router.state_dict()


def test_losses():
    config = RouterConfig(aux_loss=0.5, z_loss=0.25)
    router, x = make(config)
    found = router(x)
    logits = x @ router.weight.T
    share = torch.bincount(found.ids.flatten(), minlength=16) / (64 * 4)
    aux = 16 * (share * logits.softmax(-1).mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(found.loss, 0.5 * aux + 0.25 * z)
    found.loss.backward()
    assert router.weight.grad.isfinite().all() and router.weight.grad.any()


def test_an_even_load_has_an_auxiliary_loss_of_one():
    router = Router(16, 16, 1, RouterConfig(aux_loss=1.0))
    with torch.no_grad():
        router.weight.copy_(1e-4 * torch.eye(16))
    torch.testing.assert_close(router(torch.eye(16)).loss, torch.tensor(1.0))


def test_the_bias_moves_towards_an_even_load():
    router, x = make(RouterConfig("sigmoid", bias=True))
    router(x)
    load = router.load.clone().float()
    router.update_bias(0.125)
    assert torch.equal(router.bias, 0.125 * torch.sign(load.mean() - load))
    assert not router.load.any()
    first = (load - load.mean()).abs().mean()
    for _ in range(300):
        router(x)
        router.update_bias(0.003)
    assert (router(x).tokens_per_expert - load.mean()).abs().mean() < 0.4 * first
    with pytest.raises(ValueError, match="no bias"):
        make(RouterConfig())[0].update_bias(0.1)


@pytest.mark.parametrize(
    ("config", "topk", "words"),
    [
        (RouterConfig("tanh"), 2, "score is 'tanh'"),
        (RouterConfig(), 17, "topk is 17"),
        (RouterConfig(), 0, "topk is 0"),
        (RouterConfig(n_group=3), 2, "n_group is 3"),
        (RouterConfig(n_group=16, topk_group=4), 2, "n_group is 16"),
        (RouterConfig(n_group=4, topk_group=5), 2, "topk_group is 5"),
        (RouterConfig(n_group=8, topk_group=1), 4, "only 2 experts"),
    ],
)
def test_refuses(config, topk, words):
    with pytest.raises(ValueError, match=words):
        Router(32, 16, topk, config)


def test_computes_in_fp32_under_autocast():
    router, x = make(RouterConfig())
    wanted = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = router(x)
    assert found.probs.dtype == torch.float32 and torch.equal(found.probs, wanted.probs)


def test_compiles():
    for config in (
        RouterConfig(aux_loss=0.1, z_loss=0.1),
        RouterConfig("sigmoid", bias=True, n_group=4, topk_group=2),
    ):
        router, x = make(config)
        wanted = router.eval()(x)
        found = torch.compile(router, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(found.ids, wanted.ids) and torch.equal(found.probs, wanted.probs)
    assert uniep.RouterConfig is RouterConfig
