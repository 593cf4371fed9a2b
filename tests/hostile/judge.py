"""What every end of uniep must be like, whatever was done to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from case import Outcome

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
# A sentence with a path or two in it; longer values are cut.
MOST_CHARACTERS = 600
# Words that say nothing to whoever reads them, or that are not true.
FORBIDDEN = (
    *("internal error", "Success", "[json.exception", "std::", "terminate called", "bad_alloc"),
    *("nan from", "basic_string", "vector::", "Traceback", "Assertion", "stoi", "what():"),
)
SENTENCE = re.compile(r"uniep( [a-z-]+)?: .")
# Warnings go on with the work, and say what of it they leave out.
WARNING = re.compile(r"ignored|not kept|was moved to|times mean nothing")
# Where stderr is no terminal, progress is a line now and then, like the comments on stdout.
PROGRESS = "# "
# Exit code 1 is a result of theirs, which they print.
VERDICTS = ("compare",)
# What stands beside the file of tuned schedules, as docs/tuning.md has it.
BESIDE_THE_CACHE = re.compile(r"(|\.lock|\.session-[0-9a-f]+|\.damaged(\.[0-9]+)?)")


def is_of_the_cache(path: Path, cache: Path) -> bool:
    name, of = path.name, cache.name
    beside = name.startswith(of) and BESIDE_THE_CACHE.fullmatch(name[len(of) :]) is not None
    return beside or path in (link.with_name(link.name + ".lock") for link in _led_to(cache))


def _led_to(cache: Path) -> list[Path]:
    """The files that links lead from the cache to: the lock stands beside the last of them."""
    found: list[Path] = []
    while cache.is_symlink() and cache not in found:
        found.append(cache)
        cache = cache.parent / os.readlink(cache)
    return [*found, cache]


def problem_of_end(outcome: Outcome) -> str | None:
    """The promise that it breaks, if any."""
    return _problem_of_code(outcome) or _problem_of_errors(outcome)


def _problem_of_code(outcome: Outcome) -> str | None:
    code, command = outcome.code, outcome.command
    if code in (0, 1, 2) or (command.may_not_start and _did_not_start(outcome)):
        return None
    # The shell's way to say it, which a launcher passes on.
    ended_by = -code if code < 0 else code - 128
    interrupted = command.interrupt_after is not None and ended_by == signal.SIGINT
    if interrupted or ended_by in command.signals:
        return None
    if ended_by in CRASHES:
        return f"crashed: {signal.Signals(ended_by).name}"
    return f"exit code {code}"


def _did_not_start(outcome: Outcome) -> bool:
    return outcome.code == 127 and b"error while loading shared libraries" in outcome.stderr


def _problem_of_errors(outcome: Outcome) -> str | None:
    if outcome.command.program or (outcome.command.may_not_start and _did_not_start(outcome)):
        return None
    try:
        text = outcome.stderr.decode()
    except UnicodeDecodeError as error:
        return f"stderr is not UTF-8: {error}"
    lines = [line for line in text.splitlines() if not line.startswith(PROGRESS)]
    for line in lines:
        problem = _problem_of_line(line)
        if problem:
            return problem
    return _problem_of_number(outcome, text, lines)


def _problem_of_line(line: str) -> str | None:
    if not SENTENCE.match(line):
        return f"a line of stderr is no sentence of uniep: {line[:300]!r}"
    if len(line) > MOST_CHARACTERS:
        return f"a sentence of {len(line)} characters: {line[:300]!r}..."
    for word in FORBIDDEN:
        if word in line:
            return f"'{word}' is no reason: {line[:300]!r}"
    if any(ord(c) < 32 or ord(c) == 127 for c in line):
        return f"a control character in {line[:300]!r}"
    return None


def _problem_of_number(outcome: Outcome, text: str, lines: list[str]) -> str | None:
    if text and not text.endswith("\n"):
        return f"stderr ends within a line: {text[-200:]!r}"
    errors = [line for line in lines if not WARNING.search(line)]
    readable = outcome.command.stderr == subprocess.PIPE and 2 not in outcome.command.closed
    silent = outcome.code == 1 and outcome.command.subcommand in VERDICTS
    if outcome.code in (1, 2) and readable and not lines and not silent:
        return f"exit code {outcome.code} without a sentence"
    if len(errors) > outcome.command.most_sentences:
        return f"{len(errors)} sentences: {errors[:4]}"
    if outcome.code == 0 and errors:
        return f"exit code 0 with {errors[0][:300]!r}"
    return None
