"""uniep compare from outside (program.py); an argument names one test class."""

import json
import re
import struct
import unittest
from pathlib import Path
from typing import Any

import layer_file
from program import TRACE, ProgramTest

Tensors = dict[str, tuple[str, list[int], bytes]]

INFINITY, NAN = float("inf"), float("nan")


class Compare(ProgramTest):
    def file(self, name: str, tensors: Tensors) -> Path:
        path: Path = self.folder / name
        path.write_bytes(layer_file.serialized(tensors))
        return path

    def compare(self, a: Path, b: Path, code: int) -> tuple[str, dict[str, Any], str]:
        """The printed text, the file of figures, and stderr."""
        path = self.folder / "figures.json"
        done = self.call("compare", a, b, "--json", path)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        for line in done.stdout.splitlines():
            if not line.startswith(("# a ", "# b ")):
                self.assertLessEqual(len(line), 100, line)
        return done.stdout, json.loads(path.read_text()), done.stderr

    def compare_numbers(self, a: list[float], b: list[float], code: int) -> dict[str, Any]:
        paths = [self.file(name, {"t": ("F32", [len(values)], layer_file.f32(values))})
                 for name, values in (("a", a), ("b", b))]
        _, figures, _ = self.compare(paths[0], paths[1], code)
        tensor, = figures["tensors"]
        self.assertEqual(figures["equal"], code == 0)
        return dict(tensor)

    def test_results_of_two_schedules_are_equal(self) -> None:
        paths = [self.folder / "a", self.folder / "b"]
        for path, schedule in zip(paths, ("sequential", "pipelined:4"), strict=True):
            self.succeed("run", "--input", TRACE, "--schedule", schedule, "--output", path)
        text, figures, errors = self.compare(paths[0], paths[1], 0)
        self.assertIn("# equal bits: 5 tensors\n", text)
        self.assertEqual(errors, "")
        self.assertTrue(figures["equal"])
        self.assertEqual([t["tensor"] for t in figures["tensors"]],
                         ["out", "dx", "dprobs", "dw1", "dw2"])
        self.assertTrue(all(t["first"] is None and t["differing"] == 0 for t in figures["tensors"]))

    def test_the_first_difference_has_its_place(self) -> None:
        layer = layer_file.layer(5)
        changed = dict(layer)
        for name, element, size in (("x", 16 * 3 + 7, 2), ("w1", 16 * 16 * 2 + 16 * 5 + 1, 2),
                                    ("topk_probs", 2 * 4 + 1, 4)):
            dtype, shape, content = layer[name]
            content = bytearray(content)
            content[element * size] ^= 1
            content[-1] ^= 64
            changed[name] = (dtype, shape, bytes(content))
        text, figures, _ = self.compare(self.file("a", layer), self.file("b", changed), 1)
        self.assertIn("# different: 3 of 6 tensors\n", text)
        places = {t["tensor"]: t["first"]["place"] for t in figures["tensors"] if t["first"]}
        self.assertEqual(places, {"x": "token 3, column 7", "w1": "expert 2, row 5, column 1",
                                  "topk_probs": "token 4, slot 1"})
        for tensor, place in places.items():
            self.assertIn(f"# first of {tensor}: {place} is ", text)
        counts = {t["tensor"]: (t["differing"], t["differing_bits"]) for t in figures["tensors"]}
        self.assertEqual(counts["x"], (2, 2))
        self.assertEqual(counts["topk_probs"], (1, 2))
        self.assertEqual(counts["dy"], (0, 0))

    def test_signs_of_zero_and_what_is_not_finite(self) -> None:
        self.compare_numbers([NAN, INFINITY, -0.0], [NAN, INFINITY, -0.0], 0)
        zeros = self.compare_numbers([0.0, 1.0], [-0.0, 1.0], 1)
        self.assertEqual((zeros["differing_bits"], zeros["relative_l2"]), (1, 0))
        lost = self.compare_numbers([NAN, 1.0, 3.0, 4.0], [1.0, INFINITY, 3.0, 4.0], 1)
        self.assertEqual((lost["differing"], lost["not_finite"]), (2, 2))
        self.assertEqual(lost["largest_difference"], 0)
        appeared = self.compare_numbers([0.0], [1.0], 1)
        self.assertIsNone(appeared["relative_l2"])
        self.assertEqual(self.compare_numbers([3.0, 4.0], [3.0, 4.5], 1)["relative_l2"], 0.1)

    def test_values_of_every_element_type(self) -> None:
        # The element that changes, as the format has it, and what it is in words.
        cases = {
            "F16": (b"\x00\x3e", "1.5"), "F8_E4M3": (b"\x7e", "448"), "F8_E5M2": (b"\x7c", "inf"),
            "BF16": (b"\x40\xbf", "-0.75"), "F32": (b"\x00\x00\x00\x3f", "0.5"),
            "F64": (b"\0" * 6 + b"\xf0\x3f", "1"), "BOOL": (b"\x01", "1"), "U8": (b"\xff", "255"),
            "I8": (b"\xff", "-1"), "U16": (b"\xff\xff", "65535"), "I16": (b"\xfe\xff", "-2"),
            "U32": (b"\xff" * 4, "4294967295"), "I32": (b"\xff" * 4, "-1"),
            "U64": (b"\xff" * 8, "18446744073709551615"),
            "I64": (b"\0" * 7 + b"\x80", "-9223372036854775808")}
        ones = {name: (name, [1], bits) for name, (bits, _) in cases.items()}
        zeros = {name: (name, [1], bytes(len(bits))) for name, (bits, _) in cases.items()}
        text, figures, _ = self.compare(self.file("a", ones), self.file("b", zeros), 1)
        self.assertEqual(len(figures["tensors"]), len(cases))
        for name, (_, value) in cases.items():
            self.assertRegex(text, f"# first of {name}: .* is {re.escape(value)} ")

    def test_empty_tensors_are_equal(self) -> None:
        empty = self.file("a", {"out": ("BF16", [0, 16], b""), "t": ("F32", [2, 0], b"")})
        _, figures, _ = self.compare(empty, empty, 0)
        self.assertEqual([t["elements"] for t in figures["tensors"]], [0, 0])
        none = self.file("none", {})
        self.compare(none, none, 0)

    def test_the_order_of_tensors_says_nothing(self) -> None:
        layer = layer_file.layer(5)
        backwards = dict(reversed(layer.items()))
        self.compare(self.file("a", layer), self.file("b", backwards), 0)

    def test_tensors_that_cannot_be_compared_are_named(self) -> None:
        a = {"same": ("F32", [2], layer_file.f32([1, 2])), "only_a": ("I32", [1], bytes(4)),
             "type": ("F32", [2], bytes(8)), "shape": ("F32", [2, 3], bytes(24))}
        b = {"same": ("F32", [2], layer_file.f32([1, 3])), "only_b": ("I32", [1], bytes(4)),
             "type": ("I32", [2], bytes(8)), "shape": ("F32", [3, 2], bytes(24))}
        text, figures, errors = self.compare(self.file("a", a), self.file("b", b), 2)
        self.assertEqual(errors.count("\n"), 1)
        for words in ("'only_a'", "'only_b'", "'type' is F32 [2] ", "I32 [2]", "'shape'", "[2, 3]"):
            self.assertIn(words, errors)
        self.assertIn("# different: 1 of 1 tensor; not compared: 4 others", text)
        self.assertFalse(figures["equal"])
        self.assertEqual(len(figures["unusable"]), 4)

    def test_a_long_place_is_folded(self) -> None:
        shape = [1, 1, 1, 1, 1, 1, 1, 1]
        name = "a tensor of many dimensions"
        path = self.file("a", {name: ("F32", shape, layer_file.f32([1 / 3]))})
        other = self.file("b", {name: ("F32", shape, layer_file.f32([-1e-30 / 3]))})
        text, _, _ = self.compare(path, other, 1)
        self.assertRegex(text, r"# first of a tensor .*\[0, 0, 0, 0, 0, 0, 0, 0\] is\s[^#]*\n#   ")

    def test_many_or_long_names_do_not_flood(self) -> None:
        a = {f"{'long' * 100}{i}": ("I32", [1], bytes(4)) for i in range(500)}
        _, _, errors = self.compare(self.file("a", a), self.file("b", {}), 2)
        self.assertIn("and 492 more", errors)
        self.assertLess(len(errors), 1200)
        self.compare(self.file("a", a), self.folder / "a", 0)

    def test_arguments(self) -> None:
        self.refuse("compare", words=["two files are needed", "A B"])
        self.refuse("compare", TRACE, words=["two files are needed"])
        self.refuse("compare", TRACE, TRACE, "c", words=["'c'"])
        self.refuse("compare", TRACE, self.folder / "none", words=["none"])
        self.refuse("compare", TRACE, __file__, words=["compare_test.py"])
        copy = self.layer_path(5)
        done = self.refuse("compare", copy, copy, "--json", copy, words=["--json", "one file"])
        self.assertEqual(done.stdout, "")
        broken = self.folder / "broken"
        broken.write_bytes(struct.pack("<Q", 2**63) + b"{}")
        self.refuse("compare", copy, broken, words=["broken"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
