"""Several processes: the same bits as one, errors on all ranks alike, groups of all kinds."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, gradients, make_case, step
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.arithmetic import PARTIALS

TOKENS = 60


def raised(function, *args, **options) -> str:
    try:
        function(*args, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


def bits():
    """One step in several ways."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    most = TOKENS
    found = {}

    def part():
        return make_case(tokens=TOKENS, dropped=True).part(rank, size)

    found["process group"] = step(part(), group=world, max_tokens=most)
    found["again"] = step(part(), group=world, max_tokens=most)
    found["schedule"] = step(part(), group=world, max_tokens=most, schedule="pipelined:2")
    found["nothing saved"] = step(
        part(), group=world, max_tokens=most, save="none", recompute_h=True
    )
    found["exact rows"] = step(
        part(), group=world, max_tokens=most, save="tokens", recompute_h=True, exact_rows=True
    )
    group = uniep.Group(world, device="cpu")
    found["uniep.Group"] = step(part(), group=group, max_tokens=most)
    with uniep.Workspace(group, 64, 32, 8, 2, most) as own:
        found["workspace"] = step(part(), workspace=own)
        schedules = [None] * size
        dist.all_gather_object(schedules, own.schedule("forward"))
        assert len(set(schedules)) == 1

        case = part().requires_grad()

        def layer(x, probs, w1, w2):
            return uniep.moe(x, case.ids, probs, w1, w2, workspace=own)

        for name, function in {
            "compiled": torch.compile(layer, fullgraph=True, backend="aot_eager"),
            "checkpointed": functools.partial(checkpoint, layer, use_reentrant=False),
        }.items():
            found[name] = gradients(case, function(case.x, case.probs, case.w1, case.w2))

        deferred = uniep.DeferredWeights()
        case = part().requires_grad()
        out = uniep.moe(
            case.x, case.ids, case.probs, case.w1, case.w2, workspace=own, deferred=deferred
        )
        out.backward(case.dy)
        uniep.backward_weights(deferred)
        found["deferred"] = [out.detach(), case.x.grad, case.probs.grad, case.w1.grad, case.w2.grad]
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    case = part().requires_grad()
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    found["compiled with a process group"] = gradients(
        case, compiled(*tensors, group=world, max_tokens=most)
    )
    group.close()
    for partials in PARTIALS:
        found[partials] = step(
            part(), group=world, max_tokens=most, combine_groups=4, combine_partials=partials
        )
    return found


def compiled_first():
    """Of each kind of group: a layer that holds it, compiled ahead of any call that is not."""
    world = dist.group.WORLD
    groups = {
        "world": world,
        "another process group": dist.new_group([0, 1]),
        "mesh": init_device_mesh("cpu", (2,)),
        "uniep.Group": uniep.Group(world, device="cpu"),
    }
    found = {}
    for name, group in groups.items():
        torch.manual_seed(1)
        layer = uniep.MoELayer(64, 32, 8, 2, group=group, dtype=torch.bfloat16, device="cpu")
        x = torch.randn(24, 64, dtype=torch.bfloat16)
        steps = []
        for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
            layer.zero_grad()
            out = function(x)
            out.sum().backward()
            steps.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
        found[name] = steps
    return found


def test_the_first_call_may_be_compiled():
    for results in run_ranks(2, compiled_first):
        assert len(results) == 4
        for name, (compiled, called) in results.items():
            assert all(torch.equal(a, b) for a, b in zip(compiled, called, strict=True)), name


def other_weights():
    """Warnings of layers whose ranks differ by what "name" says, in two calls each."""
    rank = dist.get_rank()
    world = dist.group.WORLD
    groups = {"alike": world, "alike, mesh": init_device_mesh("cpu", (2,))}
    found = {}
    for name in ("alike", "alike, mesh", "seeds", "shared experts", "experts", "ended"):
        torch.manual_seed(rank if name in ("seeds", "ended") else 1)
        group = groups.get(name, world)
        if name == "ended":
            own = dist.new_group([0, 1])
            group = uniep.Group(own, device="cpu")
            dist.destroy_process_group(own)
            del own
        layer = uniep.MoELayer(64, 32, 8, 2, group=group, shared_experts=1, device="cpu")
        with torch.no_grad():
            if name == "shared experts":
                layer.shared_w2[0, rank, 5] = 1.0
            if name == "experts":
                layer.w1 += rank
        x = torch.randn(24, 64, dtype=torch.bfloat16)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer(x), layer(x)
        found[name] = [str(warning.message) for warning in caught]
    return found


def test_ranks_whose_routers_differ_are_warned():
    """Once, all of them, of what every rank should have alike."""
    for found in run_ranks(2, other_weights):
        for name in ("alike", "alike, mesh", "experts", "ended"):
            assert found[name] == [], name
        for name, weight in (("seeds", "router.weight"), ("shared experts", "shared_w2")):
            (text,) = found[name]
            assert text.startswith(f"{weight} of rank 1")


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_bits_as_one_process(size):
    case = make_case(tokens=TOKENS, dropped=True)
    results = run_ranks(size, bits)
    for name in results[0]:
        groups = {"combine_groups": 4, "combine_partials": name} if name in PARTIALS else {}
        wanted = step(case, **groups)
        parts = [result[name] for result in results]
        together = [torch.cat([part[i] for part in parts]) for i in range(5)]
        assert_same(together, wanted)


def sub_groups():
    """Pairs of ranks are groups of their own, beside the world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([r, r + 1]) for r in range(0, size, 2)]
    mine = pairs[rank // 2]
    case = make_case(tokens=TOKENS, seed=rank // 2)
    pair = step(case.part(rank % 2, 2), group=mine, max_tokens=TOKENS)
    refused = raised(uniep.Group, pairs[1 - rank // 2], device="cpu")
    world = make_case(tokens=TOKENS, seed=7)
    return pair, step(world.part(rank, size), group=dist.group.WORLD, max_tokens=TOKENS), refused


def test_groups_beside_groups():
    results = run_ranks(4, sub_groups)
    assert all("not a member of process_group" in result[2] for result in results)
    for pair in range(2):
        wanted = step(make_case(tokens=TOKENS, seed=pair))
        parts = [results[2 * pair + r][0] for r in range(2)]
        assert_same([torch.cat([p[i] for p in parts]) for i in range(5)], wanted)
    wanted = step(make_case(tokens=TOKENS, seed=7))
    assert_same([torch.cat([r[1][i] for r in results]) for i in range(5)], wanted)


def errors_of_groups():
    """What is said where the last rank of groups of several kinds has too many tokens."""
    rank = dist.get_rank()
    pairs = [dist.new_group([r, r + 1]) for r in (0, 2)]
    every_other = [dist.new_group([r, r + 2]) for r in (0, 1)]
    places = {
        "pair": (pairs[rank // 2], rank % 2, 2),
        "every other": (every_other[rank % 2], rank // 2, 2),
        "world": (dist.group.WORLD, rank, 4),
    }
    found = {}
    for name, (group, place, ranks) in places.items():
        case = make_case(tokens=TOKENS).part(place, ranks)
        if place == ranks - 1:
            case = make_case(tokens=20 * TOKENS).part(place, ranks)
        found[name] = raised(step, case, group=group, max_tokens=TOKENS)
    return found


def test_errors_say_which_ranks_of_the_world_are_meant():
    results = run_ranks(4, errors_of_groups)
    for rank, found in enumerate(results):
        others = "0, 2" if rank % 2 == 0 else "1, 3"
        assert "rank 1" in found["pair"]
        assert ("whose ranks are 2 to 3 of the world" in found["pair"]) == (rank >= 2)
        assert "rank 1" in found["every other"]
        assert f"whose ranks are {others} of the world" in found["every other"]
        assert "rank 3" in found["world"] and "of the world" not in found["world"]


def errors():
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    found = {}
    with uniep.Workspace(world, 64, 32, 8, 2, TOKENS, device="cpu") as own:
        case = make_case(tokens=TOKENS).part(rank, size)
        if rank == 1:
            case.ids[0, 0] = 8
        found["id of one rank"] = raised(step, case, workspace=own)
        case = make_case(tokens=TOKENS).part(rank, size)
        found["good again"] = step(case, workspace=own)
        schedule = "single" if rank == 0 else "sequential"
        found["schedules differ"] = raised(step, case, workspace=own, schedule=schedule)
    found["max_tokens differ"] = raised(
        uniep.Workspace, world, 64, 32, 8, 2, TOKENS + rank, device="cpu"
    )
    found["experts"] = raised(uniep.Workspace, world, 64, 32, 9, 2, TOKENS, device="cpu")
    few = make_case(tokens=8, hidden=72)
    few.w1, few.w2 = few.part(rank, size).w1, few.part(rank, size).w2
    step(few, group=world)
    more = make_case(tokens=16 if rank == 1 else 8, hidden=72)
    more.w1, more.w2 = few.w1, few.w2
    found["more tokens"] = raised(step, more, group=world)
    uneven = make_case(tokens=8 + rank, hidden=80)
    uneven.w1, uneven.w2 = uneven.part(rank, size).w1, uneven.part(rank, size).w2
    found["first tokens differ"] = raised(step, uneven, group=world)
    with uniep.Workspace(
        world, 64, 32, 8, 2, 300, device="cpu", capacity_rows=512, on_overflow="flag"
    ) as own:
        case = make_case(tokens=300)
        case.ids.zero_()
        case = case.part(rank, size)
        assert step(case, workspace=own)[0].isnan().all()
        found["overflow"] = own.overflow.tolist()
        own.grow(capacity_rows=own.needed_rows())
        assert step(case, workspace=own)[0].isfinite().all()
    return found


def test_errors_on_all_ranks_alike():
    results = run_ranks(2, errors)
    for rank, result in enumerate(results):
        sentence = result["first tokens differ"]
        assert f"{8 + rank} tokens on rank {rank}" in sentence and "pass max_tokens" in sentence
        assert len(sentence) < 300
    for name in ("id of one rank", "schedules differ", "max_tokens differ", "more tokens"):
        assert "\n" not in results[0][name]
    assert results[0]["id of one rank"] == results[1]["id of one rank"]
    assert "8" in results[0]["id of one rank"]
    for found in results:
        assert "schedule" in found["schedules differ"]
        assert "max_tokens" in found["max_tokens differ"]
        assert "9" in found["experts"]
        assert found["more tokens"] == results[1]["more tokens"]
        assert "16" in found["more tokens"] and "max_tokens=8" in found["more tokens"]
        assert found["overflow"] == [1, 640]
    wanted = step(make_case(tokens=TOKENS))
    parts = [found["good again"] for found in results]
    assert_same([torch.cat([p[i] for p in parts]) for i in range(5)], wanted)


def exits():
    """Rank 0 leaves a workspace, a group and a pending backward open; rank 1 closes all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    case = make_case(tokens=TOKENS).part(rank, size).requires_grad()
    own = uniep.Workspace(world, 64, 32, 8, 2, TOKENS, device="cpu")
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
    if rank == 1:
        own.close()
    else:
        globals()["kept"] = (own, out)
    return own.closed


def test_processes_exit_cleanly_with_open_layers():
    assert run_ranks(2, exits) == [False, True]


def too_many():
    """One rank has more tokens than there is room for: what all raise, and a step behind that."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = make_case(tokens=TOKENS)
    most = 20
    assert [case.part(r, size).x.shape[0] > most for r in range(size)].count(True) == 1
    with uniep.Workspace(dist.group.WORLD, 64, 32, 8, 2, most, device="cpu") as own:
        sentence = raised(step, case.part(rank, size), workspace=own)
        fits = make_case(tokens=40).part(rank, size)
        return sentence, step(fits, workspace=own)


def test_too_many_tokens_on_one_rank_are_refused_by_all():
    results = run_ranks(4, too_many)
    sentences = {sentence for sentence, _ in results}
    assert len(sentences) == 1
    assert "rank 0" in sentences.pop()
    together = [torch.cat([step[i] for _, step in results]) for i in range(5)]
    assert_same(together, step(make_case(tokens=40)))


def bad_limit():
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv("UNIEP_TIMEOUT_MS", "abc")
        return raised(uniep.Group, dist.group.WORLD)


def test_a_limit_that_is_out_of_range_on_one_rank_is_refused_by_all():
    first, second = run_ranks(2, bad_limit)
    assert first == second
    assert "rank 1" in first and "UNIEP_TIMEOUT_MS" in first
