"""simulate and tune, and what run and bench take from them (program.py); an argument names one test
class."""

import json
import os
import re
import signal
import subprocess
import time
import unittest
import xml.etree.ElementTree
from pathlib import Path

from program import PROGRAM, TRACE, ProgramTest, unfolded, without_progress


class Simulate(ProgramTest):
    def test_table_over_ranks(self):
        path, plot = self.folder / "s.json", self.folder / "s.svg"
        text = self.succeed("simulate", "--shape", "qwen3-30b,tokens=512", "--ranks", 16,
                            "--gpus-per-node", 8, "--nic-gbps", 400, "--json", path, "--plot", plot)
        rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
        self.assertEqual([int(row[0]) for row in rows], [1, 2, 4, 8, 16])
        self.assertIn("# above 8 ranks the fullest one stands for all of them", text)
        file = json.loads(path.read_text())
        self.assertEqual(file["schema"], "uniep-simulate-1")
        records = file["records"]
        self.assertEqual([(r["ranks"], r["direction"]) for r in records],
                         [(n, d) for n in (1, 2, 4, 8, 16) for d in ("forward", "backward")])
        for r in records:
            self.assertLess(r["exposed_ms"], r["predicted_ms"])
            self.assertEqual(r["one_stands_for_all"], r["ranks"] > 8)
        root = xml.etree.ElementTree.parse(plot).getroot()
        self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")

    def predicted(self, *args):
        path = self.folder / "s.json"
        self.succeed("simulate", "--shape", "qwen3-30b,tokens=512", "--pass", "forward", *args,
                     "--json", path)
        return json.loads(path.read_text())["records"][-1]["predicted_ms"]

    def test_what_slows_a_cluster_down(self):
        cluster = ("--ranks", 16, "--gpus-per-node", 8, "--nic-gbps")
        fast, slow = self.predicted(*cluster, 400), self.predicted(*cluster, 100)
        self.assertLess(self.predicted("--ranks", 16), fast)
        self.assertLess(fast, slow)
        even, skewed = self.predicted("--ranks", 8), self.predicted("--ranks", 8, "--skew", 1)
        self.assertLess(even, skewed)

    def test_a_routing_that_the_layer_would_refuse_is_warned_of(self):
        path = self.folder / "s.json"
        shape = ("custom,tokens=4800,hidden=1024,intermediate=1024,experts=16,topk=4", "--skew", 4)
        done = self.call("simulate", "--shape", *shape, "--ranks", 4, "--pass", "forward",
                         "--json", path)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        one, *_, four = json.loads(path.read_text())["records"]
        self.assertIsNone(one["overflow"])
        rank, rows = four["overflow"]["rank"], four["overflow"]["rows"]
        self.assertGreater(rows, four["default_capacity_rows"])
        self.assertGreaterEqual(rows, four["fullest_rows"])
        self.refuse("run", "--shape", *shape, "--ranks", 4, "--pass", "forward",
                    words=[f"rank {rank} would receive {rows} rows",
                           f"capacity_rows is {four['default_capacity_rows']};"])
        two = self.call("simulate", "--shape", *shape, "--ranks", 2, "--pass", "forward")
        self.assertEqual("at 4 ranks" in done.stderr, two.stderr == "")

    def test_a_ring_that_the_layer_would_refuse_is_refused(self):
        for more in ([], ["--memory", 1, "--layers", 2], ["--hosts", 2, "--nic-gbps", 10]):
            self.refuse("simulate", "--shape", "tiny,tokens=1024", "--ranks", 2, "--backward-rows",
                        128, *more, words=["backward_rows is 128; backward_rows=", "would do"])

    def test_a_measured_profile_predicts(self):
        profile = self.folder / "here.json"
        text = self.succeed("profile", "--effort", 0.1, "--output", profile)
        stages = [line.split()[0] for line in text.splitlines() if re.match(r"  \S", line)]
        products = ["fc1", "fc2", "dfc2", "dfc1", "wgrad2", "wgrad1"]
        self.assertEqual(stages, products + products + ["dispatch", "reduce"])  # tiles, then fits
        self.assertEqual(json.loads(profile.read_text())["schema"], "uniep-profile-1")
        path = self.folder / "s.json"
        self.succeed("simulate", "--shape", "small", "--ranks", 2, "--profile", profile,
                     "--schedule", "two-kernel,tile_m=32", "--json", path)
        for r in json.loads(path.read_text())["records"]:
            self.assertGreater(r["predicted_ms"], 0)
        linked = self.folder / "linked.json"
        self.succeed("profile", "--effort", 0.1, "--output", linked, UNIEP_CPU_LINK_GBPS="2")
        self.assertEqual(json.loads(linked.read_text())["link"]["bytes_per_s"], 2e9)
        self.refuse("profile", "--ranks", 2, words=("--ranks 2", "1 rank"))
        self.refuse("profile", "--like", "h200", words=("--like h200", "--backend cuda"))
        if "cuda: not in this build" in self.succeed("info"):
            self.refuse("profile", "--backend", "cuda", words=("no CUDA backend",))

    def test_refusals(self):
        self.refuse("simulate", "--shape", "tiny", "--nic-gbps", 400, words=("--gpus-per-node",))
        self.refuse("simulate", "--shape", "tiny", "--nic-latency-us", 7,
                    words=("--nic-latency-us is 7", "--gpus-per-node and --nic-gbps"))
        self.refuse("simulate", "--shape", "tiny", "--profile", "h300", words=("h300", "h200"))
        self.refuse("simulate", "--shape", "tiny", "--profile", self.folder,
                    words=(f"cannot read profile {self.folder}",))
        self.refuse("simulate", "--shape", "tiny", "--profile", "/dev/null", words=("/dev/null",))
        self.refuse("simulate", "--shape", "tiny", "--schedule", "tile_m=64", words=("tile_m=64",))
        self.refuse("simulate", "--shape", "tiny", "--ranks", 3, words=("8 experts",))


class Tune(ProgramTest):
    def setUp(self):
        super().setUp()
        self.cache = self.folder / "cache" / "tuned.json"
        self.environment = {"UNIEP_TUNE_CACHE": str(self.cache)}

    def tune(self, *args):
        return self.succeed("tune", *args, "--profile", "none", **self.environment)

    def entries(self):
        return json.loads(self.cache.read_text())["entries"]

    def sessions(self):
        return list(self.cache.parent.glob("*.session-*"))

    def test_finds_prints_and_stores(self):
        path = self.folder / "tune.json"
        # More than a busy machine takes to tell them apart: who spends the budget keeps a session.
        text = self.tune("--shape", "tiny", "--candidates", 4, "--budget", 200, "--json", path)
        for words in ("# forward round 1, ", "# forward: ", "# backward: ", "# why 1   ",
                      f"# stored  {self.cache}", "differs from the default in"):
            self.assertIn(words, text)
        file = json.loads(path.read_text())
        self.assertEqual(file["schema"], "uniep-tune-1")
        self.assertEqual([p["direction"] for p in file["passes"]], ["forward", "backward"])
        self.assertNotIn("the budget is spent", [p["end"] for p in file["passes"]])
        self.assertEqual(len(self.entries()), 2)
        rows = [line.split() for line in text.splitlines() if re.match(r" +\d+  ", line)]
        places = [c for of_pass in file["passes"] for c in of_pass["candidates"][:5]]
        self.assertEqual([(row[1], row[4]) for row in rows],
                         [(str(len(c["ms"])), f"{c['speedup']:.3f}") for c in places])
        for entry, of_pass in zip(self.entries(), file["passes"]):
            self.assertGreater(len(of_pass["candidates"]), 1)
            pairs = dict(pair.split("=") for pair in of_pass["chosen"].split(","))
            self.assertEqual(entry["schedule"], pairs)
            self.assertEqual((entry["ranks"], entry["tokens"], entry["pass"]),
                             (2, 64, of_pass["direction"]))
            self.assertGreater(entry["ms"], 0)
            self.assertFalse(any(c["rejected"] for c in of_pass["candidates"]))
        self.assertEqual(self.sessions(), [])

    def test_with_the_model(self):
        path = self.folder / "tune.json"
        self.succeed("tune", "--shape", "tiny", "--pass", "forward", "--candidates", 3, "--budget",
                     6, "--json", path, **self.environment)
        of_pass = json.loads(path.read_text())["passes"][0]
        self.assertGreater(of_pass["modelled"], 30)
        self.assertGreater(len(of_pass["candidates"]), 1)
        self.assertTrue(all(c["predicted_ms"] > 0 for c in of_pass["candidates"]))

    SMALL_SPACE = ("launch=single|paired,waves=1,workers=2,dispatch_workers=1,dispatch_join=yes,"
                   "pull_tokens=64,dispatch_wire=dedup,tile_m=32|64,tile_n=128,expert_order=index,"
                   "rotate=none,raster=along-m,band=0,lag=1,lag_tiles=0,head_start=0,mix_run=0,"
                   "ready_rows=32,token_block=32,push_depth=64")

    def test_a_space_made_small(self):
        path = self.folder / "tune.json"
        self.tune("--shape", "tiny", "--pass", "forward", "--candidates", 30, "--budget", 3,
                  "--space", self.SMALL_SPACE, "--json", path)
        candidates = json.loads(path.read_text())["passes"][0]["candidates"]
        self.assertLessEqual(len(candidates), 6)  # the reference, presets within it, four points
        fixed = [pair for pair in self.SMALL_SPACE.split(",") if "|" not in pair]
        within = [c for c in candidates if all(pair in c["schedule"].split(",") for pair in fixed)]
        self.assertIn(len(within), (len(candidates), len(candidates) - 1))  # but the reference
        self.assertGreaterEqual(len({c["schedule"] for c in within}), 2)

    def interrupted(self, command, rounds=1, meanwhile=lambda: None, code=None):
        """Runs it until it has measured for some rounds, then ends it with Ctrl-C, unless it ends
        by itself, which takes five rounds or more. Calls `meanwhile` after the first."""
        process = subprocess.Popen([PROGRAM, *command], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True,
                                   env={**os.environ, **self.environment})
        output = ""
        for line in process.stdout:
            output += line
            words = line.split()
            if words[:1] != ["#"] or words[2:3] != ["round"]:
                continue
            meanwhile()
            meanwhile = lambda: None
            if int(words[3].rstrip(",")) >= rounds:
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=300)
        if code is None:
            code = 130 if "; interrupted\n" in unfolded(rest) else 0
        self.assertEqual(process.returncode, code, output + rest + errors)
        return output + rest + without_progress(errors)

    LONG = ["tune", "--shape", "small", "--pass", "forward", "--candidates", "24", "--budget",
            "200", "--profile", "none"]

    def test_a_budget_too_small_for_a_round_says_which_would_do(self):
        done = self.call("tune", "--shape", "small,tokens=4096,hidden=1024,intermediate=512",
                         "--budget", 1, "--pass", "forward", "--profile", "none", "--space",
                         "tile_m=32|64|128", **self.environment)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"--budget 1 is too small .*; --budget [1-9][0-9]* would do")
        self.assertFalse(self.cache.exists())

    def test_a_budget_far_too_small_is_refused_before_anything_is_made_or_measured(self):
        for shape in ("small,tokens=16384,hidden=2048,intermediate=512",
                      "custom,tokens=1048576,hidden=8,intermediate=8,experts=64,topk=16"):
            start = time.monotonic()
            done = self.refuse("tune", "--shape", shape, "--budget", 1, **self.environment)
            self.assertLess(time.monotonic() - start, 3)  # measuring the machine takes longer
            self.assertEqual(done.stdout, "")
            self.assertRegex(done.stderr,
                             r"--budget 1 is too small .*; --budget [1-9][0-9]* would do")

    def test_a_budget_that_no_search_keeps_is_refused_before_the_machine_is_measured(self):
        # What the shape alone says of a round is less.
        candidates = ("--shape", "tiny", "--candidates", 1000, "--budget", 0.1)
        for more in ((), ("--profile", "none"), ("--pass", "backward")):
            start = time.monotonic()
            done = self.refuse("tune", *candidates, *more, **self.environment,
                               words=("--budget 0.1 is too small for the ", " pass: "))
            self.assertLess(time.monotonic() - start, 3)
            self.assertEqual(done.stdout, "")
            self.assertRegex(done.stderr, r"; --budget [1-9]\d* would do")

    def tuned_within(self, budget, *args):
        """Tunes within `budget` seconds, or in what a refusal names where a round takes longer than
        that. Returns the seconds that were enough and the output."""
        for _ in range(5):  # a machine that has become busier meanwhile names another
            done = self.call("tune", *args, "--fresh", "--budget", budget, **self.environment)
            self.assertNotIn(" in 0 rounds", done.stdout)
            if done.returncode != 2:
                break
            named = re.search(r"; --budget (\d+) would do\n", done.stderr)
            self.assertTrue(named, done.stderr)
            self.assertGreater(float(named[1]), budget)
            budget = float(named[1])
        self.assertEqual(done.returncode, 0, done.stderr)
        return budget, unfolded(done.stdout)

    def test_a_search_has_a_whole_round_or_names_a_budget_for_one(self):
        for budget in (0.1, 0.5):
            _, text = self.tuned_within(budget, "--shape", "small", "--pass", "forward")
            self.assertRegex(text, r" in [1-9]\d* rounds?, ")

    def test_a_budget_is_kept(self):
        path = self.folder / "tune.json"
        # All rounds would take longer, unless noise decides before.
        budget, _ = self.tuned_within(2, "--shape", "small,tokens=512", "--candidates", 30,
                                      "--profile", "none", "--json", path)
        for of_pass in json.loads(path.read_text())["passes"]:
            self.assertLess(of_pass["seconds"], budget + max(budget, 5))
            if of_pass["end"] == "the budget is spent":
                self.assertGreaterEqual(of_pass["seconds"], budget)

    def test_interrupted_and_resumed(self):
        text = self.interrupted(self.LONG, code=130)
        self.assertIn("interrupted", text)
        self.assertIn("# the same command goes on from here", text)
        # A fast machine has had rounds enough by the time that it says how many.
        self.assertEqual("# stored  nothing: too few rounds" in text, not self.cache.exists())
        self.assertEqual(len(self.sessions()), 1)
        again = self.interrupted(self.LONG, rounds=15)
        self.assertEqual(len(self.entries()), 1)  # what it had
        self.assertRegex(again, r"after [1-9][0-9]+ of an earlier session")
        self.assertNotIn("# forward round 1,", again)
        fresh = self.interrupted([*self.LONG, "--fresh"])
        self.assertNotIn("of an earlier session", fresh)

    def test_a_session_of_another_layer_is_not_gone_on_with(self):
        self.interrupted(self.LONG, code=130)
        for change in (["--shape", "small,tokens=1000"], ["--seed", "1"]):
            other = [*self.LONG, *change] if "--seed" in change else \
                [self.LONG[0], *change, *self.LONG[3:]]
            self.assertNotIn("of an earlier session", self.interrupted(other, code=130))
        self.assertEqual(len(self.sessions()), 3)

    def test_what_cannot_be_stored_in_the_end_is_still_printed(self):
        path = self.folder / "tune.json"
        text = self.interrupted([*self.LONG, "--json", str(path)], rounds=15,
                                meanwhile=self.cache.mkdir, code=1)
        for words in ("# best    --schedule", "# stored  nothing: the cache could not be written",
                      "# the same command goes on from here",
                      f"uniep tune: what was found is not stored: {self.cache}: is a directory"):
            self.assertIn(words, text)
        self.assertTrue(json.loads(path.read_text())["passes"][0]["chosen"])
        self.assertEqual(len(self.sessions()), 1)

    def test_a_folder_for_a_cache(self):
        self.cache.mkdir(parents=True)
        done = self.call("run", "--shape", "tiny", **self.environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for words in (str(self.cache), "is a directory", "regular file"):
            self.assertIn(words, done.stderr)
        done = self.refuse("tune", "--shape", "tiny", words=(self.cache, "is a directory"),
                           **self.environment)
        self.assertEqual(done.stdout, "")  # before anything was measured
        self.assertTrue(self.cache.is_dir())

    def test_a_damaged_session_is_reported_and_ignored(self):
        self.interrupted(self.LONG, code=130)
        path = self.sessions()[0]
        session = json.loads(path.read_text())
        for damaged in ("{", json.dumps({**session, "candidates": []})):
            path.write_text(damaged)
            text = self.interrupted(self.LONG)
            self.assertIn("is ignored", text)
            self.assertNotIn("of an earlier session", text)

    def test_a_damaged_cache_is_reported_and_kept_aside(self):
        self.cache.parent.mkdir()
        for damage, aside in (("{", ".damaged"),
                              ('{"schema": "of-another-program"}', ".damaged.1")):
            self.cache.write_text(damage)
            done = self.call("tune", "--shape", "tiny", "--pass", "forward", "--candidates", 2,
                             "--budget", 2, "--profile", "none", **self.environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"{self.cache} is ignored", done.stderr)
            self.assertEqual(len(self.entries()), 1)
            self.assertEqual(Path(f"{self.cache}{aside}").read_text(), damage)

    def test_two_processes_at_once(self):
        commands = [[PROGRAM, "tune", "--shape", f"tiny,tokens={tokens}", "--candidates", "3",
                     "--budget", "2", "--profile", "none"] for tokens in (32, 64, 128)]
        running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                    env={**os.environ, **self.environment}) for c in commands]
        for process in running:
            _, errors = process.communicate(timeout=300)
            self.assertEqual((process.returncode, without_progress(errors.decode())), (0, ""))
        self.assertEqual({(e["tokens"], e["pass"]) for e in self.entries()},
                         {(t, p) for t in (32, 64, 128) for p in ("forward", "backward")})

    def test_auto_takes_what_was_tuned(self):
        figures = self.folder / "run.json"
        arguments = ("run", "--shape", "tiny", "--ranks", 2, "--check", "--json", figures)
        before = unfolded(self.succeed(*arguments, **self.environment))
        self.assertIn("(auto: forward default, backward default)", before)
        self.tune("--shape", "tiny", "--candidates", 2, "--budget", 2)
        text = unfolded(self.succeed(*arguments, **self.environment))
        self.assertIn("(auto: forward cache, backward cache)", text)
        self.assertIn("check PASSED", text)
        for entry in self.entries():
            of_pass = [r for r in json.loads(figures.read_text())["records"]
                       if r["direction"] == entry["pass"]]
            pairs = dict(pair.split("=") for pair in of_pass[0]["schedule"].split(","))
            self.assertEqual(pairs, entry["schedule"])
        # Fewer tokens share the entry, more do not; nor does another number of ranks.
        for shape, ranks, origin in (("tiny,tokens=40", 2, "cache"), ("tiny,tokens=65", 2, "default"),
                                     ("tiny", 4, "default")):
            text = self.succeed("run", "--shape", shape, "--ranks", ranks, "--schedule", "auto",
                                **self.environment)
            self.assertIn(f"(auto: forward {origin}, backward {origin})", unfolded(text))
        text = self.succeed(*arguments, "--schedule", "single", **self.environment)
        self.assertNotIn("auto:", text)  # what is given is what runs
        self.cache.write_text("{")
        done = self.call(*arguments, **self.environment)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stderr.count("is ignored"), 1)
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("(auto: forward default, backward default)", unfolded(done.stdout))

    def test_bench_says_what_auto_took_for_each_shape(self):
        figures = self.folder / "bench.json"
        self.tune("--shape", "tiny", "--pass", "backward", "--candidates", 2, "--budget", 2)
        text = self.succeed("bench", "--shape", "tiny", "small", "--schedule", "sequential", "auto",
                            "--iterations", 1, "--json", figures, **self.environment)
        text = unfolded(text)
        self.assertIn("# schedule 1  auto: looked up for each shape", text)
        self.assertRegex(text, r"# schedule 1  launch=single,.*\(auto: forward default, backward cache\)")
        self.assertRegex(text, r"# schedule 1  launch=single,.*\(auto: forward default, backward default\)")
        self.assertIn("check PASSED", text)
        records = [r for r in json.loads(figures.read_text())["records"]
                   if r["shape"] == "tiny"]
        taken = {r["schedule"] for r in records if r["direction"] == "backward"}
        tuned = ",".join(f"{k}={v}" for k, v in self.entries()[0]["schedule"].items())
        self.assertIn(tuned, taken)

    def test_survey(self):
        path, plot = self.folder / "survey.json", self.folder / "survey.svg"
        text = self.succeed("tune", "--shape", "tiny", "--survey", 12, "--json", path, "--plot",
                            plot, **self.environment)
        self.assertIn("correlation", text)
        passes = json.loads(path.read_text())["passes"]
        self.assertEqual([p["direction"] for p in passes], ["forward", "backward"])
        for of_pass in passes:
            self.assertEqual(len(of_pass["points"]), 12)
            self.assertLessEqual(abs(of_pass["rank_correlation"]), 1)
        self.assertFalse(self.cache.exists())
        xml.etree.ElementTree.parse(plot)

    def test_a_survey_of_a_small_space_has_all_of_its_points(self):
        path = self.folder / "survey.json"
        self.succeed("tune", "--shape", "tiny", "--pass", "forward", "--survey", 100, "--space",
                     self.SMALL_SPACE, "--json", path, **self.environment)
        points = json.loads(path.read_text())["passes"][0]["points"]
        schedules = {p["schedule"] for p in points}
        self.assertEqual([len(points), len(schedules)], [4, 4])

    def test_refusals(self):
        self.refuse("tune", "--shape", "tiny", "--space", "tile_k=3", words=("tile_k",))
        self.refuse("tune", "--shape", "tiny", "--ranks", 3, words=("8 experts",))
        self.refuse("tune", "--shape", "tiny", "--profile", "h200", words=("backend cuda",))
        self.refuse("tune", "--shape", "tiny", "--plot", "x.svg", words=("--survey",))
        for layer in (["--shape", "tiny"], ["--input", TRACE]):
            done = self.refuse("tune", *layer, "--survey", 3, "--profile", "none",
                               words=("--profile",))
            self.assertEqual(done.stdout, "")
        for flag in (["--budget", 1], ["--candidates", 2], ["--fresh"]):
            self.refuse("tune", "--shape", "tiny", "--survey", 3, *flag,
                        words=("--survey", flag[0]))
        done = self.refuse("tune", "--shape", "tiny", "--profile", "none", "--pass", "forward",
                           "--budget", 1, UNIEP_TUNE_CACHE="/proc/no/cache.json",
                           words=("/proc/no",))
        self.assertEqual(done.stdout, "")  # before anything was measured


if __name__ == "__main__":
    unittest.main(verbosity=2)
