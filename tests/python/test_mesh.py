"""A mesh of hosts and ranks: the bits of one group, training, checkpoints, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, gradients, make_case, step
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import uniep
from uniep import hosts as hosts_module

TOKENS = 60
EXPERTS = 12


def case_of(**options):
    return make_case(tokens=TOKENS, experts=EXPERTS, topk=4, dropped=True, **options)


def mesh_of(hosts: int):
    shape = (hosts, dist.get_world_size() // hosts)
    return init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "ranks"))


def sums_of(hosts: int) -> dict[str, object]:
    return {"combine_groups": hosts, "combine_partials": "bf16"}


def bits(hosts: int):
    """One step in several ways."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(hosts)
    options = {"group": mesh, "max_tokens": TOKENS, **sums_of(hosts)}

    def part():
        return case_of().part(rank, size)

    found = {"plain": step(part(), **options), "again": step(part(), **options)}
    compiled = torch.compile(uniep.moe, backend="aot_eager")
    case = part().requires_grad()
    out = compiled(case.x, case.ids, case.probs, case.w1, case.w2, **options)
    found["compiled"] = gradients(case, out)
    found["nothing saved"] = step(part(), save="none", recompute_h=True, **options)
    found["exact rows"] = step(part(), save="tokens", exact_rows=True, **options)
    found["schedule"] = step(part(), schedule="pipelined:2", **options)
    found["row pool"] = step(part(), row_pool=1 << 22, **options)
    found["after"] = step(part(), probs="after", **options)

    case = part().requires_grad()
    deferred = uniep.DeferredWeights()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, deferred=deferred, **options)
    out.backward(case.dy)
    uniep.backward_weights(deferred)
    found["deferred"] = [out.detach(), case.x.grad, case.probs.grad, case.w1.grad, case.w2.grad]

    case = part().requires_grad()
    main = tuple(torch.ones(w.shape, dtype=torch.float32) for w in (case.w1, case.w2))
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, main_grads=main, **options)
    out.backward(case.dy)
    found["main_grads"] = [out.detach(), case.x.grad, case.probs.grad, *main]

    case = part().requires_grad()
    case.w1, case.w2 = list(case.w1.detach()), list(case.w2.detach())
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, **options)
    found["a tensor an expert"] = out.detach()
    with torch.autocast("cpu", torch.bfloat16):
        case = part().requires_grad()
        found["autocast"] = uniep.moe(
            case.x.float(), case.ids.long(), case.probs, case.w1.float(), case.w2.float(), **options
        ).detach()
    return found


@pytest.mark.parametrize(("hosts", "size"), [(2, 2), (2, 4), (3, 6), (2, 6), (4, 4)])
def test_the_bits_of_one_process(hosts, size):
    results = run_ranks(size, bits, hosts)
    main = tuple(torch.ones(w.shape, dtype=torch.float32) for w in (case_of().w1, case_of().w2))
    for name in results[0]:
        parts = [result[name] for result in results]
        if torch.is_tensor(parts[0]):
            assert torch.equal(torch.cat(parts), step(case_of(), **sums_of(hosts))[0]), name
            continue
        more = {"probs": "after"} if name == "after" else {}
        wanted = step(case_of(), **more, **sums_of(hosts))
        if name == "main_grads":
            case = case_of().requires_grad()
            tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
            uniep.moe(*tensors, main_grads=main, **sums_of(hosts)).backward(case.dy)
            wanted[3:] = main
        assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], wanted)


def arithmetic():
    """Biases, another activation, experts that compute nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def layer():
        case = case_of(seed=4)
        case.ids[case.ids == 3] = EXPERTS  # an identity
        return case

    g = torch.Generator().manual_seed(1)
    b1 = torch.randn(EXPERTS, 64, generator=g).bfloat16()
    b2 = torch.randn(EXPERTS, 64, generator=g).bfloat16()
    options = {"zero_experts": 2, "activation": "gpt_oss", **sums_of(2)}
    whole = step(layer(), b1=b1, b2=b2, **options)
    each = EXPERTS // size
    own = slice(rank * each, (rank + 1) * each)
    mine = step(
        layer().part(rank, size),
        group=mesh_of(2),
        max_tokens=TOKENS,
        b1=b1[own].clone(),
        b2=b2[own].clone(),
        **options,
    )
    return [tensor.detach() for tensor in whole], mine


def test_other_arithmetic():
    results = run_ranks(4, arithmetic)
    parts = [mine for _, mine in results]
    assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], results[0][0])


def train(hosts: int | None):
    """Losses of a layer, over a mesh or in one group of all; and what a checkpoint gives back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if hosts is None else mesh_of(hosts)
    sums = sums_of(hosts or 2)
    torch.manual_seed(0)
    layer = uniep.MoELayer(64, 32, EXPERTS, 4, group=group, max_tokens=24, **sums)
    assert (layer.rank, layer.size) == (rank, size)
    optimizer = torch.optim.SGD([layer.w1, layer.w2], lr=1e-4)
    g = torch.Generator().manual_seed(10 + rank)
    x, target = torch.randn(2, 24 - rank, 64, generator=g).bfloat16()
    losses = []
    for _ in range(4):
        loss = (layer(x) - target).float().square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = uniep.checkpoint.distributed_state_dict(layer)
    whole = state["w1"].full_tensor().detach()
    copy.deepcopy(layer)
    return torch.stack(losses), whole


def test_a_layer_trains_as_in_one_group():
    one, two = run_ranks(4, train, None), run_ranks(4, train, 2)
    for (losses, weights), (found, whole) in zip(one, two, strict=True):
        assert losses[-1] < losses[0]
        assert torch.equal(found, losses)
        assert torch.equal(whole, weights)


def refused():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(2)
    found = {}

    def sentence(case, **options):
        try:
            step(case, **{"group": mesh, "max_tokens": TOKENS, **options})
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "nothing was raised"

    case = case_of().part(rank, size)
    found["combine_groups=2"] = sentence(case)
    found["combine_partials='bf16'"] = sentence(case, combine_groups=2)
    found["apart"] = sentence(case, shared_w1=case.w1.detach()[:1], shared_w2=case.w2.detach()[:1])
    found["max_tokens is 1"] = sentence(case, max_tokens=1, **sums_of(2))
    if rank == 3:
        case.ids[0, 0] = EXPERTS
    found[f"{EXPERTS}"] = sentence(case, **sums_of(2))
    found["nothing was raised"] = sentence(case_of().part(rank, size), **sums_of(2))
    try:
        uniep.Workspace(mesh, 64, 32, EXPERTS, 4, TOKENS)
    except ValueError as error:
        found["DeviceMesh of 2 dimensions"] = str(error)
    return found


def test_what_does_not_fit_is_refused_by_all():
    for found in run_ranks(4, refused):
        assert len(found) == 7
        for words, sentence in found.items():
            assert words in sentence, sentence


def test_sums_are_in_the_order_of_hosts():
    partials = torch.tensor([1.0, 2.0**-9, 2.0**-9]).bfloat16().view(3, 1, 1)
    # 1 + 2^-9 + 2^-9 is 1 + 2^-8, which bf16 rounds to 1; rounded in between it is 1, too, but
    # from the smallest on 1 + 2^-8 again. Larger ones tell the orders apart.
    assert float(hosts_module.sum_of_hosts(partials, 1)) == 1.0
    cancelling = torch.tensor([2.0**30, 1.0, -(2.0**30)]).bfloat16().view(3, 1, 1)
    assert float(hosts_module.sum_of_hosts(cancelling, 1)) == 0.0
    assert float(hosts_module.sum_of_hosts(cancelling.flip(0), 1)) == 0.0
    minus_zero = torch.tensor([-0.0, -0.0]).bfloat16().view(2, 1, 1)
    assert not torch.signbit(hosts_module.sum_of_hosts(minus_zero, 1)).any()
