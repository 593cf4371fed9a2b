"""The package's command `uniep`, as a user calls it."""

from __future__ import annotations

import subprocess
import sys

# As the script that pip makes of the entry point.
PROGRAM = ("-c", "from uniep_program import main; main()")


def uniep_command(*arguments, code=0, program=PROGRAM):
    done = subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr
