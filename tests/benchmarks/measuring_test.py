"""How compare_torch.py measures, with a stand-in for PyTorch that only takes notes."""
import contextlib
import io
import sys
import unittest
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

for module in ("torch", "torch.distributed", "triton", "triton.language"):
    sys.modules[module] = mock.MagicMock()

import compare_torch
from compare import comparison, group, timing, uniep_layer
from compare.figures import Product

RANKS = 2


def gather_numbers(values):
    """As if the other rank measured twice as much."""
    def twice(v):
        return [twice(x) for x in v] if isinstance(v, list) else 2 * v
    return [values, twice(values)]


class Layer:
    """Notes its calls in one list with others."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def forward(self, schedule=None):
        self.calls.append(f"{self.name} {schedule}")

    def synchronize(self):
        self.calls.append(f"{self.name} synchronized")

    def time_use(self):
        self.calls.append(f"{self.name} synchronized")
        return {"processors": 1.0, "span_s": 1.0, "exposed_s": 0.5, "tail_s": 0.0,
                "waiting_s": 0.5, "idle_s": 0.0, "clock_hz": 1.5e9, "fc1": 0.5}

    def last_pass(self):
        return {"dispatch": 1.0, "fc1": 3.0, "reduce": 0.0}


def time_once(timed):
    (timed.before or timed.call)()
    timed.call()
    return 5.0


@mock.patch.object(timing, "time_once", time_once)
@mock.patch.object(group, "gather_numbers", gather_numbers)
@mock.patch.object(group, "together", lambda: None)
@mock.patch.object(group, "size", lambda: RANKS)
class Measuring(unittest.TestCase):
    def test_sustained_calls_are_repeated_alike_on_all_ranks(self):
        repeats, calls = [], [timing.Timed(lambda: None), timing.Timed(lambda: None)]
        with mock.patch.object(timing, "time_sustained",
                               lambda timed, count: repeats.append(count) or 4.0):
            values = timing.measure(calls, 2, sustain_ms=60)
        # 5 ms here, so 12 calls; the other rank asks for twice as many. Not in the first turn,
        # whose times they follow from.
        self.assertEqual(repeats, [24] * (len(calls) * (timing.WARMUPS + 2 - 1)))
        self.assertEqual(values, [[[4.0, 4.0], [8.0, 8.0]]] * len(calls))

    def test_calls_take_turns_and_warm_up(self):
        order, after = [], []
        calls = [timing.Timed(lambda i=i: order.append(i), after=lambda i=i: after.append(i))
                 for i in range(3)]
        iterations = len(timing.balanced_orders(3))
        values = timing.measure(calls, iterations)
        self.assertEqual(values, [[[5.0] * iterations, [10.0] * iterations]] * 3)
        turns = timing.WARMUPS + iterations
        self.assertEqual(len(order), 2 * 3 * turns)
        each = [order[i:i + 6:2] for i in range(0, len(order), 6)]
        self.assertTrue(all(sorted(turn) == [0, 1, 2] for turn in each), each)
        behind = Counter(pair for turn in each[timing.WARMUPS:] for pair in pairwise(turn))
        self.assertEqual((len(behind), set(behind.values())), (3 * 2, {2}))
        self.assertEqual(after, order[::2])

    def test_every_call_runs_as_often_behind_every_other(self):
        for count in range(1, 10):
            orders = timing.balanced_orders(count)
            behind = Counter(pair for order in orders for pair in pairwise(order))
            self.assertEqual(len(behind), count * (count - 1))
            self.assertLessEqual(len(set(behind.values())), 1)
            for order in orders:
                self.assertEqual(sorted(order), list(range(count)))

    def test_products_are_batched_where_the_load_is_even(self):
        rows, passes, batches = mock.MagicMock(), [], []
        operands = {"fc1": (rows, rows), "fc2": (rows, rows)}

        def time_of_kind(timed):
            """Other times for products behind a pass, batched ones, and those by themselves."""
            batches.clear()
            time_once(timed)
            return 2.0 if timed.before else 3.0 if batches else 1.0

        def products(even):
            with mock.patch.object(timing, "balanced", lambda a, b, experts: (a, b)), \
                    mock.patch.object(timing.torch, "bmm", lambda a, b: batches.append(a)), \
                    mock.patch.object(timing, "time_once", time_of_kind):
                return timing.time_products(operands, [1, 2], 1, even,
                                            lambda name: lambda: passes.append(name))

        each = {"grouped": [1.0, 2.0], "batched": [3.0, 6.0], "hot": [2.0, 4.0]}
        self.assertEqual(products(True), {name: Product(**each) for name in operands})
        each["batched"] = None
        self.assertEqual(products(False), {name: Product(**each) for name in operands})
        self.assertEqual(set(passes), set(operands))  # in front of the product that is to be hot

    def comparison(self, trace, **shape):
        c = comparison.Comparison.__new__(comparison.Comparison)
        c.shape = SimpleNamespace(**{"experts": 4, "skew": 0.0, **shape})
        c.args = SimpleNamespace(iterations=2, no_stages=False, sustain=0)
        c.stage_names = ["fc1"]
        c.clock, self.calls = comparison.Clock(), []
        c.torch, c.uniep = Layer("torch", self.calls), Layer("uniep", self.calls)
        c.traced = Layer("traced", self.calls) if trace else None
        return c

    def test_a_direction_has_times_of_all_layers(self):
        torch_times, timed = self.comparison(False).time_direction("forward", ["a", "b"])
        self.assertEqual(torch_times.ms, 10.0)
        self.assertEqual([t.times.ms for t in timed], [10.0, 10.0])
        self.assertEqual([(t.traced, t.use) for t in timed], [(None, None)] * 2)
        self.assertEqual(list(timed[0].stages), ["dispatch", "fc1"])  # reduce shared its launch
        self.assertEqual(timed[0].stages["fc1"].turns, [[3.0, 6.0]] * 2)

    def test_a_traced_call_follows_an_untraced_one(self):
        _, timed = self.comparison(True).time_direction("forward", ["a", "b"])
        self.assertEqual([t.traced.ms for t in timed], [10.0, 10.0])
        self.assertEqual(timed[0].use.exposed_ms, 1000)  # of the other rank
        self.assertAlmostEqual(timed[0].use.stages["fc1"], 1.5 / (1 * 1 + 2 * 2))
        for i, call in enumerate(self.calls):
            if call in ("traced a", "traced b"):
                self.assertEqual(self.calls[i - 1], "uniep" + call[-2:])
                self.assertEqual(self.calls[i + 1], "traced synchronized")

    def test_no_stages_are_noted_unless_wanted(self):
        c = self.comparison(False)
        c.args.no_stages = True
        _, timed = c.time_direction("forward", ["a"])
        self.assertEqual(timed[0].stages, {})

    def test_a_layer_is_even_where_every_expert_can_have_a_row(self):
        for rows, skew, even in ([9, 2], 0, True), ([9, 1], 0, False), ([9, 9], 0.5, False):
            c = self.comparison(False, skew=skew)
            c.rows = rows
            self.assertEqual(c.is_even(), even)

    def compare_all(self, models, deadline):
        """The models that had no time; (model, that of the weights it was given) of the others."""
        given = []

        def compare_case(library, shape, args, weights, report, copy_gbps):
            given.append((shape.model, weights and weights.model))
            return SimpleNamespace(model=shape.model)

        chosen = [SimpleNamespace(model=model) for model in models]
        with mock.patch.object(compare_torch, "compare_case", compare_case):
            left = compare_torch.compare_all(None, chosen, SimpleNamespace(json=None), None,
                                             {"copy_gbps": 1}, deadline)
        return [shape.model for shape in left], given

    def test_weights_are_kept_for_the_model_only(self):
        left, given = self.compare_all("aab", compare_torch.Deadline(float("inf")))
        self.assertEqual((left, given), ([], [("a", None), ("a", "a"), ("b", None)]))

    def test_no_case_is_begun_that_could_not_be_done(self):
        clock = iter([0, 1, 4, 6, 9])  # begun at 0; cases from 1 to 4, 4 to 6, 6 to 9
        with mock.patch.object(compare_torch.time, "monotonic", lambda: next(clock)):
            left, given = self.compare_all("abcd", compare_torch.Deadline(10))
        self.assertEqual((left, [model for model, _ in given]), (["d"], ["a", "b", "c"]))


class Schedules(unittest.TestCase):
    def run_under(self, forward, backward, looks_up):
        """What the library is asked to run passes under."""
        with mock.patch.object(uniep_layer.bridge, "Layer") as made, \
                mock.patch.object(group, "size", return_value=RANKS):
            library_layer = made.return_value
            library_layer.schedule = lambda direction: f"looked up for {direction}"
            layer = uniep_layer.UniepLayer("library", "shape", mock.MagicMock(), mock.MagicMock(), 0,
                                           looks_up=looks_up)
        self.assertEqual(made.call_args.args[-1], looks_up)
        layer.forward(forward)
        layer.backward(backward)
        return [library_layer.forward.call_args.args[-1], library_layer.backward.call_args.args[-1]]

    def test_passes_run_under_what_is_asked_for(self):
        for looks_up in False, True:
            self.assertEqual(self.run_under("single", "sequential", looks_up),
                             ["single", "sequential"])

    def test_auto_is_what_the_layer_looked_up_for_the_direction(self):
        self.assertEqual(self.run_under("auto", "auto", looks_up=True),
                         ["looked up for forward", "looked up for backward"])


class Arguments(unittest.TestCase):
    def parse(self, *arguments):
        errors = io.StringIO()
        with mock.patch.object(sys, "argv", ["compare_torch.py", "--library", "L", *arguments]), \
                contextlib.redirect_stderr(errors):
            try:
                return compare_torch.parse_arguments(), ""
            except SystemExit as exit_:
                return exit_.code, errors.getvalue()

    def test_there_is_something_to_measure(self):
        self.assertEqual(self.parse("--iterations", "1")[0].iterations, 1)
        for text in ("0", "-3", "1.5", "many"):
            code, sentence = self.parse(f"--iterations={text}")
            self.assertEqual(code, 2, text)
            self.assertIn(f"--iterations: '{text}'; an integer of 1 or more is accepted", sentence)


class Running(unittest.TestCase):
    def test_schedules_are_parsed_before_anything_is_measured_but_for_auto(self):
        library, measured = mock.MagicMock(commit="c0ffee"), []
        library.full_schedule.side_effect = lambda text: self.assertEqual(measured, []) or text
        arguments = ["--library", "L", "--cases", "qwen3-30b", "--forward", "auto", "single"]
        with mock.patch.object(sys, "argv", ["compare_torch.py", *arguments]), \
                mock.patch.object(compare_torch.bridge, "Library", return_value=library), \
                mock.patch.object(timing, "copy_gbps", return_value=4000), \
                mock.patch.object(compare_torch, "machine", return_value="a machine"), \
                mock.patch.object(compare_torch, "say"), \
                mock.patch.object(compare_torch, "compare_case", side_effect=lambda *args:
                                  measured.append(args[1].name)), \
                mock.patch.multiple(group, size=lambda: RANKS, rank=lambda: 0,
                                    gather_numbers=gather_numbers):
            self.assertEqual(compare_torch.run(compare_torch.parse_arguments()), 0)
        self.assertEqual(measured, ["qwen3-30b"])
        self.assertEqual([call.args for call in library.full_schedule.call_args_list],
                         [("single",), ("sequential",), ("single",)])


if __name__ == "__main__":
    unittest.main()
