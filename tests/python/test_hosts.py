"""Groups whose ranks are on several hosts: as found, their bits, what is refused, a lost host."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, make_case, step
from ranks import launch_hosts, run_ranks
from torch.distributed.device_mesh import init_device_mesh

import uniep
from uniep.arithmetic import PARTIALS

TOKENS = 60
TRAINER = Path(__file__).with_name("host_trainer.py")
LONG_LIMIT_S = 60


def be_on_host(number: int) -> None:
    """Takes this process to be on another host; all of them meet on the loopback interface."""
    os.environ.update(UNIEP_HOST_ID=f"host {number}", UNIEP_SOCKET_IFNAME="lo")


def sentence(function, *args, **options) -> str:
    try:
        function(*args, **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def of_a_mesh():
    """Four ranks on two hosts: the world, and the groups along both dimensions of a mesh."""
    rank, size = dist.get_rank(), dist.get_world_size()
    be_on_host(rank // 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    layouts, found = {}, {}

    world = uniep.Group(dist.group.WORLD, device="cpu")
    layouts["world"] = (world.hosts, world.local_ranks, repr(world))
    bytes_of = [uniep.Workspace(group, 64, 32, 8, 2, TOKENS).bytes for group in (world, None)]
    assert bytes_of[0] > 1.8 * bytes_of[1]  # it stands in for a rank of the other host

    case = make_case(tokens=TOKENS, dropped=True)
    found["fp32"] = step(case.part(rank, size), group=world, max_tokens=TOKENS)
    for partials in PARTIALS:
        sums = {"combine_groups": 2, "combine_partials": partials}
        found[f"sums {partials}"] = step(
            case.part(rank, size), group=world, max_tokens=TOKENS, **sums
        )
    for name, local in {"across": rank // 2, "within": rank % 2}.items():
        group = uniep.Group(mesh[name], device="cpu")
        layouts[name] = (group.hosts, group.local_ranks, group.rank)
        assert group.rank == local
        case = make_case(tokens=TOKENS, seed=3)
        found[name] = step(case.part(local, 2), group=mesh[name], max_tokens=TOKENS)
    layer = uniep.MoELayer(64, 32, 8, 2, group=mesh["within"])
    assert layer.w1.shape[0] == 4
    refused = [sentence(uniep.Group, mesh, device="cpu")]
    be_on_host(rank % 2)
    refused.append(sentence(uniep.Group, dist.group.WORLD, device="cpu"))
    be_on_host(min(rank, 1))
    refused.append(sentence(uniep.Group, dist.group.WORLD, device="cpu"))
    os.environ["UNIEP_HOSTS"] = "4"
    layouts["UNIEP_HOSTS"] = uniep.Group(dist.group.WORLD, device="cpu").hosts
    return layouts, found, refused


def joined(parts):
    return [torch.cat([part[i] for part in parts]) for i in range(5)]


def test_groups_of_a_mesh_over_hosts():
    results = run_ranks(4, of_a_mesh)
    for rank, (layouts, _, _) in enumerate(results):
        assert layouts["world"][:2] == (2, 2)
        assert "hosts=2" in layouts["world"][2]
        assert layouts["across"] == (2, 1, rank // 2)
        assert layouts["within"] == (1, 2, rank % 2)
        assert layouts["UNIEP_HOSTS"] == 4

    case = make_case(tokens=TOKENS, dropped=True)
    found = [result[1] for result in results]
    assert_same(joined([f["fp32"] for f in found]), step(case))
    for partials in PARTIALS:
        wanted = step(case, combine_groups=2, combine_partials=partials)
        assert_same(joined([f[f"sums {partials}"] for f in found]), wanted)
    wanted = step(make_case(tokens=TOKENS, seed=3))
    for name, members in {"across": (0, 2), "within": (0, 1)}.items():
        assert_same(joined([found[rank][name] for rank in members]), wanted)

    of_rank_0 = results[0][2]
    assert all(result[2] == of_rank_0 for result in results)
    dimensions, scattered, unequal = of_rank_0
    assert dimensions.startswith("ValueError")
    assert "2 dimensions" in dimensions
    assert "mesh['within']" in dimensions
    assert scattered.startswith("Error")
    assert "ranks 0 and 2" in scattered
    assert "rank 1" in scattered
    assert "1 ranks on its first host and 3 on host 1" in unequal


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_others_with_its_name(tmp_path: Path, lost: int) -> None:
    agents = launch_hosts(
        [str(TRAINER), str(lost), str(tmp_path)], UNIEP_TIMEOUT_MS=str(1000 * LONG_LIMIT_S)
    )
    outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    left = 1 - lost
    assert agents[lost].returncode == -9, outputs[lost]
    assert agents[left].returncode == 1, outputs[left]
    died = float((tmp_path / "died").read_text())
    for rank in (2 * left, 2 * left + 1):
        raised, error = (tmp_path / f"error{rank}").read_text().split(" ", 1)
        assert float(raised) - died < LONG_LIMIT_S / 2
        assert re.search(rf"rank [{2 * lost}{2 * lost + 1}] was lost", error), error
