"""Placement of experts: what crosses, which bits stay, and what a placement finds."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch
from ranks import run_ranks

import uniep
from uniep import cli, placement
from uniep.placement import Placement

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 16, 4, 64, 32


def families(tokens=512, experts=EXPERTS, topk=TOPK, count=4, strays=0.0, seed=0, popularity=None):
    """Ids of tokens that use experts of one of `count` families, scattered over all numbers.

    A share `strays` of the slots goes to any expert instead.
    """
    rng = torch.Generator().manual_seed(seed)
    members = torch.randperm(experts, generator=rng).view(count, -1)
    scores = torch.rand(tokens, experts, generator=rng)
    weights = torch.ones(count) if popularity is None else torch.tensor(popularity)
    family = torch.multinomial(weights, tokens, replacement=True, generator=rng)
    in_family = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, members[family], True)
    strays_here = torch.rand(tokens, experts, generator=rng) < strays
    return (scores + 2.0 * (in_family ^ strays_here)).topk(topk, -1).indices


def layer_of(ids, seed=0):
    """x, ids, probs, w1, w2 and dy of all ranks."""
    rng = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=rng).to(torch.bfloat16)

    tokens = ids.shape[0]
    return {
        "x": random(tokens, HIDDEN),
        "ids": ids,
        "probs": torch.rand(tokens, TOPK, generator=rng),
        "w1": random(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 0.2,
        "w2": random(EXPERTS, HIDDEN, INTERMEDIATE) * 0.2,
        "dy": random(tokens, HIDDEN),
    }


def step(layer, placed, group=None, rank=0, size=1):
    """Results of a rank's part under a placement."""
    tokens, experts = layer["x"].shape[0] // size, EXPERTS // size
    own = slice(rank * tokens, (rank + 1) * tokens)
    held = slice(rank * experts, (rank + 1) * experts)
    x = layer["x"][own].clone().requires_grad_()
    probs = layer["probs"][own].clone().requires_grad_()
    w1 = placed.permute(layer["w1"])[held].clone().requires_grad_()
    w2 = placed.permute(layer["w2"])[held].clone().requires_grad_()
    out = uniep.moe(x, placed.ids(layer["ids"][own]), probs, w1, w2, group=group)
    out.backward(layer["dy"][own])
    return {"out": out.detach(), "dx": x.grad, "dprobs": probs.grad, "dw1": w1.grad, "dw2": w2.grad}


def step_of_rank(layer, experts, hosts):
    os.environ["UNIEP_HOSTS"] = str(hosts)
    group = torch.distributed.group.WORLD
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return step(layer, Placement.of(experts), group, rank, size)


def assert_same_bits(found, wanted, placed):
    for name, tensor in wanted.items():
        expected = placed.permute(tensor) if name in ("dw1", "dw2") else tensor
        assert torch.equal(found[name], expected), name


def test_coactivation_counts_pairs_of_every_token():
    ids = torch.tensor([[0, 2, 1], [2, -1, 1], [3, 5, 2]])  # 5: computes nothing
    counts = placement.coactivation(ids, 4)
    wanted = torch.zeros(4, 4, dtype=torch.int64)
    for token in ids.tolist():
        for a, b in itertools.product(token, token):
            if 0 <= a < 4 and 0 <= b < 4:
                wanted[a, b] += 1
    assert torch.equal(counts, wanted)
    again = placement.coactivation(ids.to(torch.int32).view(3, 1, 3), 4, counts)
    assert again is counts
    assert torch.equal(counts, 2 * wanted)


def test_a_token_that_names_an_expert_twice_has_two_rows_of_it():
    assert placement.coactivation(torch.tensor([[1, 1, 0]]), 2).tolist() == [[1, 1], [1, 2]]


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 4), (2, 2), (2, 8), (4, 4), (4, 16)])
def test_is_a_permutation_that_ids_or_counts_give_alike(hosts, ranks):
    ids = families(strays=0.1)
    placed = placement.place_experts(ids, num_experts=EXPERTS, hosts=hosts, ranks=ranks)
    assert sorted(placed.experts.tolist()) == list(range(EXPERTS))
    assert torch.equal(placed.experts[placed.places], torch.arange(EXPERTS))
    counts = placement.coactivation(ids[:100], EXPERTS)
    placement.coactivation(ids[100:], EXPERTS, counts)
    again = placement.place_experts(counts, hosts=hosts, ranks=ranks)
    assert torch.equal(again.experts, placed.experts)


@pytest.mark.parametrize("seed", range(5))
def test_finds_what_tokens_use_together(seed):
    ids = families(seed=seed)
    placed = placement.place_experts(ids, num_experts=EXPERTS, hosts=4, slack=0.3)
    before = placement.predict_traffic(ids, Placement.identity(EXPERTS), hosts=4)
    after = placement.predict_traffic(ids, placed, hosts=4)
    assert torch.equal(
        placement.hosts_needed(ids, placed, hosts=4), torch.ones(len(ids), dtype=torch.int64)
    )
    assert after.crossing_tokens < before.crossing_tokens / 2


@pytest.mark.parametrize("experts", [16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_fewer_tokens_cross_and_the_load_stays_even(experts, seed):
    hosts, ranks, slack = 2, 4, 0.05
    ids = families(2048, experts, TOPK, experts // 4, strays=0.05, seed=seed)
    placed = placement.place_experts(
        ids, num_experts=experts, hosts=hosts, ranks=ranks, slack=slack
    )
    how = {"hosts": hosts, "ranks": ranks}
    before = placement.predict_traffic(ids, Placement.identity(experts), **how)
    after = placement.predict_traffic(ids, placed, **how)
    assert after.crossing_tokens < 0.9 * before.crossing_tokens
    assert after.imbalance <= (1 + slack) ** 2


@pytest.mark.parametrize("seed", range(6))
def test_a_popular_family_is_spread_rather_than_fill_a_host(seed):
    ids = families(4096, strays=0.05, seed=seed, popularity=[3.0, 1.0, 1.0, 1.0])
    crossing = []
    for slack in (0.0, 0.1, 0.5):
        placed = placement.place_experts(ids, num_experts=EXPERTS, hosts=2, slack=slack)
        found = placement.predict_traffic(ids, placed, hosts=2)
        assert found.imbalance <= 1 + slack + 0.005
        crossing.append(found.crossing_tokens)
    assert crossing[-1] < crossing[0]


def test_comes_near_the_best_of_all_placements():
    best = []
    for seed in range(40):
        rng = torch.Generator().manual_seed(seed)
        ids = torch.rand(60, 10, generator=rng).pow(3).topk(3, -1).indices
        counts = placement.coactivation(ids, 10)
        placed = placement.place_experts(counts, hosts=2, slack=10.0)

        def together(half, counts=counts):
            other = [e for e in range(10) if e not in half]
            return int(counts[half][:, half].sum() + counts[other][:, other].sum())

        most = max(together(list(half)) for half in itertools.combinations(range(10), 5))
        found = together(placed.experts[:5].tolist())
        assert found >= 0.95 * most
        best.append(found == most)
    assert sum(best) >= 34


def test_one_expert_that_half_of_all_tokens_use_does_not_take_the_load_with_it():
    ids = families(1024, strays=0.02, seed=3)
    ids[::2, 0] = 5  # of any family
    placed = placement.place_experts(ids, num_experts=EXPERTS, hosts=2, slack=0.0)
    rows = placement.predict_traffic(ids, placed, hosts=2).rows_of_rank
    load = torch.bincount(ids.flatten(), minlength=EXPERTS)
    best = min(
        max(int(load[list(half)].sum()), int(load.sum() - load[list(half)].sum()))
        for half in itertools.combinations(range(EXPERTS), EXPERTS // 2)
    )
    assert int(rows.max()) <= 1.01 * best


def test_what_is_recorded_in_order_stays_as_it_is():
    ids = torch.arange(EXPERTS).view(4, 4).repeat(8, 1)  # tokens of 4 hosts, evenly
    placed = placement.place_experts(ids, num_experts=EXPERTS, hosts=4)
    assert torch.equal(placed.experts, torch.arange(EXPERTS))


def test_traffic_is_what_its_words_say():
    ids = families(61, strays=0.3)
    ids[3, 1] = -1
    ids[7] = -1
    placed = Placement.of(torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1)))
    parts = [20, 0, 30, 11]
    found = placement.predict_traffic(ids, placed, hosts=2, ranks=4, tokens_per_rank=parts)
    tokens, rows, loads = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(4)
    source = [rank for rank, count in enumerate(parts) for _ in range(count)]
    for token, experts in enumerate(ids.tolist()):
        ranks = [placed.places.tolist()[e] // 4 for e in experts if e >= 0]
        for rank in ranks:
            loads[rank] += 1
            rows[source[token] // 2, rank // 2] += 1
        for host in {rank // 2 for rank in ranks}:
            tokens[source[token] // 2, host] += 1
    assert found.tokens.tolist() == tokens.tolist()
    assert found.rows.tolist() == rows.tolist()
    assert found.rows_of_rank.tolist() == loads.tolist()
    assert found.crossing_tokens == tokens[0, 1] + tokens[1, 0]
    assert found.crossing_rows == rows[0, 1] + rows[1, 0]
    assert found.imbalance == pytest.approx(float(loads.max() / loads.mean()))


def test_bits_do_not_change():
    ids = families(96, strays=0.2)
    ids[5, 2] = -1
    layer = layer_of(ids)
    wanted = step(layer, Placement.identity(EXPERTS))
    placed = placement.place_experts(ids, num_experts=EXPERTS, hosts=2, ranks=4)
    assert not torch.equal(placed.experts, torch.arange(EXPERTS))
    assert_same_bits(step(layer, placed), wanted, placed)


def test_bits_do_not_change_on_several_hosts():
    ids = families(96, strays=0.2)
    layer = layer_of(ids)
    wanted = step(layer, Placement.identity(EXPERTS))
    placed = placement.place_experts(ids, num_experts=EXPERTS, hosts=2, ranks=4)
    try:
        parts = run_ranks(4, step_of_rank, layer, placed.experts, 2)
    except Exception as error:  # of the process, whose text has the sentence
        if "libfabric" in str(error):
            pytest.skip("this build has no transport between hosts")
        raise
    found = {name: torch.cat([part[name] for part in parts]) for name in wanted}
    assert_same_bits(found, wanted, placed)


def test_a_layer_with_a_hook_behind_its_router():
    torch.manual_seed(0)
    plain = uniep.MoELayer(HIDDEN, INTERMEDIATE, EXPERTS, TOPK)
    placed = Placement.of(torch.randperm(EXPERTS))
    moved = uniep.MoELayer(HIDDEN, INTERMEDIATE, EXPERTS, TOPK)
    moved.load_state_dict(placed.state_dict(plain.state_dict()))
    moved.router.register_forward_hook(
        lambda module, args, found: found._replace(ids=placed.ids(found.ids))
    )
    x = torch.randn(40, HIDDEN).to(torch.bfloat16)
    for layer in (plain, moved):
        layer(x).float().square().mean().backward()
    assert torch.equal(plain(x), moved(x))
    assert torch.equal(plain.router.weight.grad, moved.router.weight.grad)
    assert torch.equal(placed.permute(plain.w1.grad), moved.w1.grad)


def test_a_state_dict_has_experts_by_place_and_can_be_restored():
    placed = Placement.of([2, 0, 3, 1])
    state = {
        "router.weight": torch.arange(8.0).view(4, 2),
        "layers.1.w1": torch.arange(8.0).view(4, 2),
        "mlp.b2": torch.arange(4.0),
        "exp_avg": torch.arange(4.0),
        **{f"mlp.experts.{e}.w1.weight": torch.full((2,), float(e)) for e in range(4)},
    }
    found = placed.state_dict(state, tensors=("w1", "b2", "exp_avg"))
    assert torch.equal(found["router.weight"], state["router.weight"])
    assert found["layers.1.w1"][:, 0].tolist() == [4, 0, 6, 2]
    assert found["mlp.b2"].tolist() == found["exp_avg"].tolist() == [2, 0, 3, 1]
    assert [float(found[f"mlp.experts.{p}.w1.weight"][0]) for p in range(4)] == [2, 0, 3, 1]
    restored = placed.inverse().state_dict(found, tensors=("w1", "b2", "exp_avg"))
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    "names",
    [("w1", "w2", "w3"), ("gate_up_proj", "down_proj_bias"), ("w1_EFD", "mlp1_bias")],
)
def test_tensors_of_a_module_of_experts_are_permuted_by_any_name(names):
    placed = Placement.of([2, 0, 3, 1])
    state = {f"layers.0.moe.experts.{name}": torch.arange(8.0).view(4, 2) for name in names}
    state["experts.bias"] = torch.arange(4.0)
    found = placed.state_dict(state | {"moe.shared_experts.gate": torch.arange(3.0)})
    assert all(torch.equal(found[name], placed.permute(state[name])) for name in state)
    assert found["moe.shared_experts.gate"].tolist() == [0, 1, 2]


def test_tensors_within_experts_that_nothing_says_more_of_are_refused():
    placed = Placement.of([1, 0])
    for name in ("mlp.experts.linear_fc1.weight0", "experts.gate_up_proj.lora_A"):
        with pytest.raises(ValueError, match=f"{name} is within experts"):
            placed.state_dict({name: torch.zeros(2, 3)})
    assert placed.state_dict({"mlp.experts.linear_fc1._extra_state": None}) == {
        "mlp.experts.linear_fc1._extra_state": None
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_keep_their_dtype_and_what_is_no_expert(dtype):
    placed = Placement.of([2, 0, 3, 1])
    ids = torch.tensor([[0, 1, 2], [3, -1, 4]], dtype=dtype)
    found = placed.ids(ids)
    assert found.dtype == dtype
    assert found.tolist() == [[1, 3, 0], [2, -1, 4]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_measured_is_what_was_predicted(ranks, tmp_path):
    """With a host for each rank, what ranks fetch from others is what crosses between hosts."""
    pytest.importorskip("safetensors")
    ids = families(96, strays=0.2)
    layer = layer_of(ids)
    how = {"hosts": ranks, "ranks": ranks}
    measured = {}
    for name, placed in (
        ("before", Placement.identity(EXPERTS)),
        ("after", placement.place_experts(ids, num_experts=EXPERTS, **how)),
    ):
        uniep.write_layer(
            tmp_path / name,
            layer["x"],
            placed.ids(ids),
            layer["probs"],
            placed.permute(layer["w1"]),
            placed.permute(layer["w2"]),
        )
        file = tmp_path / "figures.json"
        try:
            cli.run(
                *("run", "--input", str(tmp_path / name), "--pass", "forward"),
                *("--ranks", str(ranks), "--hosts", str(ranks), "--json", str(file)),
            )
        except RuntimeError as error:
            if "libfabric" in str(error):
                pytest.skip("this build has no transport between hosts")
            raise
        record = json.loads(file.read_text())["records"][0]
        predicted = placement.predict_traffic(ids, placed, **how)
        bytes_of_row = 2 * HIDDEN
        assert record["pushed_bytes"] == predicted.crossing_rows * bytes_of_row
        of_probs = 4 * predicted.crossing_rows
        assert record["pulled_bytes"] == predicted.crossing_tokens * bytes_of_row + of_probs
        measured[name] = record["pulled_bytes"]
    assert measured["after"] < measured["before"]


@pytest.mark.parametrize("topk_group", [1, 2, 4])
def test_a_router_limited_to_groups_needs_fewer_hosts(topk_group):
    experts, topk, hosts = 64, 8, 8
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    needed = {}
    for limited in (False, True):
        groups = {"n_group": hosts, "topk_group": topk_group} if limited else {}
        router = uniep.Router(32, experts, topk, uniep.RouterConfig("sigmoid", bias=True, **groups))
        with torch.no_grad():
            router.weight.copy_(
                torch.randn(experts, 32, generator=torch.Generator().manual_seed(1))
            )
        ids = router(x).ids
        needed[limited] = placement.hosts_needed(ids, Placement.identity(experts), hosts=hosts)
    assert int(needed[True].max()) <= topk_group
    assert int(needed[False].max()) > topk_group
    assert needed[True].float().mean() < 0.8 * needed[False].float().mean()


def test_what_is_accepted_is_said():
    counts = torch.zeros(6, 6, dtype=torch.int64)
    for arguments, words in (
        ({"hosts": 0}, ["hosts is 0"]),
        ({"hosts": 2, "ranks": 3}, ["hosts is 2 of 3 ranks", "divisor"]),
        ({"hosts": 4}, ["ranks is 4", "6 experts", "divisor"]),
        ({"hosts": 2, "slack": -1.0}, ["slack is -1.0", "0 or more"]),
    ):
        with pytest.raises(ValueError) as error:
            placement.place_experts(counts, **arguments)
        assert all(word in str(error.value) for word in words), error.value
    one_sided = counts.clone()
    one_sided[0, 1] = 2  # exchanges would never end
    for wrong in (counts[0], counts[:4], counts.float(), one_sided, counts - 1):
        with pytest.raises(ValueError, match="co-activation counts are"):
            placement.place_experts(wrong, hosts=2)
    assert Placement.of([1, 0]) == Placement.of([1, 0]) and Placement.of([1, 0]) != [1, 0]
    assert {Placement.of([1, 0]), Placement.of([1, 0]), Placement.identity(2)} == {
        Placement.identity(2),
        Placement.of([1, 0]),
    }
    with pytest.raises(ValueError, match="no permutation"):
        Placement.of([0, 0, 1])
    with pytest.raises(TypeError, match="whole numbers"):
        Placement.of([0.0, 1.0])
    with pytest.raises(ValueError, match=r"topk_ids has shape \[\]"):
        placement.coactivation(torch.tensor(1), 4)
    placed = Placement.of([1, 0])
    with pytest.raises(ValueError, match=r"shape \[3, 4\]; its first dimension must be all 2"):
        placed.permute(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="of expert 2; there are 2"):
        placed.state_dict({"experts.2.w1.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"tokens_per_rank is \[1, 1\]; the 3 tokens"):
        placement.predict_traffic(
            torch.zeros(3, 1, dtype=torch.int64), placed, hosts=2, tokens_per_rank=[1, 1]
        )


IDS = torch.tensor([[0, 1], [2, 3], [0, 3]])
COUNTS = placement.coactivation(IDS, 4)
SAME = Placement.identity(4)


@pytest.mark.parametrize(
    ("kind", "words", "act"),
    [
        (TypeError, "topk_ids is torch.float32", lambda: placement.coactivation(IDS.float(), 4)),
        (TypeError, "topk_ids is torch.float32", lambda: SAME.ids(IDS.float())),
        (TypeError, "topk_ids is a list", lambda: placement.coactivation(IDS.tolist(), 4)),
        (TypeError, "counts is a list", lambda: placement.coactivation(IDS, 4, [[0] * 4] * 4)),
        (TypeError, "num_experts is 4.0, a float", lambda: placement.coactivation(IDS, 4.0)),
        (ValueError, "num_experts is -1; 1 or more", lambda: placement.coactivation(IDS, -1)),
        (ValueError, r"shape \[3, 0\]", lambda: placement.coactivation(IDS[:, :0], 4)),
        (TypeError, "recorded is a list", lambda: placement.place_experts([[0, 1]], hosts=2)),
        (TypeError, "hosts is 2.0, a float", lambda: placement.place_experts(COUNTS, hosts=2.0)),
        (
            TypeError,
            "slack is 'a', a str",
            lambda: placement.place_experts(COUNTS, hosts=2, slack="a"),
        ),
        (
            TypeError,
            "hosts is 2.0, a float",
            lambda: placement.predict_traffic(IDS, SAME, hosts=2.0),
        ),
        (
            TypeError,
            "tokens_per_rank is 1.5, a float",
            lambda: placement.predict_traffic(IDS, SAME, hosts=2, tokens_per_rank=[1.5, 1.5]),
        ),
        (TypeError, "hosts is 2.0, a float", lambda: placement.hosts_needed(IDS, SAME, hosts=2.0)),
        (
            ValueError,
            r"sum up to 4.61e\+18; up to 2\^60 is accepted",
            lambda: placement.place_experts(torch.ones_like(COUNTS) * 2**58, hosts=2),
        ),
        (ValueError, "num_experts is -1; 0 or more", lambda: Placement.identity(-1)),
        (TypeError, "num_experts is 2.5, a float", lambda: Placement.identity(2.5)),
    ],
)
def test_other_types_are_refused_in_a_sentence(kind, words, act):
    with pytest.raises(kind, match=words):
        act()


def test_traffic_of_ids_of_any_shape():
    ids = torch.randint(0, 4, (6, 5, 2), generator=torch.Generator().manual_seed(1))
    found, wanted = (placement.predict_traffic(t, SAME, hosts=2) for t in (ids, ids.flatten(0, 1)))
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.rows, wanted.rows)
    assert torch.equal(found.rows_of_rank, wanted.rows_of_rank)


def test_tables_lie_on_the_cpu_whatever_the_default_device():
    counts = placement.coactivation(IDS, 4)
    with torch.device("meta"):
        placed = [
            placement.place_experts(counts, hosts=hosts, slack=slack)
            for hosts in (1, 2)
            for slack in (0.0, 1.0)
        ]
        same, given = Placement.identity(4), Placement.of([0, 1, 2, 3])
        found = placement.predict_traffic(IDS, same, hosts=2, tokens_per_rank=[1, IDS.shape[0] - 1])
        needed = placement.hosts_needed(IDS, same, hosts=2)
    wanted = [
        placement.place_experts(counts, hosts=hosts, slack=slack)
        for hosts in (1, 2)
        for slack in (0.0, 1.0)
    ]
    assert placed == wanted and same == given == SAME
    traffic = placement.predict_traffic(IDS, SAME, hosts=2, tokens_per_rank=[1, IDS.shape[0] - 1])
    for name, wanted_of_name in vars(traffic).items():
        assert torch.equal(getattr(found, name), wanted_of_name), name
    assert torch.equal(needed, placement.hosts_needed(IDS, SAME, hosts=2))
