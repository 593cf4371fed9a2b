"""The figures, records and tables of compare_torch.py."""
import json
import os
import tempfile
import unittest

from compare import records, tables
from compare.figures import (Product, Times, direction_floor_ms, quantile, reduce_bytes,
                             stage_figures)
from compare.shapes import SHAPES, Shape, Wire, capacity_rows, choose_shapes, wire_of

SHAPE = Shape("small", tokens=4, hidden=8, intermediate=16, experts=4, topk=2)
PRODUCTS = {"fc1": Product(3, 2), "fc2": Product(1, 2), "dfc2": Product(1, 1),
            "dfc1": Product(4, 3), "wgrad2": Product(2, 2), "wgrad1": Product(5, 6)}


class Figures(unittest.TestCase):
    def test_quantiles_lie_between_neighbours(self):
        self.assertEqual(quantile([3, 1, 2], 0.5), 2)
        self.assertAlmostEqual(quantile([0, 10], 0.1), 1)
        self.assertEqual(quantile([7], 0.9), 7)

    def test_the_slowest_rank_has_the_largest_median(self):
        self.assertEqual(Times.of_slowest([[1, 1, 9], [2, 2, 2]]), Times(2, 2, 2))

    def test_a_floor_is_the_products_or_the_wire(self):
        self.assertEqual(direction_floor_ms("forward", PRODUCTS, Wire([0], [0])), 2 + 1)
        self.assertEqual(direction_floor_ms("backward", PRODUCTS, Wire([0], [0])), 1 + 3 + 2 + 5)
        wire = Wire(pulled=[370e6], pushed=[37e9])
        self.assertAlmostEqual(direction_floor_ms("forward", PRODUCTS, wire), 100)

    def test_stages_are_compared_with_what_they_do(self):
        wire = Wire(pulled=[370e6, 0], pushed=[680e6, 0])
        figures = lambda stage, ms: stage_figures(stage, ms, SHAPE, PRODUCTS, wire, 4000)
        self.assertEqual(figures("fc1", 6), {"baseline_ms": 3, "floor_ms": 2, "ratio": 2})
        self.assertEqual(figures("fc2", 6),
                         {"baseline_ms": 1, "push_ms": 2, "floor_ms": 2, "ratio": 3})
        self.assertEqual(figures("dispatch", 2), {"floor_ms": 1, "gbps": 185})
        self.assertEqual(figures("enter", 1), {})
        reduce = figures("reduce", 1e-6)
        self.assertEqual(reduce["gbps"], reduce_bytes(SHAPE))
        self.assertAlmostEqual(reduce["floor_ms"], 1e-6 * reduce_bytes(SHAPE) / 4000)


class Shapes(unittest.TestCase):
    def test_names_are_checked(self):
        self.assertEqual([s.name for s in choose_shapes("qwen3-30b,mixtral-8x7b", None, 4)],
                         ["qwen3-30b", "mixtral-8x7b"])
        self.assertEqual(choose_shapes("qwen3-30b", 64, 4)[0].tokens, 64)
        with self.assertRaisesRegex(ValueError, "'qwen' is unknown; deepseek-v3, .* are accepted"):
            choose_shapes("qwen", None, 4)
        with self.assertRaisesRegex(ValueError, "8 experts, which 3 ranks do not divide"):
            choose_shapes("mixtral-8x7b", None, 3)

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
        self.assertEqual(wire, Wire(pulled=[1 * 16, 2 * 16], pushed=[2 * 16, 3 * 16]))


class Reports(unittest.TestCase):
    def record(self, **figures):
        return records.record(SHAPES["qwen3-30b"], 4, "forward", "launch=single",
                              Times(2.0, 1.9, 2.2), **figures)

    def test_records_have_the_keys_of_the_schema(self):
        r = self.record(floor_ms=1.0, baseline_ms=3.0, wrong=0, gbps=7)
        self.assertEqual(list(r), ["shape", "ranks", "direction", "schedule", "ms", "p10", "p90",
                                   "baseline_ms", "floor_ms", "efficiency", "wrong", "gbps"])
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
        table = tables.direction_table([SHAPES["qwen3-30b"]], ["single"])
        line = tables.direction_line(table, self.record(floor_ms=1.0, baseline_ms=3.0), "single")
        self.assertEqual(line.split(), ["qwen3-30b", "forward", "single", "3.000", "2.000", "1.50",
                                        "1.000", "33.3%", "50.0%", "-"])
        self.assertEqual(line.index("3.000") + 5, table.header().index("torch ms") + 8)

    def test_stages_and_products_are_listed(self):
        stage = {**self.record(floor_ms=1.0), "pass": "forward", "direction": "fc1", "ratio": 1.5}
        lines = tables.stage_lines([(stage, "single")])
        self.assertIn(" 1.50 ", lines[-1])
        lines = tables.product_lines([(SHAPE, "fc1", Product(2.0, 1.0))])
        self.assertEqual(lines[-1].split()[:4], ["small", "fc1", "2.000", "1.000"])
        self.assertEqual(tables.stage_lines([]), [])


if __name__ == "__main__":
    unittest.main()
