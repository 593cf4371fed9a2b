"""torch.compile, checkpointing and saved-tensor hooks change no bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys

import pytest
import torch
from cases import assert_same, gradients, make_case, relative, workspace
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import uniep
from uniep import _shared_experts
from uniep._checked_call import CheckedCall
from uniep._choices import Choices, LayerKind
from uniep._forms import Experts
from uniep.arithmetic import Arithmetic

BACKENDS = ["eager", "aot_eager", "inductor"]


def two_layers(own, case, x, probs, w1, w2):
    """Two layers that need each other's output, and one beside them that needs neither's."""
    y = uniep.moe(x, case.ids, probs, w1, w2, workspace=own)
    y = uniep.moe(torch.nn.functional.gelu(y), case.ids, probs, w1, w2, workspace=own)
    return y + uniep.moe(x * 2, case.ids, probs, w1, w2, workspace=own)


def run(function, case):
    return gradients(case, function(case.x, case.probs, case.w1, case.w2))


def test_the_compiler_is_imported_by_those_who_compile():
    """It takes nearly as long to import as PyTorch."""
    code = (
        "import sys, torch, uniep\n"
        "ids, probs = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)\n"
        "shapes = (3, 8), (1, 16, 8), (1, 8, 8)\n"
        "x, w1, w2 = (torch.ones(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)\n"
        "uniep.moe(x, ids, probs, w1, w2).sum().backward()\n"
        "uniep.moe(x, ids + 1, probs, w1, w2, zero_experts=1).sum().backward()\n"
        "pool = uniep.RowPool(None, 8, 8, bytes=1 << 22, device='cpu')\n"
        "uniep.moe(x, ids, probs, w1, w2, row_pool=pool).sum().backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_what_is_compiled_holds_no_properties():
    """PyTorch 2.10 compiles methods of named tuples, and no properties."""
    held = (Arithmetic, CheckedCall, Choices, Experts, LayerKind)
    assert not [v for kind in held for v in vars(kind).values() if isinstance(v, property)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_without_gradients_or_a_workspace(backend):
    """Of other numbers of tokens: from the second on they are symbols of the graph."""
    case = make_case(hidden=72)
    compiled = torch.compile(uniep.moe, fullgraph=True, backend=backend)
    for tokens in (16, 24, 48, 8, 31):
        inputs = [t[:tokens] for t in (case.x, case.ids, case.probs)]
        found = compiled(*inputs, case.w1, case.w2)
        assert torch.equal(found, uniep.moe(*inputs, case.w1, case.w2)), tokens


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_of_several_kinds_compile_in_one_graph(backend):
    """Their workspaces are made while it is traced."""
    torch.manual_seed(0)
    layers = [uniep.MoELayer(56, intermediate, 8, 2) for intermediate in (32, 16, 24)]
    layers.append(uniep.MoELayer(56, 32, 8, 2, save="none"))
    model = torch.nn.Sequential(*layers)
    x = torch.randn(20, 56).bfloat16().requires_grad_()
    torch.compile(model, fullgraph=True, backend=backend)(x).float().square().mean().backward()
    found = [x.grad, *(layer.w1.grad for layer in layers)]
    x.grad = None
    model.zero_grad()
    model(x).float().square().mean().backward()
    for a, b in zip(found, [x.grad, *(layer.w1.grad for layer in layers)], strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def problem():
    case = make_case(dropped=True).requires_grad()
    with workspace(case) as own:
        function = functools.partial(two_layers, own, case)
        yield case, own, function, run(function, case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_in_one_graph(problem, backend):
    case, _, function, wanted = problem
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for _ in range(2):
        found = run(compiled, case)
        for a, b in zip(found[1:], wanted[1:], strict=True):
            if backend == "inductor":  # fuses gelu, whose bits are PyTorch's affair
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["shared workspace", "first call compiled"])
def test_one_layer_compiled_has_the_same_bits(backend, where):
    hidden = 64 if where == "shared workspace" else 8 * (12 + BACKENDS.index(backend))
    case = make_case(hidden=hidden).requires_grad()
    function = torch.compile(uniep.moe, fullgraph=True, backend=backend)
    out = function(case.x, case.ids.long(), case.probs, case.w1, case.w2)
    found = gradients(case, out)
    wanted = gradients(case, uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2))
    assert_same(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_main_grads_and_flags(backend):
    case = make_case(tokens=300, topk=1).requires_grad()
    with workspace(case, capacity_rows=1024 + 256, on_overflow="flag") as own:

        def function(main):
            return uniep.moe(
                *(case.x, case.ids, case.probs, case.w1, case.w2), workspace=own, main_grads=main
            )

        results = []
        for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
            main = [torch.ones_like(w, dtype=torch.float32) for w in (case.w1, case.w2)]
            own.overflow.zero_()
            case.x.grad = None
            out = call(main)
            out.backward(case.dy)
            results.append([out.detach(), case.x.grad, *main, own.overflow.clone()])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        assert results[0][-1][1] > 0

        case.ids.zero_()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        case.ids[:] = torch.arange(300, dtype=torch.int32)[:, None] % 8
        compiled([torch.zeros_like(t) for t in main])
        assert own.overflow[0] == 0
        own.grow(capacity_rows=2048)
        assert compiled([torch.zeros_like(t) for t in main]).isfinite().all()


def test_compiled_for_any_number_of_tokens():
    full = make_case(tokens=64)
    with workspace(full) as own:

        @functools.partial(torch.compile, fullgraph=True, backend="aot_eager", dynamic=True)
        def function(x, ids, probs, w1, w2):
            return uniep.moe(x, ids, probs, w1, w2, workspace=own)

        for tokens in (64, 40, 33):
            case = make_case(tokens=tokens, seed=tokens).requires_grad()
            out = function(case.x, case.ids, case.probs, case.w1, case.w2)
            found = gradients(case, out)
            plain = uniep.moe(case.x, case.ids, case.probs, case.w1, case.w2, workspace=own)
            assert_same(found, gradients(case, plain))


def test_deferred_is_refused_while_compiling():
    case = make_case().requires_grad()

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def function(x):
        deferred = uniep.DeferredWeights()
        return uniep.moe(x, case.ids, case.probs, case.w1, case.w2, deferred=deferred)

    with pytest.raises(Exception, match="deferred weight gradients cannot be compiled"):
        function(case.x)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("reentrant", None),  # which PyTorch does not compile
        *itertools.product(
            ["full", "save forward", "recompute forward"], [None, "eager", "aot_eager"]
        ),
        ("save forward", "inductor"),  # what runs again is decided before it
    ],
)
def test_checkpointing(problem, kind, backend):
    case, _, function, wanted = problem

    def policy(_, op, *args, **kwargs):
        keeps = kind == "save forward" and op == torch.ops.uniep.forward.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(*tensors):
        if kind == "reentrant":
            return checkpoint(function, *tensors, use_reentrant=True)
        options = {}
        if kind != "full":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(function, *tensors, use_reentrant=False, **options)

    if backend is not None:
        checkpointed = torch.compile(checkpointed, fullgraph=True, backend=backend)
    found = run(checkpointed, case)
    for a, b in zip(found, wanted, strict=True):
        if backend == "inductor":
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(a, b)


def test_compiled_autograd_behind_a_forward_that_is_not_compiled(problem):
    case, _, function, wanted = problem
    out = function(case.x, case.probs, case.w1, case.w2)
    graphs = []

    def compiler(graph):
        graphs.append(graph)
        return torch.compile(graph, backend="aot_eager")

    with torch._dynamo.compiled_autograd._enable(compiler):
        found = gradients(case, out)
    assert len(graphs) == 1
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pool", [None, 1 << 22], ids=["tensors", "pool"])
def test_compiled_autograd_of_weight_gradients_that_wait(pool):
    case = make_case(tokens=16).requires_grad()
    shared = [weight[:1].detach().clone().requires_grad_() for weight in (case.w1, case.w2)]

    def step(compiler):
        case.x.grad, deferred = None, uniep.DeferredWeights()
        main = [torch.zeros_like(w, dtype=torch.float32) for w in (case.w1, case.w2, *shared)]
        out = uniep.moe(
            *(case.x, case.ids, case.probs.detach(), case.w1, case.w2),
            shared_w1=shared[0],
            shared_w2=shared[1],
            main_grads=main,
            deferred=deferred,
            row_pool=pool,
        )
        with compiler:
            out.backward(case.dy)
        assert len(deferred) == 1
        uniep.backward_weights(deferred)
        return [out.detach(), case.x.grad, *main]

    wanted = step(contextlib.nullcontext())
    torch.compiler.reset()
    found = step(torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["full", "save forward"])
def test_checkpointing_runs_forward_again_where_it_should(problem, kind):
    case, own, _, _ = problem
    calls = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "uniep":
                calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def policy(_, op, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE
            if op == torch.ops.uniep.forward.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    options = {}
    if kind != "full":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def layer(x):
        return uniep.moe(x, case.ids, case.probs, case.w1, case.w2, workspace=own)

    with Counting():
        checkpoint(layer, case.x, use_reentrant=False, **options).sum().backward()
    again = ["forward"] if kind == "full" else []
    assert calls == ["forward", *again, "backward"]


@pytest.mark.parametrize("how", ["save_on_cpu", "copies"])
def test_saved_tensor_hooks(problem, how):
    case, _, function, wanted = problem
    written = []
    if how == "save_on_cpu":
        hooks = torch.autograd.graph.save_on_cpu()
    else:

        def pack(tensor):
            if tensor.dtype == torch.uint8:  # the ops' own, not the caller's
                written.append(tensor.detach())
            return tensor.detach().clone()

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept)
    with hooks:
        out = function(case.x, case.probs, case.w1, case.w2)
    assert len(written) == (0 if how == "save_on_cpu" else 3)
    for tensor in written:  # what was saved is gone when backward comes
        tensor.fill_(255)
    assert_same(gradients(case, out), wanted)


def calls_in(graph):
    """The schedules of uniep's ops in the order of the graph, if each one needs the one before."""
    calls = []
    for node in graph.nodes:
        op = next((a for a in (node.target, *node.args[:2]) if isinstance(a, OpOverload)), None)
        if op is not None and op.namespace == "uniep":
            calls.append(node)
    for first, second in itertools.pairwise(calls):
        needed, ahead = set(), [second]
        while ahead:
            node = ahead.pop()
            needed.add(node)
            ahead.extend(n for n in node.all_input_nodes if n not in needed)
        if first not in needed:
            return f"{second} does not need {first}, so a pass may swap them"
    return [
        next(a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)) for node in calls
    ]


def test_order_of_collectives_is_kept(problem):
    """Layers that need nothing of each other stay in the order in which the program has them."""
    case, own, _, _ = problem
    seen = []

    def record(graph, _):
        seen.append(calls_in(graph.graph))
        return make_boxed_func(graph.forward)

    def function(x, probs, w1, w2):
        a = uniep.moe(x, case.ids, probs, w1, w2, workspace=own, schedule="sequential")
        b = uniep.moe(x, case.ids, probs, w1, w2, workspace=own, schedule="single")
        return b - a

    # As aot_eager and inductor have it: an input that backward changes is changed in the graph.
    backend = aot_autograd(fw_compiler=record, keep_inference_input_mutations=True)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    out = compiled(case.x, case.probs, case.w1, case.w2)
    out.backward(case.dy)
    assert not out.any()
    assert seen[0] == ["sequential", "single"]
    if TorchVersion(torch.__version__) >= "2.15":  # before, no pass is known that swaps them
        assert seen[1] == ["single", "sequential"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_calls_compiled_apart_may_be_outstanding(problem, backend):
    """A model whose blocks are compiled one by one runs forward of all before any backward."""
    case, own, _, _ = problem

    def layer(x, probs, w1, w2):
        return uniep.moe(x, case.ids, probs, w1, w2, workspace=own)

    def two(function):
        out = function(function(case.x, case.probs, case.w1, case.w2), case.probs, case.w1, case.w2)
        return gradients(case, out)

    wanted = two(layer)
    assert_same(two(torch.compile(layer, fullgraph=True, backend=backend)), wanted)


def checkpointed_step(backend, whole, device="cpu", group=None):
    """Two blocks that run again in backward, when the second has run, and another batch too."""
    torch.manual_seed(3)
    options = {"max_tokens": 24, "dtype": torch.bfloat16, "device": device, "group": group}
    layers = [uniep.MoELayer(72, 32, 8, 2, **options) for _ in range(2)]

    def block(layer):
        def function(x):
            return x + checkpoint(layer, x, use_reentrant=False)

        if backend is None or whole:
            return function
        return torch.compile(function, fullgraph=True, backend=backend)

    blocks = [block(layer) for layer in layers]

    def model(x):
        return functools.reduce(lambda y, function: function(y), blocks, x)

    if backend is not None and whole:
        model = torch.compile(model, fullgraph=True, backend=backend)
    batches = [torch.randn(24, 72).to(device, torch.bfloat16).requires_grad_() for _ in range(2)]
    outs = [model(x) for x in batches]
    sum(out.float().square().mean() for out in outs).backward()
    parameters = [p for layer in layers for p in layer.parameters()]
    return [t.detach() for t in outs] + [t.grad for t in [*batches, *parameters]]


@pytest.mark.parametrize("whole", [False, True], ids=["block by block", "whole"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_checkpointed_layers_compile(backend, whole):
    torch.compiler.reset()
    found, wanted = checkpointed_step(backend, whole), checkpointed_step(None, whole)
    for a, b in zip(found, wanted, strict=True):
        if backend == "inductor":  # fuses the router, whose bits are PyTorch's affair
            assert relative(a, b) < 2e-2
        else:
            assert torch.equal(a, b)


def budgeted_step(budget, backend):
    """Two blocks whose backward computes again what does not fit into the budget of memory."""
    torch.manual_seed(3)
    blocks = torch.nn.Sequential()
    for _ in range(2):
        layer = uniep.MoELayer(64, 32, 8, 2, max_tokens=24, device="cpu")
        before = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        blocks.append(torch.nn.Sequential(before, torch.nn.SiLU(), layer))
    with torch._functorch.config.patch(activation_memory_budget=budget):
        for block in blocks:
            block.compile(fullgraph=True, backend=backend)
        x = torch.randn(24, 64).bfloat16().requires_grad_()
        blocks(x).float().square().mean().backward()
    return [t.grad for t in [x, *blocks.parameters()]]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers_run_again_to_keep_to_a_budget_of_memory(backend):
    torch.compiler.reset()
    wanted = budgeted_step(1, "aot_eager")
    torch.compiler.reset()
    found = budgeted_step(0, backend)
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 2e-2 if backend == "inductor" else torch.equal(a, b)


def test_shared_weights_put_together_in_a_compiled_checkpoint():
    """As DeepSeek's, whose two shared experts are one twice as wide; inductor chooses layouts."""
    case, shared, wide = make_case(), 2, 64
    draw = torch.Generator().manual_seed(4)
    ups = [(0.1 * torch.randn(wide, 64, generator=draw)).bfloat16() for _ in range(2)]
    down = (0.1 * torch.randn(64, wide, generator=draw)).bfloat16()

    def layer(x):
        w1, w2 = _shared_experts.weights(ups, down, wide // shared)
        return uniep.moe(
            x, case.ids, case.probs, case.w1, case.w2, shared_w1=w1, shared_w2=w2, workspace=own
        )

    def function(x):
        return checkpoint(layer, x, use_reentrant=False)

    torch.compiler.reset()
    inputs = [case.x, *ups, down]
    found = []
    with workspace(case, shared_experts=shared) as own:
        for call in (function, torch.compile(function, fullgraph=True, backend="inductor")):
            for tensor in inputs:
                tensor.requires_grad_().grad = None
            out = call(case.x)
            out.backward(case.dy)
            found.append([out.detach()] + [tensor.grad for tensor in inputs])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_what_overflows_in_a_compiled_checkpoint_is_seen():
    case = make_case(tokens=300, topk=1).requires_grad()
    case.ids[:] = torch.arange(300, dtype=torch.int32)[:, None] % 7 + 1
    case.ids[:136] = 0  # more than a tile; each expert's rows are whole tiles
    with workspace(case, capacity_rows=1024, on_overflow="flag") as own:

        def layer(x):
            return uniep.moe(x, case.ids, case.probs, case.w1, case.w2, workspace=own)

        def function(x):
            return checkpoint(layer, x, use_reentrant=False)

        seen = []
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            own.overflow.zero_()
            out = call(case.x)
            seen.append(own.overflow.tolist())
            out.sum().backward()
            assert own.overflow.tolist() == seen[-1] and out.isnan().all()
        assert seen[0] == seen[1] and seen[0][0] == 1


def test_an_exported_program_runs_beside_a_layer_of_its_kind_alone(tmp_path):
    """In another process, too: an export knows its workspace, not how to make one."""
    code = (
        "import sys, torch, uniep\n"
        "path, activation, what = sys.argv[1:]\n"
        "torch.manual_seed(1)\n"
        "layer = uniep.MoELayer(64, 32, 8, 2, device='cpu', activation=activation)\n"
        "x = torch.randn(16, 64).bfloat16()\n"
        "if what == 'save':\n"  # as the first call of the layer
        "    program = torch.export.export(layer, (x,))\n"
        "    torch.export.save(program, path)\n"
        "out = layer(x)\n"
        "if what == 'load':\n"
        "    program = torch.export.load(path)\n"
        "assert torch.equal(program.module()(x), out)\n"
    )

    def run_alone(activation, what):
        arguments = [sys.executable, "-c", code, str(tmp_path / "layer.pt2"), activation, what]
        return subprocess.run(arguments, capture_output=True, text=True)

    for what in ("save", "load"):
        done = run_alone("swiglu", what)
        assert done.returncode == 0, done.stderr
    refused = run_alone("geglu", "load")
    assert "RuntimeError: the workspace of this call is closed" in refused.stderr
