"""Rows kept in pages of a row pool: the same bits, and pages that go back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, gradients, make_case, step, workspace
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

import uniep

CHOICES = [
    {"save": save, "recompute_h": recompute_h}
    for save in ("rows", "tokens", "none")
    for recompute_h in (False, True)
]


def pool_of(case, pages=64, **choice):
    hidden, intermediate, _, _ = case.shape
    choice["device"] = case.x.device
    one = uniep.RowPool(None, hidden, intermediate, bytes=1 << 20, **choice)
    return uniep.RowPool(
        None, hidden, intermediate, bytes=pages * one.page_bytes + (1 << 14), **choice
    )


def held(pool):
    gc.collect()
    return pool.pages - pool.free_pages


def call(case, own, **options):
    return uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own, **options)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_choice_gives_the_same_bits(choice):
    case = make_case(tokens=300, dropped=True)
    wanted = step(case)
    pool = pool_of(case, **choice)
    with workspace(case, row_pool=pool, **choice) as own:
        other = call(case, own)  # so that pages are others than the rows' numbers
        for schedule in ("sequential", "single,tile_m=32,lag=2", None):
            case.requires_grad()
            assert_same(gradients(case, call(case, own, schedule=schedule)), wanted)
        del other
        assert held(pool) == 0


def test_several_layers_share_a_pool_whose_memory_follows_what_came():
    case = make_case(tokens=300).requires_grad()
    wanted = step(case)
    pool = pool_of(case)
    with workspace(case, row_pool=pool) as first, workspace(case, row_pool=pool) as second:
        outs = [call(case, own) for own in (first, second, second, first)]
        pages = sum(-(-int((case.ids == e).sum()) // 128) for e in range(case.w1.shape[0]))
        assert held(pool) == 4 * pages
        for i in (2, 0, 3, 1):
            assert_same(gradients(case, outs[i]), wanted)
        assert held(pool) == 0
        assert pool.fewest_free_pages == pool.pages - 4 * pages


def test_retained_graphs_keep_their_pages():
    case = make_case(tokens=64).requires_grad()
    wanted = step(case)
    pool = pool_of(case)
    with workspace(case, row_pool=pool) as own:
        out = call(case, own)
        out.backward(case.dy, retain_graph=True)
        assert held(pool) > 0
        assert_same(gradients(case, out), wanted)
        assert held(pool) == 0
        out = call(case, own)
        out.backward(case.dy, retain_graph=True)
        del out
        assert held(pool) == 0


def test_a_second_backward_without_is_an_error():
    case = make_case(tokens=64).requires_grad()
    with workspace(case, row_pool=pool_of(case)) as own:
        out = call(case, own)
        out.backward(case.dy)
        with pytest.raises(RuntimeError, match="backward"):
            out.backward(case.dy)


def test_outputs_without_a_backward_give_pages_back():
    case = make_case(tokens=64)
    pool = pool_of(case)
    with workspace(case, row_pool=pool) as own:
        with torch.no_grad():
            call(case, own)
        assert held(pool) == 0
        case.requires_grad()
        out = call(case, own)
        assert held(pool) > 0
        del out
        assert held(pool) == 0


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
def test_weight_gradients_wait(choice, main):
    case = make_case(tokens=64)
    wanted = step(case)
    pool = pool_of(case, **choice)
    case.requires_grad()
    grads = tuple(torch.zeros_like(w, dtype=torch.float32) for w in (case.w1, case.w2))
    options = {"main_grads": grads} if main else {}
    for tensor in (case.x, case.probs, case.w1, case.w2):
        tensor.grad = None
    with workspace(case, row_pool=pool, **choice) as own:
        if main:
            call(case, own, **options).backward(case.dy)
            whole = [g.clone() for g in grads]
            for g in grads:
                g.zero_()
        deferred = uniep.DeferredWeights()
        case.x.grad = case.probs.grad = None
        out = call(case, own, deferred=deferred, **options)
        out.backward(case.dy)
        assert (held(pool) > 0) == (choice["save"] == "rows")
        uniep.backward_weights(deferred)
        found = [out.detach(), *(t.grad for t in (case.x, case.probs, case.w1, case.w2))]
        del out
        assert held(pool) == 0
    if main:
        for a, b in zip(grads, whole, strict=True):
            assert torch.equal(a, b)
    else:
        assert_same(found, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_weight_gradients_wait_within_a_checkpoint(reentrant):
    case = make_case(tokens=64)
    wanted = step(case)
    # A reentrant one may have copied what is no parameter.
    case.w1, case.w2 = (torch.nn.Parameter(weight.detach()) for weight in (case.w1, case.w2))
    for tensor in (case.x, case.probs):
        tensor.grad = None
    deferred = uniep.DeferredWeights()
    with workspace(case, row_pool=pool_of(case)) as own:

        def run(x, probs):
            options = {"workspace": own, "deferred": deferred}
            return uniep.moe(x, case.ids, probs, case.w1, case.w2, **options)

        out = checkpoint(run, case.x, case.probs, use_reentrant=reentrant)
        out.backward(case.dy)
        uniep.backward_weights(deferred)
    found = [out.detach(), *(t.grad for t in (case.x, case.probs, case.w1, case.w2))]
    assert_same(found, wanted)


def test_a_full_pool_is_refused_with_the_bytes_that_would_do():
    case = make_case(tokens=300).requires_grad()
    wanted = step(case)
    pool = pool_of(case, pages=20)
    with workspace(case, row_pool=pool) as own:
        outs = [call(case, own)]
        pages = held(pool)
        with pytest.raises(RuntimeError, match="pages of its row pool are held") as refused:
            outs += [call(case, own) for _ in range(20)]
        named = int(str(refused.value).split("; ")[1].split(" bytes")[0])
        assert named >= (len(outs) + 1) * pages * pool.page_bytes
        for out in outs:
            assert_same(gradients(case, out), wanted)
    with workspace(case, row_pool=pool, on_overflow="flag") as own:
        outs = [call(case, own)]
        while not own.overflow[0]:
            outs.append(call(case, own))
        assert own.overflow.tolist() == [3, named]
        assert outs[-1].isnan().all()
        outs[-1].backward(case.dy)


@pytest.mark.parametrize("bytes", [0, -3, 1 << 70])
def test_bytes_that_no_pool_can_have_are_refused(bytes):
    with pytest.raises(ValueError, match=f"bytes is {bytes}; 1 to"):
        uniep.RowPool(None, 64, 32, bytes=bytes)


def test_what_does_not_go_together_is_refused():
    case = make_case()
    pool = pool_of(case)
    with pytest.raises(ValueError, match="row_pool"):
        workspace(case, row_pool=pool, exact_rows=True)
    with pytest.raises(uniep.Error, match="recompute_h=true"):
        workspace(case, row_pool=pool, recompute_h=True)
    with pytest.raises(ValueError, match="save is 'some'"):
        uniep.RowPool(None, 64, 32, save="some")
    with pytest.raises(uniep.Error, match="has no page"):
        uniep.RowPool(None, 64, 32, bytes=100)
    with workspace(case, row_pool=pool) as own:
        with pytest.raises(ValueError, match="exact_rows"):
            call(case, own, exact_rows=True)
        with pytest.raises(ValueError, match="tune with one that has none"):
            uniep.tune_calls(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
        with pytest.raises(Exception, match="a row pool keeps what forwards save"):
            torch.compile(lambda x: call(case, own) + x, fullgraph=True)(case.x)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_calls_of_a_shape_share_a_pool_that_nobody_made(choice):
    case = make_case(tokens=300, dropped=True)
    wanted = step(case)
    case.requires_grad()
    group = uniep.Group(device=case.x.device)

    def shared(bytes):
        out = uniep.moe(
            case.x, case.ids, case.probs, case.w1, case.w2, group=group, row_pool=bytes, **choice
        )
        return out, group.row_pools[(*case.shape[:2], *choice.values(), 2, bytes)]

    first, pool = shared(1 << 20)
    second, same = shared(1 << 20)
    third, other = shared(1 << 21)
    assert same is pool and other is not pool and list(group.row_pools.values()) == [pool, other]
    assert (1 << 20) - pool.page_bytes - 2048 < pool.bytes <= 1 << 20
    assert held(pool) == 2 * held(other) > 0
    for out in (second, first, third):
        assert_same(gradients(case, out), wanted)
    assert held(pool) == held(other) == 0


@pytest.mark.parametrize("activation", ["gelu", "gpt_oss"])
def test_what_experts_compute_is_as_without(activation):
    case = make_case(tokens=300)
    w1 = case.w1.clone()
    if activation == "gelu":  # without a gate
        w1 = w1[:, : w1.shape[1] // 2].contiguous()
    results = []
    for row_pool in (None, 1 << 20):
        group = uniep.Group(device=case.x.device)
        leaves = [t.clone().requires_grad_() for t in (case.x, case.probs, w1, case.w2)]
        out = uniep.moe(
            leaves[0],
            case.ids,
            *leaves[1:],
            group=group,
            activation=activation,
            probs="after",
            row_pool=row_pool,
            save="tokens",
        )
        out.backward(case.dy)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        pools = list(group.row_pools.values())
        assert len(pools) == (row_pool is not None)
        assert all(held(pool) == 0 < pool.pages - pool.fewest_free_pages for pool in pools)
    assert_same(*results)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("probs", ["before", "after"])
@pytest.mark.parametrize("way", ["grad", "deferred", "main_grads", "deferred main_grads"])
def test_biases_are_as_without(choice, probs, way):
    case = make_case(tokens=130, dropped=True)
    experts, width, hidden = case.w1.shape
    torch.manual_seed(3)
    biases = (torch.randn(experts, width).bfloat16(), torch.randn(experts, hidden).bfloat16())
    results = []
    for pool in (None, pool_of(case, **choice)):
        leaves = [t.clone().requires_grad_() for t in (case.w1, case.w2, *biases)]
        x, p = (t.clone().requires_grad_() for t in (case.x, case.probs))
        main_grads = tuple(torch.zeros_like(t, dtype=torch.float32) for t in leaves)
        deferred = uniep.DeferredWeights()
        with workspace(case, row_pool=pool, probs=probs, bias=True, **choice) as own:
            out = uniep.moe(
                x,
                case.ids,
                p,
                *leaves[:2],
                b1=leaves[2],
                b2=leaves[3],
                workspace=own,
                main_grads=main_grads if "main_grads" in way else None,
                deferred=deferred if "deferred" in way else None,
            )
            out.backward(case.dy)
            uniep.backward_weights(deferred)
        grads = main_grads if "main_grads" in way else [leaf.grad for leaf in leaves]
        assert all(grad.any() for grad in grads)
        results.append([out.detach(), x.grad, p.grad, *grads])
        del out
    assert held(pool) == 0 < pool.pages - pool.fewest_free_pages
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_half_of_the_free_memory_is_taken_for_true_and_none_for_false():
    case = make_case(tokens=64)
    group = uniep.Group(device="cpu")
    for choice in (False, None):
        call_in_group(case, group, choice)
    assert not group.row_pools
    call_in_group(case, group, True)
    (pool,) = group.row_pools.values()
    assert pool.bytes > 1 << 26
    for wrong, kind in ((0, ValueError), (-5, ValueError), ("all", TypeError), (0.5, TypeError)):
        with pytest.raises(kind, match=f"row_pool is '?{wrong}'?;"):
            call_in_group(case, group, wrong)
    with workspace(case) as own, pytest.raises(ValueError, match="row_pool is given beside a"):
        call(case, own, row_pool=True)
    with pytest.raises(ValueError, match="exact_rows is True"):
        call_in_group(case, group, True, exact_rows=True)


def call_in_group(case, group, row_pool, **options):
    arguments = (case.x.cpu(), case.ids.cpu(), case.probs.cpu(), case.w1.cpu(), case.w2.cpu())
    return uniep.moe(*arguments, group=group, row_pool=row_pool, **options)


def test_layers_share_a_pool():
    case = make_case(tokens=64)
    group = uniep.Group(device="cpu")
    layers = [uniep.MoELayer(64, 32, 8, 2, group=group, row_pool=1 << 20) for _ in range(2)]
    out = layers[1](layers[0](case.x.cpu()))
    (pool,) = group.row_pools.values()
    assert held(pool) > 0
    out.sum().backward()
    assert held(pool) == 0
    torch.manual_seed(5)
    whole = torch.compile(layers[0], backend="aot_eager")  # in several graphs
    assert torch.equal(whole(case.x.cpu()), layers[0](case.x.cpu()))


def test_a_pool_outlives_its_object_and_its_workspace():
    case = make_case(tokens=64).requires_grad()
    wanted = step(case)
    own = workspace(case, row_pool=pool_of(case))
    out = call(case, own)
    gc.collect()
    assert_same(gradients(case, out), wanted)
    out = call(case, own)
    own.close()
    del own, out
    gc.collect()


@pytest.fixture
def no_cycles():
    """What cycles hold stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_pool_takes_along_what_calls_with_it_share(no_cycles):
    case = make_case(tokens=64).requires_grad()
    pool = pool_of(case)
    gone = weakref.ref(pool.memory)
    for _ in range(2):
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, row_pool=pool)
    assert len(pool.workspaces) == 1
    del pool
    assert gone() is not None  # the last forward keeps it
    out.backward(case.dy)
    del out
    assert gone() is None


def two_ranks():
    """Steps of a rank, until the pool of rank 1 is full."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = make_case(tokens=300).part(rank, size).requires_grad()
    mebibytes = 4 if rank == 0 else 1
    pool = uniep.RowPool(dist.group.WORLD, 64, 32, bytes=mebibytes << 20, device="cpu")
    said, outs = [], []
    with uniep.Workspace(dist.group.WORLD, 64, 32, 8, 2, 300, row_pool=pool, device="cpu") as own:
        while not said and len(outs) < 100:
            try:
                outs.append(call(case, own))
            except RuntimeError as error:
                said.append(str(error))
        results = gradients(case, outs.pop())
        outs.clear()
        return {"said": said, "results": results, "held": held(pool)}


def test_ranks_find_a_full_pool_alike_and_go_on():
    found = run_ranks(2, two_ranks)
    assert found[0]["said"] == found[1]["said"]
    assert found[0]["said"][0].startswith("rank 1 would save ")
    assert [f["held"] for f in found] == [0, 0]
    wanted = step(make_case(tokens=300))
    for i, whole in enumerate(wanted):  # ranks have parts of tokens and of experts
        assert torch.equal(torch.cat([f["results"][i] for f in found]), whole)
