"""Limits of the system: memory, descriptors, threads, sizes of files, stacks, time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from functools import cache, partial
from pathlib import Path

import commands
import isolation
from case import Case, Command, Skipped

KINDS = ("memory", "descriptors", "threads", "file size", "stack", "cpu", "locked", "all")
MIB = 1 << 20


@cache
def least_memory(program: Path) -> int:
    """With less address space the system cannot even load the program."""
    low, high = MIB, 512 * MIB
    while high - low > MIB // 8:
        middle = (low + high) // 2
        # Not by prlimit: that would have the limit on itself.
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_AS, (middle, middle)),
        )
        low, high = (low, middle) if done.returncode == 0 else (middle, high)
    return high


def attack(case: Case) -> None:
    sub = commands.pick(case)
    command = commands.plain_call(case, sub)
    if sub.name == "run":
        command = _with_ranks(case, command)
    kind = case.rng.choice(KINDS)
    case.log(f"limit: {kind}")
    _limit(case, kind, command)
    command.interrupt_after = 10
    case.run(command)


def _with_ranks(case: Case, command: Command) -> Command:
    ranks = case.rng.choice((1, 2, 4, 8))
    shape = case.rng.choice(("tiny", "tiny", "tiny,tokens=2048", "tiny,hidden=512", "small"))
    words = [shape if a == "tiny" else a for a in command.arguments]
    command.arguments = (*words, "--ranks", str(ranks))
    if case.rng.random() < 0.3:
        command.arguments = (*command.arguments, "--processes")
        command.error_lines = ranks + 1
    return command


def _limit(case: Case, kind: str, command: Command) -> None:
    rng = case.rng
    match kind:
        case "memory":
            more = rng.choice((MIB, 8 * MIB, 64 * MIB, 512 * MIB))
            size = least_memory(case.program) + rng.randrange(more)
            command.limits = {resource.RLIMIT_AS: size}
            command.may_not_start = True
        case "descriptors":
            command.limits = {resource.RLIMIT_NOFILE: rng.randrange(3, 24)}
            command.may_not_start = True
        case "threads":
            _as_another_user(case, command)
            command.limits = {resource.RLIMIT_NPROC: rng.choice((0, 1, 2, 3, 5, 9, 20))}
        case "file size":
            command.limits = {resource.RLIMIT_FSIZE: rng.choice((0, 1, 100, 1024, 4096, 65536))}
        case "stack":
            sizes = (256 << 10, MIB, 64 * MIB, 1 << 36, resource.RLIM_INFINITY)
            command.limits = {resource.RLIMIT_STACK: rng.choice(sizes)}
        case "cpu":
            command.limits = {resource.RLIMIT_CPU: rng.choice((1, 2))}
            command.signals = frozenset({signal.SIGXCPU, signal.SIGKILL})
        case "locked":
            command.limits = {resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_CORE: 0}
        case _:
            command.limits = {
                resource.RLIMIT_AS: least_memory(case.program) + rng.randrange(256 * MIB),
                resource.RLIMIT_NOFILE: rng.randrange(6, 40),
                resource.RLIMIT_FSIZE: rng.randrange(100000),
            }
            command.may_not_start = True


def _as_another_user(case: Case, command: Command) -> None:
    """Root has no limit of processes."""
    if not isolation.is_root():
        raise Skipped("this user may have other processes, which count")
    command.user = isolation.ANOTHER_USER
    os.chown(case.folder, isolation.ANOTHER_USER, isolation.ANOTHER_USER)
