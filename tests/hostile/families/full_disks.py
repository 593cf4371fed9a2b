"""Disks that are full, become full, or cannot be written."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import commands
import isolation
from case import EARLIER, Case, Command, Skipped, Text


def attack(case: Case) -> None:
    sub = commands.pick_writer(case)
    try:
        disk = _disk(case)
    except Skipped:
        disk = case.path("disk")  # the limit of a file's size is met in the same way
        disk.mkdir()
    command = _call(case, sub, disk)
    if not os.path.ismount(disk):
        command.limits = {resource.RLIMIT_FSIZE: case.rng.randrange(20000)}
    outcome = case.run(command)
    # What was tuned may be all that there was no room for.
    allowed = (0, 1, 2) if sub.name in ("tune", "compare") else (0, 2)
    case.require(outcome.code in allowed, f"exit code {outcome.code} on a full disk")


def _disk(case: Case) -> Path:
    kib = case.rng.choice((4, 8, 16, 64, 256, 1024))
    disk = case.mount("disk", f"size={kib}k,nr_inodes={case.rng.choice((3, 5, 100))}")
    for number in range(case.rng.randrange(2)):
        case.add_earlier(disk / f"out{number}", EARLIER)
    if case.rng.random() < 0.4:
        _fill(case, disk)
    if case.rng.random() < 0.15:
        isolation.make_read_only(disk)
    return disk


def _fill(case: Case, disk: Path) -> None:
    rest = disk / "rest"
    case.expect(rest)
    with rest.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass


def _call(case: Case, sub: commands.Subcommand, disk: Path) -> Command:
    arguments: list[Text] = [*commands.plain_call(case, sub, with_outputs=False).arguments]
    outputs = {}
    for number, (option, kind) in enumerate(sub.outputs.items()):
        if number == 0 or case.rng.random() < 0.5:
            name = f"disk/out{number}"
            arguments += [option, name]
            outputs[name] = kind
    environment = {"UNIEP_TUNE_CACHE": disk / "tuned.json"} if case.rng.random() < 0.5 else {}
    return Command(arguments, outputs=outputs, environment=environment)
