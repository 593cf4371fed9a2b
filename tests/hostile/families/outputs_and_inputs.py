"""Outputs that are inputs, outputs that are one another, and names that are odd."""

from __future__ import annotations

import os
from pathlib import Path

import commands
import layers
from case import Case, Command, Text

ODD: tuple[str, ...] = ("./out", "sub/../out", "sub/./../sub/../out", "//out"[1:], "link", "hard")
ODD += ("dangling", "loop", "sub", "sub/", "out/", "no/out", "/dev/null", "/dev/full", "a" * 255)
ODD += ("a" * 256, "out\n", "o\x1but", ".", "..", "/", "out.json.lock", "tuned.json", "-", "--out")
ODD += ("/proc/self/fd/1", "/dev/stdout", "/dev/stderr", "/proc/self/exe", "/dev/fd/7", "fifo-less")


def attack(case: Case) -> None:
    rng = case.rng
    sub = commands.pick_writer(case)
    case.path("sub").mkdir()
    case.path("loop").symlink_to("loop")
    case.path("dangling").symlink_to("later")
    case.expect(case.path("loop"), case.path("dangling"), case.path("later"))
    _earlier_file_with_links(case)
    arguments = _inputs(case, sub)
    names = [_name(case) for _ in sub.outputs]
    for option, name in zip(sub.outputs, names, strict=True):
        if rng.random() < 0.7:
            arguments += [option, name]
    case.expect(*(case.path(n) for n in names if not n.startswith("/")))
    cache = rng.choice(("tuned.json", "out", "dangling"))
    command = Command(arguments, environment={"UNIEP_TUNE_CACHE": case.path(cache)})
    command.error_lines = 2 if "/dev/stderr" in names else 1
    _judge(case, command)


def _judge(case: Case, command: Command) -> None:
    if "/dev/stderr" in command.arguments:
        command.stderr = os.open(os.devnull, os.O_WRONLY)
        case.run(command)
        os.close(command.stderr)
    else:
        case.run(command)


def _earlier_file_with_links(case: Case) -> None:
    path = case.path("out")
    case.expect(path, case.path("link"), case.path("hard"))
    case.path("link").symlink_to("out")
    if case.rng.random() < 0.5:
        path.write_bytes(b"earlier")
        os.link(path, case.path("hard"))


def _inputs(case: Case, sub: commands.Subcommand) -> list[Text]:
    """The plain call, or one with an input of which the outputs may be other names."""
    if not sub.inputs or (sub.plain and case.rng.random() < 0.3):
        return [*commands.plain_call(case, sub, with_outputs=False).arguments]
    option = next(iter(sub.inputs))
    words: list[Text] = [sub.name]
    rest: list[Text]
    if option == "--input":
        content, rest = layers.good(case.rng), [option]
    elif option == "--profile":
        content, rest = (commands.PROFILES / "h200.json").read_bytes(), [*sub.plain, option]
    else:
        content, rest = layers.good(case.rng), [commands.layer(case)]
    words += rest
    real = case.path("input")
    real.write_bytes(content)
    os.link(real, case.path("input-hard"))
    case.path("input-link").symlink_to("input")
    case.add_input(real)
    case.expect(case.path("input-hard"), case.path("input-link"))
    return [
        *words,
        case.rng.choice((real, Path("input"), Path("input-link"), Path("sub/../input"))),
    ]


def _name(case: Case) -> str:
    of_input = ("input", "input-hard", "input-link", "./input")
    return case.rng.choice(("out", "out", "out2", *of_input, *ODD))
