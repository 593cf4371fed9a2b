"""Flags as nobody means them: random subsets and values of what --help lists, doubled, empty,
enormous, not UTF-8, behind one another in any order."""

from __future__ import annotations

import os
import random
import resource

import commands
from case import Case, Command, Text

MEMORY = {resource.RLIMIT_AS: 4 << 30}
NUMBERS: tuple[str, ...] = (
    "0",
    "1",
    "2",
    "4",
    "-1",
    "64",
    "65",
    "1000000",
    "1e9",
    "2147483648",
    "1.5",
    "0.1",
)
NUMBERS += ("9" * 30, "9" * 5000, "-0", "+1", "0x10", " 1", "1 ", "nan", "inf", "-inf", "1e400")
NUMBERS += ("1,000", "01", "1_0", "\u0661", "18446744073709551616", "1e-320")
RUBBISH: tuple[Text, ...] = ("", " ", "-", "--", "---", "x" * 3000, b"\xff\xfe", b"\xc3(", "\u202e")
RUBBISH += ("%s%n%x", "a\nb", "\x1b[31mred", "'\"`$(id)`", "..", "/", "~", "*", "=", "=,=", ",")
RUBBISH += ("--help", "-h", "--version", "none", "auto", "null", "{}", "\ufeff", "a=b", "1=1")
SHAPES: tuple[str, ...] = (
    "tiny",
    "small",
    "custom",
    "tiny,",
    "tiny,tokens=0",
    "tiny,tokens=3,topk=9",
    "tiny,x=1",
)
SHAPES += ("tiny,experts=3", "tiny,hidden=7", "tiny,tokens=-1", "tiny,tokens=1e3", "TINY", "tiny=")
SHAPES += ("deepseek-v3", "deepseek-v3,tokens=1", "custom,tokens=1,hidden=8,intermediate=8")
SHAPES += ("custom,tokens=1,hidden=8,intermediate=8,experts=1,topk=1", "tiny,tokens=1,tokens=2")
SHAPES += ("tiny,experts=65536", "tiny,hidden=1048576", "tiny,tokens=67108864", "tiny,topk=0")
SHAPES += ("tiny,tokens=" + "9" * 40, "mixtral-8x7b,tokens=8", "tiny,,tokens=1", "tiny,tokens")
SCHEDULES: tuple[str, ...] = (
    *commands.PRESETS,
    "auto",
    "pipelined:",
    "pipelined:0",
    "pipelined:99",
    "single,",
)
SCHEDULES += ("single,waves=0", "single,tile_m=17", "waves=1,waves=2", "single,single", "=", "x=1")
SCHEDULES += ("single,tile_m=" + "1" * 300, "launch=single", "workers=1024", "single,wgrad=")
FILES: tuple[Text, ...] = ("out", "out", "out2", "no/where", ".", "/", "/dev/null", "/dev/full")
FILES += ("layer.safetensors", "a" * 300, "b/" * 2000, b"o\xffut", "out\n", "/proc/version", "out/")
NAMES = ("forward", "backward", "both", "cpu", "cuda", "auto", "bf16", "fp32", "h200", "none")


def attack(case: Case) -> None:
    rng = case.rng
    sub = commands.pick(case)
    words: list[Text] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 12))):
        words += _flag(case, sub.name)
    if rng.random() < 0.7:
        words = [*commands.plain_call(case, sub, with_outputs=False).arguments[1:], *words]
    if rng.random() < 0.1:
        rng.shuffle(words)
    if rng.random() < 0.95:
        words.insert(0, sub.name)
    if rng.random() < 0.05:
        words.insert(0, rng.choice(("--version", "--help", "run", "-", "x")))
    case.expect(*(case.path(os.fsdecode(w).split("=", 1)[-1]) for w in words))
    case.expect(case.path("layer.safetensors"))
    processes = "--processes" in words
    command = Command(
        words,
        limits=MEMORY,
        interrupt_after=1.5,
        called=rng.choice(("uniep", "uniep", "uniep", "", "x" * 5000, b"\xff", "a b\n")),
        error_lines=64 if processes else 1,
    )
    case.run(command)


def _flag(case: Case, subcommand: str) -> list[Text]:
    rng = case.rng
    flags = commands.flags_of(case.program, subcommand)
    if rng.random() < 0.1:
        return [rng.choice(RUBBISH)]
    if not flags or rng.random() < 0.03:
        return [
            "--" + rng.choice(("rnks", "jsn", "Shape", "x" * 900, "\udcff", "ranks=", "=")),
            "1",
        ]
    flag = rng.choice(flags)
    if not flag.value and rng.random() < 0.95:
        return [flag.name]
    value = _value(rng, flag)
    if isinstance(value, str) and rng.random() < 0.15:
        return [f"{flag.name}={value}"]
    return [flag.name, value]


def _value(rng: random.Random, flag: commands.Flag) -> Text:
    if rng.random() < 0.08:
        return rng.choice(RUBBISH)
    kind = flag.name
    if kind == "--shape":
        return rng.choice(SHAPES)
    if kind in ("--schedule", "--space"):
        return rng.choice(SCHEDULES)
    if "FILE" in flag.value and rng.random() < 0.9:
        return rng.choice(FILES)
    if flag.value in ("NAME", "DIRECTION", "TYPE", "NAME|FILE", "FILE|NAME"):
        return rng.choice(NAMES)
    return rng.choice(NUMBERS)
