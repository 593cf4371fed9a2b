"""Layers to compare, and what follows from their routing alone."""
import math
from dataclasses import dataclass, replace

ROW_ALIGN = 128  # Problem::row_align of include/uniep/problem.h
BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A layer to compare: a model's, with as many tokens and as skewed a routing as asked for."""
    name: str  # as parse_case reads it
    tokens: int  # of a rank
    hidden: int
    intermediate: int
    experts: int
    topk: int
    skew: float = 0.0  # of the router: expert e's logit is lowered by skew * log(1 + e)

    @property
    def row_bytes(self):
        return self.hidden * BF16_BYTES

    @property
    def model(self):
        """Shapes of one model can use the same weights."""
        return self.name.partition(",")[0]


MODELS = {shape.name: shape for shape in (
    Shape("deepseek-v3", 8192, 7168, 2048, 256, 8),
    Shape("qwen3-235b", 8192, 4096, 1536, 128, 8),
    Shape("qwen3-30b", 16384, 2048, 768, 128, 8),
    Shape("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
    Shape("gpt-oss-120b", 8192, 2880, 2880, 128, 4),
)}
# Not of the command line, nor of compare_torch.py.
OLMOE = Shape("olmoe", 16384, 2048, 1024, 64, 8)
TINY = Shape("tiny", 96, 64, 48, 8, 2)

ALL = "all"  # every model
# Of a case: type, least, most. Tokens are those that a rank can have (src/base/problem_limits.h).
KEYS = {"tokens": (int, 1, 1 << 26), "skew": (float, 0, 100)}


def parse_cases(texts, ranks):
    """The shapes of a list of cases, each MODEL[,tokens=T][,skew=Z] or the same of `all` models.
    Those of one model follow one another, so that they can share its weights."""
    shapes = list(dict.fromkeys(shape for text in texts for shape in parse_case(text)))
    for shape in shapes:
        if shape.experts % ranks != 0:
            raise ValueError(f"case '{shape.name}' has {shape.experts} experts, which {ranks} "
                             "ranks do not divide; a number of ranks that divides them is accepted")
    models = [shape.model for shape in shapes]
    return sorted(shapes, key=lambda shape: models.index(shape.model))


def parse_case(text):
    name, *pairs = text.split(",")
    if name != ALL and name not in MODELS:
        raise ValueError(f"case '{text}': '{name}' is unknown; {', '.join(MODELS)} and {ALL} are "
                         "accepted")
    changes = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in KEYS or key in changes:
            raise ValueError(f"case '{text}': '{pair}' is not accepted; tokens=T and skew=Z are, "
                             "each once")
        changes[key] = number(text, key, value)
    return [named(replace(model, **changes)) for model in MODELS.values()
            if name in (ALL, model.name)]


def number(text, key, value):
    kind, least, most = KEYS[key]
    try:
        result = kind(value)
    except ValueError:
        result = math.nan
    if not least <= result <= most:
        raise ValueError(f"case '{text}': {key} is '{value}'; {least} to {most} is accepted")
    return result


def named(shape):
    """With the shortest name that parse_case reads as this shape."""
    tokens = f",tokens={shape.tokens}" if shape.tokens != MODELS[shape.model].tokens else ""
    skew = f",skew={shape.skew:g}" if shape.skew else ""
    return replace(shape, name=shape.model + tokens + skew)


def divided(whole, by):
    """The layer with the experts of one of so many ranks."""
    experts = whole.experts // by
    return replace(whole, name=f"{whole.name},experts={experts}", experts=experts)


@dataclass(frozen=True)
class Wire:
    """Bytes that each rank moves over the wire in one direction of a layer.

    Dispatch: every token of another rank once, however many of the rank's experts want it. Combine:
    every row that came from another rank.
    """
    pulled: list  # in, by dispatch
    served: list  # out: what other ranks pull
    pushed: list  # out, by combine
    returned: list  # in: what other ranks push

    def pull_ms(self, gbps):
        return max(self.pulled + self.served) / gbps * 1e-6

    def push_ms(self, gbps):
        return max(self.pushed + self.returned) / gbps * 1e-6

    def floor_ms(self, gbps):
        """Links carry as much in as out at the same time; both stages need both."""
        into = map(sum, zip(self.pulled, self.returned))
        out = map(sum, zip(self.served, self.pushed))
        return max(*into, *out) / gbps * 1e-6


def wire_of(ids, shape):
    """`ids` holds the experts of all slots, [ranks, tokens, topk]."""
    ranks = ids.shape[0]
    owner = ids // (shape.experts // ranks)
    tokens, rows = [], []  # [to][from], bytes
    for rank in range(ranks):
        wanted = owner == rank
        wanted[rank] = False  # a rank's own tokens do not travel
        tokens.append([int(n) * shape.row_bytes for n in wanted.any(-1).sum(-1)])
        rows.append([int(n) * shape.row_bytes for n in wanted.sum((-1, -2))])
    return Wire(pulled=list(map(sum, tokens)), served=list(map(sum, zip(*tokens))),
                pushed=list(map(sum, rows)), returned=list(map(sum, zip(*rows))))


def rank_rows(rows_per_expert, ranks):
    """Rows of the experts of each rank."""
    local = len(rows_per_expert) // ranks
    return [sum(rows_per_expert[rank * local:(rank + 1) * local]) for rank in range(ranks)]


def round_up(value, step):
    return -(-value // step) * step


def capacity_rows(shape, ranks, rows_per_expert):
    """Rows that uniep's buffers hold: twice the balanced load, or what this routing needs."""
    local = shape.experts // ranks
    needed = max(rank_rows([round_up(rows, ROW_ALIGN) for rows in rows_per_expert], ranks))
    roomy = 2 * shape.tokens * shape.topk + local * ROW_ALIGN
    return round_up(max(roomy, needed), ROW_ALIGN)
