"""Flags of the arithmetic: --activation to --shared-gate (program.py); an argument names one class."""

import json
import unittest

import layer_file
from program import ProgramTest, unfolded

ACTIVATIONS = ["swiglu", "geglu", "geglu_tanh", "reglu", "gpt_oss", "swiglu_clamped",
               "swiglu_softcapped", "relu2", "gelu", "silu"]
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

    def test_shared_experts(self):
        tensors = ["out", "dx", "dprobs", "dw1", "dw2", "dshared_probs", "dshared_w1",
                   "dshared_w2"]
        for flags in (["--shared-experts", 1],
                      ["--shared-experts", 3, "--shared-gate", "--probs", "after", "--main-grad",
                       "fp32", "--defer-weights"],
                      ["--shared-experts", 1, "--hosts", 2],
                      ["--shared-experts", 2, "--activation", "relu2", "--processes",
                       "--shared-gate", "--row-pool", 1 << 24]):
            report = self.folder / "report.json"
            text = self.succeed("run", "--shape", SHAPE, "--dropped", 0.3, "--ranks", 2, *flags,
                                "--schedule", "pipelined:2,tile_m=16", "--repeat", 2, "--check",
                                "--json", report)
            self.assertIn("check PASSED", unfolded(text))
            file = json.loads(report.read_text())
            self.assertEqual(file["problem"]["shared_experts"], flags[1])
            gated = "--shared-gate" in flags
            self.assertEqual(file["problem"]["shared_gate"], gated)
            self.assertEqual(" with a gate" in unfolded(text), gated)
            self.assertEqual([c["tensor"] for c in file["check"]], tensors)
            self.assertLess(max(c["relative_l2"] for c in file["check"]), 1e-2)

    def test_files_of_shared_experts(self):
        """All but the weight gradients, of which each rank has its own, have the same bytes."""
        layer, results = self.folder / "layer", {}
        flags = ["--shared-experts", 2, "--shared-gate"]
        self.succeed("run", "--shape", SHAPE, *flags, "--save-input", layer, "--output",
                     self.folder / "made")
        self.assertIn("S=2 shared experts with probabilities", self.succeed("validate", layer))
        for ranks in (1, 2):
            output = self.folder / f"out{ranks}"
            text = self.succeed("run", "--input", layer, "--ranks", ranks, "--output", output)
            self.assertIn("2 shared experts", unfolded(text))
            results[ranks] = layer_file.read(output)
        self.assertEqual(layer_file.read(self.folder / "made"), results[1])
        for name, (dtype, shape, content) in results[1].items():
            if name in ("dshared_w1", "dshared_w2"):
                self.assertEqual(results[2][name][1], [2, *shape[1:]])
            else:
                self.assertEqual(results[2][name], (dtype, shape, content), name)
        self.succeed("run", "--input", layer, *flags)
        self.refuse("run", "--input", layer, "--shared-experts", 1,
                    words=["has 2 shared experts", "--shared-experts is 1"])
        self.succeed("bench", "--input", layer, "--iterations", 2)

    def test_shared_experts_in_other_commands(self):
        flags = ["--shape", "tiny", "--shared-experts", 2]
        report = self.folder / "bench.json"
        text = self.succeed("bench", *flags, "--shared-gate", "--iterations", 2, "--json", report)
        self.assertIn("check PASSED", unfolded(text))
        for record in json.loads(report.read_text())["records"]:
            self.assertEqual(record["arithmetic"], "swiglu,shared_experts=2")
        cache = self.folder / "tuned.json"
        self.succeed("tune", *flags, "--ranks", 1, "--pass", "forward", "--space", "lag=1|2",
                     "--candidates", 1, "--budget", 20, UNIEP_TUNE_CACHE=cache)
        for more, origin in ((flags, "forward cache"), (flags[:2], "forward default")):
            self.assertIn(origin, unfolded(self.succeed("run", *more, UNIEP_TUNE_CACHE=cache)))

        def total(*more):
            lines = self.succeed("info", "--shape", "tiny", *more).splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("  total"))
        self.assertGreater(total("--shared-experts", 2), total())

    def test_where_shared_experts_are_accepted_and_refused(self):
        flags = ["--shape", SHAPE, "--shared-experts", 1]
        self.assertIn("1 shared expert", self.succeed("simulate", *flags))
        self.refuse("run", *flags, "--bias", words=["shared_experts is 1", "biases"])
        self.refuse("run", *flags, "--combine-groups", 2, words=["shared_experts is 1"])
        self.refuse("run", "--shape", SHAPE, "--shared-experts", 16, words=["0 to 15"])
        self.refuse("run", "--shape", SHAPE, "--shared-experts", 15, words=["shared_experts is 15"])
        self.refuse("run", "--shape", SHAPE, "--shared-gate",
                    words=["--shared-gate", "--shared-experts"])
        path = self.folder / "plain"
        path.write_bytes(layer_file.serialized(layer_file.layer(4)))
        self.refuse("run", "--input", path, "--shared-experts", 1,
                    words=["has 0 shared experts", "--shared-experts is 1"])

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


    def test_benchmarks_and_tuning_take_it(self):
        flags = ["--activation", "gpt_oss", "--probs", "after", "--bias"]
        report = self.folder / "bench.json"
        text = self.succeed("bench", "--shape", "tiny", *flags, "--iterations", 2, "--json", report)
        self.assertIn("check PASSED", unfolded(text))
        self.assertIn("gpt_oss, probs after, biases", text)
        for record in json.loads(report.read_text())["records"]:
            self.assertEqual(record["arithmetic"], "gpt_oss,after,bias")

        cache = self.folder / "tuned.json"
        report = self.folder / "tune.json"
        self.succeed("tune", "--shape", "tiny", *flags, "--ranks", 1, "--profile", "none",
                     "--pass", "forward", "--space", "lag=1|2", "--candidates", 1, "--budget", 20,
                     "--json", report, UNIEP_TUNE_CACHE=cache)
        self.assertEqual(json.loads(report.read_text())["arithmetic"], "gpt_oss,after,bias")
        [entry] = json.loads(cache.read_text())["entries"]
        self.assertEqual([entry["activation"], entry["probs"], entry["bias"]],
                         ["gpt_oss", "after", "yes"])
        for more, origin in ((flags, "forward cache"), ([], "forward default")):
            text = self.succeed("run", "--shape", "tiny", *more, UNIEP_TUNE_CACHE=cache)
            self.assertIn(origin, unfolded(text))

    def test_a_file_with_biases_is_measured(self):
        file = self.folder / "layer"
        self.succeed("run", "--shape", SHAPE, "--activation", "relu2", "--bias", "--save-input",
                     file)
        text = self.succeed("bench", "--input", file, "--activation", "relu2", "--iterations", 2)
        self.assertIn("check PASSED", unfolded(text))
        self.assertIn("relu2, biases", text)

    def test_a_shape_as_its_model(self):
        def predicted(*flags):
            report = self.folder / "simulate.json"
            self.succeed("simulate", "--ranks", 1, *flags, "--pass", "backward", "--json", report)
            file = json.loads(report.read_text())
            return file["arithmetic"], file["records"][0]["predicted_ms"]
        plain, plain_ms = predicted("--shape", "gpt-oss-120b")
        self.assertEqual(plain, "swiglu")
        own, own_ms = predicted("--shape", "gpt-oss-120b", "--as-model")
        self.assertEqual(own, "gpt_oss,after,bias")
        self.assertGreater(own_ms, plain_ms)
        self.assertEqual(predicted("--shape", "gpt-oss-120b", "--activation", "gpt_oss",
                                   "--probs", "after", "--bias"), (own, own_ms))
        self.assertEqual(predicted("--shape", "qwen3-30b", "--as-model")[0], "swiglu,after")
        for command in ("run", "bench", "info", "tune", "simulate"):
            self.refuse(command, "--shape", "tiny", "--as-model", words=["tiny", "gpt-oss-120b"])
        self.refuse("simulate", "--shape", "gpt-oss-120b", "--as-model", "--bias",
                    words=["--as-model", "--bias"])


if __name__ == "__main__":
    unittest.main()
