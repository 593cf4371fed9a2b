"""Times calls by events on the device, all ranks together."""
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compare import group
from compare.figures import Product, Times, quantile

WARMUPS = 3
LEAD_CYCLES = 4_000_000  # 2 ms of a GPU: longer than the host takes to put two calls on the stream


@dataclass(frozen=True)
class Timed:
    """A call to be timed, and what surrounds it untimed."""
    call: Callable
    before: Callable | None = None  # in front of it, on the device; None: the call itself
    after: Callable | None = None  # on the host, when all is done, in every turn


def time_once(timed):
    """Milliseconds of a call behind an untimed one: the GPU has the clocks and the temperature of
    sustained work then, and ranks begin as far apart as within a step of training. Both are on the
    stream before the first begins, so the host's own time is not measured, however small they are.
    """
    group.together()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LEAD_CYCLES)
    (timed.before or timed.call)()
    begin.record()
    timed.call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def time_sustained(timed, repeats):
    """Milliseconds of a call amid so many of the same, without a pause, behind half as many: at the
    clocks that the power limit leaves in the long run."""
    group.together()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats // 2 + 1):
        timed.call()
    begin.record()
    for _ in range(repeats):
        timed.call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def agreed_repeats(sustain_ms, ms):
    """The same on all ranks, which wait for one another within a call."""
    return max(2, int(max(ratio for ratio, in group.gather_numbers([sustain_ms / ms]))))


def balanced_orders(count):
    """Orders of `count` calls in which every call runs directly behind every other one equally often
    (a Williams design), in a random order, the same on all ranks.

    A call behind one that let the GPU cool down, as one that waits for the wire does, is faster by up
    to a tenth. In orders drawn at random one of six schedules ran behind the torch layer in every
    other turn, and seemed 3 to 5 % faster than it was.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    orders = [[(step + first) % count for step in zigzag] for first in range(count)]
    if count % 2:  # takes the mirror images too
        orders += [order[::-1] for order in orders]
    random.Random(1).shuffle(orders)
    return orders


def measure(all_timed, iterations, sustain_ms=0):
    """Milliseconds of each, [call][rank][turn]; with `sustain_ms`, each call is repeated for so long.

    Calls take turns, in balanced orders: as fair as it gets where `iterations` is a multiple of their
    number.
    """
    samples, repeats = [[] for _ in all_timed], [0] * len(all_timed)
    orders = balanced_orders(len(all_timed))
    for turn in range(WARMUPS + iterations):
        for number in orders[(turn - WARMUPS) % len(orders)]:
            timed = all_timed[number]
            ms = time_sustained(timed, repeats[number]) if repeats[number] else time_once(timed)
            if turn >= WARMUPS:
                samples[number].append(ms)
            if sustain_ms and not repeats[number]:
                repeats[number] = agreed_repeats(sustain_ms, ms)
            if timed.after is not None:
                timed.after()
    return [group.gather_numbers(values) for values in samples]


def copy_gbps(iterations):
    """Bytes read and written by a copy within the device."""
    source = torch.ones(1 << 30, device=group.DEVICE, dtype=torch.bfloat16)  # 2 GiB
    target = torch.empty_like(source)
    ranks, = measure([Timed(lambda: target.copy_(source))], iterations)
    return 2 * source.nbytes / Times.of_slowest(ranks).ms * 1e-6


def time_products(operands, offsets, iterations, even, whole_pass, sustain_ms=0):
    """Product by name. `operands` has the two operands that torch._grouped_mm takes. Where the load
    is `even`, every expert having rows on every rank, there are batched products to compare with.
    `whole_pass(name)` is the pass that has the product.
    """
    calls = []
    for name, (a, b) in operands.items():
        grouped = lambda a=a, b=b: torch._grouped_mm(a, b, offs=offsets)
        calls += [Timed(grouped), Timed(grouped, before=whole_pass(name))]
        if even:
            even_a, even_b = balanced(a, b, len(offsets))
            calls.append(Timed(lambda a=even_a, b=even_b: torch.bmm(a, b)))
    medians = iter([[quantile(values, 0.5) for values in ranks]
                    for ranks in measure(calls, iterations, sustain_ms)])
    return {name: Product(grouped=next(medians), hot=next(medians),
                          batched=next(medians) if even else None) for name in operands}


def balanced(a, b, experts):
    """The same product, but for a few rows, with as many rows for each expert.

    Rows are the first dimension of `a` where `b` has a matrix per expert, else the reduction.
    """
    if b.dim() == 3:
        return per_expert(a, experts), b
    return per_expert(a.t(), experts).transpose(1, 2), per_expert(b, experts)


def per_expert(rows, experts):
    each = rows.shape[0] // experts
    return rows[:each * experts].view(experts, each, rows.shape[1])
