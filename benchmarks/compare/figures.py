"""What times are compared with: floors of directions and stages."""
from dataclasses import dataclass

from compare.shapes import BF16_BYTES

LINK_GBPS = 370  # NVLink of an H200: what a kernel that does nothing else pulls or pushes
PUSH_GBPS = 340  # the same with scattered pieces of rows

PRODUCTS = {"forward": ("fc1", "fc2"), "backward": ("dfc2", "dfc1", "wgrad2", "wgrad1")}
PUSHING = ("fc2", "dfc1")  # stages that send what they compute to the rows' own ranks


def quantile(values, q):
    """Between neighbours by linear interpolation."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Times:
    """Milliseconds over the measured iterations."""
    ms: float  # median
    p10: float
    p90: float

    @staticmethod
    def of(values):
        return Times(*(quantile(values, q) for q in (0.5, 0.1, 0.9)))

    @staticmethod
    def of_slowest(ranks):
        """Of the rank with the largest median; `ranks` has the values of each."""
        return max((Times.of(values) for values in ranks), key=lambda times: times.ms)


@dataclass(frozen=True)
class TimeUse:
    """How the SMs of all ranks spent a pass, by its timeline (docs/cli.md)."""
    exposed_ms: float  # of the rank with the most
    tail_ms: float  # likewise
    waiting: float  # shares of all SMs' time
    idle: float
    clock_mhz: float  # of the SMs while at tasks, on the rank where it is lowest
    stages: dict  # by name, of those that have any

    @staticmethod
    def of_ranks(ranks, stages):
        """`ranks` has the figures of each by name (bridge.Layer.time_use)."""
        total = sum(rank["processors"] * rank["span_s"] for rank in ranks)
        share = lambda name: sum(rank[name] for rank in ranks) / total
        return TimeUse(1e3 * max(rank["exposed_s"] for rank in ranks),
                       1e3 * max(rank["tail_s"] for rank in ranks),
                       share("waiting_s"), share("idle_s"),
                       1e-6 * min(rank["clock_hz"] for rank in ranks),
                       {name: share(name) for name in stages if share(name) > 0})


@dataclass(frozen=True)
class Product:
    """One of the six products of a layer, alone: median milliseconds of each rank, with its own
    rows."""
    grouped: list  # torch._grouped_mm on the rows as they are
    batched: list | None  # torch.bmm (cuBLAS), as many rows for each expert; None: not comparable
    hot: list  # torch._grouped_mm right behind a whole pass, as hot as a stage within one

    @property
    def grouped_ms(self):
        return max(self.grouped)

    @property
    def hot_ms(self):
        return max(self.hot)

    @property
    def batched_ms(self):
        return max(self.batched) if self.batched else None

    @property
    def floors(self):
        """The better of the two, by rank."""
        return [min(pair) for pair in zip(self.grouped, self.batched or self.grouped)]

    @property
    def floor_ms(self):
        return max(self.floors)


def direction_floor_ms(direction, products, wire):
    """No layer is done before its busiest rank has done all of its own products, nor before the
    rank with the most bytes has moved them over the wire."""
    by_rank = zip(*(products[name].floors for name in PRODUCTS[direction]))
    return max(max(map(sum, by_rank)), wire.floor_ms(LINK_GBPS))


def reduce_bytes(shape):
    """K rows of each token are read, and one is written."""
    return shape.tokens * (shape.topk + 1) * shape.hidden * BF16_BYTES


@dataclass(frozen=True)
class StageTimes:
    """Of a stage that has a launch of its own."""
    turns: list  # milliseconds of each rank, by turn

    @property
    def slowest(self):
        return Times.of_slowest(zip(*self.turns))

    def unhindered_gbps(self, bytes_by_rank):
        """Bandwidth apart from waiting for other ranks: the highest of all ranks in each turn, and
        of these the median. A rank that is ahead of another waits for it within its launch, for
        tokens to be published or rows to arrive; the one that comes last waits for nobody.
        """
        return quantile([max(moved / ms for moved, ms in zip(bytes_by_rank, turn)) * 1e-6
                         for turn in self.turns], 0.5)


def bandwidth(bytes_by_rank, times, limit_gbps):
    gbps = times.unhindered_gbps(bytes_by_rank)
    return {"gbps": gbps, "of_limit": gbps / limit_gbps}


def stage_figures(stage, times, shape, products, wire, copy_gbps):
    """What a record says beside the stage's own time."""
    ms = times.slowest.ms
    if stage in PUSHING:
        push_ms, bare = wire.push_ms(PUSH_GBPS), products[stage]
        return {"baseline_ms": bare.grouped_ms, "hot_ms": bare.hot_ms, "push_ms": push_ms,
                "floor_ms": max(bare.floor_ms, push_ms),
                "ratio": ms / max(bare.grouped_ms, push_ms),
                "hot_ratio": ms / max(bare.hot_ms, push_ms)}
    if stage in products:
        bare = products[stage]
        return {"baseline_ms": bare.grouped_ms, "hot_ms": bare.hot_ms, "floor_ms": bare.floor_ms,
                "ratio": ms / bare.grouped_ms, "hot_ratio": ms / bare.hot_ms}
    if stage == "dispatch" and max(wire.pulled) > 0:
        return {"floor_ms": wire.pull_ms(LINK_GBPS), **bandwidth(wire.pulled, times, LINK_GBPS)}
    if stage == "reduce":
        moved = [reduce_bytes(shape)] * len(times.turns[0])
        return {"floor_ms": moved[0] / copy_gbps * 1e-6, **bandwidth(moved, times, copy_gbps)}
    return {}
