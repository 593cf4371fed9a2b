"""The arguments of uniep_overlap_bench, UNIEP_OVERLAP."""
import os
import subprocess
import unittest

TINY = "tiny,tokens=8"


def call(*arguments):
    return subprocess.run([os.environ["UNIEP_OVERLAP"], *arguments], capture_output=True, text=True)


class Overlap(unittest.TestCase):
    def test_arguments_are_checked(self):
        for arguments, sentence in [
                (("gigantic",), "there is no shape 'gigantic'"),
                ((TINY, "two"), "ranks is 'two'; an integer from 1 to 64 is accepted"),
                ((TINY, "0"), "ranks is '0'; an integer from 1 to 64 is accepted"),
                ((TINY, "3"), "ranks is 3; a number that divides the 8 experts is accepted"),
                ((TINY, "2", "0"), "repeats is '0'; an integer from 1 to 10000 is accepted"),
                ((TINY, "2", "3x"), "repeats is '3x'; an integer from 1 to 10000 is accepted"),
                ((TINY, "2", "1", "best"), "best")]:
            done = call(*arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""), arguments)
            self.assertIn(sentence, done.stderr)
            self.assertIn("\nusage: uniep_overlap_bench [shape]", done.stderr)

    def test_one_repeat_is_enough(self):
        done = call(TINY, "2", "1", "single")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("single", done.stdout)


if __name__ == "__main__":
    unittest.main()
