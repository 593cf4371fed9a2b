"""The commands but those of tuning_commands_test.py (program.py); an argument names one test
class."""

import json
import os
import pty
import re
import struct
import subprocess
import unittest
import xml.etree.ElementTree
from pathlib import Path

import layer_file
from program import COMMANDS, PRESETS, PROGRAM, TRACE, ProgramTest


class SameBytes(ProgramTest):
    """--output has the same bytes whatever the ranks and the schedule."""

    def outputs(self, *args, ranks=(1, 2, 4, 8), schedules=PRESETS):
        first = None
        for n in ranks:
            for schedule in schedules:
                path = self.folder / "out.safetensors"
                self.succeed("run", *args, "--ranks", n, "--schedule", schedule, "--output", path)
                content = path.read_bytes()
                first = content if first is None else first
                self.assertEqual(content, first, f"{n} ranks, {schedule}")
        return layer_file.read(path)

    def test_shipped_trace(self):
        tensors = self.outputs("--input", TRACE)
        self.assertEqual(list(tensors), ["out", "dx", "dprobs", "dw1", "dw2"])
        self.assertEqual(tensors["dw1"][:2], ("BF16", [32, 256, 256]))

    def test_uneven_tokens(self):
        for tokens in (1, 3, 13):  # with 8 ranks: most have none, some have none, none has
            self.outputs("--input", self.layer_path(tokens))

    def test_no_tokens(self):
        tensors = self.outputs("--input", self.layer_path(0), ranks=(1, 2), schedules=["single"])
        self.assertEqual(set(tensors["dw1"][2]), {0})

    def test_main_grad(self):
        tensors = self.outputs("--input", self.layer_path(29), "--main-grad", "fp32")
        self.assertEqual(tensors["dw1"][0], "F32")
        self.assertEqual(tensors["out"][0], "BF16")

    def test_capacity_is_enough_or_names_what_is(self):
        layer = self.layer_path(29)
        words = ["capacity_rows is 128; capacity_rows="]
        done = self.refuse("run", "--input", layer, "--ranks", 2, "--capacity", 128, words=words)
        enough = int(re.search(r"capacity_rows=(\d+) would do", done.stderr).group(1))
        self.assertIn("PASSED", self.succeed("run", "--input", layer, "--ranks", 2, "--check",
                                             "--capacity", enough))

    def test_deferred_weights_have_the_same_bytes(self):
        path = self.folder / "out.safetensors"
        contents = set()
        for flags in ([], ["--defer-weights"]):
            self.succeed("run", "--input", self.layer_path(29), "--ranks", 2, *flags,
                         "--output", path)
            contents.add(path.read_bytes())
        self.assertEqual(len(contents), 1)

    def test_made_up_layer_of_one_size(self):
        # --shape counts tokens per rank; a batch is a function of its total.
        contents = set()
        for ranks in (1, 2, 4):
            path = self.folder / "out.safetensors"
            self.succeed("run", "--shape", f"tiny,tokens={64 // ranks}", "--seed", 7, "--skew", 1,
                         "--ranks", ranks, "--output", path)
            contents.add(path.read_bytes())
        self.assertEqual(len(contents), 1)

    def test_backward_alone_gives_the_same_as_both(self):
        contents = set()
        for direction in ("backward", "both"):
            path = self.folder / "out.safetensors"
            self.succeed("run", "--input", self.layer_path(20), "--pass", direction, "--ranks", 2,
                         "--output", path)
            contents.add(path.read_bytes())
        self.assertEqual(len(contents), 1)

    def test_forward_alone_writes_out_alone(self):
        layer = self.layer_path(20, with_dy=False)
        tensors = self.outputs("--input", layer, "--pass", "forward", ranks=(1, 2))
        self.assertEqual(list(tensors), ["out"])


class Reports(ProgramTest):
    def test_check_passes_on_the_trace(self):
        text = self.succeed("run", "--input", TRACE, "--ranks", 4, "--check")
        self.assertIn("# check PASSED: out dx dprobs dw1 dw2 are bitwise those of sequential", text)
        rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()
                if line.startswith("  ")}
        for tensor in ("out", "dx", "dprobs", "dw1", "dw2"):
            elements, wrong, distance, limit, verdict = rows[tensor]
            self.assertEqual((wrong, verdict), ("0", "ok"))
            self.assertLess(float(distance), float(limit))
            self.assertLess(float(limit), 6e-3)  # the contract's roundings alone

    def test_an_overflow_of_the_reference_is_a_verdict_of_its_own(self):
        layer = layer_file.layer(5)
        # Products of the largest finite bf16 overflow, and infinities of both signs are NaN.
        layer["x"] = ("BF16", [5, 16], struct.pack("<H", 0x7f7f) * 80)
        path, out, figures = (self.folder / name for name in ("layer", "out", "figures"))
        path.write_bytes(layer_file.serialized(layer))
        text = self.succeed("run", "--input", path, "--ranks", 2, "--check", "--output", out,
                            "--json", figures)
        self.assertIn("overflow, as the reference does", text)
        self.assertIn("not finite: out", text)
        self.assertIn("out", layer_file.read(out))
        check = json.loads(figures.read_text())["check"][0]
        self.assertTrue(check["ok"])
        self.assertGreater(check["overflows"], 0)
        self.assertEqual(check["wrong"], 0)

    def test_check_of_main_grad_and_of_forward(self):
        layer = self.layer_path(40)
        self.assertIn("PASSED", self.succeed("run", "--input", layer, "--main-grad", "fp32",
                                             "--ranks", 2, "--check"))
        self.assertIn("PASSED", self.succeed("run", "--input", layer, "--defer-weights",
                                             "--ranks", 2, "--check"))
        forward = self.succeed("run", "--input", layer, "--pass", "forward", "--check")
        self.assertIn("PASSED: out are", forward)
        self.assertNotIn("# backward", forward)

    def test_summary(self):
        text = self.succeed("run", "--input", TRACE, "--ranks", 4, "--repeat", 3)
        for words in ("# ranks     4, each with 512 tokens and 8 experts", "# schedule  launch=single,",
                      "min 84, median 244, max 558", "before deduplication", "# pushed", "# waiting",
                      "(min ", "4 steps gave the same bits"):
            self.assertIn(words, text)
        stages = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
        self.assertEqual(stages, ["dispatch", "fc1", "fc2", "reduce", "dispatch", "dfc2", "dfc1",
                                  "wgrad2", "wgrad1", "reduce"])

    def test_json(self):
        path = self.folder / "figures.json"
        self.succeed("run", "--input", TRACE, "--ranks", 2, "--schedule", "two-kernel",
                     "--repeat", 5, "--check", "--json", path)
        figures = json.loads(path.read_text())
        self.assertEqual(figures["schema"], "uniep-run-1")
        for key in ("version", "commit", "machine", "date", "command"):
            self.assertIsInstance(figures[key], str, key)
        self.assertTrue(figures["command"].startswith("uniep run --input "))
        self.assertEqual(figures["problem"], {"tokens": 2048, "hidden": 256, "intermediate": 128,
                                              "experts": 32, "topk": 4})
        self.assertEqual(sum(figures["load"]["rows_per_expert"]), figures["load"]["rows"])
        self.assertEqual([c["tensor"] for c in figures["check"]],
                         ["out", "dx", "dprobs", "dw1", "dw2"])
        records = figures["records"]
        self.assertEqual([r["direction"] for r in records if "pass" not in r],
                         ["forward", "backward"])
        for r in records:
            self.assertEqual((r["shape"], r["ranks"]), ("moe_lm_layer", 2))
            self.assertTrue(r["schedule"].startswith("launch=paired,"), r["schedule"])
            self.assertLessEqual(0, r["p10"])
            self.assertLessEqual(r["p10"], r["ms"])
            self.assertLessEqual(r["ms"], r["p90"])
            for key in ("baseline_ms", "floor_ms", "efficiency"):
                self.assertIsNone(r[key])
            self.assertEqual(r["wrong"], None if "pass" in r else 0)
        forward = records[0]
        self.assertLess(forward["pulled_bytes"], forward["pulled_bytes_no_dedup"])
        self.assertGreater(forward["pushed_bytes"], 0)

    def test_backend_is_a_name(self):
        backends = ["cpu"] + ["cuda"] * ("SMs, " in self.succeed("info"))  # where there is a GPU
        for backend in backends:
            path = self.folder / "figures.json"
            self.succeed("run", "--shape", "small", "--backend", backend, "--json", path)
            figures = json.loads(path.read_text())
            self.assertEqual(figures["backend"], backend)
            self.assertRegex(figures["machine"], "^1 x NVIDIA .* kernels$" if backend == "cuda" else
                             r"^(?!1 x ).* kernels$")

    def test_json_without_check_claims_nothing(self):
        path = self.folder / "figures.json"
        self.succeed("run", "--shape", "tiny", "--json", path)
        figures = json.loads(path.read_text())
        self.assertIsNone(figures["check"])
        self.assertTrue(all(r["wrong"] is None for r in figures["records"]))

    def test_one_rank_moves_nothing(self):
        path = self.folder / "figures.json"
        self.succeed("run", "--shape", "tiny", "--json", path)
        forward = json.loads(path.read_text())["records"][0]
        self.assertEqual((forward["pulled_bytes"], forward["pushed_bytes"]), (0, 0))

    def test_timeline_and_plot(self):
        trace, plot = self.folder / "step.json", self.folder / "step.svg"
        text = self.succeed("run", "--input", TRACE, "--ranks", 2, "--schedule", "workers=2",
                            "--repeat", 2, "--trace", trace, "--plot", plot)
        lines = text.splitlines()
        self.assertTrue(lines[-2].startswith("# timeline") and str(trace) in lines[-2], lines[-2])
        self.assertTrue(lines[-1].startswith("# plot") and str(plot) in lines[-1], lines[-1])
        self.check_slices(json.loads(trace.read_text()), text)
        self.check_time_shares(text)
        root = xml.etree.ElementTree.parse(plot).getroot()
        self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")
        texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
        for word in ("Load per expert", "Time per stage", "Timeline", "rank 1", "dfc2"):
            self.assertIn(word, texts)

    def check_time_shares(self, text):
        """Of each direction: its stages, waiting and idleness are all of its time."""
        for summary in text.split("\n# forward\n")[1].split("\n# backward\n"):
            lines = summary.splitlines()
            shares = [float(line.split()[-1]) for line in lines if line.startswith("  ")]
            rest, = (line for line in lines if line.startswith("# time share"))
            shares += [float(n) for n in re.findall(r"([\d.]+) %", rest)]
            self.assertAlmostEqual(sum(shares), 100, delta=0.05 * len(shares))
            for key in ("exposed", "tail"):
                line, = (line for line in lines if line.startswith("# " + key))
                self.assertGreaterEqual(float(line.split()[2]), 0)

    def check_slices(self, file, summary):
        slices = [e for e in file["traceEvents"] if e["ph"] == "X"]
        # On a busy machine one worker may have been too late for any task.
        self.assertLessEqual({(e["pid"], e["tid"]) for e in slices},
                             {(0, 0), (0, 1), (1, 0), (1, 1)})
        self.assertEqual({e["pid"] for e in slices}, {0, 1})
        first = min(e["ts"] for e in slices)  # not 0 where the wait before it is too short to show
        self.assertTrue(0 <= first < 1, first)
        self.assertTrue(all(e["dur"] >= 0 for e in slices))
        self.assertTrue(any(e["name"] == "wait" for e in slices))
        # The last step alone: as many slices as the summary counts tasks.
        tasks = [e for e in slices if e["name"] not in ("wait", "link")]
        counted = sum(int(line.split()[1]) for line in summary.splitlines() if line.startswith("  "))
        self.assertEqual(len(tasks), counted)

    def test_emulated_link_is_named_and_waited_for(self):
        trace = self.folder / "step.json"
        text = self.succeed("run", "--input", TRACE, "--ranks", 2, "--pass", "forward",
                            "--trace", trace, UNIEP_CPU_LINK_GBPS="1")
        self.assertIn("# link      emulated, 1 GB/s and 5 us", text)
        names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
        self.assertIn("link", names)

    def test_info_states_the_memory_of_a_layer(self):
        def total(*args):
            rows = [line.split() for line in
                    self.succeed("info", "--shape", "small", *args).splitlines()
                    if line.startswith("  ")]
            sizes = [next(int(word) for word in row if word.isdigit()) for row in rows]
            self.assertEqual(rows[-1][0], "total")
            self.assertEqual(sum(sizes[:-1]), sizes[-1])
            return sizes[-1]
        self.assertLess(total("--ranks", 2, "--capacity", 1024), total("--ranks", 2))
        def capacity(*args):
            text = self.succeed("info", "--shape", *args)
            return next(line for line in text.splitlines() if line.startswith("# capacity"))
        self.assertIn(" 131072 rows a rank;",
                      capacity("deepseek-v3", "--ranks", 4, "--capacity", 131072))
        self.assertIn(f" {2 * 65536 + 64 * 127} rows a rank; a balanced routing fills 65536 and",
                      capacity("deepseek-v3", "--ranks", 4))
        self.assertIn(" rows a rank, enough for any routing;", capacity("tiny", "--ranks", 4))
        self.refuse("info", "--ranks", 2, words=["--shape"])
        self.refuse("info", "--shape", "tiny", "--ranks", 7, words=["num_experts"])
        self.refuse("info", "--shape", "tiny,experts=128", "--ranks", 128, words=["--ranks", "1 to 64"])

    def test_info(self):
        text = self.succeed("info")
        for word in ("version", "compiler", "pipelined:n", "tile_m", "UNIEP_TIMEOUT_MS", "kernels"):
            self.assertIn(word, text)
        self.assertRegex(text, r"backends +cpu(; cuda: not in this build|, cuda \(Hopper GPUs; .*\))\n")
        self.assertRegex(text, r"\n  cuda: launch=single,.*,tile_m=128,")
        self.assertRegex(text, r"\n  tile_m +16\.\.128 \(2\^n\) +64 +128 +compile ")

    def test_help_and_docs_have_the_same_flags(self):
        docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
        for command in COMMANDS:
            text = self.succeed(command, "--help")
            self.assertIn("Usage: uniep " + command, text)
            flags = set(re.findall(r"^ +(?:-\w,)?(--[\w-]+)", text, re.MULTILINE)) - {"--help"}
            section = docs.split(f"\n## uniep {command}\n")[1].split("\n## ")[0]
            cells = re.findall(r"^\| (`--.*?) \|", section, re.MULTILINE)
            tabled = set(re.findall(r"`(--[\w-]+)", " ".join(cells)))
            if command in ("info", "validate"):  # too few for a table
                tabled = {flag for flag in flags if f"{flag} " in section or f"`{flag}`" in section}
            self.assertEqual(flags, tabled, command)

    def test_help(self):
        self.assertIn(", ".join(COMMANDS), self.refuse("dance").stderr)
        for command in COMMANDS:
            self.assertIn(f"\n  {command} ", self.succeed("--help"))
        self.assertIn("Examples:", self.succeed("run", "--help"))
        self.assertRegex(self.succeed("--version"), r"^\d+\.\d+\.\d+ \(")


class Bench(ProgramTest):
    FORWARD = ["all", "dispatch", "fc1", "fc2", "reduce"]
    BACKWARD = ["all", "dispatch", "dfc2", "dfc1", "wgrad2", "wgrad1", "reduce"]

    def rows(self, text):
        return [line.split() for line in text.splitlines() if line.startswith("  ")]

    def test_table(self):
        text = self.succeed("bench", "--iterations", 2, "--warmup", 1)
        self.assertIn("# check PASSED: 0 of", text)
        for words in ("# uniep ", "# machine ", "# command ", "# schedule 0  launch=single,"):
            self.assertIn(words, text)
        rows = self.rows(text)
        self.assertEqual([r[:3] for r in rows],
                         [[shape, direction, stage] for shape in ("tiny", "small")
                          for direction, stages in (("forward", self.FORWARD),
                                                    ("backward", self.BACKWARD))
                          for stage in stages])
        for row in rows:
            self.assertEqual(len(row), 12, row)
            ms, p10, p90 = map(float, row[4:7])
            self.assertTrue(0 <= p10 <= ms <= p90, row)
            self.assertEqual(row[11], "0" if row[2] == "all" else "-")
            self.assertEqual(row[9:11], ["-", "-"])  # a CPU has no floor

    def test_schedules_side_by_side(self):
        text = self.succeed("bench", "--shape", "tiny", "tiny,tokens=7", "--ranks", 4, "--skew", 1,
                            "--schedule", "sequential", "single,tile_m=32", "--pass", "forward",
                            "--iterations", 1)
        self.assertEqual([r[3] for r in self.rows(text)], 2 * (5 * ["0"] + 5 * ["1"]))
        self.assertIn("# schedule 1  launch=single,", text)

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
            self.assertEqual(r["gbps"] is None,
                             r["direction"] not in ("forward", "backward", "dispatch", "fc2", "dfc1"))

    def test_without_check_nothing_is_claimed(self):
        path = self.folder / "bench.json"
        text = self.succeed("bench", "--shape", "tiny", "--no-check", "--iterations", 1,
                            "--json", path)
        self.assertIn("# done: not checked", text)
        self.assertIsNone(json.loads(path.read_text())["records"][0]["wrong"])
        self.assertTrue(all(r[11] == "-" for r in self.rows(text)))

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
        if "cuda: not in this build" in self.succeed("info"):
            self.refuse("bench", "--backend", "cuda", words=["no CUDA backend"])
        else:
            self.refuse("bench", "--backend", "cuda", "--ranks", 3, words=["experts", "3 ranks"])


class Errors(ProgramTest):
    def test_arguments(self):
        self.refuse(words=["subcommand"])
        self.refuse("dance", words=["'dance'", ", ".join(COMMANDS)])
        self.refuse("run", words=["--input", "--shape"])
        self.refuse("run", "--input", TRACE, "--shape", "tiny", words=["two layers"])
        self.refuse("run", "--shape", "tiny", "--loudly", words=["--loudly"])
        self.refuse("run", "--shape", "tiny", "--ranks", 0, words=["--ranks", "'0'", "1 to 64"])
        self.refuse("run", "--shape", "tiny", "--ranks", "two", words=["'two'"])
        self.refuse("run", "--shape", "tiny", "--repeat", 0, words=["--repeat"])
        for seed in (-1, 2**63, 2**64, "0x2", "1 "):
            self.refuse("run", "--shape", "tiny", "--seed", seed,
                        words=["--seed", f"'{seed}'", f"0 to {2**63 - 1}"])
        self.refuse("run", "--shape", "tiny", "--skew", "nan", words=["--skew", "0 to 100"])
        self.refuse("run", "--shape", "tiny", "--pass", "sideways", words=["sideways", "forward"])
        self.refuse("run", "--input", TRACE, "--seed", 1, words=["--seed", "--shape"])
        if "cuda: not in this build" in self.succeed("info"):
            self.refuse("run", "--shape", "tiny", "--backend", "cuda", words=["no CUDA backend"])
        self.refuse("run", "--shape", "gigantic", words=["gigantic", "tiny"])
        self.refuse("run", "--shape", "tiny", "--schedule", "best", words=["best", "sequential"])
        self.refuse("run", "--shape", "tiny", "--schedule", "tile_m=48", words=["tile_m", 48])

    def test_a_forward_pass_has_no_weight_gradients(self):
        for option in (["--defer-weights"], ["--main-grad", "fp32"]):
            self.refuse("run", "--shape", "tiny", "--pass", "forward", *option,
                        words=[" ".join(option), "--pass forward", "backward or both"])
            self.succeed("run", "--shape", "tiny", "--pass", "backward", *option)

    def test_experts_that_do_not_divide(self):
        self.refuse("run", "--input", TRACE, "--ranks", 3, words=["32 experts", "3 ranks"])

    def test_a_layer_without_dy(self):
        layer = self.layer_path(4, with_dy=False)
        self.refuse("run", "--input", layer, words=["dy", "--pass forward"])

    def test_input_files(self):
        self.refuse("run", "--input", self.folder / "none", words=["none"])
        self.refuse("run", "--input", self.folder, words=["directory"])
        self.refuse("run", "--input", __file__, words=["command_line_test.py"])

    def test_output_files_are_refused_before_the_work(self):
        for option in ("--output", "--trace", "--plot", "--json"):
            done = self.refuse("run", "--shape", "tiny", option, self.folder / "no" / "file",
                               words=[option, "folder"])
            self.assertEqual(done.stdout, "")
            self.refuse("run", "--shape", "tiny", option, self.folder, words=[option, "directory"])

    def test_two_outputs_need_two_files(self):
        path = self.folder / "both"
        done = self.refuse("run", "--shape", "tiny", "--output", path, "--json",
                           self.folder / "." / "both", words=["--output", "--json", "a file for each"])
        self.assertEqual(done.stdout, "")
        self.assertFalse(path.exists())
        self.succeed("run", "--shape", "tiny", "--json", "/dev/null", "--plot", "/dev/null")

    def test_a_full_disk(self):
        self.refuse("run", "--shape", "tiny", "--json", "/dev/full", words=["/dev/full"])
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output", done.stderr)

    def test_a_layer_larger_than_memory(self):
        self.refuse("run", "--shape", "deepseek-v3,hidden=1048576,experts=65536", words=["memory"])

    def test_environment(self):
        self.refuse("run", "--shape", "tiny", words=["UNIEP_TIMEOUT_MS", "soon"],
                    UNIEP_TIMEOUT_MS="soon")
        self.refuse("run", "--shape", "tiny", words=["UNIEP_CPU_ISA"], UNIEP_CPU_ISA="mmx")

    def test_a_wait_that_expires_fails_the_run(self):
        done = self.refuse("run", "--shape", "tiny", "--ranks", 2, code=1,
                           words=["rank", "stage", "tile", "expected", "seen"],
                           UNIEP_TIMEOUT_MS="50", UNIEP_CPU_LINK_GBPS="1",
                           UNIEP_CPU_LINK_LATENCY_US="1000000")
        self.assertNotIn("done", done.stdout)


class Validate(ProgramTest):
    def broken(self, content, *words):
        path = self.folder / "broken.safetensors"
        path.write_bytes(content)
        done = self.refuse("validate", path, words=["cannot be used"])
        for word in words:
            self.assertIn(word, done.stdout)
        self.refuse("run", "--input", path)

    def test_good_files(self):
        self.assertIn("is good", self.succeed("validate", TRACE))
        self.assertIn("2048", self.succeed("validate", TRACE))
        self.assertNotIn("forward", self.succeed("validate", self.layer_path(5)))

    def test_a_layer_without_dy_is_good_for_a_forward_pass(self):
        layer = self.layer_path(5, with_dy=False)
        self.assertIn("is good for a forward pass (uniep run --pass forward): it has no tensor dy",
                      self.succeed("validate", layer))
        self.refuse("run", "--input", layer, words=["dy"])
        self.succeed("run", "--input", layer, "--pass", "forward")
        empty = self.layer_path(0, with_dy=False)  # whose dy has no numbers
        self.assertNotIn("forward", self.succeed("validate", empty))
        self.succeed("run", "--input", empty)

    def test_truncated_anywhere(self):
        content = layer_file.serialized(layer_file.layer(5))
        for size in (0, 7, 8, 100, len(content) - 1):
            self.broken(content[:size])

    def test_more_experts_than_a_layer_can_have(self):
        experts = 65544
        tensors = layer_file.layer(1)
        tensors["w1"] = ("BF16", [experts, 16, 16], bytes(experts * 16 * 16 * 2))
        tensors["w2"] = ("BF16", [experts, 16, 8], bytes(experts * 16 * 8 * 2))
        self.broken(layer_file.serialized(tensors), f"E is {experts}", "1 to 65536 is accepted")

    def test_headers(self):
        tensors = layer_file.layer(5)
        self.broken(layer_file.serialized(tensors, header_text="{not json"))
        self.broken(layer_file.serialized(tensors, header_text="[]"))
        self.broken(struct.pack("<Q", 2**63) + b"{}")

    def test_tensors(self):
        for name in ("x", "topk_ids", "topk_probs", "w1", "w2"):
            tensors = layer_file.layer(5)
            del tensors[name]
            self.broken(layer_file.serialized(tensors), name)
        tensors = layer_file.layer(5)
        dtype, _, content = tensors["x"]
        self.broken(layer_file.serialized({**tensors, "x": (dtype, [10, 8], content)}), "x")

    def test_values_and_all_findings(self):
        tensors = layer_file.layer(5)
        ids = layer_file.i32([0, 1, 2, 99, 4, 5, 6, -7, 0, 1])
        probs = layer_file.f32([0.5] * 9 + [float("nan")])
        tensors["topk_ids"] = ("I32", [5, 2], ids)
        tensors["topk_probs"] = ("F32", [5, 2], probs)
        self.broken(layer_file.serialized(tensors), "99", "-7", "topk_probs")


class Terminal(ProgramTest):
    """A progress bar is for people: on a terminal, and only when there is something to wait for."""

    def errors_on_a_terminal(self, *args, **environment):
        try:
            ours, theirs = pty.openpty()
        except OSError as error:  # some containers have no /dev/pts
            self.skipTest(f"no terminal to be had: {error}")
        with subprocess.Popen([PROGRAM, *map(str, args)], stdout=subprocess.DEVNULL, stderr=theirs,
                              env={**os.environ, **environment}) as process:
            os.close(theirs)
            text = b""
            while True:
                try:
                    chunk = os.read(ours, 4096)
                except OSError:  # how Linux says that the other end has been closed
                    break
                if not chunk:
                    break
                text += chunk
            os.close(ours)
            self.assertEqual(process.wait(), 0)
        return text.decode()

    def test_long_work_shows_a_bar_and_erases_it(self):
        text = self.errors_on_a_terminal("run", "--input", TRACE, "--ranks", 2, "--pass", "forward",
                                         "--repeat", 3, UNIEP_CPU_LINK_GBPS="0.0015")
        self.assertIn("running 2 ranks", text)
        self.assertIn("%", text)
        self.assertTrue(text.endswith("\r\x1b[K"), repr(text[-40:]))

    def test_short_work_shows_nothing(self):
        self.assertEqual(self.errors_on_a_terminal("run", "--shape", "tiny"), "")


if __name__ == "__main__":
    unittest.main(verbosity=2)
