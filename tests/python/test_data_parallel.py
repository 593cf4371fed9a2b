"""A layer of ranks beside data parallelism, as docs/parallelism.md has it, and one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from cases import relative
from ranks import cpu_mesh, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import uniep

RANKS, TOKENS = 2, 24


LAYERS = {
    "plain": {},
    "shared experts and main gradients": {"shared_experts": 1, "main_grad": torch.float32},
    "shared experts beside weights that wait": {"shared_experts": 1, "deferred": True},
}


def make_model(group=None, deferred=False, **options):
    torch.manual_seed(5)
    layer = uniep.MoELayer(64, 32, 8, 2, group=group, **options)
    if deferred:
        layer.waiting = uniep.DeferredWeights()
        layer.forward = functools.partial(layer.forward, deferred=layer.waiting)
    return nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64)).bfloat16()


def batch():
    torch.manual_seed(6)
    return torch.randn(RANKS * TOKENS, 64).bfloat16()


def loss_of(model, x):
    return model(x).float().square().mean()


def backward(model, x, parts=1):
    (loss_of(model, x) / parts).backward()
    for module in model.modules():
        if (waiting := getattr(module, "waiting", None)) is not None:
            uniep.backward_weights(waiting)


def gradient_of(weight):
    return getattr(weight, "main_grad", weight.grad)


def with_nothing(model, experts, x):
    backward(model, x, RANKS)
    for weight in model.parameters():
        if id(weight) not in experts:
            dist.all_reduce(weight.grad)
    return model


def with_fsdp(model, experts, x):
    fully_shard(model, mesh=cpu_mesh(), ignored_params=set(experts.values()))
    model.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing while it sums
    backward(model, x)
    for weight in experts.values():
        gradient_of(weight).div_(RANKS)
    return model


def with_fsdp_of_two_dtypes(model, experts, x):
    for layer in model.modules():
        if isinstance(layer, uniep.MoELayer):
            layer.router.float()  # as it is by default
            fully_shard(layer.router, mesh=cpu_mesh())
            layer.router.set_force_sum_reduction_for_comms(True)
    return with_fsdp(model, experts, x)


def with_fsdp_of_each_layer(model, experts, x):
    """Each for itself; one is called by a method of its own."""
    for layer in model:
        fully_shard(layer, mesh=cpu_mesh(), ignored_params=set(experts.values()))
        layer.set_force_sum_reduction_for_comms(True)
    first, layer, last = model
    register_fsdp_forward_method(layer, "forward_with_routing")
    y, routing = layer.forward_with_routing(first(x))
    assert routing.ids.shape == (TOKENS, 2)
    last(y).float().square().mean().backward()
    for weight in experts.values():
        gradient_of(weight).div_(RANKS)
    return model


def ddp(model, experts):
    names = [name for name, weight in model.named_parameters() if id(weight) in experts]
    names += [name for name, _ in model.named_buffers() if name.endswith("router.load")]
    names += [f".{name}" for name in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def with_ddp(model, experts, x):
    wrapped = ddp(model, experts)
    backward(wrapped, x)
    for weight in experts.values():
        gradient_of(weight).div_(RANKS)
    return model


WAYS = (with_nothing, with_fsdp, with_fsdp_of_two_dtypes, with_fsdp_of_each_layer, with_ddp)


def gradients():
    """Of every way, which takes less time than starting processes for it."""
    return [{kind: gradients_of(way, options) for kind, options in LAYERS.items()} for way in WAYS]


def gradients_of(way, options):
    model = make_model(dist.group.WORLD, **options)
    layers = [module for module in model.modules() if isinstance(module, uniep.MoELayer)]
    experts = {id(weight): weight for layer in layers for weight in (layer.w1, layer.w2)}
    x = batch()[dist.get_rank() * TOKENS :][:TOKENS]
    model = way(model, experts, x)
    found = {}
    for name, weight in model.named_parameters():
        gradient = gradient_of(weight)
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


@pytest.fixture(scope="module")
def gradients_by_way():
    return dict(zip(WAYS, zip(*run_ranks(RANKS, gradients), strict=True), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(gradients_by_way, way):
    parts = gradients_by_way[way]
    for kind, options in LAYERS.items():
        model = make_model(**options)
        backward(model, batch())
        for name, weight in model.named_parameters():
            of_ranks = [part[kind][name] for part in parts]
            if name in ("1.w1", "1.w2"):
                found = torch.cat(of_ranks)
            else:
                found = of_ranks[0]
                assert torch.equal(found, of_ranks[1]), (kind, name)
            assert relative(found, gradient_of(weight)) < 2e-2, (kind, name)


def loads_under_ddp():
    """What a router says that it counted, and what it did."""
    model = make_model(dist.group.WORLD)
    layer = model[1]
    wrapped = ddp(model, {id(weight): weight for weight in (layer.w1, layer.w2)})
    counted = torch.zeros_like(layer.router.load)

    def count(_router, _inputs, found):
        counted.add_(found.tokens_per_expert)

    layer.router.register_forward_hook(count)
    for turn in range(3):
        loss_of(wrapped, batch()[(dist.get_rank() + turn) % RANKS :: RANKS]).backward()
    return layer.router.load, counted, gradients_of_a_layer_under_ddp()


def gradients_of_a_layer_under_ddp():
    """Of the experts of a layer that is the model itself, with DDP around it and without."""
    torch.manual_seed(5)
    layer = uniep.MoELayer(64, 32, 8, 2, group=dist.group.WORLD)
    found = []
    for way in (lambda layer: layer, lambda layer: ddp(layer, {id(layer.w1), id(layer.w2)})):
        loss_of(way(layer), batch()[dist.get_rank() :: RANKS]).backward()
        found.append(torch.cat([layer.w1.grad.flatten(), layer.w2.grad.flatten()]))
        layer.zero_grad()
    return found


def experts_that_all_have():
    """Of layers with all experts, whose weights DDP or FSDP2 has in its hands."""
    found = []
    with pytest.raises(ValueError, match="averages") as error:
        backward(DistributedDataParallel(make_model(deferred=True)), batch())
    found.append(str(error.value))

    def sharded(**options):
        model = make_model(**options)
        fully_shard(model, mesh=cpu_mesh())
        model.set_force_sum_reduction_for_comms(True)
        return model

    with pytest.raises(RuntimeError, match="gathered by FSDP2") as error:
        backward(sharded(deferred=True), batch())
    found.append(str(error.value))
    return found, gradients_of_shards(sharded)


def gradients_of_shards(sharded):
    """Of experts that FSDP2 shards: with main gradients, before and behind a load, and without."""
    found = []
    for options in ({"main_grad": torch.float32}, {}):
        model = sharded(**options)
        for _ in range(2):
            model.zero_grad()
            backward(model, batch())
            experts = model[1].w1, model[1].w2
            found.append([gradient_of(weight).full_tensor() for weight in experts])
            model.load_state_dict(model.state_dict())
    return found


def test_gradients_reach_experts_that_all_have_or_are_refused():
    (first, shards), (second, _) = run_ranks(RANKS, experts_that_all_have)
    assert first == second
    assert all("ignore" in sentence for sentence in first)
    for found in shards:
        assert all(map(torch.equal, found, shards[-1])) and all(map(torch.any, found))


def test_routers_under_ddp_count_their_own_tokens():
    found = run_ranks(RANKS, loads_under_ddp)
    for load, counted, (alone, wrapped) in found:
        assert torch.equal(load, counted)
        assert torch.equal(alone, wrapped)
    assert not torch.equal(found[0][0], found[1][0])
