"""The commands but those of bench_command_test.py and tuning_commands_test.py (program.py); an
argument names one test class."""

import json
import os
import re
import struct
import subprocess
import unittest
import xml.etree.ElementTree
from pathlib import Path

import layer_file
from program import COMMANDS, PRESETS, PROGRAM, TRACE, ProgramTest, unfolded


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

    def test_a_row_pool_has_the_same_bytes_or_names_what_would_do(self):
        layer, path = self.layer_path(29), self.folder / "out.safetensors"
        run = ("run", "--input", layer, "--ranks", 2, "--output", path)
        contents = set()
        for pool in ([], ["--row-pool", 1 << 24]):
            for kept in ([], ["--save", "tokens"], ["--save", "none", "--defer-weights"]):
                text = self.succeed(*run, *pool, *kept)
                contents.add(path.read_bytes())
                found = re.search(r"row pool +a rank held at most (\d+) of its (\d+) pages", text)
                self.assertEqual(found is not None, pool != [])
                if found:
                    self.assertTrue(0 < int(found[1]) < int(found[2]))
        self.assertEqual(len(contents), 1)
        figures = self.folder / "run.json"
        self.succeed(*run, "--row-pool", 1 << 24, "--json", figures)
        pool = json.loads(figures.read_text())["row_pool"]
        needed = pool["most_pages_held"]
        words = [f"would save {needed} pages, but 0 of the {needed - 1} pages", "would do for this"]
        done = self.refuse(*run, "--row-pool", needed * pool["page_bytes"] - 1, words=words)
        enough = re.search(r"(\d+) bytes \(\d+ pages?\) would do", done.stderr)[1]
        text = self.succeed(*run, "--row-pool", enough, "--check", "--json", figures)
        self.assertIn("PASSED", text)
        pool = json.loads(figures.read_text())["row_pool"]
        self.assertIn(f'{pool["most_pages_held"]} of its {pool["pages"]} pages', text)
        self.assertLessEqual(pool["pages"] * pool["page_bytes"], int(enough))
        self.refuse(*run, "--row-pool", 10, words=["a row pool of 10 bytes has no page"])
        self.refuse(*run, "--row-pool", 0, words=["--row-pool"])

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

    def test_dropped_slots(self):
        shape = ("--shape", "tiny", "--dropped", 0.4)
        layer, out = self.folder / "layer.safetensors", self.folder / "out.safetensors"
        contents = set()
        for ranks, schedule in ((1, "sequential"), (2, "single"), (4, "pipelined:4")):
            self.succeed("run", "--shape", f"tiny,tokens={64 // ranks}", "--dropped", 0.4,
                         "--ranks", ranks, "--schedule", schedule, "--check", "--output", out)
            contents.add(out.read_bytes())
        self.assertEqual(len(contents), 1)
        text = self.succeed("run", *shape, "--save-input", layer, "--output", out)
        self.assertIn("dropped=0.4", text)
        self.assertIn(out.read_bytes(), contents)
        dropped = re.search(r"; (\d+) dropped slots", self.succeed("validate", layer))
        self.assertTrue(30 < int(dropped.group(1)) < 75, dropped)  # of 128
        self.succeed("run", "--shape", "tiny", "--dropped", 1, "--ranks", 2, "--check",
                     "--output", out)
        self.assertNotIn(out.read_bytes(), contents)

    def test_a_saved_layer_gives_the_bytes_of_the_one_made_up(self):
        layer, out = self.folder / "layer.safetensors", self.folder / "out.safetensors"
        shape = ["--shape", "tiny,tokens=21", "--seed", 5, "--skew", 1, "--ranks", 2]
        for flags in (["--pass", "forward"], ["--main-grad", "fp32"], []):
            text = self.succeed("run", *shape, *flags, "--save-input", layer, "--output", out)
            self.assertIn(f"# layer    {layer}\n", text)
            made_up = out.read_bytes()
            self.succeed("run", "--input", layer, *flags, "--output", out)
            self.assertEqual(out.read_bytes(), made_up)
        self.assertIn("is good", self.succeed("validate", layer))
        again = self.folder / "again.safetensors"
        self.succeed("run", "--input", layer, "--save-input", again)
        self.assertEqual(again.read_bytes(), layer.read_bytes())

    def test_a_saved_layer_is_there_although_its_pass_fails(self):
        layer = self.folder / "layer.safetensors"
        self.refuse("run", "--shape", "tiny", "--ranks", 2, "--save-input", layer, code=1,
                    UNIEP_TIMEOUT_MS="50", UNIEP_CPU_LINK_GBPS="1",
                    UNIEP_CPU_LINK_LATENCY_US="1000000")
        self.assertIn("is good", self.succeed("validate", layer))

    def test_more_slots_than_experts(self):
        """Every command takes such a layer, as the API does."""
        shape = ("--shape", "custom,tokens=12,hidden=16,intermediate=16,experts=2,topk=5")
        layer = self.folder / "layer.safetensors"
        text = self.succeed("run", *shape, "--check", "--ranks", 2, "--save-input", layer)
        self.assertIn("# check PASSED", text)
        self.assertIn("72 dropped slots", self.succeed("validate", layer))  # 24 tokens, 3 each
        self.outputs("--input", layer, ranks=(1, 2))
        for command in (["bench", "--iterations", 1], ["simulate", "--ranks", 2], ["info"],
                        ["tune", "--budget", 3, "--candidates", 1, "--profile", "none"]):
            self.succeed(*command, *shape, UNIEP_TUNE_CACHE=str(self.folder / "tuned.json"))

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
                                              "experts": 32, "topk": 4, "activation": "swiglu",
                                              "probs": "before", "bias": False,
                                              "combine_groups": 1, "combine_partials": "fp32"})
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
        self.refuse("run", "--shape", "tiny", "--dropped", 1.5, words=["--dropped", "0 to 1"])
        self.refuse("run", "--input", TRACE, "--dropped", 0.5, words=["--dropped", "--shape"])
        self.refuse("run", "--shape", "tiny", "--pass", "sideways", words=["sideways", "forward"])
        self.refuse("run", "--input", TRACE, "--seed", 1, words=["--seed", "--shape"])
        if "cuda: not in this build" in self.succeed("info"):
            self.refuse("run", "--shape", "tiny", "--backend", "cuda", words=["no CUDA backend"])
        self.refuse("run", "--shape", "gigantic", words=["gigantic", "tiny"])
        self.refuse("run", "--shape", "tiny", "--schedule", "best", words=["best", "sequential"])
        self.refuse("run", "--shape", "tiny", "--schedule", "tile_m=48", words=["tile_m", 48])

    def test_a_mistyped_flag_is_named_first_with_the_nearest(self):
        for args, wrong, near in ((["run", "--schedul", "a", "b"], "--schedul", "--schedule"),
                                  (["simulate", "--shap=tiny"], "--shap", "--shape"),
                                  (["run", "stray", "-ranks", 2], "-ranks", "--ranks"),
                                  (["bench", "--iteratoins", 2], "--iteratoins", "--iterations")):
            done = self.refuse(*args, words=[f"{near} is the nearest", f"uniep {args[0]} --help"])
            self.assertIn(f": there is no {wrong};", done.stderr)
        done = self.refuse("run", "--shape", "tiny", "--loudly", words=["there is no --loudly"])
        self.assertNotIn("nearest", done.stderr)
        self.refuse("rnu", words=["'rnu'", "run is the nearest", ", ".join(COMMANDS)])
        self.refuse("--version-of", "run", words=["there is no --version-of"])
        self.refuse("run", "--shape", "tiny", "--pass", "forwrad", words=["forward is the nearest"])

    def test_the_nearest_value_is_named_once(self):
        for args, wrong, near in ((["--shape", "tyni"], "tyni", "tiny"),
                                  (["--shape", "tiny,tokns=4"], "tokns", "tokens"),
                                  (["--shape", "tiny", "--schedule", "sinlge"], "sinlge", "single"),
                                  (["--shape", "tiny", "--schedule", "piplined:4"], "piplined:4",
                                   "pipelined"),
                                  (["--shape", "tiny", "--schedule", "tile_k=4"], "tile_k",
                                   "tile_m"),
                                  (["--shape", "tiny", "--schedule", "rotate=own-frist"],
                                   "own-frist", "own-first")):
            done = self.refuse("run", *args, words=[f"; {near} is the nearest; "])
            self.assertEqual(done.stderr.count(f"'{wrong}'"), 1, done.stderr)
        for args in (["--shape", "gigantic"], ["--shape", "tiny", "--schedule", "best"]):
            self.assertNotIn("nearest", self.refuse("run", *args).stderr)

    def test_what_a_subcommand_needs_is_named(self):
        for args, words in ((["compare"], "two files are needed: uniep compare A B"),
                            (["compare", TRACE], "two files are needed: uniep compare A B"),
                            (["validate"], "a file is needed: uniep validate FILE"),
                            (["cache"], "list or clear is needed"),
                            (["completion"], "bash or zsh is needed"),
                            (["simulate"], "--shape is required")):
            self.refuse(*args, words=[words])

    def test_stray_arguments_are_named_in_the_order_given(self):
        self.refuse("run", "--shape", "tiny", "b", "a", "c", words=["'b', 'a', 'c'"])
        done = self.refuse("run", *(f"word{i}" for i in range(500)), words=["'word0', 'word1'"])
        self.assertLess(len(done.stderr), 300)

    def test_long_values_are_cut(self):
        long = "".join(f"{i}-" for i in range(1000))
        for args in (["run", "--shape", long], ["run", "--shape", "tiny," + long],
                     ["run", "--shape", "tiny,tokens=" + long], ["bench", "--ranks", long],
                     ["run", "--shape", "tiny", "--schedule", long], [long], ["run", long],
                     ["run", "--shape", "tiny", "--schedule", f"tile_m={long}"],
                     ["run", "--" + long],
                     ["run", "--input", long], ["validate", long], ["tune", "--space", long],
                     ["run", "--shape", "tiny", "--output", f"/none/{long}"],
                     ["run", "--shape", "tiny", "--pass", long], ["simulate", "--profile", long],
                     ["run", "--shape", "tiny", f"--check={long}"]):
            done = self.call(*args)
            self.assertEqual(done.returncode, 2, args[:3])
            line = done.stderr
            self.assertLess(len(line), 700, line)
            self.assertTrue("..." in line or long[:60] not in line, line)
        done = self.refuse("run", "--shape", "tiny", UNIEP_TIMEOUT_MS=long, words=["..."])
        self.assertLess(len(done.stderr), 300)

    def test_a_flag_takes_no_value(self):
        for value in ("maybe", "0", "0x", "-1", "false"):
            self.refuse("run", "--shape", "tiny", f"--check={value}",
                        words=["--check takes no value"])

    def test_a_value_is_said_to_be_missing_or_one_too_many(self):
        self.refuse("run", "--ranks", words=["--ranks has no value"])
        self.refuse("run", "--shape", "tiny", "--seed", 1, "--seed", 2,
                    words=["--seed is given more than once"])

    def test_unknown_variables_are_warned_of_once(self):
        unknown = {"UNIEP_TIMEOUT": "3", "UNIEP_CPU_LINK_GPS": "1", "UNIEP_SOMETHING_ELSE": "x"}
        for args in (["run", "--shape", "tiny"], ["validate", TRACE],
                     ["run", "--shape", "tiny", "--ranks", 4, "--processes"]):
            done = self.call(*args, **unknown)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            for words in (f"uniep {args[0]}: warning: ",
                          "UNIEP_TIMEOUT (nearest: UNIEP_TIMEOUT_MS)",
                          "UNIEP_CPU_LINK_GPS (nearest: UNIEP_CPU_LINK_GBPS)",
                          " UNIEP_SOMETHING_ELSE,"):
                self.assertIn(words, done.stderr)
        self.assertIn("UNIEP_TIMEOUT (nearest: UNIEP_TIMEOUT_MS)",
                      self.call("info", **unknown).stdout)
        self.assertNotIn("read by nothing", self.succeed("info"))
        self.succeed("info", UNIEP_TIMEOUT="", RANK="1")  # an empty one counts as unset

    def test_what_this_repository_sets_is_no_unknown_variable(self):
        folder = Path(__file__).parents[2]
        files = [path for part in ("tests", "benchmarks", "scripts", "python", "examples")
                 for path in (folder / part).rglob("*")
                 if path.suffix in (".py", ".sh", ".cpp", ".h") or path.name == "CMakeLists.txt"]
        reads = re.compile(r"""(?:environ\[|environ\.get\(|environ\.setdefault\(|getenv\(|"""
                           r"""ScopedEnv \w+\()["'](UNIEP_\w+)|\$\{?(UNIEP_[A-Z_]+):?-|"""
                           r"""["; ](UNIEP_[A-Z_]+)=[$1]""")
        made_up = (Path(__file__).name, "env_test.cpp")
        names = {name for path in files if path.name not in made_up
                 for found in reads.findall(path.read_text()) for name in found if name}
        self.assertLess({"UNIEP_TEST_CASES", "UNIEP_PROGRAM", "UNIEP_FUZZ_CXX", "UNIEP_OVERLAP"},
                        names)
        self.succeed("validate", TRACE, **dict.fromkeys(names - {"UNIEP_PROGRAM"}, "1"))

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
        for option in ("--save-input", "--output", "--trace", "--plot", "--json"):
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
        done = self.call("validate", path)
        self.assertEqual(done.returncode, 2)
        reasons = done.stderr.splitlines()
        self.assertTrue(all(reason.startswith("uniep validate: ") for reason in reasons), reasons)
        self.assertIn(f"cannot be used, for {len(reasons)} reason", done.stdout)
        for word in words:
            self.assertIn(word, done.stderr)
        self.refuse("run", "--input", path, words=[reasons[0].removeprefix("uniep validate: ")])
        return reasons

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
        reasons = self.broken(layer_file.serialized(tensors), "99", "-7", "topk_probs")
        self.assertEqual(len(reasons), 3)

    def test_the_summary_is_apart_from_the_reasons(self):
        tensors = layer_file.layer(5)
        tensors["topk_ids"] = ("I32", [5, 2], layer_file.i32([99] + [0] * 9))
        path = self.folder / "layer"
        path.write_bytes(layer_file.serialized(tensors))
        done = self.call("validate", path)
        self.assertIn("T=5 ", done.stdout)
        self.assertNotIn("99", done.stdout)
        self.assertEqual(done.stderr.count("\n"), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
