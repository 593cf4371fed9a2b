"""What the pictures of run, simulate and tune say, read by an XML parser (tests/cli/program.py); an
argument names one test class."""

import json
import os
import subprocess
import unittest
import xml.etree.ElementTree
from pathlib import Path

from program import PROGRAM, ProgramTest

SVG = "{http://www.w3.org/2000/svg}"


class Picture:
    """The texts of a picture, and what is drawn in it."""

    def __init__(self, path: Path) -> None:
        self.root = xml.etree.ElementTree.parse(path).getroot()
        self.texts = [e.text or "" for e in self.root.iter(SVG + "text")]
        self.all = "\n".join(self.texts)

    def count(self, shape: str) -> int:
        return sum(1 for _ in self.root.iter(SVG + shape))


class Pictures(ProgramTest):
    def picture(self, *args: object, **environment: str) -> Picture:
        plot = self.folder / "picture.svg"
        self.succeed(*args, "--plot", plot, **environment)
        picture = Picture(plot)
        self.check(picture)
        return picture

    def check(self, picture: Picture) -> None:
        """What every picture has."""
        root = picture.root
        self.assertEqual(root.tag, SVG + "svg")
        self.assertEqual(root.get("viewBox"), f"0 0 {root.get('width')} {root.get('height')}")
        self.assertEqual([e.tag for e in root[:2]], [SVG + "title", SVG + "desc"])
        self.assertTrue(root[0].text)
        self.assertRegex(picture.all, r"uniep \d+\.\d+\.\d+ \(")  # which version
        self.assertRegex(picture.all, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
        self.assertRegex(picture.all, r"(?m)^uniep (run|simulate|tune) --")  # what made it
        for number in ("nan", "inf"):
            self.assertNotIn(number, picture.all.split())

    def test_prediction(self) -> None:
        picture = self.picture("simulate", "--shape", "qwen3-30b,tokens=512", "--ranks", 16,
                               "--gpus-per-node", 8, "--nic-gbps", 400, "--seed", 3, "--skew", 0.5)
        for words in ("qwen3-30b: predicted time", "512 tokens a rank, hidden 2048, "
                      "intermediate 768, 128 experts, top-8; seed 3, skew 0.5",
                      "profile h200 (NVIDIA H200); cluster: 8 GPUs a node, 400 Gbit/s",
                      "forward", "backward", "ms", "exposed communication", "2 nodes",
                      "ranks (GPUs), up to 8 of them in a node", "schedule: launch=single",
                      "wgrad=interleaved"):
            self.assertIn(words, picture.all)
        alone = self.picture("simulate", "--shape", "tiny", "--ranks", 2, "--pass", "forward")
        self.assertNotIn("backward", alone.texts)
        self.assertNotIn("2 nodes", alone.texts)

    def test_run_of_no_tokens(self) -> None:
        layer = "custom,tokens=0,hidden=64,intermediate=64,experts=8,topk=2"
        picture = self.picture("run", "--shape", layer, "--ranks", 2, "--pass", "forward")
        self.assertIn("There is nothing to draw: no expert has a row.", picture.texts)
        self.assertIn("0 tokens, hidden 64", picture.all)

    def test_run_of_many_ranks(self) -> None:
        picture = self.picture("run", "--shape", "tiny,experts=64", "--ranks", 64)
        for words in ("of 64 ranks", "the fastest: ", "the median: ", "the slowest: "):
            self.assertIn(words, picture.all)
        self.assertEqual(picture.texts.count("med"), picture.texts.count("max"))
        self.assertLess(picture.count("text"), 400)

    def test_run_of_one_rank_of_one_token(self) -> None:
        layer = "custom,tokens=1,hidden=32,intermediate=32,experts=1,topk=1"
        picture = self.picture("run", "--shape", layer, "--pass", "forward")
        self.assertIn("rank 0", picture.texts)
        self.assertNotIn("backward", picture.texts)

    def test_run_of_skewed_experts(self) -> None:
        layer = "custom,tokens=64,hidden=32,intermediate=32,experts=256,topk=2"
        picture = self.picture("run", "--shape", layer, "--skew", 100, "--ranks", 2)
        self.assertIn("without rows (red, below the axis): 254 experts", picture.all)

    def test_run_of_a_long_name_in_any_bytes(self) -> None:
        layer = self.layer_path(8)
        named = os.path.join(os.fsencode(self.folder), b"<&\xff>" * 40 + b".safetensors")
        os.rename(layer, named)
        plot = self.folder / "picture.svg"
        done = subprocess.run([PROGRAM, "run", "--input", named, "--plot", plot],
                              capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check(Picture(plot))

    def test_survey(self) -> None:
        path = self.folder / "survey.json"
        picture = self.picture("tune", "--shape", "tiny", "--survey", 12, "--pass", "forward",
                               "--json", path,
                               UNIEP_TUNE_CACHE=str(self.folder / "cache.json"))
        figures = json.loads(path.read_text())["passes"][0]
        for words in ("12", "points", f"{figures['rank_correlation']:.3f}",
                      f"{100 * figures['median_error']:.1f} %", "predicted = measured",
                      "backend cpu, 2 ranks", "tiny, forward", "seed 0, skew 0"):
            self.assertIn(words, picture.all)
        self.assertGreaterEqual(picture.count("circle"), 12)


if __name__ == "__main__":
    unittest.main(verbosity=2)
