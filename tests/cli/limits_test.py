"""The program where the system gives it little (program.py)."""

import resource
import subprocess
import unittest

from program import PROGRAM, ProgramTest

COMMANDS = (("run", "--shape", "tiny", "--check"),
            ("bench", "--shape", "tiny", "--iterations", "1"))


def with_limit(limit, size, *args):
    return subprocess.run([PROGRAM, *args], capture_output=True, text=True, timeout=60,
                          preexec_fn=lambda: resource.setrlimit(limit, (size, size)))


class Limits(ProgramTest):
    def test_memory_that_hardly_suffices_to_begin(self):
        """From where the system can load the program: no exception finds no way out."""
        begun = 0
        for size in range(8 << 20, 64 << 20, 24 << 10):  # a build with CUDA is larger
            if begun == 160:
                break
            done = with_limit(resource.RLIMIT_AS, size, "run", "--shape", "tiny", "--ranks", "2")
            if not begun and done.returncode != 2:
                continue
            begun += 1
            self.assertEqual(done.returncode, 2, (size, done.stderr))
            self.assertIn("uniep", done.stderr)
        self.assertGreater(begun, 10)

    def test_memory_of_any_size(self):
        """A thread, a buffer or a file that there is no room for is refused with a sentence."""
        for command in COMMANDS:
            codes = set()
            for size in range(16 << 20, 160 << 20, 4 << 20):
                done = with_limit(resource.RLIMIT_AS, size, *command)
                if done.returncode == 127:  # the system could not load it
                    continue
                codes.add(done.returncode)
                self.assertIn(done.returncode, (0, 2), (command, size, done.stderr))
                self.assertEqual(done.stderr.count("\n"), 1 if done.returncode else 0, done.stderr)
                self.assertNotIn("internal", done.stderr)
            self.assertEqual(codes, {0, 2}, command)


if __name__ == "__main__":
    unittest.main(verbosity=2)
