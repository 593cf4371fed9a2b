"""Misuse of the C API in a process of its own: api_calls.py LIBRARY SEED.

Every mistake has to be refused with a code and a sentence, and has no effect: a step of the layer
gives the same bits after it as before. Memory that is too small, or that was given back, is not
among the mistakes: no library could tell."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import c_api
import judge

MEMORY = 3 << 30
HOSTILE = (-(2**63), -(2**31), -1, 0, 1, 3, 7, 65, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
SCHEDULES: tuple[bytes, ...] = (
    b"",
    b"=",
    b"no-such",
    b"single,",
    b"single,waves=0",
    b"\xff\xfe",
    b"x" * 100000,
)
SCHEDULES += (b"single,tile_m=17", b"pipelined:", b"auto", b"waves=99999999999999999999")


class Broken(AssertionError):
    """A promise that was not kept."""


class Memory:
    """Zeros, on pages of their own."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, max(1, size))
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def write(self, content: bytes) -> Memory:
        self.map[: len(content)] = content
        return self

    @property
    def content(self) -> bytes:
        return self.map[: self.size]


class Api:
    """The library, and what all of its answers are like."""

    def __init__(self, path: Path) -> None:
        self.library = c_api.load(path)

    def error(self) -> str:
        text: bytes = self.library.uniep_last_error()
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise Broken(f"a sentence that is not UTF-8: {text[:300]!r}") from None

    def call(self, name: str, *arguments: object) -> int:
        code: int = getattr(self.library, name)(*arguments)
        if code == 0:
            return 0
        sentence = self.error()
        forbidden = [word for word in judge.FORBIDDEN if word in sentence]
        if not 1 <= code <= 7 or not sentence or "\n" in sentence or forbidden:
            raise Broken(f"{name}: code {code}, {sentence[:500]!r}")
        if len(sentence) > judge.MOST_CHARACTERS:
            raise Broken(f"{name}: a sentence of {len(sentence)} characters: {sentence[:200]!r}")
        return code

    def refused(self, name: str, *arguments: object) -> None:
        if self.call(name, *arguments) == 0:
            raise Broken(f"{name} accepts what it cannot use: {arguments_text(arguments)}")

    def done(self, name: str, *arguments: object) -> None:
        if self.call(name, *arguments) != 0:
            raise Broken(f"{name}: {self.error()}")


def arguments_text(arguments: Sequence[object]) -> str:
    """With the fields of what they point to."""
    texts = []
    for a in arguments:
        o = getattr(a, "_obj", a)
        fields = [f[0] for f in getattr(o, "_fields_", ())]
        texts.append(" ".join(f"{n}={getattr(o, n)}" for n in fields) if fields else repr(o)[:80])
    return ", ".join(texts)


class Layer:
    """One layer of this process alone, a batch for it, and the bits of its first step."""

    def __init__(self, api: Api, rng: random.Random) -> None:
        self.api, self.rng = api, rng
        self.problem = c_api.Problem(
            hidden=8 * rng.randint(1, 4), intermediate=8 * rng.randint(1, 3), num_experts=4
        )
        self.problem.topk, self.problem.max_tokens = rng.randint(1, 4), rng.randint(1, 20)
        self.needs = c_api.MemoryNeeds()
        api.done("uniep_needs", ctypes.byref(self.problem), 0, 1, ctypes.byref(self.needs))
        self.group, self.layer = ctypes.c_void_p(), ctypes.c_void_p()
        config = c_api.GroupConfig(size=1)
        api.done("uniep_group_create", ctypes.byref(config), ctypes.byref(self.group))
        where = (self.group, ctypes.byref(self.problem), None, ctypes.byref(self.layer))
        api.done("uniep_layer_create", *where)
        self.memory = self._allocate()
        self.expected: bytes | None = None

    def _allocate(self) -> dict[str, Memory]:
        p, rng = self.problem, self.rng
        t, h, i, k, e = p.max_tokens, p.hidden, p.intermediate, p.topk, p.num_experts

        def numbers(count: int) -> Memory:
            of = (b"\x80\x3f", b"\x00\x3f", b"\x40\xbf")  # 1, 0.5 and -0.75 as bf16
            return Memory(2 * count).write(b"".join(rng.choice(of) for _ in range(count)))

        ids = b"".join(
            n.to_bytes(4, "little", signed=True) for _ in range(t) for n in rng.sample(range(e), k)
        )
        return {
            "x": numbers(t * h),
            "dy": numbers(t * h),
            "w1": numbers(e * 2 * i * h),
            "w2": numbers(e * h * i),
            "topk_ids": Memory(4 * t * k).write(ids),
            "topk_probs": Memory(4 * t * k).write(b"\x00\x00\x80\x3e" * (t * k)),
            "out": Memory(2 * t * h),
            "dx": Memory(2 * t * h),
            "dprobs": Memory(4 * t * k),
            "dw1": Memory(4 * e * 2 * i * h),
            "dw2": Memory(4 * e * h * i),
            "plan": Memory(self.needs.plan),
            "x_rows": Memory(2 * self.needs.rows * h),
            "h": Memory(4 * self.needs.rows * i),
            "row_probs": Memory(4 * self.needs.rows),
            "forward_memory": Memory(self.needs.forward_memory),
            "backward_memory": Memory(self.needs.backward_memory),
        }

    def forward_call(self) -> c_api.ForwardCall:
        call = c_api.ForwardCall(tokens=self.problem.max_tokens)
        self._fill(call)
        return call

    def backward_call(self, part: int) -> c_api.BackwardCall:
        call = c_api.BackwardCall(tokens=self.problem.max_tokens, part=part)
        self._fill(call)
        if part == 0 and self.rng.randrange(2):
            call.backward_memory = None
        return call

    def _fill(self, call: ctypes.Structure) -> None:
        for name, memory in self.memory.items():
            if hasattr(call, name):
                setattr(call, name, memory.address)

    def forward(self) -> None:
        self.api.done("uniep_forward", self.layer, ctypes.byref(self.forward_call()))

    def step(self) -> None:
        """A whole one, whose bits are always the same."""
        self.forward()
        parts = self.rng.choice(((0,), (1, 2)))
        for part in parts:
            self.api.done("uniep_backward", self.layer, ctypes.byref(self.backward_call(part)))
        outputs = ("out", "dx", "dprobs", "dw1", "dw2")
        bits = b"".join(self.memory[name].content for name in outputs)
        if self.expected not in (None, bits):
            raise Broken("a step's bits have changed")
        self.expected = bits

    def destroy(self) -> None:
        first, second = self.rng.sample(("group", "layer"), 2)
        for name in (first, second):
            getattr(self.api.library, f"uniep_{name}_destroy")(getattr(self, name))


# ---- mistakes


def wrong_problem(layer: Layer) -> None:
    problem = c_api.Problem.from_buffer_copy(layer.problem)
    for field in layer.rng.sample(c_api.Problem._fields_, layer.rng.randint(1, 3)):
        setattr(problem, field[0], layer.rng.choice(HOSTILE))
    needs, other = c_api.MemoryNeeds(), ctypes.c_void_p()
    ranks = layer.rng.choice((1, 1, -1, 0, 3, 2**31 - 1))
    code = layer.api.call("uniep_needs", ctypes.byref(problem), 0, ranks, ctypes.byref(needs))
    if code == 0 and (needs.rows < 0 or needs.symmetric < 0 or needs.workspace < 0):
        raise Broken("what a layer needs is negative")
    where = (layer.group, ctypes.byref(problem), None, ctypes.byref(other))
    if layer.api.call("uniep_layer_create", *where) == 0:
        layer.api.library.uniep_layer_destroy(other)


def wrong_layer_config(layer: Layer) -> None:
    config, other = c_api.LayerConfig(), ctypes.c_void_p()
    spoil: Sequence[Callable[[], None]] = (
        lambda: setattr(config, "timeout_ms", layer.rng.choice((-1, -(2**31)))),
        lambda: setattr(config, "record_timeline", layer.rng.choice((2, -1, 2**31 - 1))),
        lambda: setattr(config, "erf_since_13_2", layer.rng.choice((2, -1, 2**31 - 1))),
        lambda: setattr(config, "schedule", layer.rng.choice(SCHEDULES)),
        lambda: setattr(config, "workspace", layer.memory["w1"].address + 8),
        lambda: setattr(config, "symmetric", layer.memory["w1"].address + 8),
    )
    layer.rng.choice(spoil)()
    where = (layer.group, ctypes.byref(layer.problem), ctypes.byref(config), ctypes.byref(other))
    layer.api.refused("uniep_layer_create", *where)


def wrong_group(layer: Layer) -> None:
    rng = layer.rng
    answer = rng.choice((1, -1, 7))
    gather = c_api.ALL_GATHER(lambda context, own, size, everything: answer)
    config, group = c_api.GroupConfig(size=1), ctypes.c_void_p()
    spoil: Sequence[Callable[[], None]] = (
        lambda: setattr(config, "size", rng.choice((0, -1, 2, 65, 2**31 - 1))),
        lambda: setattr(config, "rank", rng.choice((-1, 1, 64, 2**31 - 1))),
        lambda: setattr(config, "backend", rng.choice((-1, 2, 99))),
        lambda: setattr(config, "share_device", rng.choice((-1, 2))),
        lambda: setattr(config, "timeout_ms", rng.choice((-1, -(2**31)))),
    )
    rng.choice(spoil)()
    if config.size == 2 and rng.random() < 0.7:
        config.all_gather = gather
    layer.api.refused("uniep_group_create", ctypes.byref(config), ctypes.byref(group))


def null_somewhere(layer: Layer) -> None:
    p, n, out = ctypes.byref(layer.problem), ctypes.byref(layer.needs), ctypes.c_void_p()
    config, o = ctypes.byref(c_api.GroupConfig(size=1)), ctypes.byref(out)
    text = ctypes.create_string_buffer(4096)
    calls: Sequence[tuple[object, ...]] = (
        ("uniep_needs", None, 0, 1, n),
        ("uniep_needs", p, 0, 1, None),
        ("uniep_group_create", None, o),
        ("uniep_group_create", config, None),
        ("uniep_group_find_hosts", None, o, o),
        ("uniep_group_layout", None, o, o),
        ("uniep_group_layout", layer.group, None, o),
        ("uniep_group_layout", layer.group, o, None),
        ("uniep_layer_create", None, p, None, o),
        ("uniep_layer_create", layer.group, None, None, o),
        ("uniep_layer_create", layer.group, p, None, None),
        ("uniep_layer_schedule", None, 0, text, 4096),
        ("uniep_layer_schedule", layer.layer, 0, None, 4096),
        ("uniep_layer_schedule", layer.layer, layer.rng.choice((-1, 2, 2**31 - 1)), text, 4096),
        ("uniep_layer_schedule", layer.layer, 0, text, layer.rng.choice((0, 1, 50))),
        ("uniep_layer_synchronize", None),
        ("uniep_add_rows", None),
        ("uniep_forward", None, None),
        ("uniep_forward", layer.layer, None),
        ("uniep_backward", None, None),
        ("uniep_backward", layer.layer, None),
    )
    name, *arguments = layer.rng.choice(calls)
    layer.api.refused(str(name), *arguments)
    layer.api.library.uniep_layer_destroy(None)
    layer.api.library.uniep_group_destroy(None)


# Of layers with a row pool, biases or shared experts, and of weights that lie otherwise.
UNWANTED = (
    *("saved", "b1", "b2", "shared_w1", "shared_w2", "shared_probs"),
    *("w1_each", "w2_each"),  # Beside w1 and w2.
)


def wrong_forward(layer: Layer) -> None:
    call, rng = layer.forward_call(), layer.rng
    required = (
        *("topk_ids", "topk_probs", "x", "w1", "w2", "out"),
        *("plan", "x_rows", "h", "row_probs"),
    )
    aligned = ("plan", "x_rows", "h", "row_probs", "forward_memory")
    _spoil_call(layer, call, required, aligned)
    layer.api.refused("uniep_forward", layer.layer, ctypes.byref(call))
    if rng.random() < 0.3:
        wrong_routing(layer)


def _spoil_call(
    layer: Layer, call: ctypes.Structure, required: Sequence[str], aligned: Sequence[str]
) -> None:
    rng = layer.rng
    most = layer.problem.max_tokens
    name = rng.choice(aligned)
    # Not every part of a backward pass looks at biases, nor at the form of weights.
    unwanted = rng.choice(UNWANTED) if isinstance(call, c_api.ForwardCall) else "saved"
    form = rng.choice(("interleaved", "in_out"))
    if getattr(call, "part", 0) == 2:
        form = f"dw_{form}"
    spoil: Sequence[Callable[[], None]] = (
        lambda: setattr(call, rng.choice(required), None),
        lambda: setattr(call, unwanted, layer.memory["x"].address),
        lambda: setattr(call, form, rng.choice((-1, 2, 2**31 - 1))),
        lambda: setattr(call, "tokens", rng.choice((-1, most + 1, 2**62, -(2**63)))),
        lambda: setattr(call, "schedule", rng.choice(SCHEDULES)),
        lambda: setattr(call.waves, "count", rng.choice((-1, 1, 2**31 - 1))),
        lambda: setattr(call, name, layer.memory[name].address + rng.choice((1, 4, 32))),
    )
    rng.choice(spoil)()


def wrong_routing(layer: Layer) -> None:
    """Ids that no expert has."""
    ids = layer.memory["topk_ids"]
    good = ids.content
    where = 4 * layer.rng.randrange(len(good) // 4)
    bad = layer.rng.choice((4, -2, 2**31 - 1, -(2**31))).to_bytes(4, "little", signed=True)
    ids.map[where : where + 4] = bad
    call = layer.forward_call()
    overflow = Memory(16)
    if layer.rng.random() < 0.5:
        call.overflow = overflow.address
        layer.api.done("uniep_forward", layer.layer, ctypes.byref(call))
        if overflow.content[0] != 2:
            raise Broken("an impossible id is no overflow of kind 2")
    else:
        layer.api.refused("uniep_forward", layer.layer, ctypes.byref(call))
    ids.write(good)


def wrong_backward(layer: Layer) -> None:
    rng = layer.rng
    layer.forward()
    part = rng.randrange(3)
    call = layer.backward_call(part)
    required = {
        0: ("plan", "x_rows", "h", "row_probs", "dy", "w1", "w2", "dx", "dprobs", "dw1", "dw2"),
        1: ("plan", "x_rows", "h", "row_probs", "dy", "w1", "dx", "dprobs", "backward_memory"),
        2: ("plan", "x_rows", "h", "row_probs", "dw1", "dw2", "backward_memory"),
    }[part]
    match rng.randrange(6):
        case 0:
            call.part = rng.choice((-1, 3, 2**31 - 1))
        case 1 if part != 1:
            call.weight_grad = rng.choice((-1, 3))
        case 2:
            call.ignore_overflow = rng.choice((-1, 2))
        case 3:
            spoiled = Memory(layer.needs.plan).write(layer.memory["plan"].content)
            spoiled.map[:16] = rng.randbytes(16)
            call.plan = spoiled.address
        case 4:
            call.rows = rng.choice((-128, 1, 129, layer.needs.rows + 128))
        case _:
            _spoil_call(layer, call, required, ("plan", "x_rows", "h", "row_probs"))
    layer.api.refused("uniep_backward", layer.layer, ctypes.byref(call))


def backward_first(layer: Layer) -> None:
    """Of a plan that no forward has written."""
    call = layer.backward_call(layer.rng.randrange(3))
    plan = Memory(layer.needs.plan)
    if layer.rng.random() < 0.5:
        plan.write(layer.rng.randbytes(min(4096, layer.needs.plan)))
    call.plan = plan.address
    layer.api.refused("uniep_backward", layer.layer, ctypes.byref(call))


def in_a_fork(layer: Layer) -> None:
    """The child's calls are refused, and its end is clean."""
    pid = os.fork()
    if pid == 0:
        call = layer.forward_call()
        refused = layer.api.call("uniep_forward", layer.layer, ctypes.byref(call)) != 0
        if layer.rng.random() < 0.5:
            layer.destroy()
        sys.exit(0 if refused else 3)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise Broken(f"a forked child ended with status {status}")


MISTAKES: tuple[Callable[[Layer], None], ...] = (
    *(wrong_problem, wrong_layer_config, wrong_group, null_somewhere, wrong_forward),
    *(wrong_routing, wrong_backward, wrong_backward, backward_first, in_a_fork),
)


def main() -> int:
    library, seed = Path(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    rng = random.Random(seed)
    layer = Layer(Api(library), rng)
    layer.step()
    mistake = None
    try:
        for _ in range(rng.randint(5, 20)):
            mistake = rng.choice(MISTAKES)
            mistake(layer)
            if rng.random() < 0.5:
                layer.step()
        layer.step()
        layer.destroy()
    except Broken as error:
        print(f"{mistake.__name__ if mistake else 'first step'}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
