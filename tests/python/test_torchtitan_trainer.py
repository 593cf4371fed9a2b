"""torchtitan's trainer with uniep, on CPUs.

Trainers run in processes of their own: those of one rank in one process, those of two in two.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import make_case, relative
from ranks import run_ranks
from titan_cases import LOSS, gpt_oss_layers, layer_step, uniep_layer
from titan_trainer import ALONE, PAIR, first, train_alone, train_pair
from torch import Tensor


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all trainers found; and under "folder" their weights before and after."""
    folder = tmp_path_factory.mktemp("torchtitan")
    alone, deepseek = run_ranks(1, train_alone, str(folder))[0]
    (pair, *one), (beside, *other) = run_ranks(2, train_pair, str(folder))
    for name in PAIR:  # every rank logs the loss of all
        assert pair[name]["losses"] == beside[name]["losses"], name
    layers, gpt_oss_parts, pipelines = zip(one, other, strict=True)
    more = {"layers": layers, "gpt_oss": gpt_oss_parts, "deepseek": deepseek}
    more["pipelines"] = pipelines
    return {**alone, **pair, "folder": folder, **more}


def away(found: dict[str, Any], own: dict[str, Any]) -> float:
    """The largest relative distance of a loss or of a norm of gradients."""
    pairs = zip(found["losses"] + found["norms"], own["losses"] + own["norms"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def test_a_trainer_with_uniep_is_one_without(runs: dict[str, Any]) -> None:
    own = runs["torchtitan"]
    assert own["experts"] == "GroupedExperts" and own["forwards"] == [0, 0]
    others = ("FSDP 2", "EP 2", "EP 2, TP 2", "HSDP")
    for name in ("uniep", *others, "inductor", "torchtitan, EP 2", "turned"):
        print(f"{name}: {away(runs[name], own):.1e}")
    assert away(runs["inductor"], own) < LOSS
    for name in ("uniep", *others):
        assert runs[name]["experts"] == "UniepExperts" and runs[name]["fsdp"]
        assert runs[name]["parameters"] == ["w1_EFD", "w2_EDF", "w3_EFD"]
        assert runs[name]["forwards"] == [2, 2]
        assert away(runs[name], own) < LOSS
    assert away(runs["torchtitan, EP 2"], own) < LOSS
    assert away(runs["turned"], own) > 10 * LOSS


def test_experts_are_spread_over_ranks(runs: dict[str, Any]) -> None:
    """By expert parallelism or by FSDP2: each rank keeps w1 of 4 of 8 experts."""
    assert runs["uniep"]["local"] == [8, 64, 256]
    assert runs["HSDP"]["local"] == [8, 64, 256]
    for name in ("FSDP 2", "EP 2", "EP 2, TP 2"):
        assert runs[name]["local"] == [4, 64, 256]


def test_the_first_loss_does_not_depend_on_ranks(runs: dict[str, Any]) -> None:
    """Losses of ranks are added up, so the last bit is PyTorch's affair; uniep's part is equal."""
    assert runs["EP 2"]["losses"][0] == runs["FSDP 2"]["losses"][0]
    assert runs["EP 2"]["losses"][0] == pytest.approx(runs["uniep"]["losses"][0], rel=1e-6)


@pytest.mark.parametrize("backend", ["typechecked", "partial_dtensor", "full_dtensor"])
def test_every_backend_of_torchtitan_has_the_same_bits(runs: dict[str, Any], backend: str) -> None:
    same_training(
        runs, f"EP 2, {backend}", "EP 2" if backend.startswith("part") else "EP 2, routed"
    )


def test_checkpointing_changes_no_bit(runs: dict[str, Any]) -> None:
    for name in ("selective", "selective, kept", "full", "typechecked"):
        same_training(runs, name, "uniep")
    same_training(runs, "EP 2, kept", "EP 2")


def test_compiled_blocks_change_no_bit(runs: dict[str, Any]) -> None:
    """Of losses and experts, with a backend that fuses nothing; blocks run again in backward.

    Norms of layers have bits of their own then: the compiler takes their gradients apart. So
    weights are those behind the first step, whose losses do not see them.
    """
    for name, other in (("compiled", "uniep"), ("EP 2, compiled", "EP 2")):
        assert runs[name]["losses"][0] == runs[other]["losses"][0]
        assert away(runs[name], runs[other]) < LOSS
        found, wanted = weights(runs, first(name)), weights(runs, first(other))
        differ = {key for key in wanted if not torch.equal(found[key], wanted[key])}
        print(f"{name}: {sorted(differ)}")
        assert all("norm" in key for key in differ)


def test_shared_experts_train_in_the_pass(runs: dict[str, Any]) -> None:
    own, *others = runs["deepseek"].values()
    assert own["layers"] == ["MoE"]
    for found in others:
        assert found["layers"] == ["UniepMoE"]
        assert away(found, own) < LOSS
    fused, compiled = (runs["deepseek"][name] for name in ("in the pass", "compiled"))
    assert fused["losses"] == compiled["losses"] and fused["norms"] == compiled["norms"]


def test_pipelines_train_as_one_stage_does(runs: dict[str, Any]) -> None:
    """With each gradient computed once, whatever the schedule."""
    ranks = runs["pipelines"]
    for name in ranks[0]:
        stages = [found[name] for found in ranks]
        assert stages[0]["norms"] == stages[1]["norms"]
        (losses,) = (stage["losses"] for stage in stages if stage["losses"][0] != -1)
        found = {"losses": losses, "norms": stages[0]["norms"]}
        print(f"{name}: {away(found, runs['uniep']):.1e}")
        assert away(found, runs["uniep"]) < LOSS
        assert weights(runs, name).keys() == weights(runs, "uniep").keys()
        assert sum(stage["layers"] for stage in stages) == 2
        for stage in stages:
            calls = 4 * stage["layers"]  # of each pass: as many microbatches
            wanted = {"forward": calls * (2 if "full" in name else 1)}
            wanted |= (
                {"backward": calls}
                if name.startswith("1F1B")
                else {"backward_data": calls, "backward_weights": calls}
            )
            assert stage["passes"] == {key: n for key, n in wanted.items() if n}, name
    for name, other in (("1F1B, full", "1F1B"), ("without bubbles, pool", "without bubbles")):
        found, wanted = weights(runs, name), weights(runs, other)
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_selective_checkpointing_keeps_what_it_is_told_to(runs: dict[str, Any]) -> None:
    """Two layers: their forwards run twice a step, unless what they computed is kept."""
    forwards = {name: runs[name]["forwards"] for name in {**ALONE, **PAIR}}
    assert forwards["compiled"] == forwards["EP 2, compiled"] == []  # not counted
    assert forwards["full"] == forwards["selective"] == [4, 4]
    assert forwards["selective, kept"] == forwards["EP 2, kept"] == [2, 2]


def weights(runs: dict[str, Any], name: str) -> dict[str, Tensor]:
    """A checkpoint, as torchtitan's own model reads it in one process."""
    return dict(read(str(runs["folder"] / name)))


@functools.cache
def read(path: str) -> tuple[tuple[str, Tensor], ...]:
    reader = dcp.FileSystemReader(path)
    found = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return tuple(found.items())


def same_training(runs: dict[str, Any], name: str, other: str) -> None:
    """Losses, norms and trained weights, bit by bit."""
    assert runs[name]["losses"] == runs[other]["losses"]
    assert runs[name]["norms"] == runs[other]["norms"]
    found, wanted = weights(runs, name), weights(runs, other)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_checkpoints_are_torchtitans(runs: dict[str, Any]) -> None:
    """Names and shapes of all weights; and those of experts have become what they do there."""
    own, start = weights(runs, "torchtitan"), weights(runs, "start")
    experts = [name for name in own if "inner_experts" in name]
    assert sorted({name.rpartition(".")[2] for name in experts}) == ["w1_EFD", "w2_EDF", "w3_EFD"]
    for run in ("uniep", "FSDP 2", "EP 2"):
        found = weights(runs, run)
        assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in own.items()}
        for name in experts:
            moved, distance = relative(found[name], start[name]), relative(found[name], own[name])
            assert 2 * distance < moved, f"{run}, {name}: {distance:.1e} of {moved:.1e}"


def test_ep_2_is_ep_1_to_the_bit(runs: dict[str, Any]) -> None:
    """The layer alone; ranks have different numbers of tokens."""
    case = make_case()
    wanted = layer_step(uniep_layer(case), case)
    one, other = runs["layers"]
    for name, tensor in wanted.items():
        assert torch.equal(torch.cat([one[name], other[name]]), tensor), name


def test_gpt_oss_at_ep_2_is_at_ep_1_to_the_bit(runs: dict[str, Any]) -> None:
    case = make_case()
    own, layer = gpt_oss_layers(case)
    one, other = runs["gpt_oss"]
    for name, tensor in layer_step(layer, case).items():
        assert torch.equal(torch.cat([one[name], other[name]]), tensor), name
    for state in one["rows"] + other["rows"]:  # in torchtitan's order however rows are split
        wanted = own.inner_experts.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_experts_that_fsdp_splits_by_rows(runs: dict[str, Any]) -> None:
    """As torchtitan has it split them where experts are fewer than ranks."""
    case = make_case()
    wanted = layer_step(uniep_layer(case), case)
    w1, w3 = case.w1.chunk(2, 1)
    for found in (layer["rows"] for layer in runs["layers"]):
        assert torch.equal(found["w1_EFD"], w1) and torch.equal(found["w3_EFD"], w3)
        assert torch.equal(found["w2_EDF"], case.w2)
        assert found["local"] == [8, 16, 64]  # of 32 rows of w1 and of w3
        assert torch.equal(found["out"], wanted["out"])
        assert torch.equal(found["dw1"], 2 * wanted["w1_EFD"])  # both ranks have these tokens
        assert torch.equal(found["dw3"], 2 * wanted["w3_EFD"])
        gate, up = found["drawn"]
        assert torch.cat([gate, up]).std() == pytest.approx(0.1, rel=0.05)
        assert relative(gate, up) > 1
