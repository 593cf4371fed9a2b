"""tune --memory: which choices it measures, and what it says of them (program.py); an argument
names one test class."""

import json
import unittest

from program import ProgramTest, unfolded

SHAPE = "tiny,tokens=256"


class FittingChoices(ProgramTest):
    def setUp(self):
        super().setUp()
        self.cache = self.folder / "tuned.json"
        self.environment = {"UNIEP_TUNE_CACHE": str(self.cache)}

    def plan(self):
        """What simulate says of every choice."""
        path = self.folder / "plan.json"
        self.succeed("simulate", "--shape", SHAPE, "--ranks", 2, "--memory", 80, "--layers", 4,
                     "--json", path)
        return json.loads(path.read_text())["plans"][-1]["choices"]

    def tune(self, memory, *args):
        path = self.folder / "tune.json"
        for budget in (2, 20):  # the second where the machine is too busy for the first
            done = self.call("tune", "--shape", SHAPE, "--ranks", 2, "--memory", memory, "--layers",
                             4, "--candidates", 2, "--budget", budget, "--json", path, *args,
                             **self.environment)
            if "is too small" not in done.stderr:
                break
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout, json.loads(path.read_text())

    @staticmethod
    def kind(choice):
        return choice["save"], choice["recompute_h"], choice["exact_rows"]

    @staticmethod
    def passes(choices):
        """Choices that a pass differs in, in their order."""
        return list(dict.fromkeys((c["save"], c["recompute_h"]) for c in choices))

    def test_all_that_fit_are_measured_and_the_fastest_is_named(self):
        text, file = self.tune(80)
        memory = file["memory"]
        choices = memory["choices"]
        self.assertEqual((memory["memory_gb"], memory["layers"], memory["in_flight"]), (80, 4, 1))
        self.assertEqual([self.kind(c) for c in choices], [self.kind(c) for c in self.plan()])
        self.assertTrue(all(c["fits"] for c in choices))
        # Least predicted first; twins that differ in exact_rows have the same passes.
        ordered = self.passes(sorted(choices, key=lambda c: c["predicted_ms"]))
        self.assertEqual(self.passes(file["passes"]), ordered)
        self.assertEqual([p["direction"] for p in file["passes"]],
                         ["forward", "backward"] * len(ordered))
        for c in choices:
            ms = sum(self.chosen_ms(p) for p in file["passes"]
                     if (p["save"], p["recompute_h"]) == (c["save"], c["recompute_h"]))
            self.assertAlmostEqual(c["measured_ms"], 4 * ms)
        best = choices[memory["fastest"]]
        self.assertEqual(best["measured_ms"], min(c["measured_ms"] for c in choices))
        self.assertFalse(best["exact_rows"])  # of twins the one that leaves the host alone
        line = unfolded(text).splitlines()[-1]
        self.assertIn(f'fastest that fits: save="{best["save"]}", '
                      f'recompute_h={best["recompute_h"]}, exact_rows=False', line)
        self.assertIn(f'{best["measured_ms"]:.3f} ms', line)
        self.assertEqual((line.count("(forward)"), line.count("(backward)")), (1, 1))
        # Layers that are made with a choice find what was stored for it.
        entries = json.loads(self.cache.read_text())["entries"]
        self.assertEqual(len(entries), 2 * len(ordered))

    @staticmethod
    def chosen_ms(of_pass):
        times = sorted(next(c["ms"] for c in of_pass["candidates"]
                            if c["schedule"] == of_pass["chosen"]))
        half = len(times) // 2
        return times[half] if len(times) % 2 else (times[half - 1] + times[half]) / 2

    def test_only_what_fits_is_measured(self):
        sizes = sorted(self.plan(), key=lambda c: c["total_bytes"])
        limit = (sizes[2]["total_bytes"] + 1) * 1e-9
        text, file = self.tune(f"{limit:.9f}")
        choices = file["memory"]["choices"]
        fitting = [c for c in choices if c["fits"]]
        self.assertEqual(sorted(map(self.kind, fitting)), sorted(map(self.kind, sizes[:3])))
        self.assertEqual(set(self.passes(file["passes"])), set(self.passes(fitting)))
        best = choices[file["memory"]["fastest"]]
        self.assertTrue(best["fits"])
        twins = [c for c in fitting if self.passes([c]) == self.passes([best])]
        self.assertEqual(best["exact_rows"], all(c["exact_rows"] for c in twins))
        self.assertEqual(text.count("that fit: save="), len(self.passes(fitting)))
        self.assertEqual(text.count("too large by"), len(choices) - 3)
        self.assertLessEqual(max(map(len, text.splitlines())), 100)

    def test_without_a_profile_nothing_is_predicted(self):
        _, file = self.tune(80, "--profile", "none")
        self.assertEqual({c["predicted_ms"] for c in file["memory"]["choices"]}, {None})
        self.assertEqual(self.passes(file["passes"]), self.passes(file["memory"]["choices"]))

    def test_nothing_fits(self):
        done = self.refuse("tune", "--shape", SHAPE, "--ranks", 2, "--memory", 0.0001, "--layers",
                           4, "--profile", "none", words=("nothing fits", "--memory"),
                           **self.environment)
        enough = unfolded(done.stderr).split(": --memory ")[1].split()[0]
        self.assertNotIn("REJECTED", self.tune(enough, "--profile", "none")[0])

    def test_refusals(self):
        tune = ("tune", "--shape", "tiny")
        self.refuse(*tune, "--memory", 1, words=("--memory is 1", "--layers"))
        for flag in ("--layers", "--in-flight", "--weight-bytes"):
            self.refuse(*tune, flag, 3, words=(f"{flag} is 3", "--memory"))
        plan = (*tune, "--memory", 1, "--layers", 2)
        for flag in (("--save", "rows"), ("--recompute-h",), ("--pass", "both"), ("--survey", 3)):
            self.refuse(*plan, *flag, words=(flag[0], "--memory"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
