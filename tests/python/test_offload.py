"""uniep.Offload: what forwards save is kept on the host, and the bits are the same."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import assert_same, gradients, make_case, step, workspace
from ranks import cpu_mesh, run_ranks
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import uniep
from uniep import offload as offload_module
from uniep._save_choice import SAVES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
CHOICES = [
    *({"save": save} for save in SAVES),
    {"recompute_h": True},
    {"save": "none", "recompute_h": True},
    {"exact_rows": True},
]


def call(case, **options) -> Tensor:
    return uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_several_layers_have_the_same_bits(choice, ahead, device):
    cases = [make_case(tokens=130, seed=seed, dropped=True).to(device) for seed in range(4)]
    wanted = [step(case) for case in cases]
    offload = uniep.Offload(ahead=ahead)
    for _ in range(2):  # what the first step left behind serves the second
        with offload:
            outs = [call(case.requires_grad(), **choice) for case in cases]
        assert offload.bytes > 0
        for case, out, same in reversed(list(zip(cases, outs, wanted, strict=True))):
            assert_same(gradients(case, out), same)
        del outs, out
        assert offload.bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_backward_in_any_order_and_again(device):
    cases = [make_case(seed=seed).to(device) for seed in range(4)]
    wanted = [step(case) for case in cases]
    with uniep.Offload():
        outs = [call(case.requires_grad()) for case in cases]
    for index in (1, 3, 0, 2):
        for retain in (True, False):
            leaves = (cases[index].x, cases[index].probs, cases[index].w1, cases[index].w2)
            found = torch.autograd.grad(outs[index], leaves, cases[index].dy, retain_graph=retain)
            assert_same([outs[index].detach(), *found], wanted[index])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hooks", [uniep.Offload, torch.autograd.graph.save_on_cpu])
def test_weight_gradients_that_wait(hooks, device):
    case = make_case().to(device)
    wanted = step(case)
    deferred = uniep.DeferredWeights()
    for tensor in (case.x, case.probs, case.w1, case.w2):
        tensor.grad = None
    with hooks():
        out = call(case, deferred=deferred)
        call(make_case(seed=1).to(device).requires_grad())  # which makes the first one leave
    out.backward(case.dy)
    uniep.backward_weights(deferred)
    found = [t.grad for t in (case.x, case.probs, case.w1, case.w2)]
    assert_same([out.detach(), *found], wanted)


class Watched(offload_module._Copies):
    """Notes what goes where, and which tensors of the "device" there are."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.device: list[weakref.ref[Tensor]] = []

    def out(self, tensors):
        self.device += map(weakref.ref, tensors)
        self.log.append("out")
        return super().out(tensors)

    def back(self, hosts, complete):
        tensors, moment = super().back(hosts, complete)
        self.device += map(weakref.ref, tensors)
        self.log.append("back")
        return tensors, moment

    def calls_on_device(self) -> float:
        gc.collect()
        return sum(ref() is not None for ref in self.device) / 4  # plan, x, h, probabilities


def watched(offload: uniep.Offload) -> Watched:
    offload._movers[torch.device("cpu")] = mover = Watched()
    return mover


@pytest.mark.parametrize("ahead", [1, 2])
def test_few_calls_are_on_the_device(ahead):
    case = make_case().requires_grad()
    offload = uniep.Offload(ahead=ahead)
    mover = watched(offload)
    with workspace(case) as own:
        with offload:
            outs = []
            for number in range(5):
                outs.append(call(case, workspace=own))
                assert mover.calls_on_device() == min(number + 1, ahead)
        assert offload.bytes == 5 * own.saved_bytes
        while outs:
            outs.pop().backward(case.dy)
            # Its own are gone, and those of `ahead` calls before it have set out.
            assert mover.calls_on_device() == min(len(outs), ahead)
    # The last ones never went, so they need not come back.
    assert mover.log == ["out"] * 5 + ["back"] * (5 - ahead)


def test_a_retained_graph_is_on_the_host_again():
    case = make_case().requires_grad()
    offload = uniep.Offload()
    mover = watched(offload)
    with offload:
        first, last = call(case), call(case)
    for _ in range(2):
        torch.autograd.grad(first, case.w1, case.dy, retain_graph=True)
        assert mover.calls_on_device() == 1  # the last one, which never went
    del first, last


def test_what_a_dropped_graph_saved_is_let_go():
    case = make_case().requires_grad()
    offload = uniep.Offload()
    mover = watched(offload)
    with offload:
        outs = [call(case) for _ in range(3)]
    outs.pop(1)
    outs.pop().backward(case.dy)
    del outs
    assert offload.bytes == 0 and mover.calls_on_device() == 0


def test_the_host_has_a_limit():
    case = make_case().requires_grad()
    with workspace(case) as own:
        offload = uniep.Offload(max_bytes=2 * own.saved_bytes + 1)
        mover = watched(offload)
        with offload:
            outs = [call(case, workspace=own) for _ in range(4)]
        assert offload.bytes == 2 * own.saved_bytes and mover.log == ["out"] * 2
        wanted = step(case)
        while outs:
            assert_same(gradients(case, outs.pop()), wanted)


def test_only_calls_of_the_block_that_need_a_backward_are_kept():
    case = make_case()
    offload = uniep.Offload()
    with offload:
        call(case)
        with torch.no_grad():
            call(case.requires_grad())
        out = call(case)
        saved = offload.bytes
    assert saved > 0
    outside = call(case)
    assert offload.bytes == saved
    del out, outside
    assert offload.bytes == 0


def test_the_innermost_block_counts():
    case = make_case().requires_grad()
    outer, inner = uniep.Offload(), uniep.Offload()
    with outer:
        with inner:
            one = call(case)
        two = call(case)
    assert inner.bytes == outer.bytes > 0
    del one, two


def test_a_block_that_ends_leaves_the_others_open():
    """As where blocks are of several threads, and overlap."""
    first, second = uniep.Offload(ahead=1), uniep.Offload(ahead=1)
    cases = [make_case(seed=seed).requires_grad() for seed in range(3)]
    first.__enter__()
    with second:
        first.__exit__()
        outs = [call(case) for case in cases]
        assert first.bytes == 0 < second.bytes
    for case, out in zip(cases, outs, strict=True):
        gradients(case, out)
    assert not offload_module._active


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_what_they_want(reentrant):
    case = make_case()
    wanted = step(case)
    offload = uniep.Offload()
    with offload:
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        out = checkpoint(uniep.moe, *tensors, use_reentrant=reentrant)
        assert offload.bytes == 0
    assert_same(gradients(case, out), wanted)


def test_a_module_in_the_block():
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*(uniep.MoELayer(64, 32, 8, 2) for _ in range(3)))
    x = torch.randn(48, 64).bfloat16()

    def run() -> list[Tensor]:
        layers.zero_grad()
        out = layers(x)
        out.float().square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in layers.parameters())]

    wanted = run()
    with uniep.Offload():
        found = run()
    assert all(map(torch.equal, found, wanted))


def test_it_breaks_a_graph():
    case = make_case().requires_grad()
    compiled = torch.compile(lambda: call(case), fullgraph=True, backend="aot_eager")
    with uniep.Offload(), pytest.raises(Exception, match=r"uniep\.Offload"):
        compiled()
    torch.compiler.reset()
    compiled = torch.compile(lambda: call(case) + 1, backend="aot_eager")
    with uniep.Offload() as offload:
        out = compiled()
        assert offload.bytes > 0
    wanted = gradients(case, call(case) + 1)
    assert_same(gradients(case, out), wanted)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ahead": 0}, "ahead is 0; it must be at least 1"),
        ({"ahead": 1.5}, "ahead is 1.5, a float; it must be an int"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"max_bytes": float("nan")}, "max_bytes is nan, a float; it must be an int"),
        ({"max_bytes": "3"}, "max_bytes is '3', a str"),
    ],
)
def test_figures_out_of_range(options, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        uniep.Offload(**options)


@pytest.mark.parametrize("name", ["w1", "w2"])
@pytest.mark.parametrize("hooks", [uniep.Offload, contextlib.nullcontext])
def test_weights_that_changed_since_are_refused(name, hooks):
    """What stays where it is, its backward would read as it is now: PyTorch looks at versions."""
    case = make_case().requires_grad()
    with hooks():
        out = call(case)
    with torch.no_grad():
        getattr(case, name).mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation") as refused:
        out.backward(case.dy)
    assert len(str(refused.value)) < 600


def sharded_and_offloaded() -> list[list[Tensor]]:
    """What a step gives without and with an Offload, whose weights FSDP2 gathers again."""
    found = []
    for hooks in (contextlib.nullcontext, uniep.Offload):
        torch.manual_seed(3)
        layers = torch.nn.Sequential(*(uniep.MoELayer(64, 32, 8, 2) for _ in range(2)))
        for module in (*(layer.router for layer in layers), *layers, layers):
            fully_shard(module, mesh=cpu_mesh()).set_force_sum_reduction_for_comms(True)
        with hooks():
            out = layers(make_case().x)
        out.float().square().sum().backward()
        found.append([out.detach(), *(p.grad.full_tensor() for p in layers.parameters())])
    return found


def test_weights_that_fsdp_gathers_again_have_not_changed():
    for wanted, found in run_ranks(2, sharded_and_offloaded):
        assert all(map(torch.equal, found, wanted))


def test_blocks_of_threads_begin_and_end_at_any_time():
    def enter_and_leave() -> bool:
        offload = uniep.Offload()
        for _ in range(3000):
            with offload:
                offload_module.saving_elsewhere((torch.empty(1),))
        return True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda _: enter_and_leave(), range(4)))
    finally:
        sys.setswitchinterval(interval)
        left = len(offload_module._active)
        offload_module._active.clear()
    assert left == 0


def test_memory_that_is_copied_to_is_not_handed_on():
    """A graph goes whose tensors are on their way back: nobody may have their memory before."""

    class Late(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.alive: list[float] = []

        def back(self, hosts, complete):
            return super().back(hosts, complete)[0], "a moment"

        def drop(self, moment):
            if moment == "a moment":
                self.alive.append(self.calls_on_device())

    case = make_case().requires_grad()
    offload = uniep.Offload()
    offload._movers[torch.device("cpu")] = mover = Late()
    with offload:
        outs = [call(case) for _ in range(2)]
    outs.pop().backward(case.dy)  # the first one's set out
    assert mover.calls_on_device() == 1
    outs.clear()
    assert mover.alive == [1] and mover.calls_on_device() == 0


def test_a_copy_that_fails_is_forgotten():
    case = make_case().requires_grad()
    offload = uniep.Offload()
    mover = watched(offload)

    def fails(_tensors):
        raise MemoryError

    with offload:
        first = call(case)
        mover.out = fails
        with pytest.raises(MemoryError):
            call(case)
        del mover.out
        last = call(case)
    last.backward(case.dy)  # the first one's come ahead of its own
    assert mover.log == ["out", "out", "back"]
    assert offload.bytes > 0
    del first
    assert offload.bytes == 0


@pytest.mark.cuda
def test_the_default_device_may_be_a_gpu():
    case = make_case().to("cuda").requires_grad()
    wanted = step(case)
    with torch.device("cuda"), uniep.Offload():
        outs = [call(case) for _ in range(2)]
        for out in reversed(outs):
            assert_same(gradients(case, out), wanted)


@pytest.mark.cuda
def test_memory_of_the_gpu_is_free_and_the_host_does_not_wait():
    shape = dict(tokens=4096, hidden=1024, intermediate=1024, experts=8, topk=2)
    case = make_case(**shape).to("cuda").requires_grad()
    with workspace(case) as own:

        def run(offload: uniep.Offload | None) -> int:
            before = torch.cuda.memory_allocated()
            with offload or torch.enable_grad():
                outs = [call(case, workspace=own) for _ in range(8)]
            kept = torch.cuda.memory_allocated() - before - sum(o.nbytes for o in outs)
            while outs:
                outs.pop().backward(case.dy)
            return kept

        run(None)
        assert run(None) >= 8 * own.saved_bytes
        offload = uniep.Offload()
        run(offload)  # takes pinned memory, for which the host waits once
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert run(offload) < 2 * own.saved_bytes
        finally:
            torch.cuda.set_sync_debug_mode("default")


def large_cases(count):
    """Of as many seeds, on a GPU, with copies that take their time."""
    shape = dict(tokens=2048, hidden=1024, intermediate=512, experts=8, topk=2)
    return [make_case(**shape, seed=seed).to("cuda").requires_grad() for seed in range(count)]


@pytest.mark.cuda
def test_many_steps_on_a_gpu_have_the_same_bits():
    """What a copy reads or writes too early or too late would show in one of them."""
    cases = large_cases(6)
    wanted = [step(case) for case in cases]
    offload = uniep.Offload()
    for turn in range(20):
        with offload:
            outs = {number: call(case) for number, case in enumerate(cases)}
        if turn % 2:
            gradients(cases[5], outs.pop(5))
            del outs[4]  # its copies back are under way
        for number in reversed(list(outs)):
            assert_same(gradients(cases[number], outs.pop(number)), wanted[number])


def _spoil(sizes: list[int]) -> list[Tensor]:
    """Whatever of the current stream's memory is free, as far as it has such sizes."""
    return [torch.full((n,), 255, dtype=torch.uint8, device="cuda") for n in 4 * sizes]


@pytest.mark.cuda
def test_calls_on_several_streams_keep_their_memory():
    """Memory that is copied, or was, is of one call's stream, and another call's comes next."""
    cases = large_cases(2)
    wanted = [step(case) for case in cases]
    offload = uniep.Offload()
    with offload:
        gradients(cases[0], call(cases[0]))  # takes pinned memory and makes the streams of copies
    (mover,) = offload._movers.values()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    _spoil([1])  # loads the kernel, which may wait
    torch.cuda.synchronize()
    long = 10**9  # cycles
    with offload:
        with torch.cuda.stream(mover.leaving):
            torch.cuda._sleep(long)
        with torch.cuda.stream(first):
            out = call(cases[0])
            (sent,) = offload._calls
            sizes = [saved.on_device.nbytes for saved in sent._all()]
        with torch.cuda.stream(second):
            other = call(cases[1])  # the first leaves, whose copies have not begun
        with torch.cuda.stream(first):
            spoilt = _spoil(sizes)
    torch.cuda.synchronize()
    with torch.cuda.stream(second):
        assert_same(gradients(cases[1], other), wanted[1])  # brings back what the first kept
    torch.cuda.synchronize()
    del spoilt, sent
    with torch.cuda.stream(first):
        torch.cuda._sleep(long)
        found = gradients(cases[0], out)
        del out
    with torch.cuda.stream(second):
        spoilt = _spoil(sizes)
    torch.cuda.synchronize()
    assert_same(found, wanted[0])
    del spoilt


@pytest.mark.cuda
def test_a_captured_graph_is_refused():
    case = make_case().to("cuda").requires_grad()
    step(case)
    with (
        uniep.Offload(),
        pytest.raises(RuntimeError, match="CUDA graph cannot capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        call(case)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda offload: pickle.loads(pickle.dumps(offload))]
)
def test_a_copy_has_its_figures_and_keeps_calls_of_its_own(copied):
    case = make_case().requires_grad()
    offload = uniep.Offload(ahead=3, max_bytes=1 << 20)
    with offload:
        out = call(case)
        other = copied(offload)
    assert (other.ahead, other.max_bytes) == (3, 1 << 20)
    assert offload.bytes > 0 and other.bytes == 0
    with other:
        same = call(case)
    assert other.bytes == offload.bytes
    assert_same(gradients(case, same), gradients(case, out))
    del same
    assert other.bytes == 0
