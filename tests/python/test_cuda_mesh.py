"""A mesh of hosts and ranks on GPUs, through NCCL: the bits of one process, graphs and faults."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, make_case, step
from ranks import run_ranks
from test_mesh import EXPERTS, TOKENS, case_of, sums_of
from test_mesh_faults import CAPACITY, SIZE, many, skewed
from test_mesh_rows import PLACES, SUMS, layer
from test_shared_experts import Layer
from torch.distributed.device_mesh import init_device_mesh

import uniep
from uniep._between_hosts import crossing

pytestmark = pytest.mark.cuda


def leave_sms(count: int) -> None:
    """What passes leave to messages of NCCL: these cross while they compute, however small."""
    spared = {"UNIEP_SPARE_SMS": str(count), "NCCL_MAX_CTAS": "16", "NCCL_CGA_CLUSTER_SIZE": "0"}
    os.environ |= spared
    crossing.least_bytes = 0


def mesh_of(hosts: int):
    shape = (hosts, dist.get_world_size() // hosts)
    return init_device_mesh("cuda", shape, mesh_dim_names=("hosts", "ranks"))


def come_late() -> None:
    """Tokens of other hosts are NaN until long after all that could be computed without them."""
    receive = crossing._TokensInWaves._receive

    def late(self, step):
        self._blocks[(self._mesh.host + step) % self._mesh.hosts] = float("nan")
        torch.cuda._sleep(20_000_000)
        return receive(self, step)

    crossing._TokensInWaves._receive = late


def bits(hosts: int, spare: int):
    leave_sms(spare)
    come_late()
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"group": mesh_of(hosts), "max_tokens": TOKENS, **sums_of(hosts)}

    def part():
        return case_of().part(rank, size).to("cuda")

    found = {"rows": step(part(), **options)}
    found["nothing saved"] = step(part(), save="none", recompute_h=True, **options)
    found["row pool"] = step(part(), row_pool=1 << 24, **options)
    found["tokens"] = step(part(), save="tokens", **options)
    found["few rows at a time"] = step(part(), backward_rows=512, **options)
    found["exact rows"] = step(part(), exact_rows=True, **options)
    for name, more in (("", {}), (", nothing saved", {"save": "none", "recompute_h": True})):
        found["exact hosts" + name] = step(part(), exact_hosts=True, **more, **options)
    found["deferred"] = deferred(part(), options)
    frozen = part()
    weights = frozen.w1, frozen.w2
    frozen.x.requires_grad_(), frozen.probs.requires_grad_()
    out = uniep.moe(frozen.x, frozen.ids, frozen.probs, *weights, **options)
    of_tokens = torch.autograd.grad(out, (frozen.x, frozen.probs), frozen.dy)
    found["weights that are frozen"] = [out.detach(), *of_tokens, *found["rows"][3:]]
    # Hosts that uniep finds, of a process group.
    os.environ["UNIEP_HOST_ID"] = f"host {rank // (size // hosts)}"
    found["process group"] = step(part(), **{**options, "group": dist.group.WORLD})
    return {name: [t.cpu() for t in tensors] for name, tensors in found.items()}


def deferred(case, options):
    wait = uniep.DeferredWeights()
    case.requires_grad()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, deferred=wait, **options)
    out.backward(case.dy)
    uniep.backward_weights(wait)
    return [out.detach(), case.x.grad, case.probs.grad, case.w1.grad, case.w2.grad]


def sums_ahead_of_a_wave(hosts: int, late: int, early: int):
    """By how many ms the sums of so many hosts are back before the pass ends, of which a wave is
    late."""
    leave_sms(16)
    rank, size = dist.get_rank(), dist.get_world_size()
    of_waves, exchange = crossing._TokensInWaves, crossing.exchange
    events, begin, cross = of_waves.events, of_waves.begin_to_collect, exchange.step
    aside, kept, crossed, ends = torch.cuda.Stream(), [], [], []

    def with_late_wave(self):
        waves = events(self)
        if self._back is not None:
            with torch.cuda.stream(aside):
                torch.cuda._sleep(400_000_000)
                kept.append(crossing._recorded())
            waves[0, late] = kept[-1].cuda_event
        return waves

    def mark(marks):
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    def timed(self, out):
        mark(ends)  # of the pass
        crossed.clear()
        begin(self, out)

    def timed_step(*ends_of_it):
        cross(*ends_of_it)
        mark(crossed)

    of_waves.events, of_waves.begin_to_collect = with_late_wave, timed
    exchange.step = timed_step
    case = case_of().part(rank, size).to("cuda")
    for _ in range(2):
        step(case, group=mesh_of(hosts), max_tokens=TOKENS, **sums_of(hosts))
    torch.cuda.synchronize()
    return crossed[early - 1].elapsed_time(ends[-1])


def rows(hosts: int, spare: int):
    """Steps in which all rows cross; memory that nothing has written is NaN."""
    leave_sms(spare)
    come_late()
    torch.use_deterministic_algorithms(True)
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"group": mesh_of(hosts), "max_tokens": TOKENS}
    found = {}
    for place, i, exact in itertools.product(PLACES, range(len(SUMS)), (False, True)):
        case = layer().part(rank, size).to("cuda")
        tensors = step(case, probs=place, exact_hosts=exact, **SUMS[i], **options)
        found[place, i, exact] = [t.cpu() for t in tensors]
    return found


def shared_experts(hosts: int, spare: int):
    leave_sms(spare)
    come_late()
    rank, size = dist.get_rank(), dist.get_world_size()
    part = Layer().part(rank, size).to("cuda")
    found = part.run(uniep.moe, group=mesh_of(hosts), max_tokens=TOKENS)
    return {name: tensor.cpu() for name, tensor in found.items()}


def replays(spare: int, sums: dict[str, object]):
    """A captured step, replayed with another routing and other tokens."""
    leave_sms(spare)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(2)
    tokens = 24
    cases = [make_case(tokens * size, experts=EXPERTS, topk=4, seed=s) for s in range(3)]
    own = slice(rank * tokens, (rank + 1) * tokens)
    each = EXPERTS // size
    experts = slice(rank * each, (rank + 1) * each)
    w1, w2 = (w[experts].cuda().requires_grad_() for w in (cases[0].w1, cases[0].w2))
    x, probs = (t[own].cuda().requires_grad_() for t in (cases[0].x, cases[0].probs))
    ids, dy = cases[0].ids[own].cuda(), cases[0].dy[own].cuda()

    def run():
        out = uniep.moe(x, ids, probs, w1, w2, group=mesh, max_tokens=tokens, **sums)
        return [out.detach(), *torch.autograd.grad(out, (x, probs, w1, w2), dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    found = []
    for case in cases:
        with torch.no_grad():
            for tensor, new in ((x, case.x), (probs, case.probs), (ids, case.ids), (dy, case.dy)):
                tensor.copy_(new[own])
        graph.replay()
        torch.cuda.synchronize()
        found.append([tensor.cpu() for tensor in captured])
    del graph
    return found


def faults(spare: int):
    """What routings do that fit on one host alone."""
    leave_sms(spare)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(2)
    case = many().part(rank, size).to("cuda")
    figures = (64, 32, EXPERTS, 4, 4 * TOKENS)
    options = {"device": "cuda", "capacity_rows": CAPACITY * SIZE // size, **sums_of(2)}
    with uniep.Workspace(mesh, *figures, on_overflow="flag", **options) as own:
        refused = [t.cpu() for t in step(case, workspace=own)]
        exact = [t.cpu() for t in step(case, workspace=own, exact_hosts=True)]
        overflow = own.overflow.tolist()
        own.grow(capacity_rows=own.needed_rows())
        grown = [t.cpu() for t in step(case, workspace=own)]
    with uniep.Workspace(mesh, *figures, **options) as own:
        fits = skewed().part(rank, size).to("cuda")
        step(case, workspace=own)
        with pytest.raises(uniep.Error) as error:
            own.synchronize()
        sentences = [str(error.value)]
        step(case, workspace=own)
        calls = []
        with pytest.raises(uniep.Error) as error:
            while len(calls) < 100:
                calls.append(step(fits, workspace=own))
        sentences.append(f"{error.value} {len(calls)} calls later")
        step(fits, workspace=own)
        own.synchronize()
    return (refused, exact), overflow, grown, sentences


def needs(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, which NCCL does not share")


@pytest.mark.parametrize("spare", [0, 16])
@pytest.mark.parametrize(("hosts", "size"), [(2, 2), (2, 4), (4, 4)])
def test_the_bits_of_one_process(hosts, size, spare):
    needs(size)
    results = run_ranks(size, bits, hosts, spare, backend="nccl")
    wanted = [t.cpu() for t in step(case_of().to("cuda"), **sums_of(hosts))]
    for name in results[0]:
        parts = [result[name] for result in results]
        assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], wanted)


@pytest.mark.parametrize(("hosts", "late", "early"), [(2, 2, 1), (4, 5, 3), (4, 4, 2)])
def test_sums_cross_before_the_pass_has_ended(hosts, late, early):
    needs(hosts)
    ahead = run_ranks(hosts, sums_ahead_of_a_wave, hosts, late, early, backend="nccl")
    assert min(ahead) > 50


@pytest.mark.parametrize("spare", [0, 16])
@pytest.mark.parametrize(("hosts", "size"), [(2, 2), (2, 4), (4, 4)])
def test_rows_have_the_bits_of_one_group(hosts, size, spare):
    needs(size)
    results = run_ranks(size, rows, hosts, spare, backend="nccl")
    for place, i, exact in results[0]:
        wanted = [t.cpu() for t in step(layer().to("cuda"), probs=place, **SUMS[i])]
        parts = [result[place, i, exact] for result in results]
        assert_same([torch.cat([part[j] for part in parts]) for j in range(5)], wanted)


@pytest.mark.parametrize("spare", [0, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_shared_experts_are_beside_what_crosses(size, spare):
    needs(size)
    results = run_ranks(size, shared_experts, 2, spare, backend="nccl")
    wanted = Layer().to("cuda").run(uniep.moe)
    for name in ("out", "x", "topk_probs", "shared_probs", "w1", "w2"):
        whole = torch.cat([result[name] for result in results])
        assert torch.equal(whole, wanted[name].cpu()), name


@pytest.mark.parametrize(("spare", "sums"), [(0, sums_of(2)), (16, sums_of(2)), (0, {}), (16, {})])
@pytest.mark.parametrize("size", [2, 4])
def test_graphs_of_a_mesh(size, spare, sums):
    needs(size)
    results = run_ranks(size, replays, spare, sums, backend="nccl")
    first = make_case(24 * size, experts=EXPERTS, topk=4)
    for number in range(3):
        case = make_case(24 * size, experts=EXPERTS, topk=4, seed=number)
        case.w1, case.w2 = first.w1, first.w2
        wanted = [t.cpu() for t in step(case.to("cuda"), **sums)]
        parts = [result[number] for result in results]
        assert_same([torch.cat([part[i] for part in parts]) for i in range(5)], wanted)


@pytest.mark.parametrize("spare", [0, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_faults_are_those_of_all_hosts(size, spare):
    needs(size)
    results = run_ranks(size, faults, spare, backend="nccl")
    wanted = [t.cpu() for t in step(many().to("cuda"), **sums_of(2))]
    for refused, overflow, _, sentences in results:
        for out, dx, dprobs, dw1, dw2 in refused:
            assert out.isnan().all() and dx.isnan().all()
            assert not dprobs.any() and not dw1.any() and not dw2.any()
        assert overflow == results[0][1] and overflow[0] == 1
        assert all(f"capacity_rows={overflow[1]} would do" in sentence for sentence in sentences)
        assert "7 calls later" in sentences[1]  # on all ranks alike
    assert_same([torch.cat([result[2][i] for result in results]) for i in range(5)], wanted)
