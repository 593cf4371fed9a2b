"""What is printed: lines that begin with # are about the figures, all others are figures."""


class Table:
    """Lines that can be printed one by one, since every column has a width beforehand."""

    def __init__(self, *columns):
        """Each column is (title, width, format of its values); text stands left, numbers right."""
        self._columns = columns

    def header(self):
        return "# " + self._join(title for title, _, _ in self._columns)

    def line(self, *values):
        return "  " + self._join("-" if value is None else format(value, form)
                                 for value, (_, _, form) in zip(values, self._columns))

    def _join(self, cells):
        return "  ".join(f"{cell:{'<' if form == '' else '>'}{width}}"
                         for cell, (_, width, form) in zip(cells, self._columns)).rstrip()


def longest(words, title):
    return max(map(len, [title, *words]))


def direction_table(shapes, schedules):
    return Table(("shape", longest([s.name for s in shapes], "shape"), ""), ("pass", 8, ""),
                 ("schedule", longest(schedules, "schedule"), ""), ("load", 5, ".2f"),
                 ("torch ms", 9, ".3f"), ("uniep ms", 9, ".3f"), ("speedup", 7, ".2f"),
                 ("floor ms", 9, ".3f"), ("torch eff", 9, ".1%"), ("uniep eff", 9, ".1%"),
                 ("trace", 6, "+.1%"), ("wrong", 9, "d"))


def direction_line(table, record, schedule):
    floor, torch, uniep = record["floor_ms"], record["baseline_ms"], record["ms"]
    return table.line(record["shape"], record["direction"], schedule, record["load"], torch, uniep,
                      torch / uniep, floor, floor / torch, floor / uniep, record.get("trace_cost"),
                      record["wrong"])


def clock_line(seconds):
    """What a case took on the host's clock."""
    return "# took     " + ", ".join(f"{what} {s:.1f} s" for what, s in seconds.items())


TIME_NOTES = [
    "#",
    "# timeline of the last turn (--trace). exposed: while no SM computes, and one dispatches or",
    "# waits; tail: from the first SM without tasks to the last, of each launch; both of the rank",
    "# with the most. All else in % of the time of all SMs, from first task to last; wait: at no",
    "# task that it holds; idle: without a task. MHz: of SMs at tasks, on the rank with the lowest",
]
TIMED_STAGES = ("dispatch", "fc1", "fc2", "dfc2", "dfc1", "wgrad2", "wgrad1", "reduce")


def time_lines(directions):
    """`directions` has (record, its schedule as it was given)."""
    traced = [(r, schedule) for r, schedule in directions if "time_shares" in r]
    if not traced:
        return []
    table = Table(("shape", longest([r["shape"] for r, _ in traced], "shape"), ""),
                  ("pass", 8, ""), ("schedule", longest([s for _, s in traced], "schedule"), ""),
                  ("exposed ms", 10, ".3f"), ("tail ms", 7, ".3f"),
                  *((stage, max(len(stage), 5), ".1f") for stage in TIMED_STAGES),
                  ("wait", 5, ".1f"), ("idle", 5, ".1f"), ("MHz", 5, ".0f"))
    percent = lambda share: None if share is None else 100 * share
    return TIME_NOTES + [table.header()] + [
        table.line(r["shape"], r["direction"], schedule, r["exposed_ms"], r["tail_ms"],
                   *(percent(r["time_shares"].get(stage)) for stage in TIMED_STAGES),
                   percent(r["waiting_share"]), percent(r["idle_share"]), r["clock_mhz"])
        for r, schedule in traced]


STAGE_NOTES = [
    "#",
    "# stages of uniep. bare: torch._grouped_mm of the product alone; push: its rows' bytes over",
    "# the wire at 340 GB/s; ratio: ms / bare, where there is a push ms / max(bare, push); hot: the",
    "# same with the product timed right behind a whole pass, where a stage is timed too; GB/s:",
    "# pulled over the wire (dispatch), read and written (reduce), of the rank that came last and",
    "# waited for no other; of limit: that over 370 GB/s (dispatch), a copy's speed (reduce); eff:",
    "# floor / ms, where the floor is the better product below or push, or the bytes at the limit",
]


def stage_lines(stages):
    """`stages` has (record, its schedule as it was given)."""
    if not stages:
        return []
    table = Table(("shape", longest([r["shape"] for r, _ in stages], "shape"), ""),
                  ("pass", 8, ""), ("schedule", longest([s for _, s in stages], "schedule"), ""),
                  ("stage", 8, ""), ("ms", 9, ".3f"), ("p10", 9, ".3f"), ("p90", 9, ".3f"),
                  ("bare ms", 9, ".3f"), ("hot ms", 9, ".3f"), ("push ms", 9, ".3f"),
                  ("ratio", 6, ".2f"), ("hot", 6, ".2f"), ("GB/s", 6, ".0f"), ("of limit", 8, ".1%"), ("eff", 6, ".1%"))
    return STAGE_NOTES + [table.header()] + [
        table.line(r["shape"], r["pass"], schedule, r["direction"], r["ms"], r["p10"], r["p90"],
                   r["baseline_ms"], r.get("hot_ms"), r.get("push_ms"), r.get("ratio"),
                   r.get("hot_ratio"), r.get("gbps"), r.get("of_limit"), r["efficiency"])
        for r, schedule in stages]


def flops(shape, load, product):
    """Of the busiest rank."""
    width = 2 if product in ("fc1", "dfc1", "wgrad1") else 1
    return 2 * load * shape.tokens * shape.topk * shape.hidden * shape.intermediate * width


PRODUCT_NOTES = [
    "#",
    "# products alone, of the slowest rank: torch._grouped_mm on its real rows, and where routing",
    "# is even torch.bmm at perfect balance; floors are of the better one, whose speed is shown",
]


def product_lines(products):
    """`products` has (shape, load of its busiest rank, name, Product)."""
    table = Table(("shape", longest([shape.name for shape, *_ in products], "shape"), ""),
                  ("product", 8, ""), ("grouped ms", 10, ".3f"), ("batched ms", 10, ".3f"),
                  ("TFLOP/s", 8, ".0f"))
    return PRODUCT_NOTES + [table.header()] + [
        table.line(shape.name, name, product.grouped_ms, product.batched_ms,
                   flops(shape, load, name) / product.floor_ms * 1e-9)
        for shape, load, name, product in products]
