"""--activation, --probs, --bias and --combine-groups (program.py); an argument names one test class."""

import json
import unittest

import layer_file
from program import ProgramTest, unfolded

ACTIVATIONS = ["swiglu", "geglu", "geglu_tanh", "reglu", "gpt_oss", "relu2", "gelu", "silu"]
UNGATED = ACTIVATIONS[5:]
SHAPE = "custom,tokens=60,hidden=72,intermediate=40,experts=8,topk=2"


class Arithmetic(ProgramTest):
    def test_every_arithmetic_passes_the_check(self):
        for activation in ACTIVATIONS:
            for more in ([], ["--probs", "after", "--bias"]):
                report = self.folder / "report.json"
                text = self.succeed("run", "--shape", SHAPE, "--ranks", 2, "--schedule",
                                    "pipelined:2,tile_m=16", "--activation", activation, *more,
                                    "--check", "--json", report)
                self.assertIn("check PASSED", unfolded(text))
                file = json.loads(report.read_text())
                self.assertEqual(file["problem"]["activation"], activation)
                self.assertEqual(file["problem"]["bias"], bool(more))
                self.assertEqual(file["problem"]["probs"], "after" if more else "before")
                tensors = ["out", "dx", "dprobs", "dw1", "dw2"] + ["db1", "db2"] * bool(more)
                self.assertEqual([c["tensor"] for c in file["check"]], tensors)
                # Roundings alone: a wrong formula would be off by far more. At relu's kink they
                # decide the side, and so whether an element has a gradient at all.
                most = 0.1 if activation == "reglu" else 1e-2
                self.assertLess(max(c["relative_l2"] for c in file["check"]), most)

    def test_a_layer_file_keeps_it_but_for_names(self):
        made, again = self.folder / "made", self.folder / "again"
        file = self.folder / "layer"
        flags = ["--activation", "relu2", "--probs", "after"]
        self.succeed("run", "--shape", SHAPE, *flags, "--bias", "--save-input", file, "--output",
                     made)
        self.succeed("run", "--input", file, *flags, "--ranks", 4, "--output", again)
        self.assertEqual(made.read_bytes(), again.read_bytes())
        self.assertIn(", with biases", self.succeed("validate", file, "--activation", "relu2"))
        # As gated experts, half of w1 is missing.
        self.assertEqual(self.call("validate", file).returncode, 2)
        before = self.folder / "before"
        self.succeed("run", "--input", file, *flags[:2], "--output", before)
        self.assertNotEqual(made.read_bytes(), before.read_bytes())

    def test_combine_groups(self):
        shape, outputs, layer = SHAPE.replace("topk=2", "topk=6"), {}, self.folder / "layer"
        self.succeed("run", "--shape", shape, "--save-input", layer)
        for groups in (["1"], ["2"], ["4", "--combine-partials", "bf16"]):
            for ranks in (1, 4):
                report, output = self.folder / "report.json", self.folder / f"{ranks}"
                text = self.succeed("run", "--input", layer, "--ranks", ranks, "--combine-groups",
                                    *groups, "--schedule", "pipelined:2", "--check", "--json",
                                    report, "--output", output)
                self.assertIn("check PASSED", unfolded(text))
                self.assertEqual(", 2 combine groups in fp32" in unfolded(text), groups == ["2"])
                problem = json.loads(report.read_text())["problem"]
                self.assertEqual(problem["combine_groups"], int(groups[0]))
                self.assertEqual(problem["combine_partials"], groups[-1] if groups[1:] else "fp32")
            self.assertEqual((self.folder / "1").read_bytes(), (self.folder / "4").read_bytes())
            outputs[groups[0]] = output.read_bytes()
        self.assertNotEqual(outputs["1"], outputs["4"])
        self.refuse("run", "--shape", shape, "--combine-groups", 3,
                    words=["combine_groups is 3", "num_experts=8"])
        self.refuse("run", "--shape", shape, "--combine-groups", 0, words=["1 to 65536"])
        self.refuse("run", "--shape", shape, "--combine-partials", "fp16", words=["fp32", "bf16"])

    def test_main_grads_of_biases(self):
        text = self.succeed("run", "--shape", SHAPE, "--bias", "--main-grad", "fp32",
                            "--defer-weights", "--check")
        self.assertIn("check PASSED", unfolded(text))
        self.assertIn("db2", text)

    def test_memory_follows_the_gate(self):
        def saved(*flags):
            text = self.succeed("info", "--shape", "qwen3-30b", *flags)
            return next(line for line in text.splitlines() if line.startswith("  saved:"))
        self.assertNotEqual(saved(), saved("--activation", "relu2"))
        self.assertEqual(saved(), saved("--activation", "gpt_oss", "--probs", "after"))

    def test_what_is_accepted_is_said(self):
        self.refuse("run", "--shape", SHAPE, "--activation", "swish", words=ACTIVATIONS)
        self.refuse("run", "--shape", SHAPE, "--probs", "behind", words=["before", "after"])
        self.refuse("info", "--activation", "gelu", words=["--shape"])
        path = self.folder / "plain"
        path.write_bytes(layer_file.serialized(layer_file.layer(4)))
        self.refuse("run", "--input", path, "--bias", words=["b1", "b2", "--bias"])


if __name__ == "__main__":
    unittest.main()
