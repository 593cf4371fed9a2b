"""Collectives of NCCL that run beside passes on GPUs: SMs that passes leave to them."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, gradients, make_case, relative
from ranks import run_ranks, run_script
from test_cuda_mesh import needs
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import uniep

pytestmark = pytest.mark.cuda

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS, SPARE = 2, 16
HIDDEN, TOKENS, BLOCKS, STEPS = 256, 96, 4, 3
MILLISECOND = 1_500_000  # in cycles, about
LATE = 100 * MILLISECOND


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch):
    """What docs/parallelism.md tells users to set, and a short limit."""
    needs(RANKS)
    monkeypatch.setenv("NCCL_MAX_CTAS", str(SPARE))
    monkeypatch.setenv("NCCL_CGA_CLUSTER_SIZE", "0")
    monkeypatch.setenv("UNIEP_SPARE_SMS", str(SPARE))
    monkeypatch.setenv("UNIEP_TIMEOUT_MS", "10000")


def crossed(run):
    """`run()` puts a pass on the stream: behind a collective on one rank, before it on another."""
    side = torch.cuda.Stream()
    payload = torch.ones(1 << 26, device="cuda")
    late = torch.cuda.current_stream() if dist.get_rank() == 0 else side
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.stream(late):
        torch.cuda._sleep(LATE)
    with torch.cuda.stream(side):
        work = dist.all_reduce(payload, async_op=True)
    result = run()
    work.wait()
    torch.cuda.synchronize()
    assert int(payload[-1]) == RANKS
    return result


def warmed_up():
    """This rank's case, a forward of it, and what a step gives; NCCL has begun, too."""
    case = make_case(400, experts=16).part(dist.get_rank(), RANKS).to("cuda").requires_grad()
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)

    def forward():
        return uniep.moe(*tensors, group=dist.group.WORLD, max_tokens=400)

    wanted = gradients(case, forward())
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))
    return case, forward, wanted


def passes_and_collectives():
    case, forward, wanted = warmed_up()
    out = crossed(forward)
    found = crossed(lambda: gradients(case, out))
    return [t.cpu() for t in wanted], [t.cpu() for t in found]


def test_a_pass_and_a_collective_may_begin_in_either_order():
    for wanted, found in run_ranks(RANKS, passes_and_collectives, backend="nccl"):
        assert_same(found, wanted)


def test_a_message_begins_beside_a_pass(tmp_path):
    """And does not wait until it has ended, as it would in NCCL's clusters of CTAs."""
    file = tmp_path / "beside.json"
    program = [str(BENCHMARKS / "beside_passes.py"), "--turns", "3", "--json", str(file)]
    done = run_script(program, RANKS)
    assert done.returncode == 0, done.stderr
    ms = {(r["way"], r["what"]): r["ms"] for r in json.loads(file.read_text())["records"]}
    assert ms["both", "first"] < 0.5 * ms["both", "passes"]


def without_spare_sms():
    _, forward, _ = warmed_up()
    crossed(forward)
    with pytest.raises(RuntimeError, match=r"wait expired after 2000 ms.*UNIEP_SPARE_SMS"):
        forward()


def disagreeing():
    os.environ["UNIEP_SPARE_SMS"] = str(dist.get_rank())
    with pytest.raises(uniep.Error, match=r"ranks disagree.*UNIEP_SPARE_SMS=1"):
        uniep.Workspace(dist.group.WORLD, 64, 32, 8, 2, 16, device="cuda")


def test_ranks_spare_the_same_number():
    run_ranks(RANKS, disagreeing, backend="nccl")


def warned():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        uniep.Group(dist.group.WORLD, device="cuda").close()
    return sum("UNIEP_SPARE_SMS is not set" in str(warning.message) for warning in found)


def test_warns_on_the_first_rank_where_it_is_not_set(monkeypatch):
    assert run_ranks(RANKS, warned, backend="nccl") == [0, 0]
    monkeypatch.delenv("UNIEP_SPARE_SMS")
    assert run_ranks(RANKS, warned, backend="nccl") == [1, 0]


def test_without_spare_sms_they_wait_for_each_other(monkeypatch):
    monkeypatch.setenv("UNIEP_SPARE_SMS", "0")
    monkeypatch.setenv("UNIEP_TIMEOUT_MS", "2000")
    run_ranks(RANKS, without_spare_sms, backend="nccl")


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN))
        self.experts = uniep.MoELayer(HIDDEN, 128, 16, 4, group=group)

    def forward(self, x):
        # Ranks get here at different times.
        torch.cuda._sleep(int(torch.randint(MILLISECOND, ())))
        x = x + self.dense(x)
        return x + self.experts(x)


def with_nothing(model, experts):
    def average():
        for weight in model.parameters():
            if weight not in experts:
                dist.all_reduce(weight.grad)
            weight.grad /= RANKS

    return model, average


def with_fsdp(model, experts):
    for block in model:
        fully_shard(block, ignored_params=experts)
    fully_shard(model, ignored_params=experts)
    return model, lambda: divide(experts)


def with_ddp(model, experts):
    names = [name for name, weight in model.named_parameters() if weight in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    # A bucket for each matrix, so that many reductions run beside backward.
    return DistributedDataParallel(model, bucket_cap_mb=0.25), lambda: divide(experts)


def divide(experts):
    for weight in experts:
        weight.grad /= RANKS


def trained(way):
    """Gradients of the last of some steps."""
    torch.manual_seed(5)
    model = nn.Sequential(*(Block(dist.group.WORLD) for _ in range(BLOCKS))).bfloat16().cuda()
    experts = {w for block in model for w in (block.experts.w1, block.experts.w2)}
    wrapped, average = way(model, experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        if step > 0:
            optimizer.step()
            optimizer.zero_grad()
        x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
        wrapped(x).float().square().mean().backward()
        average()
    torch.cuda.synchronize()
    tensors = {name: weight.grad for name, weight in model.named_parameters()}
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu()
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("way", [with_fsdp, with_ddp])
def test_training_beside_data_parallelism(way):
    wanted, found = (run_ranks(RANKS, trained, w, backend="nccl") for w in (with_nothing, way))
    for one, other in zip(found, wanted, strict=True):
        for name in one:
            assert relative(one[name], other[name]) < 5e-2, name
