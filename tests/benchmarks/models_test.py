"""The models of compare_torch.py are those of the command line, UNIEP_PROGRAM."""
import os
import subprocess
import unittest

from compare.shapes import MODELS


def info(shape):
    return subprocess.run([os.environ["UNIEP_PROGRAM"], "info", "--shape", shape, "--ranks", "1"],
                          capture_output=True, text=True)


class Models(unittest.TestCase):
    def test_names(self):
        names = info("none-of-these").stderr.partition("'; ")[2].partition(" are accepted")[0]
        self.assertEqual([*MODELS, "tiny", "small", "custom"], names.split(", "))

    def test_sizes(self):
        for name, s in MODELS.items():
            self.assertEqual(info(name).stdout.splitlines()[0].split()[2],
                             f"{name},tokens={s.tokens},hidden={s.hidden},"
                             f"intermediate={s.intermediate},experts={s.experts},topk={s.topk}")


if __name__ == "__main__":
    unittest.main()
