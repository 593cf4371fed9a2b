"""uniep validate (program.py); an argument names one test class."""

import struct
import unittest

import layer_file
from program import TRACE, ProgramTest


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
