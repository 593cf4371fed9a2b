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
class Product:
    """One of the six products of a layer, alone."""
    grouped_ms: float  # torch._grouped_mm on the rows as they are
    batched_ms: float  # torch.bmm (cuBLAS), every expert with the same number of rows

    @property
    def floor_ms(self):
        return min(self.grouped_ms, self.batched_ms)


def direction_floor_ms(direction, products, wire):
    """No layer is faster than its products, nor than its bytes over the wire."""
    computing = sum(products[name].floor_ms for name in PRODUCTS[direction])
    return max(computing, wire.floor_ms(LINK_GBPS))


def reduce_bytes(shape):
    """K rows of each token are read, and one is written."""
    return shape.tokens * (shape.topk + 1) * shape.hidden * BF16_BYTES


def stage_figures(stage, ms, shape, products, wire, copy_gbps):
    """What a record says beside the stage's own time."""
    if stage in PUSHING:
        push_ms, bare = wire.push_ms(PUSH_GBPS), products[stage]
        return {"baseline_ms": bare.grouped_ms, "push_ms": push_ms,
                "floor_ms": max(bare.floor_ms, push_ms),
                "ratio": ms / max(bare.grouped_ms, push_ms)}
    if stage in products:
        bare = products[stage]
        return {"baseline_ms": bare.grouped_ms, "floor_ms": bare.floor_ms,
                "ratio": ms / bare.grouped_ms}
    if stage == "dispatch" and max(wire.pulled) > 0:
        return {"floor_ms": wire.pull_ms(LINK_GBPS), "gbps": max(wire.pulled) / ms * 1e-6}
    if stage == "reduce":
        gbps = reduce_bytes(shape) / ms * 1e-6
        return {"floor_ms": ms * gbps / copy_gbps, "gbps": gbps}
    return {}
