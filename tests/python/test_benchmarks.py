"""The benchmarks of the package run, and what they compare they really compare."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from pathlib import Path

import arithmetic
import compare_sonic
import memory_choices
import pytest
import shared_experts
import torch
from compare.shapes import TINY
from compare.step_bench import Inputs, Measured, Step, StepBench, Way, wrong_bits
from ranks import run_script

from uniep import plain

BENCHMARKS = Path(compare_sonic.__file__).parent
CPU = torch.device("cpu")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script([str(BENCHMARKS / program), *arguments])


def test_memory_choices_run_and_have_the_same_bits(tmp_path):
    path = tmp_path / "choices.json"
    done = run("memory_choices.py", "--tiny", "--turns", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    ways = [choice.name for choice in memory_choices.CHOICES for _ in range(2)]
    assert [record["way"] for record in records] == ways
    assert {r["wrong"] for r in records if not r["way"].startswith("plain")} == {0}
    assert all(record["ms"] > 0 for record in records)


def test_arithmetic_of_uniep_and_torch_runs_and_agrees(tmp_path):
    path = tmp_path / "arithmetic.json"
    done = run("arithmetic.py", "--tiny", "--turns", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert [record["way"] for record in records[::2]] == arithmetic.WAYS + arithmetic.OF_TORCH
    assert all(record["ms"] > 0 for record in records)


def test_what_shared_experts_cost_runs_and_agrees(tmp_path):
    path = tmp_path / "shared.json"
    done = run("shared_experts.py", "--tiny", "--shared", "2", "--turns", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert [record["way"] for record in records[::2]] == shared_experts.WAYS
    assert all(record["ms"] > 0 for record in records)


@pytest.mark.parametrize("all_rows", [False, True])
def test_a_mesh_of_hosts_has_the_bits_of_a_group(tmp_path, all_rows):
    path = tmp_path / "hosts.json"
    program = [str(BENCHMARKS / "over_hosts.py"), "--tiny", "--turns", "2"]
    program += ["--exact-hosts", "--limit", "1", "--all-rows" if all_rows else "--in-turn"]
    done = run_script([*program, "--json", str(path)], ranks=2)
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    ways = ["group, sums", "group", "mesh", "in turn", "exact hosts"]
    if all_rows:
        ways = ["group", "mesh", "exact hosts"]
    assert [record["way"] for record in records[::2]] == ways
    assert {r["wrong"] for r in records if all_rows or r["way"] != "group"} == {0}
    assert all(record["hosts"] == 2 and record["ms"] > 0 for record in records)


def test_arithmetic_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="behind"):
        arithmetic.arithmetic_of("swiglu,behind")
    done = run("arithmetic.py", "--tiny", "--ways", "relu2")
    assert "has a gate" in done.stderr


def test_memory_choices_with_offload_and_several_layers(tmp_path):
    path = tmp_path / "choices.json"
    arguments = (
        "--tiny",
        "--turns",
        "1",
        "--layers",
        "3",
        "--offload",
        "--choices",
        "rows",
        "plain",
    )
    done = run("memory_choices.py", *arguments, "--json", str(path))
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert [r["way"] for r in records[::2]] == ["rows", "plain", "rows,offload"]
    assert {r["layers"] for r in records} == {3}
    assert {r["wrong"] for r in records if r["way"] != "plain"} == {0}


def test_wrong_bits_are_counted():
    step = {"out": torch.ones(4).bfloat16(), "dprobs": torch.ones(4)}
    other = {"out": torch.tensor([1, 2, 1, -1]).bfloat16(), "dprobs": torch.zeros(4)}
    assert wrong_bits(step, other) == 2  # dprobs is not compared


def bench(**options: int) -> StepBench:
    torch.manual_seed(1)
    return StepBench(TINY, Inputs.make(TINY, 1, CPU), **options)


def one_step(b: StepBench) -> list[torch.Tensor]:
    leaves = [b.inputs.x, b.inputs.probs, b.inputs.w1, b.inputs.w2]
    out = plain.moe(*b.inputs.layer)
    return [out, *torch.autograd.grad(out, leaves, b.inputs.dy)]


def test_a_step_has_what_autograd_gives():
    b = bench()
    step = b.turn(Way("plain", plain.moe), Measured())
    assert list(step) == ["out", "dx", "dprobs", "dw1", "dw2"]
    for found, wanted in zip(step.values(), one_step(b), strict=True):
        assert torch.equal(found, wanted)


def test_layers_go_forward_one_after_another_and_back_in_reverse():
    b, calls = bench(layers=3), []

    def moe(*tensors: torch.Tensor) -> torch.Tensor:
        out, number = plain.moe(*tensors), len(calls)
        calls.append(f"forward {number}")
        out.register_hook(lambda _: calls.append(f"backward {number}"))
        return out

    step = b.turn(Way("plain", moe), Measured())
    assert calls == [f"forward {n}" for n in range(3)] + [f"backward {n}" for n in (2, 1, 0)]
    for found, wanted in zip(step.values(), one_step(b), strict=True):
        assert torch.equal(found, wanted)  # of one layer, not the sum of three


def test_ways_take_turns_in_changing_order():
    b, calls = bench(), []

    def way(name: str) -> Way:
        def moe(*tensors: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return plain.moe(*tensors)

        return Way(name, moe)

    found = b.measure([way(name) for name in "abc"], turns=6)
    turns = ["".join(calls[i : i + 3]) for i in range(0, 18, 3)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"} and len(set(turns)) > 1
    assert all(len(m.forward) == len(m.backward) == 6 for m in found.values())


def compare_with(ways: list[Way]) -> dict[str, dict]:
    """Rows of forward by way."""
    args = argparse.Namespace(tolerance=0.01, turns=1)
    rows = compare_sonic.compare(TINY, CPU, args, lambda shape, device: ways)
    print(compare_sonic.table(TINY, rows))
    return {row["way"]: row for row in rows if row["direction"] == "forward"}


def test_only_what_agrees_is_timed():
    def far(*tensors: torch.Tensor) -> torch.Tensor:
        return plain.moe(*tensors) * 1.03

    def failing(*tensors: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("too many experts\nwith a trace behind it")

    rows = compare_with([Way("sonic", plain.moe), Way("far", far), Way("failing", failing)])
    assert list(rows) == [*compare_sonic.CHOICES, "sonic", "far", "failing"]
    baseline = rows["sonic"]["ms"]
    for name in (*compare_sonic.CHOICES, "sonic"):
        assert rows[name]["fault"] is None and rows[name]["baseline_ms"] == baseline > 0
        assert max(rows[name]["relative_l2"].values()) < 0.01
    assert rows["far"]["ms"] is None and "out 0.03" in rows["far"]["fault"]
    assert rows["failing"]["ms"] is None
    assert rows["failing"]["fault"] == "RuntimeError: too many experts"


def test_nothing_is_near_that_is_no_number():
    near: Step = {"out": torch.ones(4)}
    odd: Step = {"out": torch.tensor([1, 1, 1, math.nan])}
    assert compare_sonic.fault(compare_sonic.relative_l2(near, near), 0) is None
    assert "out nan" in compare_sonic.fault(compare_sonic.relative_l2(odd, near), 0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it may run there")
def test_it_is_said_what_is_missing():
    done = run("compare_sonic.py", "--tiny")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert compare_sonic.INSTALL in done.stderr or "needs a GPU" in done.stderr
