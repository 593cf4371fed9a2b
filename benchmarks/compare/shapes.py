"""Layers to compare, and what follows from their routing alone."""
from dataclasses import dataclass, replace

ROW_ALIGN = 128  # Problem::row_align of include/uniep/problem.h
BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int  # of a rank
    hidden: int
    intermediate: int
    experts: int
    topk: int

    @property
    def row_bytes(self):
        return self.hidden * BF16_BYTES


SHAPES = {shape.name: shape for shape in (
    Shape("deepseek-v3", 8192, 7168, 2048, 256, 8),
    Shape("qwen3-235b", 8192, 4096, 1536, 128, 8),
    Shape("qwen3-30b", 16384, 2048, 768, 128, 8),
    Shape("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
    Shape("gpt-oss-120b", 8192, 2880, 2880, 128, 4),
)}


def choose_shapes(names, tokens, ranks):
    """The shapes of a comma-separated list; `tokens` replaces theirs unless it is None."""
    chosen = []
    for name in names.split(","):
        if name not in SHAPES:
            raise ValueError(f"shape '{name}' is unknown; {', '.join(SHAPES)} are accepted")
        shape = SHAPES[name]
        if shape.experts % ranks != 0:
            raise ValueError(f"shape '{name}' has {shape.experts} experts, which {ranks} ranks do "
                             "not divide; a number of ranks that divides them is accepted")
        chosen.append(shape if tokens is None else replace(shape, tokens=tokens))
    return chosen


@dataclass(frozen=True)
class Wire:
    """Bytes that each rank moves over the wire in one direction of a layer."""
    pulled: list  # dispatch: every token of another rank once, however many of its experts want it
    pushed: list  # combine: every row that came from another rank

    def pull_ms(self, gbps):
        return max(self.pulled) / gbps * 1e-6

    def push_ms(self, gbps):
        return max(self.pushed) / gbps * 1e-6

    def floor_ms(self, gbps):
        """Pulls and pushes use the two directions of the links, so the longer one counts."""
        return max(self.pull_ms(gbps), self.push_ms(gbps))


def wire_of(ids, shape):
    """`ids` holds the experts of all slots, [ranks, tokens, topk]."""
    ranks = ids.shape[0]
    owner = ids // (shape.experts // ranks)
    pulled, pushed = [], []
    for rank in range(ranks):
        wanted = owner == rank
        wanted[rank] = False  # a rank's own tokens do not travel
        pulled.append(int(wanted.any(-1).sum()) * shape.row_bytes)
        pushed.append(int(wanted.sum()) * shape.row_bytes)
    return Wire(pulled, pushed)


def round_up(value, step):
    return -(-value // step) * step


def capacity_rows(shape, ranks, rows_per_expert):
    """Rows that uniep's buffers hold: twice the balanced load, or what this routing needs."""
    local = shape.experts // ranks
    padded = [round_up(rows, ROW_ALIGN) for rows in rows_per_expert]
    needed = max(sum(padded[rank * local:(rank + 1) * local]) for rank in range(ranks))
    roomy = 2 * shape.tokens * shape.topk + local * ROW_ALIGN
    return round_up(max(roomy, needed), ROW_ALIGN)
