"""What uniep run, info and --help print and write (program.py); an argument names one test class."""

import json
import re
import struct
import unittest
import xml.etree.ElementTree
from pathlib import Path

import layer_file
from program import COMMANDS, TRACE, ProgramTest, unfolded


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

    def test_shared_experts_are_none_of_the_load(self):
        path = self.folder / "figures.json"
        loads = []
        for more in ([], ["--shared-experts", 2], ["--shared-experts", 2, "--processes"]):
            self.succeed("run", "--shape", "tiny", "--ranks", 2, "--json", path, *more)
            loads.append(json.loads(path.read_text())["load"]["rows_per_expert"])
        self.assertEqual(len(loads[0]), 8)
        self.assertEqual(loads[1:], loads[:1] * 2)

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
                                              "experts": 32, "topk": 4, "activation": "swiglu",
                                              "probs": "before", "bias": False,
                                              "combine_groups": 1, "combine_partials": "fp32",
                                              "shared_experts": 0, "shared_gate": False})
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

    def test_tokens_of_a_rank_and_of_all(self):
        text = unfolded(self.succeed("run", "--shape", "tiny,tokens=48", "--ranks", 2))
        self.assertIn(": 48 tokens a rank, 96 in all, hidden 64,", text)
        text = unfolded(self.succeed("run", "--shape", "tiny,tokens=1"))
        self.assertIn(": 1 token, hidden 64,", text)

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
        def balanced(*args):
            text = unfolded(self.succeed("info", "--shape", *args))
            sizes = re.findall(r" (saved|backward|total) +(\S+) GB",
                               text.split("rows of a balanced routing take")[1])
            return {what: float(size) for what, size in sizes}
        rows = 8192 * 8  # a multiple of 128 for each of 64 experts
        self.assertEqual(balanced("deepseek-v3", "--ranks", 4)["saved"],
                         round(rows * (2 * 7168 + 4 * 2048 + 4) * 1e-9, 2))
        wide = balanced("deepseek-v3", "--ranks", 4, "--capacity", 2 * rows)
        tight = balanced("deepseek-v3", "--ranks", 4, "--capacity", rows)
        self.assertEqual(wide, {**tight, "total": wide["total"]})
        text = self.succeed("info", "--shape", "deepseek-v3", "--ranks", 4, "--capacity", rows)
        self.assertIn(f"{tight['backward']:.2f} GB\n", text.split("rows of backward")[1])
        self.assertIn(f"{tight['total']:.2f} GB\n", text.split("  total ")[1])
        text = unfolded(self.succeed("info", "--shape", "deepseek-v3", "--ranks", 4))
        self.assertIn(f"in a row pool: pages of {128 * (2 * 7168 + 4 * 2048 + 4) + 4} bytes, each of "
                      f"128 rows; a balanced routing takes {rows // 128} of them", text)
        text = unfolded(self.succeed("info", "--shape", "deepseek-v3", "--save", "tokens"))
        self.assertIn("each of 128 rows or 73 tokens;", text)
        text = unfolded(self.succeed("info", "--shape", "deepseek-v3", "--save", "tokens",
                                     "--recompute-h"))
        self.assertIn("each of 128 rows and 8 tokens;", text)

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
        self.assertRegex(text, r"\n  cuda: launch=single,[^#]*[ ,]tile_m=128,")
        self.assertRegex(text, r"\n  tile_m +16\.\.128 \(2\^n\) +64, 128 +compile +64, 128\n")

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


if __name__ == "__main__":
    unittest.main(verbosity=2)
