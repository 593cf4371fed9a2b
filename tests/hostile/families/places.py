"""Where and by whom it is started: folders that are gone, a system without /proc, signals that are
ignored or blocked, file modes that nobody can use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import commands
import isolation
from case import Case, Command


def attack(case: Case) -> None:
    sub = commands.pick(case)
    command = commands.plain_call(case, sub)
    if sub.name == "run":
        ranks = case.rng.choice(("1", "2", "4"))
        command.arguments = (*command.arguments, "--ranks", ranks)
        if case.rng.random() < 0.4:
            command.arguments = (*command.arguments, "--processes")
            command.error_lines = 5
    place = case.rng.choice(PLACES)
    case.log(place.__name__)
    place(case, command)


def folder_that_is_gone(case: Case, command: Command) -> None:
    """Relative paths lead nowhere."""
    folder = case.path("gone")
    folder.mkdir()

    def leave() -> None:
        os.chdir(folder)
        os.rmdir(folder)

    command.prepare = leave
    command.outputs = {}
    case.run(command)


def folder_of_somebody_else(case: Case, command: Command) -> None:
    """Nothing can be written, and perhaps nothing looked up."""
    if isolation.is_root():
        command.user = isolation.ANOTHER_USER
        os.chmod(case.folder, case.rng.choice((0o755, 0o711)))
    else:
        os.chmod(case.folder, 0o555)
    outcome = case.run(command)
    os.chmod(case.folder, 0o700)
    wanted = bool(command.outputs) and command.subcommand != "tune"
    case.require(not wanted or outcome.code == 2, f"exit code {outcome.code}")


def no_proc(case: Case, command: Command) -> None:
    case.hide("/proc")
    case.run(command)


def no_devices(case: Case, command: Command) -> None:
    case.hide("/dev")
    case.run(command)


def ignored_signals(case: Case, command: Command) -> None:
    """As nohup and daemons leave them."""
    chosen = case.rng.sample(
        (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP), 2
    )
    command.prepare = lambda: [signal.signal(s, signal.SIG_IGN) for s in chosen]
    case.require(case.run(command).worked, f"fails where {chosen} are ignored")


def blocked_signals(case: Case, command: Command) -> None:
    """Inherited from a parent that never unblocked them."""
    chosen = case.rng.choice(
        ({signal.SIGINT}, {signal.SIGTERM, signal.SIGCHLD}, signal.valid_signals())
    )
    command.prepare = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, chosen)
    case.require(case.run(command).worked, f"fails where {chosen} are blocked")


def mode_of_files(case: Case, command: Command) -> None:
    mask = case.rng.choice((0o777, 0o077, 0o000, 0o222))
    command.prepare = lambda: os.umask(mask)
    outcome = case.run(command)
    case.require(outcome.worked or not isolation.is_root(), f"fails with umask {mask:o}")


def deep_folder(case: Case, command: Command) -> None:
    """Whose path is longer than any that the system takes."""
    folder = case.path("deep")
    folder.mkdir()

    def descend() -> None:
        os.chdir(folder)
        for _ in range(30):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)

    command.prepare = descend
    command.outputs = {}
    case.run(command)
    _remove_deep(folder)


def _remove_deep(folder: Path) -> None:
    """One level at a time: no path reaches the last."""
    start = os.open(folder, os.O_RDONLY)
    levels = [start]
    while names := [e.name for e in os.scandir(levels[-1]) if e.is_dir(follow_symlinks=False)]:
        levels.append(os.open(names[0], os.O_RDONLY, dir_fd=levels[-1]))
    for level in reversed(levels):
        for entry in list(os.scandir(level)):
            if entry.is_dir(follow_symlinks=False):
                os.rmdir(entry.name, dir_fd=level)
            else:
                os.unlink(entry.name, dir_fd=level)
        os.close(level)


PLACES: tuple[Callable[[Case, Command], None], ...] = (
    *(folder_that_is_gone, folder_of_somebody_else, no_proc, no_devices, ignored_signals),
    *(blocked_signals, mode_of_files, deep_folder),
)
