"""The C API, called as no header allows."""

from __future__ import annotations

import sys
from pathlib import Path

from case import Case, Command, Skipped

CALLS = Path(__file__).parents[1] / "api_calls.py"


def attack(case: Case) -> None:
    if case.api_library is None:
        raise Skipped("no --api-library was given")
    words = (CALLS, case.api_library, str(case.rng.randrange(10**9)))
    outcome = case.run(Command(words, program=(sys.executable,)))
    case.require(outcome.code == 0, outcome.errors[-600:])
