"""On a GPU: routers, capacity and experts that compute nothing have the CPU's choices and bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cases import assert_same, gradients, make_case, relative

import uniep
import uniep.plain
from uniep import Router, RouterConfig
from uniep.zero_experts import add_identity, split

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_drops_what_it_drops_on_a_cpu(policy: str) -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 256, (4096, 8), generator=g)
    probs = torch.randint(1, 40, (4096, 8), generator=g) / 40  # many are equal
    wanted = uniep.drop_over_capacity(ids, probs, 100, policy)  # type: ignore[arg-type]
    ids, probs = ids.to(DEVICE), probs.to(DEVICE)
    with nothing_waits():
        found = uniep.drop_over_capacity(ids, probs, 100, policy)  # type: ignore[arg-type]
    assert torch.equal(found[0].cpu(), wanted[0]) and torch.equal(found[1].cpu(), wanted[1])


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [1, 8])
def test_a_router_breaks_ties_and_waits_for_nothing(score: str, groups: int) -> None:
    config = RouterConfig(
        score,  # type: ignore[arg-type]
        bias=True,
        n_group=groups,
        topk_group=max(groups // 2, 1),
        aux_loss=0.1,
        z_loss=0.1,
        capacity_factor=1.0,
    )
    router = Router(1, 256, 8, config).to(DEVICE)
    with torch.no_grad():  # logits are the same on both devices, and few values differ
        router.weight.copy_(torch.randint(-3, 4, (256, 1)) / 2)
    x = torch.randint(-2, 3, (2048, 1)).float().to(DEVICE)
    mask = torch.arange(2048, device=DEVICE) < 2000
    with nothing_waits():
        found = router(x, mask)
        (found.loss + found.probs.sum()).backward()
        router.update_bias(0.1)
    wanted = Router(1, 256, 8, config)
    wanted.load_state_dict({**router.state_dict(), "bias": torch.zeros(256)})
    on_cpu = wanted(x.cpu(), mask.cpu())
    assert torch.equal(found.tokens_per_expert.cpu(), on_cpu.tokens_per_expert)
    wanted.update_bias(0.1)
    assert torch.equal(router.bias.cpu(), wanted.bias)


@pytest.mark.parametrize("kind", ["identity", "zero"])
def test_zero_experts_have_the_bits_of_plain_pytorch(kind: str) -> None:
    case = make_case(tokens=300, hidden=1096, topk=4, dropped=True)
    case.ids[::3, 1] = 8 + case.ids[::3, 1].clamp(min=0) % 4
    identity = (case.ids >= 8).to(DEVICE)
    case = case.to(DEVICE).requires_grad()

    def run(function):
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        return gradients(case, function(*tensors, zero_experts=4, zero_expert_type=kind))

    found, wanted = run(uniep.moe), run(uniep.plain.moe)
    assert_same([*found[:2], wanted[2], *found[3:]], wanted)
    assert relative(found[2], wanted[2]) < 1e-5
    assert bool(found[2][identity].any()) == (kind == "identity")


def test_identities_have_the_cpus_bits_and_wait_for_nothing() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 12, (700, 4))
    inputs = [torch.randn(700, 7168).bfloat16() for _ in range(3)] + [torch.rand(700, 4)]

    def run(device):
        routed, x, d_out, probs = (t.to(device) for t in inputs)
        routed, x, probs = (t.requires_grad_() for t in (routed, x, probs))
        there = ids.to(device)
        with nothing_waits():
            out = add_identity(routed, x, split(there, probs, 8, 4))
            out.backward(d_out)
        return [t.detach().cpu() for t in (out, x.grad, probs.grad, routed.grad)]

    for a, b in zip(run(DEVICE), run("cpu"), strict=True):
        assert torch.equal(a, b)
