"""uniep run: the same bytes whatever the ranks and the schedule (program.py); an argument names one
test class."""

import json
import re
import unittest

import layer_file
from program import PRESETS, TRACE, ProgramTest


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

    def test_hosts(self):
        probe = self.call("run", "--shape", "tiny,tokens=8", "--ranks", 2, "--hosts", 2)
        if "libfabric" in probe.stderr:
            self.skipTest(probe.stderr)
        layer, path = self.layer_path(29), self.folder / "out.safetensors"
        for groups in ([], ["--combine-groups", 2]):
            contents = set()
            for how in ([], ["--hosts", 2], ["--hosts", 4], ["--hosts", 2, "--processes"]):
                run = ("run", "--input", layer, "--ranks", 4, *groups, *how, "--output", path)
                text = self.succeed(*run)
                self.assertEqual("hosts" in text, how != [], text)
                contents.add(path.read_bytes())
            self.assertEqual(len(contents), 1, groups)
        run = ("run", "--input", layer, "--ranks", 4, "--hosts", 3)
        for how in ([], ["--processes"]):
            self.refuse(*run, *how, words=["number of hosts is 3 of 4 ranks", "divisor"])
        self.refuse("run", "--input", layer, "--hosts", 0, words=["--hosts"])
        self.refuse("run", "--input", layer, "--hosts", 65, words=["--hosts"])

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


if __name__ == "__main__":
    unittest.main(verbosity=2)
