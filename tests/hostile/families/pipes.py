"""Standard streams that are closed, full, or whose reader goes away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import commands
from case import Case, Command

SIGPIPE = frozenset({signal.SIGPIPE})


def attack(case: Case) -> None:
    sub = commands.pick(case)
    command = commands.plain_call(case, sub)
    command.signals = SIGPIPE
    case.rng.choice(ATTACKS)(case, command)


def _closed(case: Case, command: Command) -> None:
    command.closed = case.rng.choice(((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)))
    case.log(f"closed: {command.closed}")
    outcome = case.run(command)
    lost = 1 in command.closed
    case.require(not lost or outcome.code != 0, "exit code 0, and nothing could be printed")


def _full(case: Case, command: Command) -> None:
    case.log("stdout is full")
    with open("/dev/full", "wb", buffering=0) as full:
        command.stdout = full
        if case.rng.random() < 0.3:
            command.stderr = full
        outcome = case.run(command)
    case.require(outcome.code != 0, "exit code 0, and nothing could be printed")


def _reader_that_goes(case: Case, command: Command) -> None:
    """After a number of bytes, or before the first."""
    amount = case.rng.choice((0, 1, 100, 5000))
    case.log(f"stdout is read for {amount} bytes")
    ours, theirs = os.pipe()
    command.stdout = theirs
    running = case.start(command)
    os.close(theirs)
    while amount > 0:
        chunk = os.read(ours, amount)
        amount = amount - len(chunk) if chunk else 0
    os.close(ours)
    running.finish()


def _output_to_a_pipe(case: Case, command: Command) -> None:
    """An output that is a FIFO, whose reader may go."""
    path = case.path("fifo")
    os.mkfifo(path)
    case.expect(path)
    amount = case.rng.choice((0, 10, 1 << 30))
    reader = threading.Thread(target=_read, args=(str(path), amount), daemon=True)
    names = list(command.outputs)
    if names:
        words = ["fifo" if a == names[0] else a for a in command.arguments]
        command.arguments = words
        command.outputs = {n: k for n, k in command.outputs.items() if n != names[0]}
    case.log(f"a pipe is read for {amount} bytes")
    reader.start()
    case.run(command)
    # Where nobody opened it, its reader still waits for that.
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    reader.join(timeout=0.2)


def _read(path: str, amount: int) -> None:
    with open(path, "rb", buffering=0) as file:
        while amount > 0:
            chunk = file.read(min(amount, 65536))
            if not chunk:
                return
            amount -= len(chunk)


def _help(case: Case, command: Command) -> None:
    words = case.rng.choice((["--help"], ["--version"], [command.subcommand, "--help"]))
    _full(case, Command(words, signals=SIGPIPE))


ATTACKS: tuple[Callable[[Case, Command], None], ...] = (
    *(_closed, _full, _reader_that_goes, _output_to_a_pipe, _help),
)
