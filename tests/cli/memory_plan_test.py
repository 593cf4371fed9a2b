"""simulate --memory: what it plans, printed and as JSON (program.py); an argument names one test
class."""

import json
import unittest

from program import ProgramTest, unfolded

SHAPE = "qwen3-30b,tokens=512"


def rows_of(choice):
    """Which rows a choice keeps memory for, as the table says it."""
    if choice["row_pool"] is not None:
        return "pool"
    return "exact" if choice["exact_rows"] else "capacity"


def arguments(choice):
    """The choice as arguments of uniep.MoELayer."""
    rows = f'row_pool={choice["row_pool"]}' if choice["row_pool"] is not None \
        else f'exact_rows={choice["exact_rows"]}'
    return f'save="{choice["save"]}", recompute_h={choice["recompute_h"]}, {rows}'


class MemoryPlan(ProgramTest):
    def planned(self, *args, memory=80, layers=4):
        """The text and the file of a plan."""
        path = self.folder / "plan.json"
        text = self.succeed("simulate", "--shape", SHAPE, "--memory", memory, "--layers", layers,
                            *args, "--json", path)
        return text, json.loads(path.read_text())

    def choices(self, *args, **kwargs):
        """Of the largest number of ranks, by what is kept."""
        plan = self.planned("--ranks", 4, *args, **kwargs)[1]["plans"][-1]
        return {(c["save"], c["recompute_h"], rows_of(c)): c for c in plan["choices"]}

    def test_every_choice_at_every_number_of_ranks(self):
        text, file = self.planned("--ranks", 16, "--gpus-per-node", 8, "--nic-gbps", 400)
        self.assertEqual(file["schema"], "uniep-memory-plan-1")
        self.assertFalse(file["interrupted"])
        self.assertEqual([p["ranks"] for p in file["plans"]], [1, 2, 4, 8, 16])
        for plan in file["plans"]:
            kinds = {(c["save"], c["recompute_h"], rows_of(c)) for c in plan["choices"]}
            self.assertEqual((len(kinds), len(plan["choices"])), (18, 18))
            self.assertEqual(plan["one_stands_for_all"], plan["ranks"] > 8)
        self.assertLessEqual(max(map(len, text.splitlines())), 100)

    def test_totals_are_sums_and_the_table_has_the_figures_of_the_file(self):
        text, file = self.planned("--ranks", 2, memory=3)
        rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
        choices = [c for plan in file["plans"] for c in plan["choices"]]
        self.assertEqual(len(rows), len(choices))
        for row, c in zip(rows, choices, strict=True):
            self.assertEqual(c["total_bytes"], c["kept_bytes"] + c["pass_bytes"] +
                             c["shared_bytes"] + c["weight_bytes"])
            self.assertEqual(c["fits"], c["total_bytes"] <= 3e9)
            self.assertEqual(row[:3],
                             [c["save"], "yes" if c["recompute_h"] else "no", rows_of(c)])
            sizes = [f"{c[key] * 1e-9:.3f}" for key in
                     ("kept_bytes", "pass_bytes", "shared_bytes", "total_bytes")]
            self.assertEqual(row[3:7], sizes)
            self.assertAlmostEqual(float(row[7]), c["predicted_ms"], delta=6e-4)
            self.assertEqual(row[8] == "fits", c["fits"])
        self.assertEqual({c["fits"] for c in choices}, {True, False})

    def test_who_keeps_less(self):
        choices = self.choices()
        def kept(*choice):
            return choices[choice]["kept_bytes"]
        for rows in ("capacity", "pool", "exact"):
            self.assertLess(kept("none", False, rows), kept("rows", False, rows))
            self.assertLess(kept("none", True, rows), kept("none", False, rows))
            self.assertLess(kept("none", True, rows), kept("rows", True, rows))
        for save in ("rows", "none"):
            for recompute in (False, True):
                reserved, exact = (choices[save, recompute, r] for r in ("capacity", "exact"))
                for key in ("rows", "kept_bytes", "pass_bytes", "total_bytes"):
                    self.assertLess(exact[key], reserved[key])
                self.assertEqual(exact["shared_bytes"], reserved["shared_bytes"])
                self.assertEqual(exact["predicted_ms"], reserved["predicted_ms"])
        self.assertLess(choices["rows", False, "capacity"]["predicted_ms"],
                        choices["rows", True, "capacity"]["predicted_ms"])

    def test_a_row_pool_keeps_what_comes_and_works_in_the_capacity(self):
        choices = self.choices()
        for (save, recompute, rows), pool in choices.items():
            if rows != "pool":
                continue
            reserved, exact = (choices[save, recompute, r] for r in ("capacity", "exact"))
            self.assertEqual(pool["pass_bytes"], reserved["pass_bytes"])
            self.assertEqual(pool["rows"], exact["rows"])
            self.assertEqual(pool["predicted_ms"], reserved["predicted_ms"])
            self.assertGreater(pool["kept_bytes"], exact["kept_bytes"])
            # Page numbers, at most half a page of tokens for each forward, and 10 KB for all. Where
            # h is not kept, each page has as many probabilities as tokens of 16 rows.
            room = 1.02 if save == "tokens" else 1.001
            self.assertLess(pool["kept_bytes"], room * exact["kept_bytes"] + 4 * 2**20)
            self.assertLessEqual(pool["row_pool"], pool["kept_bytes"])

    def test_layers_microbatches_and_parameters_multiply(self):
        one = self.choices()
        layers, flying = self.choices(layers=8), self.choices("--in-flight", 3)
        heavy, skewed = self.choices("--weight-bytes", 18), self.choices("--skew", 1)
        for kind, c in one.items():
            more = layers[kind]["kept_bytes"] - 2 * c["kept_bytes"]
            # What a pool has but once: 256 bytes for each tensor of the graph (page_pool.h).
            self.assertTrue(-10240 <= more <= 0 if kind[2] == "pool" else more == 0, (kind, more))
            self.assertEqual(layers[kind]["weight_bytes"], 2 * c["weight_bytes"])
            self.assertAlmostEqual(layers[kind]["predicted_ms"], 2 * c["predicted_ms"])
            if kind[2] != "pool":
                self.assertEqual(flying[kind]["kept_bytes"], 3 * c["kept_bytes"])
            self.assertEqual(flying[kind]["predicted_ms"], c["predicted_ms"])
            self.assertEqual(heavy[kind]["weight_bytes"], 9 * c["weight_bytes"])
            self.assertEqual(c["weight_bytes"], 4 * 2 * 3 * 2048 * 768 * 128 // 4)
            for other in (layers, flying, heavy):
                for key in ("pass_bytes", "shared_bytes"):
                    self.assertEqual(other[kind][key], c[key])
        for kind in one:
            if kind[2] != "capacity":
                self.assertGreater(skewed[kind]["rows"], one[kind]["rows"])

    def test_one_layer_is_that_of_info(self):
        text = self.succeed("info", "--shape", SHAPE, "--ranks", 4)
        saved = next(line.split() for line in text.splitlines() if line.startswith("  saved:"))
        saved = next(int(word) for word in saved if word.isdigit())
        kept = self.choices(layers=1)["rows", False, "capacity"]["kept_bytes"]
        self.assertGreaterEqual(kept, saved)
        self.assertLess(kept - saved, 0.01 * saved)  # the plan

    def test_the_fastest_that_fits(self):
        choices = self.choices().values()
        sizes = sorted(c["total_bytes"] for c in choices)
        for size in sizes:
            memory = size * 1e-9 + 1e-6
            text, file = self.planned("--ranks", 4, memory=memory)
            plan = file["plans"][-1]
            fitting = [c for c in plan["choices"] if c["fits"]]
            self.assertEqual(len(fitting), sum(s <= memory * 1e9 for s in sizes))
            best = plan["choices"][plan["fastest"]]
            self.assertTrue(best["fits"])
            self.assertEqual(best["predicted_ms"], min(c["predicted_ms"] for c in fitting))
            twins = [c for c in fitting if c["predicted_ms"] == best["predicted_ms"]]
            order = ["capacity", "pool", "exact"]
            self.assertEqual(rows_of(best), min((rows_of(c) for c in twins), key=order.index))
            self.assertIn(f"fastest that fits: {arguments(best)}", unfolded(text).splitlines()[-1])

    def test_nothing_fits(self):
        text, file = self.planned("--ranks", 4, memory=0.001)
        plan = file["plans"][-1]
        self.assertIsNone(plan["fastest"])
        least = plan["choices"][plan["smallest"]]
        self.assertEqual(least["total_bytes"], min(c["total_bytes"] for c in plan["choices"]))
        line = unfolded(text).splitlines()[-1]
        self.assertIn(arguments(least), line)
        enough = line.split("--memory ")[1].split()[0]
        plan = self.planned("--ranks", 4, memory=enough)[1]["plans"][-1]
        self.assertIsNotNone(plan["fastest"])

    def test_a_routing_that_needs_more_room_names_it(self):
        text = unfolded(self.succeed(
            "simulate", "--shape",
            "custom,tokens=4800,hidden=1024,intermediate=1024,experts=16,topk=4", "--skew", 4,
            "--ranks", 4, "--memory", 80, "--layers", 2))
        lines = [line for line in text.splitlines() if "fastest that fits" in line]
        self.assertNotIn("capacity_rows", lines[0])
        self.assertRegex(lines[-1], r"capacity_rows=\d+")

    def test_backward_in_less_memory(self):
        rows = 2048
        usual, less = self.choices(), self.choices("--backward-rows", rows)
        for kind, choice in less.items():
            self.assertEqual(choice["backward_rows"], rows)
            self.assertEqual(choice["kept_bytes"], usual[kind]["kept_bytes"])
            self.assertLess(choice["pass_bytes"], 0.6 * usual[kind]["pass_bytes"])
        text = self.planned("--backward-rows", rows)[0]
        self.assertIn(f"backward_rows={rows}", unfolded(text))

    def test_refusals(self):
        simulate = ("simulate", "--shape", "tiny")
        self.refuse(*simulate, "--memory", 1, words=("--memory is 1", "--layers"))
        for flag in ("--layers", "--in-flight", "--weight-bytes"):
            self.refuse(*simulate, flag, 3, words=(f"{flag} is 3", "--memory"))
        plan = (*simulate, "--memory", 1, "--layers", 2)
        for flag in (("--save", "rows"), ("--recompute-h",), ("--pass", "both"),
                     ("--plot", self.folder / "p.svg")):
            self.refuse(*plan, *flag, words=(flag[0], "--memory"))
        for flag, value in (("--memory", 0), ("--layers", 0), ("--in-flight", "1.5"),
                            ("--weight-bytes", -1)):
            self.refuse(*simulate, flag, value, words=(flag, f"'{value}'"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
