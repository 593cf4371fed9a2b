"""uniep.plain: against float64, against the command line's results, over process groups."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import uniep
from uniep import plain
from uniep._library import binary

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "moe_lm_layer.safetensors"
NAMES = ("out", "dx", "dprobs", "dw1", "dw2")

Layer = dict[str, Tensor]


def made_up_layer(tokens: int = 50, hidden: int = 40, inter: int = 72, experts: int = 8) -> Layer:
    """Odd sizes, dropped slots, a token without any expert, an expert without rows."""
    torch.manual_seed(1)
    logits = torch.randn(tokens, experts)
    logits[:, 3] = -1e9
    probs, ids = torch.topk(torch.softmax(logits, -1), 3)
    ids[::7, 1] = -1
    ids[5] = -1
    return {
        "x": torch.randn(tokens, hidden).bfloat16(),
        "topk_ids": ids.int(),
        "topk_probs": probs.contiguous(),
        "w1": (torch.randn(experts, 2 * inter, hidden) * hidden**-0.5).bfloat16(),
        "w2": (torch.randn(experts, hidden, inter) * inter**-0.5).bfloat16(),
        "dy": torch.randn(tokens, hidden).bfloat16(),
    }


def run_plain(
    layer: Layer, group: dist.ProcessGroup | None = None, ascending: bool = False
) -> Layer:
    leaves = [layer[name].clone().requires_grad_() for name in ("x", "topk_probs", "w1", "w2")]
    x, probs, w1, w2 = leaves
    out = plain.moe(x, layer["topk_ids"], probs, w1, w2, group=group, ascending=ascending)
    out.backward(layer["dy"])
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return dict(zip(NAMES, [out.detach(), *gradients], strict=True))


def run_exact(layer: Layer) -> Layer:
    """The layer in float64 without roundings; gradients by autograd."""
    leaves = [layer[name].double().requires_grad_() for name in ("x", "topk_probs", "w1", "w2")]
    x, probs, w1, w2 = leaves
    rows = []
    for t, ids in enumerate(layer["topk_ids"].tolist()):
        row = torch.zeros_like(x[t])
        for k, expert in enumerate(ids):
            if expert >= 0:
                gate, up = (w1[expert] @ x[t]).chunk(2)
                row = row + w2[expert] @ (probs[t, k] * torch.nn.functional.silu(gate) * up)
        rows.append(row)
    out = torch.stack(rows)
    gradients = torch.autograd.grad(out, leaves, layer["dy"].double())
    return dict(zip(NAMES, [out.detach(), *gradients], strict=True))


def call(layer: Layer, main_grads: tuple[Tensor, Tensor] | None = None) -> Tensor:
    arguments = [layer[name] for name in ("x", "topk_ids", "topk_probs", "w1", "w2")]
    return plain.moe(*arguments, main_grads=main_grads)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def differing(got: Layer, want: Layer) -> dict[str, int]:
    """Elements that differ in any bit, by tensor."""
    return {
        name: int((got[name].contiguous().view(torch.uint8) != want[name].view(torch.uint8)).sum())
        for name in NAMES
    }


@pytest.mark.parametrize("ascending", [False, True])
def test_is_near_the_exact_layer(ascending: bool) -> None:
    layer = made_up_layer()
    got, want = run_plain(layer, ascending=ascending), run_exact(layer)
    assert {name: distance(got[name], want[name]) < 6e-3 for name in NAMES} == dict.fromkeys(
        NAMES, True
    )
    assert torch.equal(got["dw1"][3], torch.zeros_like(got["dw1"][3]))  # an expert without rows
    assert torch.equal(got["out"][5], torch.zeros_like(got["out"][5]))  # a token without experts
    assert torch.equal(
        got["dprobs"][layer["topk_ids"] < 0], torch.zeros(int((layer["topk_ids"] < 0).sum()))
    )


def run_command_line(layer_file: Path, result: Path) -> Layer:
    command = [str(binary()), "run", "--input", str(layer_file), "--output", str(result)]
    subprocess.run([*command, "--ranks", "2"], check=True, stdout=subprocess.DEVNULL)
    return load_file(result)


def test_agrees_with_the_command_line_on_a_real_layer(tmp_path: Path) -> None:
    want = run_command_line(DATA, tmp_path / "result.safetensors")
    got = run_plain(load_file(DATA))
    assert {name: distance(got[name], want[name]) < 2e-4 for name in NAMES} == dict.fromkeys(
        NAMES, True
    )


def test_ascending_sums_have_the_bits_of_the_command_line(tmp_path: Path) -> None:
    layer = made_up_layer(tokens=120, hidden=72, inter=200)
    save_file(layer, tmp_path / "layer.safetensors")
    want = run_command_line(tmp_path / "layer.safetensors", tmp_path / "result.safetensors")
    assert differing(run_plain(layer, ascending=True), want) == dict.fromkeys(NAMES, 0)


def rank_part(layer: Layer, tokens: slice, experts: slice) -> Layer:
    by_token = {name: layer[name][tokens] for name in ("x", "topk_ids", "topk_probs", "dy")}
    return {**by_token, "w1": layer["w1"][experts], "w2": layer["w2"][experts]}


def compare_rank(rank: int, cuts: list[int], store: str) -> None:
    ranks = len(cuts) - 1
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    layer = made_up_layer()
    local = len(layer["w1"]) // ranks
    tokens = slice(cuts[rank], cuts[rank + 1])
    experts = slice(rank * local, (rank + 1) * local)
    alone = run_plain(layer)
    want = {name: alone[name][experts if "w" in name else tokens].contiguous() for name in NAMES}
    got = run_plain(rank_part(layer, tokens, experts), dist.group.WORLD)
    assert differing(got, want) == dict.fromkeys(NAMES, 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("cuts", [[0, 13, 50], [0, 20, 20, 21, 50]], ids=["2 ranks", "4 ranks"])
def test_ranks_of_a_group_have_the_bits_of_one(cuts: list[int], tmp_path: Path) -> None:
    """Tokens are cut unevenly; one of the 4 ranks has none."""
    spawn(compare_rank, (cuts, str(tmp_path / "store")), nprocs=len(cuts) - 1)


@pytest.mark.parametrize("ids", [[0], [0, 1], [0, 1, 1], [1, 0, 1, 1]])
def test_a_sum_has_no_rows_of_other_experts(ids: list[int]) -> None:
    """A product that is too small for fp32 leaves -0, of which a row of zeros more makes +0."""
    found = []
    for function in (uniep.moe, partial(plain.moe, ascending=True)):
        x, w1 = torch.ones(len(ids), 8).bfloat16(), torch.full((2, 8, 8), 1e-20).bfloat16()
        w2 = torch.ones(2, 8, 8).bfloat16().requires_grad_()
        probs = torch.ones(len(ids), 1)
        out = function(x, torch.tensor(ids)[:, None], probs, w1, w2, activation="silu")
        (gradient,) = torch.autograd.grad(out, w2, torch.full_like(x, -1e-30))
        found.append(torch.signbit(gradient))
    assert torch.equal(*found)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 6e-3), (torch.bfloat16, 2e-2)])
def test_main_grads_are_added_to(dtype: torch.dtype, limit: float) -> None:
    layer = made_up_layer()
    exact = run_exact(layer)
    before = [torch.randn_like(layer[name].float()).to(dtype) for name in ("w1", "w2")]
    grads = (before[0].clone(), before[1].clone())
    leaves = {name: layer[name].clone().requires_grad_() for name in ("x", "w1", "w2")}
    call({**layer, **leaves}, main_grads=grads).backward(layer["dy"])
    assert leaves["w1"].grad is None and leaves["w2"].grad is None
    for name, old, new in zip(("dw1", "dw2"), before, grads, strict=True):
        assert distance(new.double() - old.double(), exact[name]) < limit
        assert torch.equal(new[3], old[3])  # an expert without rows


def test_only_the_gradients_that_are_asked_for() -> None:
    layer = made_up_layer()
    x = layer["x"].clone().requires_grad_()
    call({**layer, "x": x}).backward(layer["dy"])
    assert x.grad is not None
    assert torch.equal(x.grad, run_plain(layer)["dx"])


def test_leading_dimensions_are_kept() -> None:
    layer = made_up_layer()
    shaped = {name: layer[name].view(5, 10, -1) for name in ("x", "topk_ids", "topk_probs")}
    assert torch.equal(call({**layer, **shaped}).view(50, -1), run_plain(layer)["out"])


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("x", torch.zeros(50, 40), "x is torch.float32; it must be torch.bfloat16"),
        ("topk_ids", torch.zeros(50, 3, dtype=torch.int16), "topk_ids is torch.int16; it must be"),
        (
            "topk_ids",
            torch.full((50, 3), 8),
            r"topk_ids lie in \[8, 8\]; they must be -1 .* 0 to 7",
        ),
        ("topk_ids", torch.full((50, 3), -2), r"topk_ids lie in \[-2, -2\]"),
        (
            "topk_probs",
            torch.zeros(50, 2),
            r"topk_probs has shape \[50, 2\]; it must be that of topk_ids",
        ),
        ("w1", torch.zeros(8, 144, 41).bfloat16(), r"w1 has shape \[8, 144, 41\]; it must be"),
        ("w2", torch.zeros(8, 40, 71).bfloat16(), r"w2 has shape \[8, 40, 71\]; .* \[8, 40, 72\]"),
    ],
)
def test_errors_name_what_is_accepted(name: str, value: Tensor, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        call({**made_up_layer(), name: value})


def test_main_grads_of_another_shape_are_refused() -> None:
    grads = (torch.zeros(8, 144, 40), torch.zeros(8, 40, 70))
    with pytest.raises(ValueError, match=r"main_grads\[1\] is \[8, 40, 70\] .*\[8, 40, 72\]"):
        call(made_up_layer(), main_grads=grads)
