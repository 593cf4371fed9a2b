"""The search for a schedule on tensors of the caller's own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, make_case, step, workspace
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import uniep


@pytest.mark.parametrize("choice", [{}, {"save": "none", "recompute_h": True}], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_finds_a_schedule_and_changes_nothing(backward, choice, tmp_path, monkeypatch):
    cache = tmp_path / "tuned.json"
    monkeypatch.setenv("UNIEP_TUNE_CACHE", str(cache))
    case = make_case()
    before = [t.clone() for t in vars(case).values()]
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2, *([case.dy] if backward else []))
    with workspace(case, **choice) as own:
        found = uniep.tune_calls(*tensors, workspace=own, budget=1.5, candidates=2)
    assert all(torch.equal(a, b) for a, b in zip(before, vars(case).values(), strict=True))
    assert found.rejected == 0 and found.candidates > 2 and found.rounds > 0
    assert 0 < found.seconds <= found.default_seconds * 1.5
    assert "launch=" in found.schedule and "tile_n=" in found.schedule
    if found.stored:
        (entry,) = json.loads(cache.read_text())["entries"]
        axes = dict(axis.split("=") for axis in found.schedule.split(","))
        assert axes == {name: str(value) for name, value in entry["schedule"].items()}


@pytest.mark.parametrize("backward", [False, True])
def test_searches_for_layers_of_another_arithmetic(backward, tmp_path, monkeypatch):
    cache = tmp_path / "tuned.json"
    monkeypatch.setenv("UNIEP_TUNE_CACHE", str(cache))
    case = make_case()
    biases = {"b1": torch.ones(8, 64).bfloat16(), "b2": torch.ones(8, 64).bfloat16()}
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2, *([case.dy] if backward else []))
    with workspace(case, activation="gpt_oss", probs="after", bias=True) as own:
        found = uniep.tune_calls(*tensors, workspace=own, budget=1, candidates=2, **biases)
        assert found.rejected == 0 and found.rounds > 0
        with pytest.raises(ValueError, match="b1 and b2 are not given; the workspace is for"):
            uniep.tune_calls(*tensors, workspace=own)
    if found.stored:
        (entry,) = json.loads(cache.read_text())["entries"]
        assert (entry["activation"], entry["probs"], entry["bias"]) == ("gpt_oss", "after", "yes")


def test_takes_weights_of_several_tensors():
    case = make_case()
    gate, up = (half.contiguous() for half in case.w1.chunk(2, 1))
    tensors = (case.x, case.ids, case.probs, (gate, up), list(case.w2.unbind()))
    with workspace(case) as own:
        for dy in ([], [case.dy]):
            found = uniep.tune_calls(
                *tensors, *dy, workspace=own, budget=1, candidates=1, store=False
            )
            assert found.rejected == 0 and found.rounds > 0


@pytest.mark.parametrize(
    ("name", "wrong"), [("budget", "1"), ("budget", None), ("candidates", 1.5)]
)
def test_refuses_what_is_no_number(name, wrong):
    case = make_case()
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    with workspace(case) as own, pytest.raises(TypeError, match=f"^{name} is .*; it must be a"):
        uniep.tune_calls(*tensors, workspace=own, **{name: wrong})


def test_keeps_nothing_if_told_so(tmp_path, monkeypatch):
    cache = tmp_path / "tuned.json"
    monkeypatch.setenv("UNIEP_TUNE_CACHE", str(cache))
    case = make_case()
    with workspace(case) as own:
        found = uniep.tune_calls(
            case.x, case.ids, case.probs, case.w1, case.w2, workspace=own, budget=1, store=False
        )
    assert not found.stored and not cache.exists()


def of_mesh(sums: dict[str, object]) -> list[dict[str, object]]:
    """Of a forward and a backward; tokens that cross hosts come from all ranks of the rail."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("hosts", "ranks"))
    case = make_case().part(rank, size)
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    with uniep.Workspace(mesh, 64, 32, 8, 2, 48, device="cpu", **sums) as own:
        wanted = step(case, workspace=own)
        options = {"workspace": own, "budget": 1, "candidates": 2, "store": False}
        found = [vars(uniep.tune_calls(*tensors, *dy, **options)) for dy in ([], [case.dy])]
        assert_same(step(case, workspace=own), wanted)
    return found


@pytest.mark.parametrize(
    "sums", [{}, {"combine_groups": 2, "combine_partials": "bf16"}], ids=["all rows", "sums"]
)
def test_searches_for_the_layers_of_hosts(sums):
    results = run_ranks(4, of_mesh, sums)
    for of_pass in zip(*results, strict=True):
        assert all(found["rejected"] == 0 and found["rounds"] > 0 for found in of_pass)
        for host in (of_pass[:2], of_pass[2:]):
            assert host[0]["schedule"] == host[1]["schedule"]


@pytest.fixture
def heeds_ctrl_c():
    """A shell starts what it puts in the background deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_it_with_what_it_has(monkeypatch):
    case = make_case(tokens=1024, hidden=256, intermediate=128)
    function, asked = uniep.tuning._Stop, itertools.count()

    def ends(requested):
        """What a search asks again and again whether it shall end."""

        def end(context):
            if next(asked) == 20:
                os.kill(os.getpid(), signal.SIGINT)
            return requested(context)

        return function(end)

    monkeypatch.setattr(uniep.tuning, "_Stop", ends)
    with workspace(case) as own:
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        found = uniep.tune_calls(*tensors, workspace=own, budget=3600, candidates=1000, store=False)
    assert found.stopped
    with pytest.raises(KeyboardInterrupt):  # as before
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)


def test_refuses_in_one_sentence():
    case = make_case()
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    with workspace(case) as own:
        with pytest.raises(uniep.Error, match="budget"):
            uniep.tune_calls(*tensors, workspace=own, budget=1e9)
        for zero in ("budget", "candidates"):
            with pytest.raises(ValueError, match=f"{zero} is 0; more is accepted"):
                uniep.tune_calls(*tensors, workspace=own, **{zero: 0})
        with pytest.raises(uniep.Error, match="no_such_axis"):
            uniep.tune_calls(*tensors, workspace=own, space="no_such_axis=1")
        with pytest.raises(ValueError, match="dy"):
            uniep.tune_calls(*tensors, case.dy[:1], workspace=own)
        with pytest.raises(ValueError, match="workspace"):
            one_slot = (case.x, case.ids[:, :1], case.probs[:, :1], case.w1, case.w2)
            uniep.tune_calls(*one_slot, workspace=own)
    with pytest.raises(ValueError, match="closed"):
        uniep.tune_calls(*tensors, workspace=own)
