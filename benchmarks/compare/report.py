"""Collects what comparisons measured: records for the file, lines for the reader."""
from compare import records, tables
from compare.figures import PRODUCTS, direction_floor_ms, stage_figures


class Report:
    """All ranks have the same records; `say` prints on rank 0."""

    def __init__(self, args, ranks, shapes, say):
        self.args, self.ranks, self.say = args, ranks, say
        self.full_schedules = {}  # of the shape at hand, by direction and what `args` has
        self.directions, self.all, self.stages, self.products = [], [], [], []
        self.table = tables.direction_table(shapes, args.forward + args.backward)

    def add_shape(self, comparison, copy_gbps):
        """Measures everything; a Comparison (compare/comparison.py)."""
        shape, wire = comparison.shape, comparison.wire
        self.full_schedules = {(direction, schedule): comparison.full_schedule(direction, schedule)
                               for direction in PRODUCTS
                               for schedule in getattr(self.args, direction)}
        load = max(comparison.rows) * self.ranks / sum(comparison.rows)
        checks = comparison.check() if self.args.check else {}
        products = comparison.time_products()
        self.products += [(shape, load, name, product) for name, product in products.items()]
        self.add("plan", None, shape, comparison.time_plan())
        for direction in PRODUCTS:
            schedules = getattr(self.args, direction)
            torch_times, timed = comparison.time_direction(direction, schedules)
            for schedule, its in zip(schedules, timed):
                self.add_direction(direction, schedule, shape, its, load=load,
                                   baseline_ms=torch_times.ms, baseline_p10=torch_times.p10,
                                   baseline_p90=torch_times.p90,
                                   floor_ms=direction_floor_ms(direction, products, wire),
                                   **checks.get((direction, schedule), {}))
                for stage, times in its.stages.items():
                    figures = stage_figures(stage, times, shape, products, wire, copy_gbps)
                    self.add_stage(direction, schedule, shape, stage, times.slowest, figures)
        self.say(tables.clock_line(comparison.clock.seconds))

    def add_direction(self, direction, schedule, shape, its, **figures):
        if its.traced is not None:
            figures.update(traced_ms=its.traced.ms, trace_cost=its.traced.ms / its.times.ms - 1,
                           exposed_ms=its.use.exposed_ms, tail_ms=its.use.tail_ms,
                           waiting_share=its.use.waiting, idle_share=its.use.idle,
                           clock_mhz=its.use.clock_mhz, time_shares=its.use.stages)
        record = self.add(direction, schedule, shape, its.times, **figures)
        self.directions.append((record, schedule))
        self.say(tables.direction_line(self.table, record, schedule))

    def add_stage(self, direction, schedule, shape, stage, times, figures):
        record = self.add(stage, schedule, shape, times, **{"pass": direction}, **figures)
        self.stages.append((record, schedule))

    def add(self, direction, schedule, shape, times, **figures):
        pass_of_stage = figures.get("pass", direction)
        full = self.full_schedules.get((pass_of_stage, schedule))  # a plan has none
        self.all.append(records.record(shape, self.ranks, direction, full, times, **figures))
        return self.all[-1]

    def finish(self):
        self.say(*tables.time_lines(self.directions), *tables.stage_lines(self.stages),
                 *tables.product_lines(self.products), "#", self.verdict())

    def verdict(self):
        if not self.directions:
            return "# nothing was measured"
        speedups = [r["baseline_ms"] / r["ms"] for r, _ in self.directions]
        text = f"uniep is {min(speedups):.2f} to {max(speedups):.2f} times as fast as torch + NCCL"
        if not self.args.check:
            return f"# not checked (--check does); {text}"
        wrong = sum(r["wrong"] for r, _ in self.directions)
        return f"# check {'PASSED' if wrong == 0 else 'FAILED'}: {wrong} elements are wrong; {text}"

    def passed(self):
        return all(not r["wrong"] for r, _ in self.directions)
