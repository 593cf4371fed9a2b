"""Workspaces: memory, overflow, growing, closing; and that nothing is kept alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import assert_same, gradients, make_case, step, workspace
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import uniep
from uniep import _library


def bound() -> int:
    gc.collect()
    return _library.torch_library.uniep_torch_bound()


def crowded():
    """All tokens to expert 0."""
    case = make_case(topk=1)
    case.ids.zero_()
    return case


def test_says_what_it_takes():
    case = make_case()
    with workspace(case) as own:
        assert own.bytes > 0
        assert own.saved_bytes >= own.rows * (2 * 64 + 4 * 32 + 4)
        assert "rows=" in repr(own)
        assert own.schedule("forward").startswith("launch=")
        assert own.schedule("backward").startswith("launch=")
    assert own.closed and "closed" in repr(own)
    own.close()  # again


def test_one_that_a_fake_call_makes_serves_real_ones():
    """What watches memory or shapes runs a step with fake tensors, which may be the first."""
    case = make_case(hidden=72).requires_grad()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2)
    assert isinstance(fake, FakeTensor)
    with workspace(case) as own:
        wanted = step(case, workspace=own)
    found = step(case)
    assert not any(isinstance(tensor, FakeTensor) for tensor in found)
    assert_same(found, wanted)


def test_overflow_raises_and_names_the_capacity():
    case = crowded().requires_grad()
    with workspace(case, capacity_rows=16 * 8) as own:
        assert own.rows == 128
        wanted = step(case, workspace=own)
        assert wanted[0].isfinite().all()
    big = make_case(tokens=300, topk=1)
    big.ids.zero_()
    with workspace(big, capacity_rows=256) as own:
        with pytest.raises(RuntimeError, match="384"):
            step(big, workspace=own)
        with pytest.raises(ValueError, match="on_overflow='flag'"):
            own.needed_rows()
        own.grow(capacity_rows=384)
        assert_same(step(big, workspace=own), step(big))


def test_overflow_as_a_flag():
    big = make_case(tokens=300, topk=1)
    big.ids.zero_()
    with workspace(big, capacity_rows=256, on_overflow="flag") as own:
        out, dx, dprobs, dw1, dw2 = step(big, workspace=own)
        assert out.isnan().all() and dx.isnan().all()
        assert not dprobs.any() and not dw1.any() and not dw2.any()
        assert own.overflow.tolist() == [1, 384] and own.needed_rows() == 384
        # It stays until it is cleared.
        few = make_case(tokens=20, topk=1)
        few.ids.zero_()
        assert step(few, workspace=own)[0].isfinite().all()
        assert own.overflow.tolist() == [1, 384]
        own.overflow.zero_()
        step(few, workspace=own)
        assert own.overflow.tolist() == [0, 128]
        few.ids[3] = 99
        assert step(few, workspace=own)[0].isnan().all()
        assert own.overflow[0] == uniep.Overflow.IMPOSSIBLE
        own.grow(capacity_rows=384)
        assert own.overflow.tolist() == [0, 0]
        assert_same(step(big, workspace=own), step(big))


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"combine_groups": 2}, {"shared_apart": True}],
    ids=lambda options: "".join(options) or "in the pass",
)
def test_overflow_as_a_flag_leaves_shared_experts_alone(options, main):
    case = make_case(tokens=600, topk=1)
    case.ids.zero_()
    w1, w2 = case.w1, case.w2
    weights = {"w1": w1, "w2": w2}
    if "bias" in options:
        weights |= {"b1": w1[:, :, 0].contiguous(), "b2": w2[:, :, 0].contiguous()}
    weights |= {"shared_w1": w1[:1].clone(), "shared_w2": w2[:1].clone()}
    shared_probs = torch.rand(600, 1).requires_grad_()
    for weight in weights.values():
        weight.requires_grad_()
    mains = tuple(torch.full_like(weight, 3, dtype=torch.float32) for weight in weights.values())
    given = {"shared_probs": shared_probs, "main_grads": mains if main else None}
    rows = 512 if options else 512 + 640  # shared experts that are part of the pass have 640
    options = {"capacity_rows": rows, "on_overflow": "flag", "shared_experts": 1, **options}

    def run(own):
        out = uniep.moe(case.x, case.ids, case.probs, **weights, **given, workspace=own)
        out.backward(case.dy)
        return out

    with workspace(case, **options) as own:
        assert run(own).isnan().all()
        overflow = own.overflow.clone()
        assert overflow[0] == uniep.Overflow.ROWS
        assert not shared_probs.grad.any()
        found = mains if main else [weight.grad for weight in weights.values()]
        assert all((gradient == (3 if main else 0)).all() for gradient in found)
        # A flag that stays up says nothing of a later call.
        case.ids.fill_(-1)[:20] = 0
        assert run(own).isfinite().all()
        assert torch.equal(own.overflow, overflow)
        assert all((gradient != (3 if main else 0)).any() for gradient in found)
        assert all(gradient.isfinite().all() for gradient in found)


def test_overflow_as_a_flag_leaves_identity_experts_alone():
    case = make_case(tokens=300, topk=2)
    case.ids[:, 0], case.ids[:, 1] = 0, 8
    case.requires_grad()
    with workspace(case, capacity_rows=256, on_overflow="flag") as own:
        out = uniep.moe(
            case.x, case.ids, case.probs, case.w1, case.w2, workspace=own, zero_experts=1
        )
        found = gradients(case, out)
        assert found[0].isnan().all() and found[1].isnan().all()
        assert all((gradient == 0).all() for gradient in found[2:])
        assert own.overflow.tolist() == [1, 384]


def test_a_backward_of_before_it_grew_is_refused():
    case = make_case(tokens=300).requires_grad()
    with workspace(case) as own:
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
        own.grow(capacity_rows=2048)
        with pytest.raises(RuntimeError, match="closed"):
            out.backward(case.dy)
    assert_same(step(case), step(case))


def test_default_workspaces_are_shared_and_grow():
    before = bound()
    step(make_case(hidden=80))
    assert bound() == before + 1
    step(make_case(hidden=80, seed=1))
    step(make_case(hidden=80, tokens=20))
    assert bound() == before + 1
    # A larger one takes its place, and the backward of the old one still works.
    case = make_case(hidden=80).requires_grad()
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2)
    wanted = step(make_case(hidden=80, tokens=48))
    step(make_case(hidden=80, tokens=100))
    assert_same(gradients(case, out), wanted)
    del out
    assert bound() == before + 1


def test_an_abandoned_workspace_ends():
    before = bound()
    own = workspace(make_case())
    alive = weakref.ref(own)
    assert bound() == before + 1
    step(make_case(), workspace=own)
    del own
    assert bound() == before and alive() is None


def test_shared_workspaces_are_dropped():
    uniep.drop_workspaces()
    before = bound()
    case = make_case(hidden=88).requires_grad()
    wanted = step(case)
    step(case, row_pool=1 << 20)
    out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2)
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    assert torch.equal(compiled(*tensors), wanted[0])
    assert bound() == before + 2
    uniep.drop_workspaces()
    uniep.drop_workspaces(uniep.Group(device="cpu"))  # which has none
    assert torch.equal(compiled(*tensors), wanted[0])
    assert_same(gradients(case, out), wanted)
    del out, compiled  # also in a compiler's view of this frame
    torch.compiler.reset()
    uniep.drop_workspaces()  # what the compiled call has made again
    assert bound() == before
    assert_same(step(case), wanted)
    with pytest.raises(TypeError, match="group is of type int"):
        uniep.drop_workspaces(3)


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_returns_after_a_thousand_steps_and_after_exceptions():
    case = make_case()
    bad = make_case()
    bad.ids[0, 0] = 77
    failing = make_case().requires_grad()

    class Stop(Exception):
        pass

    def stop(_):
        raise Stop

    def one(own):
        step(case, workspace=own)
        with pytest.raises(RuntimeError):
            step(bad, workspace=own)
        out = uniep.moe(
            failing.x, failing.ids, failing.probs, failing.w1, failing.w2, workspace=own
        )
        out.register_hook(stop)
        with pytest.raises(Stop):
            out.backward(failing.dy)

    before = bound()
    with workspace(case) as own:
        for _ in range(50):
            one(own)
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        start = rss()
        for _ in range(1000):
            one(own)
        gc.collect()
        assert sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) <= tensors
        # One step keeps about own.saved_bytes; a thousand that were kept would be 60 times this.
        assert rss() - start < max(16 * own.saved_bytes, 8 << 20)
    assert bound() == before


def test_saved_state_is_not_held_by_the_context():
    case = make_case().requires_grad()
    saved = []

    def pack(tensor):
        saved.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2)
    out.backward(case.dy)
    gc.collect()
    kept = [ref() for ref in saved]
    kept = [t for t in kept if t is not None and t is not case.w1 and t is not case.w2]
    assert len(saved) >= 6 and not any(t.numel() > 1000 and t.dtype == torch.uint8 for t in kept)


@pytest.mark.parametrize("how", ["open", "closed", "raises", "held by a graph"])
def test_the_interpreter_exits_cleanly(how):
    code = f"""
import torch, uniep
g = uniep.Group(device="cpu")
own = uniep.Workspace(g, 64, 32, 8, 2, 16)
x = torch.zeros(16, 64, dtype=torch.bfloat16, requires_grad=True)
w1 = torch.zeros(8, 64, 64, dtype=torch.bfloat16); w2 = torch.zeros(8, 64, 32, dtype=torch.bfloat16)
out = uniep.moe(x, torch.zeros(16, 2, dtype=torch.int32), torch.zeros(16, 2), w1, w2, workspace=own)
how = {how!r}
if how == "closed": own.close(); g.close()
if how == "held by a graph": del own, g
if how == "raises": raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == (3 if how == "raises" else 0), done.stderr
    assert done.stderr == ""


def test_figures_are_whole_numbers_of_any_kind():
    numpy = pytest.importorskip("numpy")
    with uniep.Workspace(None, numpy.int64(64), 32, numpy.int32(8), 2, numpy.int64(5)) as own:
        assert own.max_tokens == 5
    with pytest.raises(TypeError, match=r"hidden is '64', a str; it must be an int"):
        uniep.Workspace(None, "64", 32, 8, 2, 5)
    with pytest.raises(
        ValueError, match=r"max_tokens is 18446744073709551621; a number of 64 bits"
    ):
        uniep.Workspace(None, 64, 32, 8, 2, 2**64 + 5)


def test_other_calls_take_turns_with_those_of_threads(monkeypatch):
    case = make_case(tokens=128, hidden=128, intermediate=128)
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    with workspace(case) as own, ThreadPoolExecutor() as threads:
        calls = threads.submit(lambda: [uniep.moe(*tensors, workspace=own) for _ in range(50)])
        while not calls.done():
            own.synchronize()
            assert "launch=" in own.schedule()
        found = calls.result()
        assert all(torch.equal(out, found[0]) for out in found)
        function, running = uniep.tuning._Stop, threading.Event()
        # What a search asks whether it shall end.
        monkeypatch.setattr(uniep.tuning, "_Stop", lambda _: function(lambda _: running.set() or 0))
        options = {"budget": 5, "candidates": 1, "store": False}
        search = threads.submit(uniep.tune_calls, *tensors, workspace=own, **options)
        assert running.wait(60)
        own.close()  # behind the search
        assert search.result().candidates > 0


def test_a_forked_child_is_refused_and_exits_cleanly():
    code = """
import os, sys, torch, uniep
torch.set_num_threads(1)
x = torch.zeros(16, 64, dtype=torch.bfloat16)
w1 = torch.zeros(8, 64, 64, dtype=torch.bfloat16); w2 = torch.zeros(8, 64, 32, dtype=torch.bfloat16)
ids, probs = torch.zeros(16, 2, dtype=torch.int32), torch.zeros(16, 2)
group = uniep.Group(device="cpu")
x[:] = torch.randn(16, 64)
w1[:], w2[:] = torch.randn(8, 64, 64), torch.randn(8, 64, 32)
out = uniep.moe(x, ids, probs + 1, w1, w2)
uniep.moe(x, ids, probs, w1, w2, group=group)
child = os.fork()
try:
    uniep.moe(x, ids, probs, w1, w2, group=group)
except RuntimeError as error:
    assert child == 0 and "was forked from process" in str(error), error
    # Where nobody gave a group, the child has its own.
    assert torch.equal(uniep.moe(x, ids, probs + 1, w1, w2), out)
    uniep.drop_workspaces()
    assert torch.equal(uniep.moe(x, ids, probs + 1, w1, w2), out)
    sys.exit(7)
assert child != 0
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(uniep.moe(x, ids, probs + 1, w1, w2), out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
