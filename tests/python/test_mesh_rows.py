"""A mesh of hosts whose rows all cross: any combine groups, with the bits of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_same, gradients, step
from ranks import run_ranks
from test_mesh import EXPERTS, TOKENS, case_of, mesh_of
from test_mesh_faults import CAPACITY, many, part_of, skewed, times

import uniep
from uniep._ops import ops

#: Those of which no host has one bf16 sum: one group, fewer and more than hosts, and fp32.
SUMS = [
    {},
    {"combine_groups": 2, "combine_partials": "fp32"},
    {"combine_groups": 3, "combine_partials": "bf16"},
    {"combine_groups": 12, "combine_partials": "bf16"},
]
PLACES = ("before", "after")


def layer() -> Case:
    """Dropped slots hold NaN, which is not read; some probabilities are 0, or less."""
    case = case_of(seed=5)
    case.probs[::7] = 0
    case.probs[3::7, 1] = -0.0
    case.probs[1::7] *= -1
    case.probs[case.ids < 0] = torch.nan
    case.ids[4] = -1
    return case


def ways(hosts: int, place: str) -> dict[str, list[torch.Tensor]]:
    """One step in several ways; memory that nothing has written is NaN."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"group": mesh_of(hosts), "max_tokens": TOKENS, "probs": place}
    torch.use_deterministic_algorithms(True)

    def part() -> Case:
        return layer().part(rank, size)

    found = {}
    for i, sums in enumerate(SUMS):
        for exact in (False, True):
            found[f"{i}, {exact}"] = step(part(), exact_hosts=exact, **sums, **options)
    more = {"nothing saved": {"save": "none", "recompute_h": True}}
    more["row pool"] = {"row_pool": 1 << 22}
    more["exact rows"] = {"exact_rows": True, "save": "tokens"}
    more["in turns"] = {"backward_rows": 512}
    for (name, also), exact in itertools.product(more.items(), (False, True)):
        found[f"0, {name}, {exact}"] = step(part(), exact_hosts=exact, **also, **options)
    case = part().requires_grad()
    deferred = uniep.DeferredWeights()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, deferred=deferred, **options)
    out.backward(case.dy)
    uniep.backward_weights(deferred)
    found["0, deferred"] = [out.detach(), *(getattr(case, n).grad for n in ("x", "probs"))]
    found["0, deferred"] += [case.w1.grad, case.w2.grad]
    case = part().requires_grad()
    compiled = torch.compile(uniep.moe, backend="aot_eager")
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    found["0, compiled"] = gradients(case, compiled(*tensors, **options))
    torch.use_deterministic_algorithms(False)
    return found


def of_experts() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Biases, another activation, experts that compute nothing; of one process, and of the mesh."""
    rank, size = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(1)
    b1 = torch.randn(EXPERTS, 64, generator=g).bfloat16()
    b2 = torch.randn(EXPERTS, 64, generator=g).bfloat16()
    case = case_of(seed=4)
    case.ids[case.ids == 3] = EXPERTS  # an identity
    options = {"zero_experts": 2, "activation": "gpt_oss", "probs": "after"}
    own = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    mine = step(
        case.part(rank, size),
        group=mesh_of(2),
        max_tokens=TOKENS,
        b1=b1[own].clone(),
        b2=b2[own].clone(),
        **options,
    )
    whole = step(case, b1=b1, b2=b2, **options)
    return [tensor.detach() for tensor in whole], mine


def too_many() -> Case:
    """Rows for the first host; some tokens have none there, and some have none at all."""
    case = many()
    case.ids[::12] = -1
    case.ids[1::12] = torch.arange(EXPERTS // 2, EXPERTS // 2 + 4, dtype=torch.int32)
    return case


def faults() -> dict[str, object]:
    """A routing that does not fit on the first host, and one that does."""
    figures = (64, 32, EXPERTS, 4, 4 * TOKENS)
    found: dict[str, object] = {}
    for exact in (False, True):
        options = {"capacity_rows": CAPACITY, "on_overflow": "flag", "exact_hosts": exact}
        with uniep.Workspace(mesh_of(2), *figures, device="cpu", **options) as own:
            found[f"refused, {exact}"] = step(part_of(too_many()), workspace=own)
            assert own.overflow.tolist()[0] == 1
            own.overflow.zero_()
            found[f"longer, {exact}"] = step(part_of(times(10, case_of())), workspace=own)
            assert own.overflow.tolist() == [2, 0]
            own.overflow.zero_()
            found[f"no expert, {exact}"] = step(part_of(no_expert()), workspace=own)
            assert own.overflow.tolist() == [uniep.Overflow.IMPOSSIBLE, 0]
            own.overflow.zero_()
            found[f"fits, {exact}"] = step(part_of(skewed()), workspace=own)
            assert own.overflow.tolist()[0] == 0
    with uniep.Workspace(mesh_of(2), *figures, device="cpu", capacity_rows=CAPACITY) as own:
        for case, words in ((many(), "capacity_rows="), (no_expert(), "topk_ids")):
            with pytest.raises(uniep.Error, match=words):
                step(part_of(case), workspace=own, exact_hosts=True)
    return found


def no_expert() -> Case:
    case = case_of()
    case.ids[50, 1] = EXPERTS
    return case


def by_four() -> dict[str, object]:
    return {
        "ways": {key: ways(*key) for key in itertools.product((2, 4), PLACES)},
        "experts": of_experts(),
        "faults": faults(),
        "refused": refused(),
    }


@pytest.fixture(scope="module")
def four():
    return run_ranks(4, by_four)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hosts", [2, 4])
def test_the_bits_of_one_process(four, hosts, place):
    results = [result["ways"][hosts, place] for result in four]
    assert len(results[0]) == 18
    wanted = [step(layer(), probs=place, **sums) for sums in SUMS]
    assert any(not torch.equal(wanted[0][0], other[0]) for other in wanted[1:])
    for name in results[0]:
        parts = [result[name] for result in results]
        of = wanted[int(name.split(",")[0])]
        assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], of)


def test_other_arithmetic(four):
    parts = [result["experts"][1] for result in four]
    assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], four[0]["experts"][0])


@pytest.mark.parametrize("exact", [False, True])
def test_faults_of_one_host_are_those_of_all(four, exact):
    for result in four:
        found = result["faults"]
        for name in ("refused", "longer", "no expert"):
            out, dx, *others = found[f"{name}, {exact}"]
            assert out.isnan().all() and dx.isnan().all()
            assert not any(tensor.any() for tensor in others)
    parts = [result["faults"][f"fits, {exact}"] for result in four]
    assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], step(skewed()))


def refused() -> str:
    with pytest.raises(ValueError) as error:
        uniep.Workspace(mesh_of(2), 64, 32, EXPERTS, 4, TOKENS, device="cpu", combine_groups=5)
    return str(error.value)


def test_groups_that_do_not_divide_the_experts_are_refused(four):
    assert all("combine_groups is 5" in result["refused"] for result in four)


def sum_of(rows, *, groups=1, rounds=False, probs=None):
    """Of one token, whose experts are of two groups: 1, 0, 1. Its rows lie in two tensors."""
    ids = torch.tensor([[7, 0, 5, -1]], dtype=torch.int32)[:, : len(rows)].contiguous()
    lying = torch.tensor(rows[::-1]).bfloat16()[:, None].repeat(1, 8)
    numbers = torch.arange(len(rows)).flip(0)[None].contiguous()
    factors = None if probs is None else torch.tensor([probs])
    sums = ops.add_rows(lying[:1], lying[1:], numbers, ids, factors, 8, groups, rounds)
    assert sums.shape == (1, 8) and (sums == sums[0, 0]).all()
    return float(sums[0, 0])


def test_sums_are_in_the_order_of_groups_and_slots():
    large, small, more = 2.0**30, 2.0**-9, 3 * 2.0**-10
    assert sum_of([large, 1.0, -large]) == 0.0
    assert sum_of([large, 1.0, -large, 0.0], groups=2) == 1.0
    assert sum_of([1.0, more, small]) == 1.0 + 2.0**-7  # rounded once
    assert sum_of([1.0, more, small], groups=2) == 1.0 + 2.0**-7
    assert sum_of([1.0, more, small], groups=2, rounds=True) == 1.0
    assert sum_of([1.0, more, small], rounds=True) == 1.0 + 2.0**-7  # no sums of groups
    assert sum_of([1.0, 1.0], probs=[1.0 + small, more]) == 1.0 + 2.0**-7  # products are fp32
    assert not torch.signbit(torch.tensor(sum_of([-0.0, -0.0])))
