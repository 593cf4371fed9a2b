"""Clipping by the norm of all experts: of the same bits on all ranks, however many there are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize, prune

import uniep

TOKENS = 24
MOST = 0.05


class Model(nn.Module):
    def __init__(self, group: object = None, **options: object) -> None:
        super().__init__()
        torch.manual_seed(3)
        more = {"dtype": torch.float32, **options}
        if "workspace" not in more:  # which has its own
            more = {"bias": True, "max_tokens": 2 * TOKENS, **more}
        self.moe = uniep.MoELayer(64, 32, 8, 2, group=group, **more)
        self.dense = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.dense(x))

    def experts(self) -> set[Tensor]:
        return {self.moe.w1, self.moe.w2, self.moe.b1, self.moe.b2}

    def others(self) -> list[Tensor]:
        return [weight for weight in self.parameters() if weight not in self.experts()]


def run(model: Model) -> None:
    """Gradients of the tokens of two ranks; the model without a group has all of them."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2 * TOKENS, 64, generator=g)
    size = model.moe.size
    own = x[model.moe.rank * 2 * TOKENS // size :][: 2 * TOKENS // size]
    with torch.autocast("cpu", torch.bfloat16):
        out = model(own)
    out.float().square().sum().backward()


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def of_ranks(group: str) -> tuple[Tensor, Tensor]:
    """The norm, and what of the experts' gradients is left; all others are taken as alike."""
    groups = {"group": dist.group.WORLD}
    if group == "mesh":
        groups["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "ranks"))
    model = Model(groups[group])
    run(model)
    for weight in model.others():
        weight.grad = torch.ones_like(weight)
    norm = uniep.clip_grad_norm_(model, MOST)
    return norm, model.moe.w1.grad


def alone() -> list[Tensor]:
    """Norms of layers that this process has whole: WORLD is not their group."""
    workspace = uniep.Workspace(None, 64, 32, 8, 2, 2 * TOKENS, bias=True, device="cpu")
    norms = []
    for options in ({}, {"group": uniep.Group(device="cpu")}, {"workspace": workspace}):
        model = Model(**options)
        run(model)
        norms.append(uniep.clip_grad_norm_(model, MOST))
    return norms


def test_a_group_of_one_process_is_not_all_of_them() -> None:
    wanted, *others = alone()
    for found in (others, *run_ranks(2, alone)):
        for norm in found:
            assert torch.equal(norm, wanted)


@pytest.mark.parametrize("group", ["group", "mesh"])
def test_ranks_clip_by_the_norm_of_one_process(group: str) -> None:
    model = Model()
    run(model)
    for weight in model.others():
        weight.grad = torch.ones_like(weight)
    squares = [weight.grad.double().square().sum() for weight in model.parameters()]
    norm = uniep.clip_grad_norm_(model, MOST)
    assert norm > MOST
    torch.testing.assert_close(norm.double(), sum(squares).sqrt(), rtol=1e-6, atol=0)
    after = [weight.grad.double().square().sum() for weight in model.parameters()]
    torch.testing.assert_close(float(sum(after).sqrt()), MOST, rtol=1e-4, atol=0)
    found = run_ranks(2, of_ranks, group)
    for of_rank, _ in found:
        assert torch.equal(of_rank, norm)
    assert torch.equal(torch.cat([of_w1 for _, of_w1 in found]), model.moe.w1.grad)


def test_what_is_short_stays() -> None:
    model = Model()
    run(model)
    before = gradients(model)
    uniep.clip_grad_norm_(model, 1e6)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, before[name]), name
    assert uniep.clip_grad_norm_(Model(), 1.0) == 0
    with pytest.raises(ValueError, match="max_norm is 0; more than 0"):
        uniep.clip_grad_norm_(model, 0)
    with pytest.raises(TypeError, match=r"module is a generator; it must be a torch.nn.Module"):
        uniep.clip_grad_norm_(model.parameters(), 1.0)


def test_weights_that_layers_share_count_once() -> None:
    first, second = Model().moe, Model().moe
    second.w1, second.w2 = first.w1, first.w2
    model = nn.ModuleList([first, second])
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    wanted = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(uniep.clip_grad_norm_(model, MOST), wanted)
    after = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(float(after), MOST, rtol=1e-4, atol=0)


def test_main_gradients_count() -> None:
    model = Model(main_grad=torch.float32)
    run(model)
    assert model.moe.w1.grad is None
    wanted = float(model.moe.w1.main_grad.norm())
    model.dense.zero_grad()
    assert float(uniep.clip_grad_norm_(model, MOST)) >= wanted
    assert float(model.moe.w1.main_grad.norm()) < MOST


@pytest.mark.parametrize("frozen", ["w1", "all"])
def test_frozen_experts_do_not_count(frozen: str) -> None:
    model = Model(main_grad=torch.float32)
    for name in ("w1", "w2", "b1", "b2"):
        if frozen in (name, "all") and (weight := getattr(model.moe, name)) is not None:
            weight.requires_grad_(False)
    run(model)
    if frozen == "all":
        assert not model.moe.w1.main_grad.any() and not model.moe.w2.main_grad.any()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = [getattr(weight, "main_grad", weight.grad) for weight in trained]
    wanted = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(uniep.clip_grad_norm_(model, MOST), wanted)


def with_gradients_of_some() -> list[Tensor]:
    """A rank lacks gradients that another has: one weight's, or all."""
    norms = []
    for lacking in (["w1"], ["w1", "w2", "b1", "b2"]):
        model = Model(dist.group.WORLD)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        for name in lacking if dist.get_rank() == 1 else ():
            getattr(model.moe, name).grad = None
        squares = sum(w.grad.double().square().sum() for w in model.experts() if w.grad is not None)
        of_all = torch.as_tensor(squares, dtype=torch.float64)
        dist.all_reduce(of_all)
        of_others = sum(w.grad.double().square().sum() for w in model.others())
        norm = uniep.clip_grad_norm_(model, MOST)
        torch.testing.assert_close(norm.double(), (of_all + of_others).sqrt(), rtol=1e-6, atol=0)
        norms.append(norm)
    return norms


def test_ranks_may_lack_gradients_that_others_have() -> None:
    for norms in zip(*run_ranks(2, with_gradients_of_some), strict=True):
        assert torch.equal(*norms)


def beside_fsdp() -> tuple[Tensor, Tensor]:
    model = Model(dist.group.WORLD)
    fully_shard(model, mesh=cpu_mesh(), ignored_params=model.experts())
    run(model)
    of_experts = sum(weight.grad.double().square().sum() for weight in model.experts())
    dist.all_reduce(of_experts)  # each rank has others
    of_others = sum(w.grad.full_tensor().double().square().sum() for w in model.others())
    return uniep.clip_grad_norm_(model, MOST), (of_experts + of_others).sqrt()


def test_gradients_of_fsdp_count_once() -> None:
    found = run_ranks(2, beside_fsdp)
    for norm, wanted in found:
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)
    assert torch.equal(found[0][0], found[1][0])


def sharded_experts(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of experts that FSDP2 has sharded, what it has to be, and what is left of it."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    model = Model(mesh["ep"])
    fully_shard(model.moe, mesh=mesh["dp"], ignored_params={*model.others(), model.moe.b2})
    run(model)
    for weight in model.others():
        weight.grad = torch.zeros_like(weight)

    def norm() -> Tensor:
        experts = model.experts()  # a set, whose order is another on each rank
        found = [weight for weight in model.parameters() if weight in experts]
        whole = [getattr(w.grad, "full_tensor", lambda w=w: w.grad)() for w in found]
        squares = sum(gradient.double().square().sum() for gradient in whole)
        dist.all_reduce(squares, group=mesh["ep"].get_group())  # each rank of ep has others
        return squares.sqrt()

    wanted = norm()
    return uniep.clip_grad_norm_(model, MOST), wanted, norm()


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)], ids=str)
def test_experts_that_are_sharded_count_once(shape: tuple[int, int]) -> None:
    found = run_ranks(shape[0] * shape[1], sharded_experts, shape)
    for norm, wanted, left in found:
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(float(left), MOST, rtol=1e-4, atol=0)
        assert torch.equal(norm, found[0][0])


def of_computed_weights() -> list[str]:
    """What clipping says to parametrized and to pruned experts that two ranks share."""
    found = []
    for compute in (
        lambda layer: parametrize.register_parametrization(layer, "w1", nn.Identity()),
        lambda layer: prune.random_unstructured(layer, "w1", 0.5),
    ):
        model = Model(dist.group.WORLD)
        compute(model.moe)
        run(model)
        before = gradients(model)
        with pytest.raises(ValueError, match=r"moe\.w1 is no parameter") as refused:
            uniep.clip_grad_norm_(model, MOST)
        assert all(torch.equal(before[name], left) for name, left in gradients(model).items())
        found.append(str(refused.value))
    return found


def test_computed_experts_are_refused_where_ranks_share_them() -> None:
    """Each rank would find a norm of its own, of what its experts are computed of."""
    ranks = run_ranks(2, of_computed_weights)
    assert ranks[0] == ranks[1]
    model = Model()
    parametrize.register_parametrization(model.moe, "w1", nn.Identity())
    plain = Model()
    norms = []
    for one in (model, plain):
        run(one)
        norms.append(uniep.clip_grad_norm_(one, MOST))
    assert norms[0] == pytest.approx(float(norms[1]), rel=1e-6)


def test_the_norm_is_fp32_whatever_the_default_type() -> None:
    model = Model()
    torch.set_default_dtype(torch.float64)
    try:
        assert uniep.clip_grad_norm_(nn.Linear(2, 2), MOST).dtype == torch.float32
        model.dense(torch.ones(64, dtype=torch.float32)).sum().backward()  # experts have none
        assert uniep.clip_grad_norm_(model, MOST).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
