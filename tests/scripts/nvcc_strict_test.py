"""cmake/nvcc_strict.sh with a made-up compiler: what it says, how it exits."""
import os
import subprocess
import unittest

SCRIPT = os.environ["NVCC_STRICT"]
SERIALISED = ("ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are "
              "serialized due to ...")


def compile_with(says, code):
    """Of a compiler that says so on stderr and exits so."""
    return subprocess.run([SCRIPT, "sh", "-c", 'echo "$1" >&2; exit "$2"', "sh", says, str(code)],
                          capture_output=True, text=True, timeout=30, check=False)


class NvccStrict(unittest.TestCase):
    def test_says_what_the_compiler_says_and_exits_like_it(self):
        for code in (0, 1, 7):
            done = compile_with("ptxas warning : Registers are spilled", code)
            self.assertEqual(done.returncode, code)
            self.assertIn("Registers are spilled", done.stderr)

    def test_fails_where_products_are_serialised(self):
        done = compile_with(SERIALISED, 0)
        self.assertEqual(done.returncode, 1)
        self.assertIn(SERIALISED, done.stderr)
        self.assertIn("error: ptxas serialises wgmma", done.stderr)

    def test_passes_arguments_on_as_they_are(self):
        done = subprocess.run([SCRIPT, "printf", "%s|", "-I/a b", "$HOME", ""],
                              capture_output=True, text=True, timeout=30, check=True)
        self.assertEqual(done.stderr, "-I/a b|$HOME||\n")


if __name__ == "__main__":
    unittest.main()
