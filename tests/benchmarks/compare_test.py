"""The figures, records and tables of compare_torch.py."""
import json
import os
import tempfile
import unittest

from types import SimpleNamespace

from compare import records, tables
from compare.figures import (Product, StageTimes, Times, TimeUse, direction_floor_ms, quantile,
                             reduce_bytes, stage_figures)
from compare.report import Report
from compare.shapes import (MODELS, Shape, Wire, capacity_rows, parse_case, parse_cases, rank_rows,
                            wire_of)

SHAPE = Shape("small", tokens=4, hidden=8, intermediate=16, experts=4, topk=2)
# Milliseconds of two ranks, of which the second is the busier one.
PRODUCTS = {"fc1": Product([1, 3], [2, 2], [1, 3]), "fc2": Product([1, 1], [2, 2], [1, 1]),
            "dfc2": Product([0, 1], None, [0, 1]), "dfc1": Product([0, 4], [0, 3], [0, 4]),
            "wgrad2": Product([0, 2], [0, 2], [0, 2]), "wgrad1": Product([0, 5], [0, 6], [0, 5])}
NO_WIRE = Wire([0, 0], [0, 0], [0, 0], [0, 0])


class Figures(unittest.TestCase):
    def test_quantiles_lie_between_neighbours(self):
        self.assertEqual(quantile([3, 1, 2], 0.5), 2)
        self.assertAlmostEqual(quantile([0, 10], 0.1), 1)
        self.assertEqual(quantile([7], 0.9), 7)

    def test_the_slowest_rank_has_the_largest_median(self):
        self.assertEqual(Times.of_slowest([[1, 1, 9], [2, 2, 2]]), Times(2, 2, 2))

    def test_a_product_is_as_fast_as_the_better_way_on_the_slowest_rank(self):
        product = Product([1, 3], [2, 2], [1, 3])
        self.assertEqual((product.grouped_ms, product.batched_ms, product.floor_ms), (3, 2, 2))
        product = Product([1, 3], None, [1, 3])
        self.assertEqual((product.batched_ms, product.floor_ms), (None, 3))

    def test_a_floor_is_the_products_or_the_wire(self):
        self.assertEqual(direction_floor_ms("forward", PRODUCTS, NO_WIRE), 2 + 1)
        self.assertEqual(direction_floor_ms("backward", PRODUCTS, NO_WIRE), 1 + 3 + 2 + 5)
        wire = Wire(pulled=[0, 1], served=[370e6, 0], pushed=[37e9, 0], returned=[0, 1])
        self.assertAlmostEqual(direction_floor_ms("forward", PRODUCTS, wire), 101)

    def test_what_comes_in_and_what_goes_out_share_no_link(self):
        wire = Wire(pulled=[370e6, 0], served=[0, 370e6], pushed=[740e6, 0], returned=[0, 740e6])
        self.assertAlmostEqual(wire.floor_ms(370), 2)  # in 1 and 2 ms, out 2 and 1

    def test_a_floor_is_of_one_rank_with_all_of_its_products(self):
        uneven = {"fc1": Product([9, 1], None, [9, 1]), "fc2": Product([1, 5], None, [1, 5])}
        self.assertEqual(direction_floor_ms("forward", uneven, NO_WIRE), 10)

    def test_time_is_shared_by_all_processors(self):
        rank = {"processors": 2, "span_s": 3, "exposed_s": 0.5, "tail_s": 0.25, "waiting_s": 1,
                "idle_s": 2, "clock_hz": 1.5e9, "plan": 0, "fc1": 3}
        other = {**rank, "processors": 1, "span_s": 4, "exposed_s": 1, "clock_hz": 1.4e9, "fc1": 1}
        use = TimeUse.of_ranks([rank, other], ["plan", "fc1"])
        self.assertEqual((use.exposed_ms, use.tail_ms), (1000, 250))
        self.assertAlmostEqual(use.clock_mhz, 1400)
        self.assertEqual((use.waiting, use.idle, use.stages), (0.2, 0.4, {"fc1": 0.4}))

    def test_stages_are_compared_with_what_they_do(self):
        wire = Wire(pulled=[370e6, 0], served=[0, 1], pushed=[680e6, 0], returned=[0, 1])
        times = lambda ms: StageTimes([[ms, ms / 2]])
        figures = lambda stage, ms: stage_figures(stage, times(ms), SHAPE, PRODUCTS, wire, 4000)
        self.assertEqual(figures("fc1", 6), {"baseline_ms": 3, "hot_ms": 3, "floor_ms": 2,
                                             "ratio": 2, "hot_ratio": 2})
        self.assertEqual(figures("fc2", 6),
                         {"baseline_ms": 1, "hot_ms": 1, "push_ms": 2, "floor_ms": 2, "ratio": 3,
                          "hot_ratio": 3})
        self.assertEqual(figures("dispatch", 2), {"floor_ms": 1, "gbps": 185, "of_limit": 0.5})
        self.assertEqual(figures("enter", 1), {})
        reduce = figures("reduce", 2e-6)
        self.assertEqual(reduce["gbps"], reduce_bytes(SHAPE))  # of the rank that took half as long
        self.assertAlmostEqual(reduce["floor_ms"], 1e-6 * reduce_bytes(SHAPE) / 4000)
        self.assertAlmostEqual(reduce["of_limit"], reduce_bytes(SHAPE) / 4000)

    def test_the_rank_that_comes_last_waits_for_nobody(self):
        times = StageTimes([[1, 4], [4, 2], [8, 2]])  # now the one rank is ahead, now the other
        self.assertAlmostEqual(times.unhindered_gbps([4e6, 4e6]), 2)
        self.assertAlmostEqual(times.unhindered_gbps([1e6, 4e6]), 2)  # its own bytes, too
        self.assertEqual(times.slowest.ms, 4)


class Shapes(unittest.TestCase):
    def names(self, *cases, ranks=4):
        return [shape.name for shape in parse_cases(cases, ranks)]

    def test_a_case_is_a_model_and_changes(self):
        self.assertEqual(parse_case("qwen3-30b"), [MODELS["qwen3-30b"]])
        shape, = parse_case("qwen3-30b,tokens=64,skew=1.0")
        self.assertEqual((shape.tokens, shape.skew, shape.experts), (64, 1, 128))
        self.assertEqual((shape.name, shape.model), ("qwen3-30b,tokens=64,skew=1", "qwen3-30b"))
        self.assertEqual(parse_case(shape.name), [shape])
        self.assertEqual(parse_case("qwen3-30b,tokens=16384,skew=0"), [MODELS["qwen3-30b"]])
        self.assertEqual(parse_case("all"), list(MODELS.values()))
        self.assertEqual([s.name for s in parse_case("all,skew=0.5")],
                         [name + ",skew=0.5" for name in MODELS])

    def test_cases_of_a_model_follow_one_another(self):
        self.assertEqual(
            self.names("qwen3-30b", "mixtral-8x7b", "qwen3-30b,tokens=64", "qwen3-30b"),
            ["qwen3-30b", "qwen3-30b,tokens=64", "mixtral-8x7b"])

    def test_cases_are_checked(self):
        for case, sentence in [
                ("qwen", "'qwen' is unknown; deepseek-v3, .* and all are accepted"),
                ("qwen3-30b,hidden=8", "'hidden=8' is not accepted; tokens=T and skew=Z are"),
                ("qwen3-30b,skew=1,skew=1", "'skew=1' is not accepted; .* each once"),
                ("qwen3-30b,", "'' is not accepted"),
                ("qwen3-30b,tokens=0", "tokens is '0'; 1 to 67108864 is accepted"),
                ("qwen3-30b,tokens=1.5", "tokens is '1.5'"),
                ("qwen3-30b,skew=nan", "skew is 'nan'"),
                ("qwen3-30b,skew=-1", "skew is '-1'; 0 to 100 is accepted")]:
            with self.assertRaisesRegex(ValueError, f"case '{case}': .*{sentence}"):
                parse_case(case)
        with self.assertRaisesRegex(ValueError, "8 experts, which 3 ranks do not divide"):
            self.names("mixtral-8x7b", ranks=3)

    def test_rows_of_a_rank_are_those_of_its_experts(self):
        self.assertEqual(rank_rows([1, 2, 3, 4], 2), [3, 7])

    def test_capacity_is_twice_the_balanced_load_or_what_is_needed(self):
        self.assertEqual(capacity_rows(SHAPE, 2, [4, 4, 4, 4]), 384)  # 2 * 8 + 2 * 128, rounded
        self.assertEqual(capacity_rows(SHAPE, 2, [0, 1, 129, 200]), 512)

    def test_a_token_is_pulled_once_and_pushed_once_a_row(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("there is no numpy")
        ids = numpy.array([[[0, 1], [2, 3], [0, 2]],  # rank 0: to rank 1 go 2 tokens, 3 rows
                           [[0, 1], [2, 3], [3, 2]]], dtype=numpy.int32)
        wire = wire_of(ids, SHAPE)
        self.assertEqual(wire, Wire(pulled=[1 * 16, 2 * 16], served=[2 * 16, 1 * 16],
                                    pushed=[2 * 16, 3 * 16], returned=[3 * 16, 2 * 16]))

    def test_bytes_that_leave_a_rank_reach_another(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("there is no numpy")
        shape = Shape("small", tokens=50, hidden=8, intermediate=16, experts=12, topk=3)
        ids = numpy.random.default_rng(1).integers(0, 12, (4, 50, 3))
        wire = wire_of(ids, shape)
        self.assertEqual(sum(wire.pulled), sum(wire.served))
        self.assertEqual(sum(wire.pushed), sum(wire.returned))
        want = sum(len({e // 3 for e in ids[0, t]} - {0}) for t in range(50))
        self.assertEqual(wire.served[0], want * 16)
        self.assertEqual(wire.returned[0], int((ids[0] // 3 != 0).sum()) * 16)


class Reports(unittest.TestCase):
    def record(self, **figures):
        return records.record(MODELS["qwen3-30b"], 4, "forward", "launch=single",
                              Times(2.0, 1.9, 2.2), **figures)

    def test_records_have_the_keys_of_the_schema(self):
        r = self.record(floor_ms=1.0, baseline_ms=3.0, wrong=0, gbps=7)
        self.assertEqual(list(r), ["shape", "tokens", "skew", "ranks", "direction", "schedule",
                                   "ms", "p10", "p90", "baseline_ms", "floor_ms", "efficiency",
                                   "wrong", "gbps"])
        self.assertEqual(r["efficiency"], 0.5)
        self.assertIsNone(self.record()["efficiency"])

    def test_a_file_holds_them(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "figures.json")
            records.write(path, {"commit": "abc"}, [self.record()])
            with open(path) as file:
                content = json.load(file)
        self.assertEqual(list(content), ["schema", "commit", "records"])
        self.assertEqual(content["schema"], "uniep-bench-1")

    def test_columns_stand_below_their_titles(self):
        table = tables.direction_table([MODELS["qwen3-30b"]], ["single"])
        line = tables.direction_line(
            table, self.record(floor_ms=1.0, baseline_ms=3.0, load=1.5, trace_cost=0.01), "single")
        self.assertEqual(line.split(), ["qwen3-30b", "forward", "single", "1.50", "3.000", "2.000",
                                        "1.50", "1.000", "33.3%", "50.0%", "+1.0%", "-"])
        self.assertEqual(line.index("3.000") + 5, table.header().index("torch ms") + 8)

    def test_stages_and_products_are_listed(self):
        stage = {**self.record(floor_ms=1.0), "pass": "forward", "direction": "fc1", "ratio": 1.5}
        lines = tables.stage_lines([(stage, "single")])
        self.assertIn(" 1.50 ", lines[-1])
        lines = tables.product_lines([(SHAPE, 1.5, "fc1", Product([1.0, 2.0], None, [1.0, 2.0]))])
        self.assertEqual(lines[-1].split()[:4], ["small", "fc1", "2.000", "-"])
        self.assertEqual(tables.stage_lines([]), [])


class MadeUpComparison:
    """What compare/comparison.py gives of a shape, in round figures."""

    def __init__(self, shape, traced):
        self.shape, self.rows, self.wire = shape, [1, 3], NO_WIRE
        self.clock = SimpleNamespace(seconds={"passes": 2.0})
        self.traced = Times(2.02, 2, 2.1) if traced else None
        self.use = TimeUse(0.5, 0.25, 0.1, 0.2, 1400, {"dispatch": 0.3, "fc1": 0.4}) if traced else None

    def full_schedule(self, direction, schedule):
        return f"launch={schedule},of={direction}"

    def check(self):
        return {(d, "single"): {"wrong": 2} for d in ("forward", "backward")}

    def time_products(self):
        return PRODUCTS

    def time_plan(self):
        return Times(0.1, 0.1, 0.1)

    def time_direction(self, direction, schedules):
        its = SimpleNamespace(times=Times(2, 1, 3), traced=self.traced, use=self.use,
                              stages={"reduce": StageTimes([[1, 1]])})
        return Times(8, 8, 8), [its for _ in schedules]


class Reporting(unittest.TestCase):
    def report(self, traced=False, check=True):
        self.said = []
        args = SimpleNamespace(forward=["single"], backward=["single"], check=check)
        report = Report(args, 2, [SHAPE], lambda *lines: self.said.extend(lines))
        report.add_shape(MadeUpComparison(SHAPE, traced), 4000)
        report.finish()
        return report

    def test_records_stand_in_the_order_of_measuring(self):
        all_records = self.report().all
        self.assertEqual([(r["direction"], r["schedule"]) for r in all_records],
                         [("plan", None), ("forward", "launch=single,of=forward"),
                          ("reduce", "launch=single,of=forward"),
                          ("backward", "launch=single,of=backward"),
                          ("reduce", "launch=single,of=backward")])
        forward = all_records[1]
        self.assertEqual((forward["ms"], forward["baseline_ms"], forward["floor_ms"]), (2, 8, 3))
        self.assertEqual((forward["load"], forward["wrong"]), (1.5, 2))
        self.assertNotIn("traced_ms", forward)
        json.dumps(all_records)

    def test_a_traced_schedule_tells_what_the_trace_costs(self):
        forward = self.report(traced=True).all[1]
        self.assertEqual(forward["traced_ms"], 2.02)
        self.assertAlmostEqual(forward["trace_cost"], 0.01)
        self.assertIn("+1.0%", self.said[0])
        self.assertEqual(forward["time_shares"], {"dispatch": 0.3, "fc1": 0.4})
        lines = self.said[self.said.index(tables.TIME_NOTES[1]):]
        self.assertEqual(lines[5].split(), ["small", "forward", "single", "0.500", "0.250", "30.0",
                                            "40.0", "-", "-", "-", "-", "-", "-", "10.0", "20.0",
                                            "1400"])

    def test_wrong_bits_fail(self):
        report = self.report()
        self.assertFalse(report.passed())
        self.assertIn("# took     passes 2.0 s", self.said)
        self.assertIn("check FAILED: 4 elements are wrong; uniep is 4.00 to 4.00", self.said[-1])
        self.assertTrue(self.report(check=False).passed())
        self.assertIn("# not checked", self.said[-1])


if __name__ == "__main__":
    unittest.main()
