"""Routers against what their models define."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import cpu_mesh, run_ranks
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [1, 4])
def test_of_equal_scores_the_first_experts_come_first(score, groups):
    router, x = make(RouterConfig(score, n_group=groups, topk_group=max(groups // 2, 1)))
    with torch.no_grad():
        router.weight.zero_()
    assert (router(x).ids == torch.arange(4)).all()
    with torch.no_grad():
        router.weight[9:11] = 1  # equal among each other, above or below all others
    above = x.sum(-1) > 0
    assert (router(x).ids[above, :2] == torch.tensor([9, 10])).all()
    below = router(x).ids[~above]
    assert (below == torch.arange(4)).all()


def test_sqrt_softplus_far_from_zero():
    """Against float64, where softplus is 0 in fp32, too: no gradient is NaN."""
    router = Router(1, 9, 9, RouterConfig("sqrtsoftplus", normalize=False))
    logits = torch.tensor([-170.0, -104.0, -50.0, -20.5, -19.5, -3.0, 0.0, 19.5, 80.0])
    with torch.no_grad():
        router.weight.copy_(logits[:, None])
    found = router(torch.ones(1, 1))
    probs = by_expert(found.ids, found.probs, 9)[0]
    z = logits.double().requires_grad_()
    wanted = torch.log1p(z.exp()).sqrt()
    torch.testing.assert_close(probs, wanted.float(), rtol=1e-6, atol=0)
    probs.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(router.weight.grad[:, 0], z.grad.float(), rtol=1e-5, atol=0)


def test_the_best_group_by_its_best_expert():
    router, x = make(RouterConfig(n_group=4, topk_group=1, group_score="max", normalize=False))
    found = router(x)
    scores = torch.softmax(x @ router.weight.T, -1)
    assert torch.equal(found.ids[:, 0], scores.argmax(-1))
    assert (found.ids // 4 == found.ids[:, :1] // 4).all()
    router.config = RouterConfig(n_group=4, topk_group=1, normalize=False)
    assert not torch.equal(found.ids, router(x).ids)


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


def test_in_a_checkpointed_layer_tokens_count_twice_which_moves_no_bias():
    torch.manual_seed(4)
    options = {"router": RouterConfig("sigmoid", bias=True), "max_tokens": 24}
    layer = uniep.MoELayer(64, 32, 8, 2, **options).bfloat16()
    x = torch.randn(24, 64).bfloat16()
    layer(x)
    once = layer.router.load.clone()
    layer.router.update_bias(0.125)
    bias = layer.router.bias.clone()
    layer.router.bias.zero_()
    checkpoint(layer, x, use_reentrant=False).float().sum().backward()
    assert torch.equal(layer.router.load, 2 * once)
    layer.router.update_bias(0.125)
    assert bias.any() and torch.equal(layer.router.bias, bias)


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
    router = Router(16, 16, 1, RouterConfig(aux_loss=1.0, normalize=False))
    with torch.no_grad():
        router.weight.copy_(1e-4 * torch.eye(16))
    torch.testing.assert_close(router(torch.eye(16)).loss, torch.tensor(1.0))


def test_the_bias_moves_towards_an_even_load():
    router, x = make(RouterConfig("sigmoid", bias=True))
    router(x)
    load = router.load.clone().float()
    router.update_bias(0.125)
    assert torch.equal(router.bias, 0.125 * torch.sign(load.mean() - load))
    router.load.copy_(torch.tensor([2**25 + 1] * 15 + [2**25 + 2]))  # fp32 has not all of these
    before = router.bias.clone()
    router.update_bias(0.125)
    assert torch.equal(router.bias - before, torch.tensor([0.125] * 15 + [-0.125]))
    router.bias.copy_(before)
    assert not router.load.any()
    first = (load - load.mean()).abs().mean()
    for _ in range(300):
        router(x)
        router.update_bias(0.003)
    assert (router(x).tokens_per_expert - load.mean()).abs().mean() < 0.4 * first
    with pytest.raises(ValueError, match="no bias"):
        make(RouterConfig())[0].update_bias(0.1)


def test_the_bias_stays_fp32():
    layer = uniep.MoELayer(32, 16, 16, 4, router=RouterConfig("sigmoid", bias=True))
    layer.router.bias.normal_()
    wanted = layer.router.bias.clone()
    layer.to(torch.bfloat16).float().half().to(torch.bfloat16)
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.router.bias.dtype == torch.float32 and torch.equal(layer.router.bias, wanted)
    assert layer.router(torch.randn(8, 32)).probs.dtype == torch.float32
    with torch.device("meta"):
        router = Router(32, 16, 4, RouterConfig(bias=True))
    router.bfloat16().to_empty(device="cpu")
    assert router.bias.dtype == torch.float32 and router.bias.device.type == "cpu"


def _update_together() -> torch.Tensor:
    import torch.distributed as dist

    router, x = make(RouterConfig("sigmoid", bias=True))
    router(x[40:] if dist.get_rank() else x[:40])
    groups = (dist.group.WORLD, uniep.Group(dist.group.WORLD, device="cpu"), cpu_mesh())
    load, bias = router.load.clone(), router.bias.clone()
    for group in groups:
        router.load.copy_(load)
        router.bias.copy_(bias)
        router.update_bias(0.125, group)
    assert not router.load.any()
    return router.bias


def test_ranks_update_the_bias_by_the_load_of_all():
    router, x = make(RouterConfig("sigmoid", bias=True))
    router(x)
    router.update_bias(0.125)
    assert router.bias.unique().numel() > 1
    for bias in run_ranks(2, _update_together):
        assert torch.equal(bias, router.bias)


@pytest.mark.parametrize(
    ("config", "topk", "words"),
    [
        (RouterConfig("tanh"), 2, "score is 'tanh'"),
        (RouterConfig(group_score="mean"), 2, "group_score is 'mean'"),
        (RouterConfig(), 17, "topk is 17"),
        (RouterConfig(), 0, "topk is 0"),
        (RouterConfig(n_group=3), 2, "n_group is 3"),
        (RouterConfig(n_group=16, topk_group=4), 2, "n_group is 16"),
        (RouterConfig(n_group=4, topk_group=5), 2, "topk_group is 5"),
        (RouterConfig(n_group=8, topk_group=1), 4, "only 2 experts"),
        (RouterConfig(scaling_factor=float("nan")), 2, "scaling_factor is nan; it must be finite"),
        (RouterConfig(z_loss=float("inf")), 2, "z_loss is inf; it must be finite"),
        (RouterConfig(aux_loss=float("-inf")), 2, "aux_loss is -inf; it must be finite"),
    ],
)
def test_refuses(config, topk, words):
    with pytest.raises(ValueError, match=words):
        Router(32, 16, topk, config)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *((name, "no") for name in ("normalize", "bias", "logit_bias")),
        *((name, "0.1") for name in ("scaling_factor", "aux_loss", "z_loss", "capacity_factor")),
        *((name, 2.0) for name in ("n_group", "topk_group")),
        ("aux_loss", [0.1]),
        ("scaling_factor", torch.ones(2)),
    ],
)
def test_refuses_other_types(field, wrong):
    with pytest.raises(TypeError, match=rf"^{field} is .*, a {type(wrong).__name__}; it must be"):
        Router(32, 16, 2, RouterConfig(**{field: wrong}))


def test_numbers_of_a_router_are_whole():
    for numbers, name in (((32.0, 16, 2), "hidden"), ((32, 16.0, 2), "num"), ((32, 16, "2"), "to")):
        with pytest.raises(TypeError, match=f"^{name}.*; it must be an int"):
            Router(*numbers)
    for score in (["softmax"], None):
        with pytest.raises(ValueError, match="score is "):
            Router(32, 16, 2, RouterConfig(score))


def test_computes_in_fp32_under_autocast():
    router, x = make(RouterConfig())
    wanted = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = router(x)
    assert found.probs.dtype == torch.float32 and torch.equal(found.probs, wanted.probs)


def gradients_under_autocast(function, router, x):
    """Of all that it returns; no gradient is exact in bf16."""
    router.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function(x)
    loss = (found.probs * torch.linspace(-1, 1, found.probs.shape[-1])).sum()
    (loss if found.loss is None else loss + found.loss).backward()
    return [found.probs.detach(), x.grad, *(weight.grad for weight in router.parameters())]


ODD = torch.randn(3, 32, 5, generator=torch.Generator().manual_seed(7)).transpose(1, 2)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (RouterConfig(aux_loss=0.1, z_loss=0.1), (64, 32)),
        (RouterConfig("sigmoid", logit_bias=True, bias=True), (64, 32)),
        (RouterConfig("sqrtsoftplus", logit_bias=True, aux_loss=0.1), (4, 16, 32)),
        (RouterConfig(), (2, 2, 16, 32)),
        (RouterConfig(logit_bias=True), (32,)),
        (RouterConfig(), "strides"),
        (RouterConfig(logit_bias=True), "strides"),
    ],
    ids=str,
)
def test_compiled_under_autocast_gradients_are_fp32(config, shape):
    """PyTorch traces the backward of a graph under the autocast around its call."""
    router, x = make(config, tokens=64)
    x = ODD if shape == "strides" else x.flatten()[: torch.Size(shape).numel()].view(shape)
    wanted = gradients_under_autocast(router, router, x)
    torch.compiler.reset()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    found = gradients_under_autocast(compiled, router, x)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(found[2], found[2].bfloat16().float())


def test_compiled_under_autocast_for_any_number_of_tokens_and_in_a_checkpoint():
    router, x = make(RouterConfig(aux_loss=0.1, logit_bias=True))

    def function(x):
        return checkpoint(router, x.tanh(), use_reentrant=False)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (64, 40, 33):
        wanted = gradients_under_autocast(function, router, x[:tokens])
        found = gradients_under_autocast(compiled, router, x[:tokens])
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


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


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        RouterConfig(),
        RouterConfig("sigmoid", bias=True, n_group=4, topk_group=2, aux_loss=0.1, z_loss=0.1),
        RouterConfig(n_group=4, topk_group=2, group_score="max", capacity_factor=1.0),
        RouterConfig("sqrtsoftplus", logit_bias=True, capacity_factor=1.0, drop_policy="position"),
    ],
    ids=str,
)
def test_no_tokens(config, shape):
    router, _ = make(config)
    found = router(torch.zeros(shape, requires_grad=True))
    assert found.ids.shape == found.probs.shape == (*shape[:-1], 4)
    assert int(found.tokens_per_expert.sum()) == 0
    loss = found.probs.sum() if found.loss is None else found.probs.sum() + found.loss
    loss.backward()
    assert torch.isfinite(router.weight.grad).all()


def test_the_bias_is_fp32_whatever_happens():
    config = RouterConfig("sigmoid", bias=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = Router(32, 16, 4, config)
    finally:
        torch.set_default_dtype(before)
    assert router.bias.dtype == torch.float32
    state = {name: value.bfloat16() for name, value in router.state_dict().items()}
    router.load_state_dict(state, assign=True)
    assert router.bias.dtype == torch.float32


def test_a_router_made_without_memory_counts_from_zero():
    config = RouterConfig("sigmoid", bias=True)
    full, x = make(config)
    router = Router(32, 16, 4, config, device="meta")
    router._apply(lambda tensor: torch.full_like(tensor, 7, device="cpu"))  # as to_empty may leave
    router.load_state_dict(full.state_dict())
    wanted = full(x).tokens_per_expert
    router(x)
    assert torch.equal(router.load, wanted)


def test_a_router_that_gets_its_memory_by_assignment_counts_from_zero():
    config = RouterConfig("sigmoid", bias=True)
    full, x = make(config)
    router = Router(32, 16, 4, config, device="meta")
    with pytest.raises(ValueError, match=r"load is on the meta device.*assign=True"):
        router.update_bias(0.125)
    state = {name: value.clone() for name, value in full.state_dict().items()}
    router.load_state_dict(state, assign=True)
    assert not router.load.is_meta and not router.load.any()
    for each in (full, router):
        each(x)
        each.update_bias(0.125)
    assert router.bias.any() and torch.equal(router.bias, full.bias)


def test_a_router_whose_memory_is_made_anew_counts_from_zero():
    router, x = make(RouterConfig())
    router(x)
    counted = router.load.clone()
    assert torch.equal(router.to("cpu", torch.bfloat16).float().load, counted)
    assert torch.equal(router.share_memory().load, counted)
    router._apply(lambda tensor: torch.full_like(tensor, 7, device="cpu"))  # as to_empty may leave
    assert not router.load.any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_one_expert_of_weight_one_teaches_the_router_nothing(score):
    x = torch.randn(64, 32)
    for normalize in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer = uniep.MoELayer(32, 16, 8, 1, router=RouterConfig(score, normalize))
        found = [str(warning.message) for warning in caught]
        assert [text.startswith("topk is 1 and normalize is True") for text in found] == (
            [True] if normalize else []
        )
        layer(x.bfloat16()).float().square().sum().backward()
        assert (layer.router.weight.grad.abs().max() > 1e-3) == (not normalize)


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (1, 1)])
def test_no_other_router_warns(experts, topk):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Router(32, experts, topk)
