"""The uniep program as a user runs it. UNIEP_PROGRAM and UNIEP_TRACE say where it and the shipped
trace are."""

import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

import layer_file

PROGRAM = os.environ["UNIEP_PROGRAM"]
TRACE = os.environ["UNIEP_TRACE"]
PROFILES = Path(__file__).parents[2] / "profiles"
COMMANDS = ["run", "bench", "cache", "compare", "info", "profile", "simulate", "tune", "validate",
            "completion"]
PRESETS = ["sequential", "pipelined:4", "two-kernel", "single"]


def without_progress(errors):
    """What stderr says besides how long work goes on: on a busy machine any may take long."""
    return "".join(line for line in errors.splitlines(True) if not line.startswith("# "))


def unfolded(text):
    """Comments as they were before they were folded to the width of a page.

    Schedules are also folded behind the commas between their axes, which no space follows.
    """
    return re.sub(r"\n#  +", " ", re.sub(r",\n#  +(?=\w+=)", ",", text))


class ProgramTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def call(self, *args, **environment):
        done = subprocess.run([PROGRAM, *map(str, args)], capture_output=True, text=True,
                              env={**os.environ, **environment}, timeout=300)
        done.stderr = without_progress(done.stderr)
        return done

    def succeed(self, *args, **environment):
        done = self.call(*args, **environment)
        self.assertEqual((done.returncode, without_progress(done.stderr)), (0, ""),
                         f"{args}\n{done.stdout}")
        return done.stdout

    def refuse(self, *args, code=2, words=(), **environment):
        """Expects one sentence on stderr that has all of `words`."""
        done = self.call(*args, **environment)
        done.stderr = without_progress(done.stderr)
        self.assertEqual(done.returncode, code, f"{args}\n{done.stdout}\n{done.stderr}")
        known = args and args[0] in COMMANDS
        command = "uniep " + args[0] if known else "uniep"
        self.assertTrue(done.stderr.startswith(command + ": "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for word in words:
            self.assertIn(str(word), done.stderr)
        return done

    def layer_path(self, *args, **kwargs):
        path = self.folder / "layer.safetensors"
        path.write_bytes(layer_file.serialized(layer_file.layer(*args, **kwargs)))
        return path
