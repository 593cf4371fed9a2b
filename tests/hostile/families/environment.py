"""Hostile values of every variable that the program or its libraries read."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import commands
from case import WAIT_MS, Case, Text

VALUES: tuple[Text, ...] = ("", " ", "0", "1", "-1", "1.5", "nan", "inf", "-inf", "1e309", "1e-7")
VALUES += ("9" * 400, "x" * 20000, b"\xff\xfe", "/dev/zero", "/proc/self/mem", "/", ".", "a\nb")
VALUES += ("%s%n", "\x1b[31m", "\u0661", "portable", "avx2", "avx512", "AVX2", "1000000", "64", "2")
VALUES += (
    "0.001",
    "nccl",
    "ipc",
    "auto",
    "true",
    "no/where/file",
    "\u202e",
    "/dev/full",
    "~",
    "+1",
)
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OTHERS: tuple[str, ...] = (
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "PATH",
    "TERM",
    "COLUMNS",
    "TZ",
    "OMP_NUM_THREADS",
    "HOME",
)
OTHERS += ("MALLOC_ARENA_MAX", "LC_NUMERIC", "PWD", "USER", "SHELL", "CUDA_VISIBLE_DEVICES")
LOCALES = ("C", "POSIX", "de_DE.UTF-8", "tr_TR", "C.UTF-8", "xx", "/etc")


@cache
def variables(program: Path) -> tuple[str, ...]:
    """From `uniep info`, so that new ones are attacked as soon as they are there."""
    text = subprocess.run([program, "info"], capture_output=True, text=True, check=True).stdout
    section = text[text.index("environment") :]
    return tuple(re.findall(r"^  ([A-Z][A-Z_0-9]+) ", section, re.MULTILINE))


def attack(case: Case) -> None:
    rng = case.rng
    chosen = rng.sample((*variables(case.program), *OTHERS), rng.choice((1, 1, 2, 3, 8)))
    changes: dict[str, Text | None] = {name: rng.choice((*VALUES, None)) for name in chosen}
    for name in ("LANG", "LC_ALL", "LC_NUMERIC"):
        if name in changes:
            changes[name] = rng.choice(LOCALES)
    if rng.random() < 0.15:
        changes |= _group(case)
    if any(changes.get(name) for name in RANKS):
        # A group that never gets complete is waited for as long as this says.
        changes["UNIEP_TIMEOUT_MS"] = str(WAIT_MS)
    sub = commands.pick(case)
    command = commands.plain_call(case, sub)
    command.environment = changes
    command.interrupt_after = 5  # a link may legally be slow
    outcome = case.run(command)
    if outcome.code == 1 and not outcome.worked:
        expected = re.search(r"limit|timed? ?out|expire|rank|within|stored", outcome.errors)
        case.require(expected is not None, "exit code 1 for a value of a variable")


def _group(case: Case) -> dict[str, Text | None]:
    """What torchrun would set, with one or two mistakes."""
    group: dict[str, Text | None] = {
        "RANK": "0",
        "WORLD_SIZE": case.rng.choice(("1", "2")),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(case.rng.randrange(20000, 60000)),
    }
    for name in case.rng.sample(RANKS, case.rng.choice((0, 1, 2))):
        group[name] = case.rng.choice(("", "-1", "1", "7", "65536", "::1", "localhost", "x", None))
    return group
