"""What the command ``uniep`` runs.

A package of its own, since ``import uniep`` loads PyTorch, which takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Becomes the command line: ``uniep ARGUMENTS...``, ``python -m uniep ARGUMENTS...``.

    Args:
        arguments: those behind the name of the program; None: of this process.
    """
    program = str(_program())
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is not None:  # as where it is closed
        sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what it becomes would
    try:
        os.execv(program, ["uniep", *arguments])
    except OSError as error:
        sys.exit(f"uniep: cannot run {program} ({error.strerror}); reinstall the package uniep")


def _program() -> Path:
    """Of the package uniep, which is looked up without being imported."""
    spec = importlib.util.find_spec("uniep")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        path = Path(folder, "bin", "uniep")
        if path.exists():
            return path
    sys.exit(f"uniep: no bin/uniep in {folders}; reinstall the package uniep")
