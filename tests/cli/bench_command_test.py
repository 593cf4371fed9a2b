"""uniep bench (program.py); an argument names one test class."""

import json
import math
import os
import unittest

import layer_file
from program import PRESETS, TRACE, ProgramTest, unfolded


class Bench(ProgramTest):
    FORWARD = ("all", "dispatch", "fc1", "fc2", "reduce")
    BACKWARD = ("all", "dispatch", "dfc2", "dfc1", "wgrad2", "wgrad1", "reduce")

    def rows(self, text):
        return [line.split() for line in text.splitlines() if line.startswith("  ")]

    def test_table(self):
        text = self.succeed("bench", "--iterations", 2, "--warmup", 1)
        self.assertIn("# check PASSED: 0 of", text)
        for words in ("# uniep ", "# machine ", "# command ", "# schedule 0  launch=single,"):
            self.assertIn(words, text)
        self.assertRegex(text, r"(?s)# shape +tiny: .*# shape +small: ")
        rows = self.rows(text)
        self.assertEqual([r[:2] for r in rows],
                         [[direction, stage] for shape in ("tiny", "small")
                          for direction, stages in (("forward", self.FORWARD),
                                                    ("backward", self.BACKWARD))
                          for stage in stages])
        for row in rows:
            self.assertEqual(len(row), 11, row)
            ms, p10, p90 = map(float, row[3:6])
            self.assertTrue(0 <= p10 <= ms <= p90, row)
            self.assertEqual(row[10], "0" if row[1] == "all" else "-")
            self.assertEqual(row[8:10], ["-", "-"])  # a CPU has no floor

    def test_schedules_side_by_side(self):
        text = self.succeed("bench", "--shape", "tiny", "tiny,tokens=7", "--ranks", 4, "--skew", 1,
                            "--schedule", "sequential", "single,tile_m=32", "--pass", "forward",
                            "--iterations", 1)
        self.assertEqual([r[2] for r in self.rows(text)], 2 * (5 * ["0"] + 5 * ["1"]))
        self.assertIn("# schedule 1  launch=single,", text)

    def test_the_last_line_compares_schedules(self):
        def last(*args):
            return unfolded(self.succeed("bench", "--iterations", 2, *args)).splitlines()[-1]

        one = last("--shape", "tiny", "--schedule", "single")
        self.assertNotIn("fastest", one)
        name = "(?:sequential|single|schedule 2)"
        three = last("--shape", "tiny", "tiny,tokens=40", "--schedule", "sequential", "single",
                     "single,tile_m=32,tile_n=64,workers=2", "--pass", "forward")
        self.assertRegex(three, rf"^# fastest: {name}, [0-9.]+x {name} forward "
                                r"\(geometric mean over 2 shapes\)$")
        both = last("--shape", "tiny", "--schedule", "sequential", "single")
        self.assertRegex(both, rf"^# fastest: {name},? .*forward.*backward")
        self.assertNotIn("mean", both)

    def test_json(self):
        path = self.folder / "bench.json"
        self.succeed("bench", "--shape", "tiny", "--ranks", 2, "--iterations", 3, "--json", path)
        figures = json.loads(path.read_text())
        self.assertEqual(figures["schema"], "uniep-bench-1")
        for key in ("version", "commit", "machine", "date", "command"):
            self.assertIsInstance(figures[key], str, key)
        self.assertEqual(figures["check"]["differing"], 0)
        self.assertEqual(figures["check"]["inexact"], 0)
        self.assertGreater(figures["check"]["sampled"], 0)
        records = figures["records"]
        self.assertEqual([r["direction"] for r in records],
                         ["forward", *self.FORWARD[1:], "backward", *self.BACKWARD[1:]])
        for r in records:
            self.assertEqual((r["shape"], r["ranks"]), ("tiny", 2))
            self.assertTrue(r["schedule"].startswith("launch=single,"), r["schedule"])
            self.assertTrue(0 <= r["p10"] <= r["ms"] <= r["p90"])
            for key in ("baseline_ms", "floor_ms", "efficiency"):
                self.assertIsNone(r[key])
            self.assertEqual(r["wrong"], None if "pass" in r else 0)
            self.assertEqual(r["tflops"] is None, r["direction"] in ("dispatch", "reduce"))
            moves = r["direction"] in ("forward", "backward", "dispatch", "fc2", "dfc1")
            self.assertEqual(r["gbps"] is None, not moves)

    def test_without_check_nothing_is_claimed(self):
        path = self.folder / "bench.json"
        text = self.succeed("bench", "--shape", "tiny", "--no-check", "--iterations", 1,
                            "--json", path)
        self.assertIn("# done: not checked", text)
        self.assertIsNone(json.loads(path.read_text())["records"][0]["wrong"])
        self.assertTrue(all(r[10] == "-" for r in self.rows(text)))

    def test_arguments(self):
        self.refuse("bench", "--shape", "gigantic", words=["gigantic", "tiny"])
        self.refuse("bench", "--shape", "tiny", "--ranks", 3, words=["8 experts", "3 ranks"])
        self.refuse("bench", "--schedule", "best", words=["best", "sequential"])
        self.refuse("bench", "--iterations", 0, words=["--iterations", "'0'"])
        self.refuse("bench", "--warmup", -1, words=["--warmup"])
        self.refuse("bench", "--backend", "abacus", words=["abacus", "cpu"])
        self.refuse("bench", "--json", self.folder / "no" / "file", words=["--json", "folder"])
        self.refuse("bench", "--shape", "deepseek-v3,hidden=1048576,experts=65536",
                    words=["memory"])
        self.refuse("bench", "--shape", "tiny", "--input", TRACE, words=["--input", "--shape"])
        for flag in ("--seed", "--skew"):
            self.refuse("bench", "--input", TRACE, flag, 1, words=["--input", flag])
        if "cuda: not in this build" in self.succeed("info"):
            self.refuse("bench", "--backend", "cuda", words=["no CUDA backend"])
        else:
            self.refuse("bench", "--backend", "cuda", "--ranks", 3, words=["experts", "3 ranks"])


class OwnRouting(ProgramTest):
    """What a layer file holds, in bench and tune."""

    def bench(self, *args):
        path = self.folder / "bench.json"
        text = self.succeed("bench", "--iterations", 2, *args, "--json", path)
        self.assertIn("# check PASSED: 0 of", text)
        return text, json.loads(path.read_text())

    def test_bench(self):
        for ranks in (1, 4):
            text, file = self.bench("--input", TRACE, "--ranks", ranks)
            self.assertIn("min 84, median 244, max 558, max / mean 2.18", text)  # as run has it
            self.assertEqual((file["input"], file["seed"]), (TRACE, None))
            self.assertTrue(0.1 < file["skew"] < 1, file["skew"])
            self.assertEqual({r["shape"] for r in file["records"]}, {"moe_lm_layer"})

    def test_combine_groups(self):
        tune = ("tune", "--candidates", 1, "--budget", 2, "--profile", "none")
        for command in (("bench", "--iterations", 1), tune):
            text = self.call(*command, "--input", self.layer_path(4), "--ranks", 2,
                             "--combine-groups", 2).stdout
            self.assertIn("2 combine groups in fp32", text)

    def test_uneven_tokens_and_dropped_slots(self):
        for tokens in (1, 3, 13):  # with 8 ranks: most have none, some have none, none has
            self.bench("--input", self.layer_path(tokens), "--ranks", 8, "--schedule", *PRESETS)

    def test_a_layer_without_dy(self):
        layer = self.layer_path(4, with_dy=False)
        for command in ("bench", "tune"):
            self.refuse(command, "--input", layer, words=["dy", "--pass forward"])
        self.bench("--input", layer, "--pass", "forward")

    def test_a_layer_that_overflows(self):
        tensors = layer_file.layer(4, hidden=16)
        for name, factor in (("x", 2.0 ** 100), ("w1", 2.0 ** 100)):
            dtype, shape, _ = tensors[name]
            tensors[name] = (dtype, shape, layer_file.bf16([factor] * math.prod(shape)))
        path = self.folder / "large.safetensors"
        path.write_bytes(layer_file.serialized(tensors))
        figures = self.folder / "bench.json"
        done = self.call("bench", "--input", path, "--iterations", 1, "--json", figures)
        self.assertEqual(done.returncode, 1, done.stderr)
        verdict = unfolded(done.stdout).splitlines()[-1]
        self.assertNotIn("FAILED", unfolded(done.stdout))
        self.assertRegex(unfolded(done.stdout), r"# check OVERFLOW: 0 of [1-9]\d* elements differ from "
                         r"sequential in a bit; [1-9]\d* of [1-9]\d* sampled ones are infinite or NaN")
        self.assertIn("uniep run --check", unfolded(done.stdout), verdict)
        check = json.loads(figures.read_text())["check"]
        self.assertEqual(check["not_finite"], check["inexact"])

    def test_refusals(self):
        for command in ("bench", "tune"):
            self.refuse(command, "--input", self.folder / "none", words=["none"])
            self.refuse(command, "--input", TRACE, "--ranks", 3, words=["32 experts", "3 ranks"])
            self.refuse(command, "--input", TRACE, "--json", TRACE, words=["--json", "one file"])
        self.refuse("tune", words=["--input", "--shape"])
        self.refuse("tune", "--input", TRACE, "--shape", "tiny", words=["two layers"])
        self.refuse("tune", "--input", TRACE, "--skew", 1, words=["--input", "--skew"])

    def test_what_is_tuned_for_a_routing_is_found_for_it(self):
        cache = self.folder / "tuned.json"
        environment = {"UNIEP_TUNE_CACHE": str(cache)}
        layer = self.layer_path(64, hidden=64, intermediate=32)
        self.succeed("tune", "--input", layer, "--ranks", 2, "--candidates", 2, "--budget", 4,
                     "--profile", "none", **environment)
        entries = json.loads(cache.read_text())["entries"]
        self.assertEqual({(e["hidden"], e["intermediate"], e["experts"], e["tokens"])
                          for e in entries}, {(64, 32, 8, 32)})
        for command in (["bench", "--schedule", "auto", "--iterations", 1], ["run"]):
            text = self.succeed(*command, "--input", layer, "--ranks", 2, **environment)
            self.assertIn("(auto: forward cache, backward cache)", unfolded(text))

    def test_the_key_has_the_skew_that_was_measured(self):
        cache = self.folder / "tuned.json"
        self.succeed("tune", "--input", TRACE, "--ranks", 2, "--candidates", 1, "--budget", 8,
                     "--pass", "forward", "--profile", "none", "--space", "lag=1",
                     UNIEP_TUNE_CACHE=str(cache))
        self.assertTrue(all(0.1 < e["skew"] < 1 for e in json.loads(cache.read_text())["entries"]))


class Against(ProgramTest):
    """bench --against compares with an earlier file."""

    def setUp(self):
        super().setUp()
        self.earlier = self.folder / "earlier.json"

    ARGUMENTS = ("--shape", "tiny", "tiny,tokens=7", "--schedule", "sequential", "single",
                 "--iterations", 4)

    def measure(self):
        self.succeed("bench", *self.ARGUMENTS, "--json", self.earlier)
        return json.loads(self.earlier.read_text())

    def scaled(self, file, factor, spread=0.0):
        """The file with times that many times as long, which vary by such a share."""
        for record in file["records"]:
            record["ms"] *= factor
            record["p10"] = record["ms"] * max(1 - spread, 1e-3)
            record["p90"] = record["ms"] * (1 + spread)
        self.earlier.write_text(json.dumps(file))

    def compare(self, *args, code=0):
        path = self.folder / "new.json"
        done = self.call("bench", *self.ARGUMENTS, "--against", self.earlier, "--json", path, *args)
        self.assertEqual((done.returncode, done.stderr), (code, ""), done.stdout)
        return unfolded(done.stdout), json.loads(path.read_text())["against"]

    def test_says_what_is_faster_and_slower(self):
        file = self.measure()
        self.scaled(file, 1e4)
        text, against = self.compare("--fail-above", 0)
        self.assertIn("against the earlier file: 8 faster\n", text)
        self.assertEqual({c["change"] for c in against["cases"]}, {"faster"})
        self.assertEqual(len(against["cases"]), 8)  # shapes, schedules, directions; no stages
        self.scaled(file, 1e-8)  # a ten thousandth
        _, against = self.compare()  # code 0: nobody asked
        for case in against["cases"]:
            self.assertAlmostEqual(case["ratio"], case["ms"] / case["earlier_ms"])
            # On a busy machine some passes take several times as long as others.
            slower = case["ratio"] - 1 > case["noise"]
            self.assertEqual(case["change"], "slower" if slower else "noise")

    def test_fails_where_it_is_asked_to(self):
        file = self.measure()
        self.scaled(file, 1e-4)
        path = self.folder / "new.json"
        for percent in (50, 1e6):
            done = self.call("bench", *self.ARGUMENTS, "--against", self.earlier, "--json", path,
                             "--fail-above", percent)
            cases = json.loads(path.read_text())["against"]["cases"]
            slower = [c for c in cases
                      if c["change"] == "slower" and c["ratio"] > 1 + percent / 100]
            self.assertEqual(done.returncode, 1 if slower else 0, done.stdout)
            self.assertIn(f"# {'FAILED' if slower else 'ok'}: {len(slower)} of 8 are slower",
                          unfolded(done.stdout))

    def test_noise_is_no_change(self):
        self.scaled(self.measure(), 1e-4, spread=1e12)  # however busy the machine is
        text, against = self.compare("--fail-above", 0)
        self.assertIn("against the earlier file: 8 within noise\n", text)
        self.assertEqual(against["differences"], [])

    def test_too_few_passes_tell_nothing(self):
        file = self.measure()
        for record in file["records"]:
            record["passes"] = 2
        self.scaled(file, 1e-4)
        text, against = self.compare("--fail-above", 0)
        self.assertIn("8 of too few passes to tell", text)
        self.assertEqual({c["noise"] for c in against["cases"]}, {None})
        self.refuse("bench", *self.ARGUMENTS[:-1], 2, "--against", self.earlier, "--fail-above", 1,
                    words=["--iterations is 2", "3 or more"])

    def test_nothing_in_common_is_no_success(self):
        file = self.measure()
        for record in file["records"]:
            record["shape"] = "small"
        self.earlier.write_text(json.dumps(file))
        text, against = self.compare("--fail-above", 5, code=1)
        self.assertIn("FAILED: no case is in both", text)
        self.assertEqual(against["cases"], [])

    def test_says_what_is_different(self):
        file = self.measure()
        file.update(machine="an abacus", version="0.0.9", link="1 GB/s", skew=1, save="none",
                    recompute_h=True, backward_rows=256)
        for record in file["records"]:
            record["ranks"] = 8
            record["given"] = record["given"].replace("single", "another")
            if record["given"] == "another":
                record["schedule"] = record["schedule"].replace("lag=1,", "lag=77,")
        file["records"] = [r for r in file["records"] if r["shape"] == "tiny"]
        self.scaled(file, 1)
        text, against = self.compare()
        for words in ("machine: an abacus then, ", "version: 0.0.9 then, ", "link: 1 GB/s then, ",
                      "skew: 1 then, ", "ranks: 8 then, 2 now",
                      "save: none then, rows now", "recompute_h: true then, false now",
                      "backward_rows: 256 then, 0 now",
                      "only then  tiny forward another; tiny backward another",
                      "only now   tiny forward single; tiny backward single; "
                      "tiny,tokens=7 forward sequential"):
            self.assertIn(words, text)
        self.assertEqual(len(against["cases"]), 2)
        self.assertEqual(len(against["differences"]), 8)

    def test_names_some_of_many_that_are_only_in_one(self):
        file = self.measure()
        record = {k: v for k, v in file["records"][0].items() if k != "given"}
        file["records"] = [{**record, "shape": f"layer{i}"} for i in range(100)]
        self.scaled(file, 1)
        text, against = self.compare()
        self.assertEqual(against["only_earlier"],
                         [f"layer{i} forward {record['schedule']}" for i in range(100)])
        self.assertIn("; layer11 forward launch=separate,", text)
        self.assertIn("; and 88 more\n", text)
        self.assertIn("no case is in both", text)

    def test_a_preset_that_stands_for_another_schedule_is_still_compared(self):
        file = self.measure()
        for record in file["records"]:
            record["schedule"] = record["schedule"].replace("lag=1,", "lag=77,")
        self.scaled(file, 1)
        text, against = self.compare()
        self.assertEqual(len(against["cases"]), 8)
        self.assertIn("single (which stood for another one)", text)

    def test_refusals(self):
        def refuse(*words):
            self.refuse("bench", "--shape", "tiny", "--against", self.earlier,
                        words=("--against", *words))

        refuse("there is none")
        self.refuse("bench", "--fail-above", 5, words=("--fail-above", "--against"))
        file = self.measure()
        record = file["records"][0]
        for content, words in (
                ("", ["no JSON"]), ("[]", ["object"]), ("{}", ["schema"]),
                (json.dumps({**file, "schema": "uniep-run-1"}), ["uniep-run-1", "uniep-bench-1"]),
                (json.dumps({**file, "records": {}}), ["records"]),
                (json.dumps({**file, "records": [7]}), ["records[0]", "7"]),
                (json.dumps({**file, "records": [{**record, "ms": "fast"}]}), ["ms", "fast"]),
                (json.dumps({**file, "records": [{**record, "ms": 0}]}), ["records[0].ms", "0"]),
                (json.dumps({**file, "iterations": -1}), ["iterations", "-1"])):
            self.earlier.write_text(content)
            refuse(*words)
        self.earlier.unlink()
        with open(self.earlier, "wb") as large:
            large.truncate((64 << 20) + 1)
        refuse("67108864")
        self.refuse("bench", "--shape", "tiny", "--against", "/dev/zero", words=["/dev/zero"])
        self.earlier.write_text(json.dumps(file))
        self.refuse("bench", "--shape", "tiny", "--against", self.earlier, "--json", self.earlier,
                    words=["--json", "--against", "one file"])


class Sizes(ProgramTest):
    """What would not fit, or take for ever, is refused before it is begun."""

    def free_memory(self):
        with open("/proc/meminfo") as file:
            free, = (int(line.split()[1]) << 10 for line in file if line.startswith("MemAvail"))
        return free

    def test_memory(self):
        for command in ("run", "bench", "tune"):
            for shape in ("deepseek-v3,hidden=1048576,experts=65536",
                          "custom,tokens=67108864,hidden=64,intermediate=8,experts=64,topk=16"):
                done = self.refuse(command, "--shape", shape, "--ranks", 2,
                                   words=["memory", "are free", "are accepted"])
                self.assertEqual(done.stdout, "", shape)

    def test_memory_of_rows(self):
        """A layer that fits, whose rows do not: a token has 35 kB of them, and 0.4 kB itself."""
        tokens = min(self.free_memory() // 10000, 1 << 26)
        shape = f"custom,tokens={tokens},hidden=64,intermediate=512,experts=8,topk=16"
        for command in ("run", "bench", "tune"):
            done = self.refuse(command, "--shape", shape, "--ranks", 1, words=["memory", "free"])
            self.assertEqual(done.stdout, "")

    def test_routings_that_take_for_ever(self):
        for command in ("run", "bench", "tune", "simulate"):
            self.refuse(command, "--ranks", 2, "--shape",
                        "custom,tokens=262144,hidden=8,intermediate=8,experts=65536,topk=1",
                        words=["router logits", "too long", "are accepted"])

    def on_one_slow_cpu(self):
        """The environment of a machine that is as slow as can be."""
        cpus = os.sched_getaffinity(0)
        self.addCleanup(os.sched_setaffinity, 0, cpus)
        os.sched_setaffinity(0, {min(cpus)})
        return {"UNIEP_CPU_ISA": "portable"}

    def test_passes_that_take_for_ever(self):
        slow = self.on_one_slow_cpu()
        for command in (["run"], ["run", "--processes"], ["bench"], ["tune"]):
            done = self.refuse(*command, "--ranks", 2, "--shape",
                               "custom,tokens=10000,hidden=8192,intermediate=8192,experts=2,topk=1",
                               words=["minutes for each pass on 1 CPU", "at most 10", "accepted"],
                               **slow)
            self.assertEqual(done.stdout, "")

    def test_checks_that_take_for_ever_or_do_not_fit(self):
        # A pass of a minute, and a check of hours.
        shape = "custom,tokens=4096,hidden=4096,intermediate=4096,experts=8,topk=8"
        done = self.refuse("run", "--shape", shape, "--check",
                           words=["minutes for --check", "at most 60", "no --check"])
        self.assertEqual(done.stdout, "")
        # Three times the layer is a fifth of it, and 16 bytes for 2 are more than all.
        experts = 7 * self.free_memory() // 100 // (2 * 3 * 1024 * 1024)
        self.refuse("run", "--check", "--shape",
                    f"custom,tokens=1,hidden=1024,intermediate=1024,experts={experts},topk=1",
                    words=["memory for --check", "are free", "no --check"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
