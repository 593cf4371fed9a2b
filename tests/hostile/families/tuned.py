"""Caches of tuned schedules, sessions of searches and profiles: damaged, cut, of other versions."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import commands
from case import Case, Command, Text

LAYER = ("tune", "--shape", "tiny", "--ranks", "1")
FEW = ("--candidates", "2")  # more of them spend all of a budget
BRIEF = (*FEW, "--budget", "1")
FORWARD = (*LAYER, *BRIEF, "--profile", "none", "--pass", "forward")
# In both directions, and with time enough on a busy machine: within a second it may store nothing.
STORED = (*LAYER, *FEW, "--budget", "20", "--profile", "none")
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1.5,
    1e308,
    2**63,
    2**70,
    -(2**63),
    "",
    "x",
    [],
    {},
)
VALUES += ("x" * 100000, "\udcff", "\x00", [[[]]], {"a": {}}, "single", "1", 1e-320, "\u202e")
TEXTS: tuple[str, ...] = (
    "",
    "{",
    "[]",
    "null",
    "[" * 200000,
    '{"a":' * 90000,
    '"\xff',
    "\x00" * 4096,
    "NaN",
    "{}}",
)
TEXTS += ('{"schema": 1e999}', '{"schema": "uniep-tuned-2"}', '{"schema": "uniep-tuned-1"}', "﻿{}")
TEXTS += (
    '{"schema": "uniep-tuned-1", "entries": {}}',
    '{"schema":"uniep-profile-1"}',
    "9" * 100000,
)


def attack(case: Case) -> None:
    case.rng.choice((_cache, _cache, _session, _profile))(case)


# ---- what is spoiled


@cache
def _good_cache(program: Path) -> bytes:
    return _made_by(program, "tuned.json")


@cache
def _made_by(program: Path, name: str) -> bytes:
    """What a search leaves: the file of this program, found once."""
    from isolation import Isolation

    maker = Case(program, random.Random(0), Isolation.__new__(Isolation), None)
    try:
        path = maker.path(name)
        maker.run(Command(STORED, environment={"UNIEP_TUNE_CACHE": path}))
        return path.read_bytes()
    finally:
        maker.close()


def _spoiled(rng: random.Random, content: bytes) -> bytes:
    match rng.randrange(5):
        case 0:
            return content[: rng.randrange(len(content))]
        case 1:
            changed = bytearray(content)
            for _ in range(rng.choice((1, 3, 30))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
        case 2:
            return rng.choice(TEXTS).encode("utf-8", "surrogateescape")
        case 3:
            return content + rng.choice((b"x", b"{}", b"\0", content))
        case _:
            value = json.loads(content)
            for _ in range(rng.choice((1, 1, 2, 5))):
                _change_somewhere(rng, value)
            return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(
                "utf-8", "surrogatepass"
            )


def _change_somewhere(rng: random.Random, value: Any) -> None:
    """One value of it, at any depth, becomes another, goes, or is doubled."""
    while True:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = value[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
            value = inner
            continue
        if rng.random() < 0.2:
            del value[key]
        elif isinstance(value, dict) and rng.random() < 0.1:
            value[str(key) + rng.choice(("2", "", "\n", "\udcff"))] = inner
        else:
            value[key] = rng.choice(VALUES)
        return


def _special(case: Case, path: Path) -> None:
    kind: Callable[[Path], None] = case.rng.choice(
        (os.mkfifo, os.mkdir, lambda p: p.symlink_to("loop.json"), lambda p: p.symlink_to("no/x"))
    )
    kind(path)
    case.expect(path, case.path("loop.json"))


# ---- who reads it


def _cache(case: Case) -> None:
    path = case.path("tuned.json")
    if case.rng.random() < 0.1:
        _special(case, case.path(case.rng.choice(("tuned.json", "tuned.json.lock"))))
    if not os.path.lexists(path):
        path.write_bytes(_spoiled(case.rng, _good_cache(case.program)))
    before = path.read_bytes() if path.is_file() else b""
    environment: dict[str, Text | None] = {"UNIEP_TUNE_CACHE": path}
    step: tuple[Text, ...] = ("run", "--shape", "tiny", "--seed", "3", "--output", "result")
    reading = case.run(Command(step, outputs={"result": "tensors"}, environment=environment))
    case.require(reading.code == 0, "a cache is no reason for a run to fail")
    case.require(not path.is_file() or path.read_bytes() == before, "a run has changed the cache")
    bench = ("bench", "--shape", "tiny", "--schedule", "auto", "--iterations", "1")
    case.run(Command(bench, environment=environment))
    storing = case.run(Command(FORWARD, environment=environment))
    # On a busy machine so short a search may end undecided, and leaves the file as it was.
    if storing.code == 0 and path.is_file() and path.read_bytes() != before:
        json.loads(path.read_bytes())
        again = case.run(Command(step[:-2], environment=environment))
        case.require(again.code == 0, "a run fails with what has just been tuned")


def _session(case: Case) -> None:
    path = case.path("tuned.json")
    environment: dict[str, Text | None] = {"UNIEP_TUNE_CACHE": path}
    more = ("--candidates", "60", "--budget", "30", "--profile", "none", "--pass", "forward")
    search = (*LAYER, *more)
    interrupted = Command(search, environment=environment, interrupt_after=0.15)
    case.run(interrupted)
    for session in case.folder.glob("tuned.json.session-*"):
        session.write_bytes(_spoiled(case.rng, session.read_bytes()))
    case.run(Command(search, environment=environment, interrupt_after=0.15))
    if path.exists():
        json.loads(path.read_bytes())


def _profile(case: Case) -> None:
    good = (commands.PROFILES / case.rng.choice(("h100.json", "h200.json"))).read_bytes()
    path = case.add_input(case.path("profile.json"), _spoiled(case.rng, good))
    words: tuple[Text, ...] = case.rng.choice(
        (
            ("simulate", "--shape", "tiny", "--ranks", "4", "--profile", path),
            ("simulate", "--shape", "small", "--ranks", "2", "--profile", path, "--json", "out"),
            (*LAYER, *BRIEF, "--pass", "forward", "--profile", path),
            ("profile", "--backend", "cuda", "--like", path),
        )
    )
    outputs = {"out": "figures"} if "--json" in words else {}
    case.run(Command(words, outputs=outputs, interrupt_after=10))
