"""A mesh of hosts and ranks: the bits of one group, training, checkpoints, what is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, gradients, make_case, step
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import uniep
from uniep._between_hosts import exchange
from uniep._between_hosts import place as place_of_ranks
from uniep._between_hosts.crossing import Crossing, comes_in_waves
from uniep._between_hosts.exchange import sum_of_hosts
from uniep._between_hosts.routes import Routes
from uniep.group import group_of

TOKENS = 60
EXPERTS = 12


def case_of(**options):
    return make_case(tokens=TOKENS, experts=EXPERTS, topk=4, dropped=True, **options)


def mesh_of(hosts: int):
    shape = (hosts, dist.get_world_size() // hosts)
    return init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "ranks"))


def sums_of(hosts: int) -> dict[str, object]:
    return {"combine_groups": hosts, "combine_partials": "bf16"}


class Layer(torch.nn.Module):
    """What has its mesh, as layers of models do."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, *tensors, **options):
        return uniep.moe(*tensors, group=self.mesh, **options)


def bits(hosts: int):
    """One step in several ways."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(hosts)
    without_group = {"max_tokens": TOKENS, **sums_of(hosts)}
    options = {"group": mesh, **without_group}

    def part():
        return case_of().part(rank, size)

    found = {}
    compiles = hosts == size // 2  # takes most of the time of all of these
    if compiles:  # ahead of calls that are not
        case = part().requires_grad()
        compiled = torch.compile(Layer(mesh), backend="aot_eager")
        out = compiled(case.x, case.ids, case.probs, case.w1, case.w2, **without_group)
        found["compiled"] = gradients(case, out)
    found["plain"] = step(part(), **options)
    found["again"] = step(part(), **options)
    found["nothing saved"] = step(part(), save="none", recompute_h=True, **options)
    found["exact rows"] = step(part(), save="tokens", exact_rows=True, **options)
    found["schedule"] = step(part(), schedule="pipelined:2", **options)
    found |= exact_hosts(part, mesh, options, compiles)
    with uniep.Workspace(
        mesh, 64, 32, EXPERTS, 4, TOKENS, device="cpu", on_overflow="flag", **sums_of(hosts)
    ) as own:
        found["workspace"] = step(part(), workspace=own)
        own.grow(capacity_rows=own.rows + 128)
        found["grown"] = step(part(), workspace=own)
        assert int(own.overflow[0]) == 0
    found["row pool"] = step(part(), row_pool=1 << 22, **options)
    found["after"] = step(part(), probs="after", **options)
    case = part()
    with torch.device("meta"):  # as the default, on which nothing of a call may come to lie
        found["default device"] = step(case, exact_hosts=True, **options)

    case = part().requires_grad()
    deferred = uniep.DeferredWeights()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, deferred=deferred, **options)
    out.backward(case.dy)
    uniep.backward_weights(deferred)
    found["deferred"] = [out.detach(), case.x.grad, case.probs.grad, case.w1.grad, case.w2.grad]

    # As zero-bubble schedules ask for them.
    case = part().requires_grad()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, **options)
    of_weights = torch.autograd.grad(out, (case.w1, case.w2), case.dy, retain_graph=True)
    of_tokens = torch.autograd.grad(out, (case.x, case.probs), case.dy)
    found["apart"] = [out.detach(), *of_tokens, *of_weights]

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


def exact_hosts(part, mesh, options, compiles):
    """Steps in which tokens go only where they are needed; memory that no token fills is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    found = {"exact hosts": step(part(), exact_hosts=True, **options)}
    more = {"exact hosts, nothing saved": {"save": "none", "recompute_h": True}}
    more["exact hosts, row pool"] = {"row_pool": 1 << 22}
    more["exact hosts and rows"] = {"exact_rows": True}
    for name, also in more.items():
        found[name] = step(part(), exact_hosts=True, **also, **options)
    if compiles:
        case = part().requires_grad()
        compiled = torch.compile(uniep.moe, backend="aot_eager")
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        out = compiled(*tensors, exact_hosts=True, **options)
        found["exact hosts, compiled"] = gradients(case, out)
    figures = (64, 32, EXPERTS, 4, TOKENS)
    sums = sums_of(mesh.shape[0])
    with uniep.Workspace(mesh, *figures, device="cpu", exact_hosts=True, **sums) as own:
        found["exact hosts of a workspace"] = step(part(), workspace=own)
        nowhere = part()
        nowhere.ids.fill_(-1)
        assert not any(tensor.any() for tensor in step(nowhere, workspace=own))
    torch.use_deterministic_algorithms(False)
    return found


def some_cross(hosts: int):
    """Which tokens cross with routes, at once and host by host, and what is found of the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = place_of_ranks.host_mesh(mesh_of(hosts), torch.device("cpu"))
    each, tokens = EXPERTS // hosts, 20
    g = torch.Generator().manual_seed(7)
    # Two slots a token, so that most hosts have none of it; of all ranks.
    ids = torch.randint(-1, EXPERTS, (size, tokens, 2), generator=g)
    rail = slice(mesh.local, None, size // hosts)
    routes = Routes(mesh, ids[rank], ids[rail].flatten(0, 1), each)
    rows = torch.randn(size, tokens, 3, generator=g).bfloat16()

    def goes(of, host, own):
        return (((ids[of] >= 0) & (ids[of] // each == host)).any(-1)) | own

    wanted = torch.full((hosts, tokens, 3), torch.nan).bfloat16()
    came = []
    for host, of in enumerate(range(mesh.local, size, size // hosts)):
        came.append(goes(of, mesh.host, host == mesh.host))
        needed = rows[of][came[-1]]
        wanted[host, : len(needed)] = needed
    back = torch.stack([goes(rank, host, host == mesh.host) for host in range(hosts)])
    sums = torch.where(back[..., None], rows[rank], 0)
    fewer = 0 < int(torch.stack(came).sum()) < hosts * tokens

    torch.use_deterministic_algorithms(True)
    seen = exchange.spread(mesh, rows[rank], routes)
    stepped, found = host_by_host(mesh, rows[rank], routes)
    collected = torch.stack(exchange.collect(mesh, seen, routes).blocks())
    torch.use_deterministic_algorithms(False)
    up = routes.moved_up(rows[rail].flatten(0, 1)).view_as(wanted)
    return {
        "fewer": fewer,
        "spread": same(seen.view_as(wanted), wanted) and same(stepped, wanted),
        "moved up": same(torch.where(wanted.isnan(), wanted, up), wanted),
        "collect": torch.equal(collected, sums) and torch.equal(found, sums),
    }


def same(a, b):
    return torch.equal(a.nan_to_num(9), b.nan_to_num(9))


def host_by_host(mesh, rows, routes):
    """What `spread` and `collect` give, by steps; each writes what comes from one host alone."""
    host, hosts = mesh.host, mesh.hosts
    seen = torch.full((hosts, *rows.shape), torch.nan).bfloat16()
    seen[host] = rows
    sent, received = exchange.to_hosts(mesh, rows, routes), exchange.by_host(seen, routes)
    for step_of in range(1, hosts):
        before, behind = (host - step_of) % hosts, (host + step_of) % hosts
        assert received[behind].isnan().all()
        exchange.step(mesh, (sent[before], before), (received[behind], behind))
        assert not received[behind].isnan().any()
    found = exchange.Found(mesh, seen.shape, seen, routes)
    for step_of in range(1, hosts):
        before, behind = (host - step_of) % hosts, (host + step_of) % hosts
        back = exchange.going_back(seen, behind, routes)
        exchange.step(mesh, (back, behind), (found.parts[before], before))
    found.parts[host] = seen[host]
    return seen, torch.stack(found.blocks())


def by_steps(hosts: int):
    """Whether tokens and sums get host by host to where they all go at a time."""
    mesh = place_of_ranks.host_mesh(mesh_of(hosts), torch.device("cpu"))
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    seen, found = host_by_host(mesh, rows, None)
    return {
        "spread": torch.equal(seen.flatten(0, 1), exchange.spread(mesh, rows)),
        "collect": torch.equal(
            found, torch.stack(exchange.collect(mesh, seen.flatten(0, 1)).blocks())
        ),
    }


def test_tokens_come_in_waves_where_that_gains(monkeypatch):
    gpu, many = torch.device("cuda"), 1 << 24

    def comes(hosts: int = 2, device: torch.device = gpu, token_bytes: int = many) -> bool:
        return comes_in_waves(SimpleNamespace(hosts=hosts), device, token_bytes)

    monkeypatch.setenv("UNIEP_SPARE_SMS", "16")
    assert comes() and comes(hosts=14)
    assert not comes(hosts=1) and not comes(hosts=15)
    assert not comes(device=torch.device("cpu")) and not comes(token_bytes=many - 1)
    assert not comes_in_waves(None, gpu, many)
    for none in ("0", ""):
        monkeypatch.setenv("UNIEP_SPARE_SMS", none)
        assert not comes()


def test_exact_hosts_are_not_captured(monkeypatch):
    kept = {"in_waves": False, "in_forward": True, "in_backward": True}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mesh = SimpleNamespace(hosts=2)
    with pytest.raises(ValueError, match="exact_hosts=False"):
        Crossing.of(mesh, None, exact_hosts=True, **kept)
    assert Crossing.of(mesh, None, exact_hosts=False, **kept) is not None


def begun_ahead():
    """How many times gradients of tokens went ahead of those of weights, in some ways."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"group": mesh_of(2), "max_tokens": TOKENS, **sums_of(2)}
    times = []
    ahead = Crossing.ahead_of_others

    def counted(self, dx, dprobs):
        times[-1] += 1
        return ahead(self, dx, dprobs)

    Crossing.ahead_of_others = counted
    for more in ({}, {"row_pool": 1 << 22}, {"deferred": uniep.DeferredWeights()}):
        times.append(0)
        case = case_of().part(rank, size).requires_grad()
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        uniep.moe(*tensors, **options, **more).backward(case.dy)
        times.append(0)
        frozen = (case.x, case.ids, case.probs, case.w1.detach(), case.w2.detach())
        uniep.moe(*frozen, **options, **more).backward(case.dy)
    Crossing.ahead_of_others = ahead
    return times


def unalike():
    """Steps in which x and probabilities need gradients on all ranks, and on the first alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for backward_rows in (None, 512):  # with fewer than all rows, tokens cross behind the pass
        options = {"group": mesh_of(2), "max_tokens": TOKENS, "backward_rows": backward_rows}
        for alike in (True, False):
            case = case_of().part(rank, size).requires_grad()
            data = [case.x, case.probs]
            if not alike and rank > 0:
                data = [tensor.requires_grad_(False) for tensor in data]
            out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, **options)
            out.backward(case.dy)
            found.append([out.detach(), *(t.grad for t in (case.w1, case.w2, *data[: 2 - rank]))])
    return found


def other_meshes():
    """Two meshes with the same groups within hosts; and one whose ranks descend."""
    rank = dist.get_rank()
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "ranks"))
    steps = {}
    for place, name in ((rank // 2, "a"), (rank % 2, "b")):
        part = case_of().part(place, 2)
        steps[name] = step(part, group=cube[name, "ranks"], max_tokens=TOKENS, **sums_of(2))
    return steps, [said_of(ranks) for ranks in ([[3, 2], [1, 0]], [3, 2, 1, 0])]


def said_of(ranks):
    """What a layer, a workspace and a call say of a mesh of these ranks."""
    mesh, case = DeviceMesh("cpu", ranks), case_of().part(dist.get_rank(), 4)
    said = []
    for make in (
        lambda: uniep.MoELayer(64, 32, EXPERTS, 4, group=mesh),
        lambda: uniep.Workspace(mesh, 64, 32, EXPERTS, 4, TOKENS, device="cpu"),
        lambda: step(case, group=mesh, max_tokens=TOKENS),
    ):
        with pytest.raises(ValueError) as raised:
            make()
        said.append(str(raised.value))
    return said


def by_four():
    """All that four processes are made for, once."""
    return {
        "begun ahead": begun_ahead(),
        "by steps": {hosts: by_steps(hosts) for hosts in (2, 4)},
        "some cross": {hosts: some_cross(hosts) for hosts in (2, 4)},
        "bits": {hosts: bits(hosts) for hosts in (1, 2, 4)},
        "arithmetic": arithmetic(),
        "one group": train(None),
        "mesh": train(2),
        "refused": refused(),
        "other meshes": other_meshes(),
        "unalike": unalike(),
    }


def by_six():
    """Hosts that are more than their ranks, and fewer; and hosts that are found."""
    return {"bits": {hosts: bits(hosts) for hosts in (2, 3)}, "found": of_ranks()}


@pytest.fixture(scope="module")
def four():
    return run_ranks(4, by_four)


@pytest.fixture(scope="module")
def six():
    return run_ranks(6, by_six)


@pytest.mark.parametrize("size", [4, 6])
def test_the_bits_of_one_process(size, request):
    results = request.getfixturevalue({4: "four", 6: "six"}[size])
    for hosts in results[0]["bits"]:
        check_bits(hosts, [result["bits"][hosts] for result in results])


def check_bits(hosts, results):
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


@pytest.mark.parametrize("hosts", [2, 4])
def test_what_crosses_host_by_host_gets_where_it_does_at_once(four, hosts):
    for result in four:
        assert result["by steps"][hosts] == {"spread": True, "collect": True}


@pytest.mark.parametrize("hosts", [2, 4])
def test_only_tokens_cross_that_have_an_expert_there(four, hosts):
    for result in four:
        assert all(result["some cross"][hosts].values()), result["some cross"]


def test_tokens_cross_under_gradients_of_weights(four):
    for result in four:
        assert result["begun ahead"] == [1, 0, 1, 0, 0, 0]


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


def test_other_arithmetic(four):
    parts = [result["arithmetic"][1] for result in four]
    wanted = four[0]["arithmetic"][0]
    assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], wanted)


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
    # One folder of all ranks: they have the same parent.
    folder = Path(tempfile.gettempdir()) / f"uniep_mesh_{os.getppid()}"
    folder.mkdir(exist_ok=True)
    with uniep.capture(folder / "trace"):
        layer(x).backward(target)
    uniep.checkpoint.save_hugging_face(folder, {"mlp": layer}, "qwen3_moe")
    dist.barrier()
    trace = load_file(folder / "trace")
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return torch.stack(losses), whole, trace, files


def test_a_layer_trains_as_in_one_group(four):
    for result in four:
        losses, weights, trace, files = result["one group"]
        found, whole, traced, saved = result["mesh"]
        assert losses[-1] < losses[0]
        assert torch.equal(found, losses)
        assert torch.equal(whole, weights)
        assert traced.keys() == trace.keys() and "dy" in trace
        assert all(torch.equal(traced[name], trace[name]) for name in trace)
        assert saved == files and len(files) == 3 * EXPERTS + 1


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
    shared = {"shared_w1": case.w1.detach()[:1], "shared_w2": case.w2.detach()[:1]}
    with uniep.Workspace(mesh, 64, 32, EXPERTS, 4, TOKENS, device="cpu") as own:
        where = {"workspace": own, "group": None, "max_tokens": None}
        found["shared experts of the tensors is 1"] = sentence(case, **shared, **where)
    if rank == 3:
        case.ids[0, 0] = EXPERTS
    found[f"no expert; -1 (dropped) to {EXPERTS - 1}"] = sentence(case, **sums_of(2))
    found["nothing was raised"] = sentence(case_of().part(rank, size), **sums_of(2))
    with uniep.Workspace(mesh, 64, 32, EXPERTS, 4, 1, device="cpu", **sums_of(2)) as own:
        found["max_tokens=1"] = sentence(case, workspace=own, group=None, max_tokens=None)
    try:
        uniep.Workspace(mesh, 64, 32, EXPERTS + 1, 4, TOKENS, device="cpu", **sums_of(2))
    except ValueError as error:
        found["num_experts is 13"] = str(error)
    figures = (64, 32, EXPERTS, 4, TOKENS)
    for other, words in (
        ({"exact_hosts": rank == 3}, "exact_hosts is False on rank 0 and True on rank 3"),
        (sums_of(2 if rank < 2 else 1), "combine_groups is 2 on rank 0 and 1 on rank 2"),
        ({"save": "none" if rank == 1 else "rows"}, "save is rows on rank 0 and none on rank 1"),
    ):
        try:
            uniep.Workspace(mesh, *figures, device="cpu", **{**sums_of(2), **other})
        except uniep.Error as error:
            found[words] = str(error)
    try:
        uniep.Group(mesh, device="cpu")
    except ValueError as error:
        found["DeviceMesh of 2 dimensions"] = str(error)
    return found


def test_meshes_that_share_hosts_are_told_apart(four):
    wanted = step(case_of(), **sums_of(2))
    for name, ranks in (("a", (0, 2)), ("b", (0, 1))):
        parts = [four[rank]["other meshes"][0][name] for rank in ranks]
        assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], wanted)


def test_not_all_ranks_need_gradients_of_tokens(four):
    for rank, result in enumerate(four):
        for alike, unalike in (result["unalike"][:2], result["unalike"][2:]):
            for wanted, found in zip(alike, unalike, strict=True):
                if rank == 0 or found is not None:
                    assert torch.equal(found, wanted)


def test_ranks_of_a_mesh_ascend(four):
    for rank, result in enumerate(four):
        places = [[1 - rank // 2, 1 - rank % 2], [3 - rank]]
        for place, said in zip(places, result["other meshes"][1], strict=True):
            for sentence in said:
                assert f"the mesh has this process at {place}" in sentence


def test_what_does_not_fit_is_refused_by_all(four):
    for result in four:
        assert len(result["refused"]) == 9
        for words, sentence in result["refused"].items():
            assert words in sentence, sentence


def of_ranks():
    """The mesh that uniep finds for a process group of GPUs, in sub-groups of the world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["UNIEP_HOST_ID"] = f"host {rank // 2}"
    groups = [dist.new_group(list(range(4))), dist.new_group(list(range(4, size)))]
    with torch.device("meta"):  # as the default, on which nothing of hosts may come to lie
        mesh = place_of_ranks.mesh_of_ranks(groups[rank // 4])
    if rank >= 4:  # two ranks of one host
        assert mesh is None
        return None
    assert mesh is not None
    place = (mesh.hosts, mesh.local_ranks, mesh.host, mesh.local)
    members = [dist.get_process_group_ranks(group) for group in (mesh.across, mesh.within)]
    place_of_ranks._found[groups[0]] = mesh  # as where they have GPUs
    of_host = group_of(mesh.within, torch.device("cpu"))
    for group in (groups[0], DeviceMesh.from_group(groups[0], "cpu")):
        of_host.workspaces["some",] = None
        uniep.drop_workspaces(group)
        assert not of_host.workspaces, group
    del place_of_ranks._found[groups[0]]
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert place_of_ranks.mesh_of_ranks(alone) is None
    os.environ["UNIEP_HOST_ID"] = f"host {rank % 2}"
    try:
        place_of_ranks.mesh_of_ranks(groups[rank // 4])
    except uniep.Error as error:
        return place, members, str(error)
    return place, members, "nothing was raised"


def test_hosts_of_a_process_group_are_found(six):
    for rank, result in enumerate(six[:4]):
        place, members, refused = result["found"]
        assert place == (2, 2, rank // 2, rank % 2)
        assert members == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
        assert "one after another" in refused


def test_sums_are_in_the_order_of_hosts():
    def sum_of(*partials):
        return float(sum_of_hosts(torch.tensor(partials).bfloat16()[:, None, None], 1))

    large = 2.0**30
    assert sum_of(large, -large, 1.0) == 1.0
    assert sum_of(1.0, large, -large) == 0.0
    assert sum_of(1.0, 2.0**-9, 2.0**-9, 2.0**-8) == 1.0 + 2.0**-7  # rounded once
    for count in (2, 3):
        minus_zero = torch.full((count, 1, 1), -0.0).bfloat16()
        assert not torch.signbit(sum_of_hosts(minus_zero, 1)).any()
