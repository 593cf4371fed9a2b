"""Routings that do not fit on one host of a mesh: what all hosts learn of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_same, step
from ranks import run_ranks
from test_mesh import EXPERTS, TOKENS, case_of, mesh_of, sums_of

import uniep

HOSTS = 2
SIZE = 4
CAPACITY = 384  # of a rank: skewed() fits on four, and many() does not


def skewed() -> Case:
    """A layer whose tokens all go to the first expert, on the first host."""
    case = case_of()
    case.ids[:, 0] = 0
    case.ids[:, 1:][case.ids[:, 1:] == 0] = -1
    return case


def workspace(**options: object) -> uniep.Workspace:
    figures = (64, 32, EXPERTS, 4, 4 * TOKENS)
    return uniep.Workspace(mesh_of(HOSTS), *figures, device="cpu", **sums_of(HOSTS), **options)


def part_of(case: Case) -> Case:
    return case.part(dist.get_rank(), dist.get_world_size())


def times(count: int, case: Case) -> Case:
    """The same with so many times as many tokens; ten times are too many for the first rank."""
    x, ids, probs, dy = (torch.cat([t] * count) for t in (case.x, case.ids, case.probs, case.dy))
    return Case(x, ids, probs, case.w1, case.w2, dy)


def many() -> Case:
    return times(4, skewed())


def some_nowhere(case: Case) -> Case:
    """With exact hosts every third token then stays at its host, which may have no fault."""
    case.ids[::3] = -1
    return case


def flagged() -> dict[str, object]:
    found: dict[str, object] = {}
    with workspace(capacity_rows=CAPACITY, on_overflow="flag") as own:
        found["fits"] = step(part_of(skewed()), workspace=own)
        assert int(own.overflow[0]) == 0
        found["needed"] = own.needed_rows()

        case = part_of(many())
        found["refused"] = step(case, workspace=own)
        found["overflow"] = own.overflow.tolist()
        fewer = part_of(some_nowhere(many()))
        found["refused, exact hosts"] = step(fewer, workspace=own, exact_hosts=True)
        mixed = part_of(many())
        mixed.ids[:, 3] = EXPERTS
        found["refused, identity experts"] = step(mixed, workspace=own, zero_experts=1)
        main = tuple(torch.ones(w.shape, dtype=torch.float32) for w in (case.w1, case.w2))
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        uniep.moe(*tensors, workspace=own, main_grads=main).backward(case.dy)
        found["main_grads"] = list(main)

        own.overflow.zero_()
        found["longer"] = step(part_of(times(10, case_of())), workspace=own)
        assert own.overflow.tolist() == [2, 0]
        longer = part_of(some_nowhere(times(10, case_of())))
        found["longer, exact hosts"] = step(longer, workspace=own, exact_hosts=True)
        own.overflow.zero_()
        found["usable"] = step(part_of(skewed()), workspace=own)
        assert int(own.overflow[0]) == 0
        step(case, workspace=own)
        own.grow(capacity_rows=own.needed_rows())
        found["grown"] = step(part_of(many()), workspace=own)
        assert int(own.overflow[0]) == 0
    return found


def beside_shared_experts() -> dict[str, list[torch.Tensor]]:
    """Gradients of shared experts, by what a call is refused for."""
    found = {}
    with workspace(capacity_rows=CAPACITY, on_overflow="flag", shared_experts=1) as own:
        for name, case in (
            ("nothing", skewed()),
            ("too many rows", many()),
            ("too many tokens", times(10, case_of())),
        ):
            case = part_of(case)
            shared = [w[:1].clone().requires_grad_() for w in (case.w1, case.w2)]
            tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
            out = uniep.moe(*tensors, shared_w1=shared[0], shared_w2=shared[1], workspace=own)
            assert (name == "nothing") == (not out.isnan().any())
            assert out.isnan().all() or name == "nothing"
            out.backward(case.dy)
            found[name] = [w.grad for w in shared]
    return found


def raised() -> dict[str, str]:
    """What is raised, by words of it."""

    def sentence(case: Case, **options: object) -> str:
        with workspace(**options) as own:
            with pytest.raises(uniep.Error) as error:
                step(part_of(case), workspace=own)
            own.synchronize()
            if "row_pool" not in options:
                step(part_of(skewed()), workspace=own)  # it stays usable
        return f"{error.value.code}: {error.value}"

    within = mesh_of(HOSTS).get_group(1)
    pool = uniep.RowPool(within, 64, 32, bytes=2 * 33792, device="cpu")  # two pages
    impossible = skewed()
    impossible.ids[-1, 0] = EXPERTS
    return {
        "capacity_rows is 384; capacity_rows=512": sentence(many(), capacity_rows=CAPACITY),
        "capacity: an expert would receive 256 rows": sentence(many(), backward_rows=128),
        "bytes would do": sentence(many(), row_pool=pool),
        "argument: topk_ids has a number that is no expert; -1": sentence(impossible),
        f"Or a rank has more tokens than max_tokens={4 * TOKENS}": sentence(times(10, case_of())),
    }


def all_of_them() -> dict[str, object]:
    return {"flagged": flagged(), "raised": raised(), "shared": beside_shared_experts()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, object]]:
    return run_ranks(SIZE, all_of_them)


@pytest.mark.parametrize(
    "refused", ["refused", "refused, exact hosts", "refused, identity experts"]
)
def test_a_fault_is_a_value_on_all_hosts(ranks, refused):
    for result in (rank["flagged"] for rank in ranks):
        out, dx, dprobs, dw1, dw2 = result[refused]
        assert out.isnan().all() and dx.isnan().all()
        assert not dprobs.any() and not dw1.any() and not dw2.any()
        assert all((main == 1).all() for main in result["main_grads"])
        assert result["overflow"] == ranks[0]["flagged"]["overflow"]
        assert result["needed"] == ranks[0]["flagged"]["needed"]
    assert ranks[0]["flagged"]["overflow"] == [1, 512]


@pytest.mark.parametrize("longer", ["longer", "longer, exact hosts"])
def test_a_rank_with_too_many_tokens_is_a_fault_on_all_hosts(ranks, longer):
    whole = times(10, case_of())
    tokens = [whole.part(rank, SIZE).x.shape[0] for rank in range(SIZE)]
    assert [count > 4 * TOKENS for count in tokens] == [True, False, False, False]
    for count, result in zip(tokens, (rank["flagged"] for rank in ranks), strict=True):
        out, dx, dprobs, dw1, dw2 = result[longer]
        assert out.shape == dx.shape == (count, 64) and dprobs.shape == (count, 4)
        assert out.isnan().all() and dx.isnan().all()
        assert not dprobs.any() and not dw1.any() and not dw2.any()


@pytest.mark.parametrize(("name", "case"), [("fits", skewed), ("usable", skewed), ("grown", many)])
def test_what_fits_has_the_bits_of_one_process(ranks, name, case):
    parts = [rank["flagged"][name] for rank in ranks]
    wanted = step(case(), **sums_of(HOSTS))
    assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], wanted)


def test_all_hosts_raise_the_same(ranks):
    for words, sentence in ranks[0]["raised"].items():
        assert words in sentence
    assert len(ranks[0]["raised"]) == 5
    for rank in ranks[1:]:
        assert rank["raised"] == ranks[0]["raised"]


def test_gradients_of_shared_experts_are_0_then(ranks):
    for result in (rank["shared"] for rank in ranks):
        for name, tensors in result.items():
            assert all(bool(tensor.any()) == (name == "nothing") for tensor in tensors), name
