"""On a GPU: bits of plain PyTorch at any number of ranks, graphs, streams, accounting."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_same, gradients, make_case, relative, step, workspace
from ranks import run_ranks
from test_arithmetic import EVERY, GROUPED, Layer, name_of
from test_arithmetic import assert_same as assert_same_tensors
from test_compile import checkpointed_step
from test_layouts import Formed, joined
from test_shared_experts import TOKENS as SHARED_TOKENS
from test_shared_experts import Layer as SharedLayer
from torch import Tensor

import uniep
import uniep.plain
from uniep import _library
from uniep.arithmetic import Arithmetic

pytestmark = pytest.mark.cuda

SHAPES = [
    {"tokens": 96, "hidden": 64, "intermediate": 32, "experts": 8, "topk": 2},
    {"tokens": 200, "hidden": 136, "intermediate": 72, "experts": 4, "topk": 3, "dropped": True},
    {"tokens": 1024, "hidden": 512, "intermediate": 256, "experts": 32, "topk": 4},
]


def plain(case: Case) -> list[Tensor]:
    case.requires_grad()
    return gradients(case, uniep.plain.moe(case.x, case.ids, case.probs, case.w1, case.w2))


def assert_plain(found: list[Tensor], wanted: list[Tensor]) -> None:
    """The same bits, but for dprobs, whose sums plain PyTorch orders otherwise."""
    assert_same([*found[:2], wanted[2], *found[3:]], wanted)
    assert relative(found[2], wanted[2]) < 1e-5


@pytest.mark.parametrize("form", ["one in_out", "pair in_out", "each in_out"])
@pytest.mark.parametrize("main", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("save", ["rows", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_before_outputs(
    shape: dict[str, int], form: str, main: torch.dtype | None, save: str
) -> None:
    if form == "pair in_out":
        shape = {**shape, "intermediate": 64 * -(-shape["intermediate"] // 64)}
    case = make_case(**shape, seed=4).to("cuda")  # type: ignore[arg-type]
    wanted = step(case)
    formed = Formed(case, form, "each in_out" if "each" in form else "one in_out")
    sums = None
    if main is not None:
        # What is added to has numbers of its own, and the gradient's form.
        wanted[3:] = [torch.ones_like(grad, dtype=main) for grad in wanted[3:]]
        uniep.moe(
            *(case.x, case.ids, case.probs, case.w1, case.w2),
            main_grads=(wanted[3], wanted[4]),
        ).backward(case.dy)
        sums = formed.main_grads(wanted[3:], main)
    grads = None if sums is None else tuple(t[0] if len(t) == 1 else t for t in sums)
    options = {"save": save, "recompute_h": save == "none", "main_grads": grads}
    out = formed.call(**options)
    out.backward(case.dy)
    found = None if sums is None else [joined(*s) for s in zip(sums, formed.forms, strict=True)]
    assert_same(formed.found(out, found), wanted)


def test_a_pair_that_shares_boxes_is_refused() -> None:
    case = make_case(intermediate=72).to("cuda")
    with pytest.raises(RuntimeError, match=r"w1 is a pair of .*intermediate=72"):
        Formed(case, "pair in_out", "one in_out").call()
    step(case)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", [None, "sequential", "pipelined:2", "single"])
def test_bits_of_plain_pytorch(shape: dict[str, int], schedule: str | None) -> None:
    case = make_case(**shape, seed=3).to("cuda")  # type: ignore[arg-type]
    base = ",tile_m=128,tile_n=256,dispatch_workers=16"
    text = schedule if schedule is None else schedule + base
    assert_plain(step(case, schedule=text), plain(case))


@pytest.mark.parametrize("arithmetic", EVERY + GROUPED, ids=name_of)
def test_bits_of_other_experts(arithmetic: Arithmetic) -> None:
    layer = Layer(arithmetic, tokens=700, device="cuda")
    wanted = layer.run(uniep.plain.moe, **layer.options)
    schedules = [None, "single,tile_m=128,tile_n=128", "sequential,tile_m=128,tile_n=256"]
    for schedule in schedules:
        found = layer.run(uniep.moe, schedule=schedule, **layer.options)
        assert relative(found["dtopk_probs"], wanted["dtopk_probs"]) < 1e-5
        assert_same_tensors({**found, "dtopk_probs": wanted["dtopk_probs"]}, wanted)
    kept = layer.run(uniep.moe, save="none", recompute_h=True, **layer.options)
    assert_same_tensors(kept, found)
    in_ring = layer.run(uniep.moe, backward_rows=1024, **layer.options)
    assert_same_tensors(in_ring, found)


@pytest.mark.parametrize("probs", ["before", "after"])
def test_bits_of_long_sums_of_biases(probs: str) -> None:
    """Near 4000 rows an expert: many times more steps than a tile's pipeline has slots."""
    layer = Layer(Arithmetic("gpt_oss", probs, True), tokens=16000, device="cuda")
    wanted = layer.run(uniep.plain.moe, **layer.options)
    for schedule in (None, "single,tile_m=128,tile_n=128", "sequential,tile_m=128,tile_n=256"):
        found = layer.run(uniep.moe, schedule=schedule, **layer.options)
        assert relative(found["dtopk_probs"], wanted["dtopk_probs"]) < 1e-5
        assert_same_tensors({**found, "dtopk_probs": wanted["dtopk_probs"]}, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_of_biases(dtype: torch.dtype) -> None:
    layer = Layer(Arithmetic("gpt_oss", "after", True), tokens=700, device="cuda")
    names = ["w1", "w2", "b1", "b2"]
    sums = []
    for moe in (uniep.moe, uniep.plain.moe):
        grads = tuple(torch.ones_like(layer.leaves[name], dtype=dtype) for name in names)
        layer.run(moe, main_grads=grads, **layer.options)
        sums.append(dict(zip(names, grads, strict=True)))
    assert_same_tensors(sums[0], sums[1])


def assert_plain_shared(layer: SharedLayer, found: dict[str, Tensor], **options: Any) -> None:
    """The same bits, but for gradients of probabilities."""
    wanted = layer.run(uniep.plain.moe, **options)
    for name in ("topk_probs", "shared_probs"):
        if name in found and "main_grad" not in options:
            assert relative(found[name], wanted[name]) < 1e-5, name
            found = found | {name: wanted[name]}
    assert_same_tensors(found, wanted)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("probs", ["before", "after"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_bits_of_shared_experts(activation: str, probs: str, shared: int, gated: bool) -> None:
    layer = SharedLayer(shared, gated, activation, probs).to("cuda")
    found = layer.run(uniep.moe)
    assert_plain_shared(layer, found)
    options: list[dict[str, Any]] = [
        {"schedule": "single,tile_m=128,tile_n=128"},
        {"schedule": "sequential,tile_m=128,tile_n=256"},
        {"save": "none", "recompute_h": True},
        {"save": "tokens", "row_pool": 1 << 24},
        {"backward_rows": 128},
        {"exact_rows": True},
    ]
    for choice in options:
        assert_same_tensors(layer.run(uniep.moe, **choice), found)
    deferred = uniep.DeferredWeights()
    assert_same_tensors(layer.run(uniep.moe, deferred=deferred), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_of_shared_experts(dtype: torch.dtype) -> None:
    layer = SharedLayer().to("cuda")
    assert_plain_shared(layer, layer.run(uniep.moe, main_grad=dtype), main_grad=dtype)


def _shared_part() -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = uniep.Group(dist.group.WORLD, device="cuda:0", share_device=True)
    layer = SharedLayer().part(rank, size).to("cuda")
    found = layer.run(uniep.moe, group=group, max_tokens=SHARED_TOKENS)
    found = {name: tensor.cpu() for name, tensor in found.items()}
    dist.barrier()
    group.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_shared_experts_of_ranks_that_share_a_gpu(size: int) -> None:
    """Weight gradients of a rank are those of its tokens alone."""
    whole = {n: t.cpu() for n, t in SharedLayer().to("cuda").run(uniep.moe).items()}
    results = run_ranks(size, _shared_part)
    for name in ("out", "x", "topk_probs", "shared_probs", "w1", "w2"):
        assert torch.equal(torch.cat([r[name] for r in results]), whole[name]), name
    for rank, found in enumerate(results):
        part = SharedLayer().part(rank, size).to("cuda")
        part.case.ids = torch.full_like(part.case.ids, -1)
        alone = part.run(uniep.moe)
        for name in ("shared_w1", "shared_w2"):
            assert torch.equal(found[name], alone[name].cpu()), name


def _part(tokens: int) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = uniep.Group(dist.group.WORLD, device="cuda:0", share_device=True)
    case = make_case(tokens=tokens, seed=5).part(rank, size).to("cuda")
    with uniep.Workspace(group, *case_shape(), max_tokens=tokens) as own:
        found = [t.cpu() for t in step(case, workspace=own)]
        assert_same([t.cpu() for t in step(case, workspace=own)], found)
        dist.barrier()  # nobody lets go of memory that another still writes
    group.close()
    return found


def case_shape() -> tuple[int, int, int, int]:
    return make_case(tokens=1).shape


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_a_gpu(size: int) -> None:
    whole = [t.cpu() for t in step(make_case(tokens=96, seed=5).to("cuda"))]
    parts = run_ranks(size, _part, 96)
    assert_same([torch.cat(tensors) for tensors in zip(*parts, strict=True)], whole)


def _refused_in_a_capture() -> bool:
    """Of a call that is refused there nobody hears; the capture and the ranks go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = uniep.Group(dist.group.WORLD, device="cuda:0", share_device=True)
    case = make_case(tokens=96, seed=5).part(rank, size).to("cuda").requires_grad()
    with uniep.Workspace(group, *case_shape(), max_tokens=96) as own:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            wanted = step(case, workspace=own)
        own.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            with pytest.raises(uniep.Error, match="no_such_axis"):
                step(case, workspace=own, schedule="no_such_axis=1")
            found = step(case, workspace=own)
        graph.replay()
        own.synchronize()
        same = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        dist.barrier()
    group.close()
    return same


def test_a_call_that_is_refused_in_a_capture_does_not_spoil_it() -> None:
    assert run_ranks(2, _refused_in_a_capture) == [True, True]


def _compiled() -> list[list[Tensor]]:
    """Steps that are compiled and one that is not: the first makes workspaces."""
    if dist.get_world_size() > 1:
        os.environ["UNIEP_SHARE_DEVICE"] = "1"
    ways: list[tuple[str | None, bool]] = [("aot_eager", False), ("aot_eager", True), (None, False)]
    steps = [
        checkpointed_step(backend, whole, "cuda:0", dist.group.WORLD) for backend, whole in ways
    ]
    dist.barrier()
    return [[t.cpu() for t in tensors] for tensors in steps]


@pytest.mark.parametrize("size", [1, 2])
def test_compiled_checkpoints_change_no_bit(size: int) -> None:
    for blocks, whole, called in run_ranks(size, _compiled):
        for a, b, wanted in zip(blocks, whole, called, strict=True):
            assert torch.equal(a, wanted) and torch.equal(b, wanted)


@pytest.mark.parametrize("save", ["rows", "tokens", "none"])
@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize("exact_rows", [False, True])
def test_what_is_kept_changes_no_bit(save: str, recompute_h: bool, exact_rows: bool) -> None:
    case = make_case(tokens=300, seed=11, dropped=True).to("cuda")
    choice = {"save": save, "recompute_h": recompute_h, "exact_rows": exact_rows}
    assert_same(step(case, **choice), step(case))


@pytest.mark.parametrize("choice", [{}, {"save": "tokens"}, {"save": "none", "recompute_h": True}])
def test_a_ring_of_rows_changes_no_bit_and_takes_less_memory(choice: dict[str, Any]) -> None:
    case = make_case(**SHAPES[2], seed=6).to("cuda")  # type: ignore[arg-type]
    wanted = step(case, schedule="single,tile_m=128,tile_n=256,dispatch_workers=16", **choice)
    for schedule in (None, "sequential,tile_m=128,tile_n=128,dispatch_workers=0"):
        with workspace(case, schedule=schedule, backward_rows=512, **choice) as own:
            assert_same(step(case, workspace=own), wanted)
            with workspace(case, **choice) as all_rows:
                assert own.backward_bytes < all_rows.backward_bytes / 4


def test_a_row_pool_changes_no_bit_and_gets_its_pages_back() -> None:
    case = make_case(tokens=300, seed=12).to("cuda").requires_grad()
    wanted = step(case)
    hidden, intermediate, _, _ = case.shape
    pool = uniep.RowPool(None, hidden, intermediate, bytes=1 << 24, device="cuda")
    with workspace(case, row_pool=pool) as first, workspace(case, row_pool=pool) as second:
        outs = [
            uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
            for own in (first, second, first)
        ]
        assert pool.free_pages < pool.pages
        for i in (1, 2, 0):
            assert_same(gradients(case, outs[i]), wanted)
        outs.clear()
        assert pool.free_pages == pool.pages


def test_saved_tensors_may_be_offloaded() -> None:
    case = make_case(seed=7).to("cuda").requires_grad()
    wanted = step(case)
    with torch.autograd.graph.save_on_cpu():
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2)
    assert_same(gradients(case, out), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_added_to(dtype: torch.dtype) -> None:
    case = make_case(seed=8).to("cuda").requires_grad()
    sums = [torch.ones_like(w, dtype=dtype) for w in (case.w1, case.w2)]
    plain_sums = [t.clone() for t in sums]
    for moe, target in ((uniep.moe, sums), (uniep.plain.moe, plain_sums)):
        out = moe(case.x, case.ids, case.probs, case.w1, case.w2, main_grads=(target[0], target[1]))
        out.backward(case.dy)
    for found, wanted in zip(sums, plain_sums, strict=True):
        assert torch.equal(found, wanted)
        assert not torch.equal(found, torch.ones_like(found))


def test_calls_on_other_streams() -> None:
    case = make_case(seed=9).to("cuda").requires_grad()
    wanted = step(case)
    own = workspace(case)
    for _ in range(20):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step(case, workspace=own)
        torch.cuda.current_stream().wait_stream(stream)
        assert_same(found, wanted)


def test_deferred_weights_on_another_stream_keep_their_memory() -> None:
    shape = dict(tokens=2048, hidden=1024, intermediate=512, experts=8, topk=2)
    case = make_case(**shape, seed=12).to("cuda").requires_grad()
    wanted = step(case)
    deferred = uniep.DeferredWeights()
    case.w1.grad = case.w2.grad = None
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, deferred=deferred)
    out.backward(case.dy)
    sizes = [t.nbytes for t in deferred._pending[0].memory() if t is not None]
    del out
    torch.full((1,), 255, dtype=torch.uint8, device="cuda")  # loads the kernel, which may wait
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**9)
        uniep.backward_weights(deferred)
    # Of the stream that the memory is of, which waits for nothing.
    spoilt = [torch.full((n,), 255, dtype=torch.uint8, device="cuda") for n in 8 * sizes]
    torch.cuda.synchronize()
    assert torch.equal(case.w1.grad, wanted[3])
    assert torch.equal(case.w2.grad, wanted[4])
    del spoilt


def test_a_step_in_a_graph_keeps_its_plan_in_a_row_pool() -> None:
    case = make_case(tokens=128, seed=13).to("cuda").requires_grad()
    other = make_case(tokens=128, seed=14).to("cuda")
    wanted, others = step(case), step(other)
    pool = uniep.RowPool(None, 64, 32, bytes=1 << 22, device="cuda")
    own = workspace(case, row_pool=pool)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(case, workspace=own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = step(case, workspace=own)
    for _ in range(2):
        out = uniep.moe(other.x, other.ids, other.probs, other.w1, other.w2, workspace=own)
        graph.replay()  # with a plan of its own, while the other's is there
        assert_same(gradients(other, out), others)
        assert_same(found, wanted)
    del out
    own.synchronize()
    step(other, workspace=own)
    assert pool.free_pages == pool.pages


def test_a_graph_keeps_the_workspace_that_calls_share() -> None:
    case = make_case(tokens=64, hidden=96, seed=14).to("cuda").requires_grad()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        wanted = [tensor.detach() for tensor in step(case)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = [tensor.detach() for tensor in step(case)]  # nor does autograd keep it
    gc.collect()
    layers = _library.torch_library.uniep_torch_bound()
    step(make_case(tokens=1024, hidden=96).to("cuda").requires_grad())  # needs a larger one
    gc.collect()
    assert _library.torch_library.uniep_torch_bound() == layers + 1
    graph.replay()
    torch.cuda.synchronize()
    assert_same(found, wanted)
    del graph
    uniep.drop_workspaces()
    gc.collect()
    assert _library.torch_library.uniep_torch_bound() < layers


def test_a_whole_step_in_a_graph() -> None:
    case = make_case(tokens=128, seed=10).to("cuda").requires_grad()
    own = workspace(case)
    parameters = [case.w1, case.w2]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    start = [p.detach().clone() for p in parameters]

    def train() -> None:
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def reset() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)

    for _ in range(5):
        train()
    wanted = [p.detach().clone() for p in parameters]
    reset()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    reset()
    for _ in range(5):
        graph.replay()
    for found, value in zip(parameters, wanted, strict=True):
        assert torch.equal(found, value)
    own.synchronize()


def test_memory_is_in_torchs_accounting() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    case = make_case(tokens=256, hidden=512, intermediate=256, seed=11).to("cuda")
    tensors = torch.cuda.memory_allocated()
    own = workspace(case)
    assert torch.cuda.memory_allocated() - tensors >= own.bytes
    with_workspace = torch.cuda.memory_allocated()
    case.requires_grad()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
    assert torch.cuda.memory_allocated() - with_workspace >= own.saved_bytes
    del out
    assert torch.cuda.memory_allocated() == with_workspace
    own.close()
    del own, case
    assert torch.cuda.memory_allocated() <= before + 4096


def test_overflow_is_a_value_on_the_device() -> None:
    case = make_case(tokens=512, experts=2, topk=2, seed=12).to("cuda").requires_grad()
    own = workspace(case, capacity_rows=512, on_overflow="flag")
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
    out.backward(case.dy)
    assert torch.isnan(out).all()
    assert own.overflow[0].item() == 1 and own.needed_rows() >= 1024
    own.grow(capacity_rows=own.needed_rows())
    assert_same(step(case, workspace=own), step(case))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save": "none", "recompute_h": True},
        {"save": "tokens", "exact_rows": True},
        {"save": "none", "row_pool": 1 << 26},
        {"main": True},
        {"deferred": True},
    ],
    ids=str,
)
def test_tensors_may_begin_anywhere(options: dict[str, Any]) -> None:
    """Of x, and of the gradient of out, which is a part of another tensor's."""
    tokens, hidden = 96, 64
    aux = torch.randn(3, dtype=torch.bfloat16, device="cuda")

    def run(aligned: bool) -> list[Tensor]:
        case = make_case(tokens=tokens, hidden=hidden, seed=14).to("cuda")
        if not aligned:
            memory = torch.empty(tokens * hidden + 3, dtype=torch.bfloat16, device="cuda")
            case.x = memory[3:].view(tokens, hidden).copy_(case.x)
            assert case.x.is_contiguous() and case.x.data_ptr() % 16
        case.requires_grad()
        more = dict(options)
        deferred = uniep.DeferredWeights() if more.pop("deferred", False) else None
        main = None
        if more.pop("main", False):
            main = tuple(torch.ones(w.shape, device="cuda") for w in (case.w1, case.w2))
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        out = uniep.moe(*tensors, main_grads=main, deferred=deferred, **more)  # type: ignore[arg-type]
        given: list[Tensor] = []
        out.register_hook(given.append)  # type: ignore[no-untyped-call]
        parts = (out.flatten(), aux) if aligned else (aux, out.flatten())
        torch.cat(parts).float().square().sum().backward()
        assert bool(given[0].data_ptr() % 16) is not aligned
        if deferred is not None:
            uniep.backward_weights(deferred)
        of_weights = main or (case.w1.grad, case.w2.grad)
        found = [out.detach(), case.x.grad, case.probs.grad, *of_weights]
        assert all(tensor is not None for tensor in found)
        return found  # type: ignore[return-value]

    assert_same(run(False), run(True))


def test_tokens_of_shared_experts_may_begin_anywhere() -> None:
    found = []
    for begin in (0, 3):
        layer = SharedLayer().to("cuda")
        case = layer.case.requires_grad()
        more = {name: tensor.requires_grad_() for name, tensor in layer.more.items()}
        x, dy = (
            torch.cat((t.new_zeros(begin), t.detach().flatten()))[begin:].view_as(t)
            for t in (case.x, case.dy)
        )
        assert all(bool(t.data_ptr() % 16) is (begin > 0) for t in (x, dy))
        leaves = {"x": x.requires_grad_(), "topk_probs": case.probs, "w1": case.w1, "w2": case.w2}
        out = uniep.moe(topk_ids=case.ids, **leaves, **more, **layer.options)
        out.backward(dy)
        found.append({n: t.grad for n, t in (leaves | more).items()} | {"out": out.detach()})
    assert_same_tensors(*found)
