"""What uniep can be asked: a row for each subcommand, and random calls that are in order."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import layers
from case import Case, Command, Text

PROFILES = Path(__file__).parents[2] / "profiles"
PRESETS = ("sequential", "pipelined:2", "pipelined:4", "two-kernel", "single")


@dataclass(frozen=True)
class Subcommand:
    """How a subcommand is called so that it works, quickly."""

    name: str
    plain: tuple[str, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Its options that name a file to write, and the kind of file (outputs.py)."""
    inputs: Mapping[str, Callable[[Case], Path]] = field(default_factory=dict)
    """Its options that name a file to read, or words for such that need none, and what it takes."""
    seconds: float = 0.05
    """What the plain call takes, about: families choose dear ones less often."""


def layer(case: Case) -> Path:
    return case.add_input(case.path("layer.safetensors"), layers.good(case.rng))


def other_layer(case: Case) -> Path:
    """Of the same shapes, and perhaps of other numbers."""
    content = case.path("layer.safetensors").read_bytes()
    if case.rng.random() < 0.5:
        content = content[:-1] + bytes([content[-1] ^ 1])
    return case.add_input(case.path("other.safetensors"), content)


def profile(case: Case) -> Path:
    return case.add_input(case.path("profile.json"), (PROFILES / "h200.json").read_bytes())


OF_RUN = {"--output": "tensors", "--trace": "trace", "--plot": "plot", "--json": "figures"}
ROWS = (
    Subcommand(
        "run",
        ("--shape", "tiny"),
        OF_RUN,
        {"--input": layer},
    ),
    Subcommand("bench", ("--shape", "tiny", "--iterations", "2"), {"--json": "figures"}),
    Subcommand("info"),
    Subcommand("validate", (), {}, {"FILE": layer}),
    Subcommand("compare", (), {"--json": "figures"}, {"A": layer, "B": other_layer}),
    Subcommand("cache", ("list",)),
    Subcommand("completion", ("bash",)),
    Subcommand("profile", ("--effort", "0.1"), {"--output": "figures"}, {}, 1.5),
    Subcommand(
        "simulate",
        ("--shape", "tiny", "--ranks", "4"),
        {"--json": "figures", "--plot": "plot"},
        {"--profile": profile},
    ),
    Subcommand(
        "tune",
        ("--shape", "tiny", "--budget", "1", "--profile", "none"),
        {"--json": "figures"},
        {"--profile": profile},
        0.2,
    ),
)


@dataclass(frozen=True)
class Flag:
    """An option, as --help has it."""

    name: str
    value: str
    """What its value is called; empty: it takes none."""


@cache
def flags_of(program: Path, subcommand: str) -> tuple[Flag, ...]:
    """From the program's own help, so that new flags are attacked as soon as they are there."""
    words = (program, subcommand, "--help")
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^  (--[a-z-]+)(?: ([A-Z<][^ ]*|[^ ]+\|[^ ]+))?", text, re.MULTILINE)
    return tuple(Flag(name, value) for name, value in found)


@cache
def subcommands(program: Path) -> tuple[Subcommand, ...]:
    """Of this program: those without a row here are attacked as well, though by flags only."""
    text = subprocess.run((program, "--help"), capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^  ([a-z]+) ", text[text.index("Subcommands:") :], re.MULTILINE)
    rows = {row.name: row for row in ROWS}
    return tuple(rows.get(name, Subcommand(name)) for name in names)


def pick(case: Case) -> Subcommand:
    """Any subcommand, dear ones more rarely."""
    of = subcommands(case.program)
    return case.rng.choices(of, [1 / (0.05 + s.seconds) for s in of])[0]


def pick_writer(case: Case) -> Subcommand:
    """One with outputs."""
    of = [s for s in subcommands(case.program) if s.outputs and s.seconds < 1]
    return case.rng.choice(of)


def plain_call(case: Case, sub: Subcommand, with_outputs: bool = True) -> Command:
    """A call that is in order, with some of the outputs, some of whose files are there already."""
    arguments: list[Text] = [sub.name, *sub.plain]
    arguments += [make(case) for name, make in sub.inputs.items() if not name.startswith("-")]
    chosen = {}
    for number, (option, kind) in enumerate(sub.outputs.items()):
        if with_outputs and case.rng.random() < 0.5:
            name = f"out{number}"
            chosen[name] = kind
            arguments += [option, name]
            if case.rng.random() < 0.5:
                case.add_earlier(case.path(name))
    return Command(arguments, outputs=chosen)


# ---- steps of a layer whose result is known


@dataclass(frozen=True)
class Step:
    """A call of `uniep run` in two parts: what decides the result, and what must not."""

    what: tuple[Text, ...]
    how: tuple[Text, ...]
    ranks: int
    processes: bool

    @property
    def arguments(self) -> tuple[Text, ...]:
        return ("run", *self.what, *self.how)


def random_step(case: Case, processes: bool | None = None, least_ranks: int = 1) -> Step:
    rng = case.rng
    ranks = rng.choice([n for n in (1, 2, 4) if n >= least_ranks])
    if rng.random() < 0.5:
        content = layers.good(rng)
        path = case.add_input(case.path("layer.safetensors"), content)
        what: list[Text] = ["--input", path]
        if b'"dy"' not in content[:1000]:
            what += ["--pass", "forward"]
    else:
        tokens = rng.choice((1, 3, 16, 64))
        what = ["--shape", f"tiny,tokens={tokens}", "--seed", str(rng.randrange(99))]
        what += ["--skew", str(rng.choice((0, 1, 9)))]
        what += rng.choice(([], ["--dropped", rng.choice(("0.2", "1"))]))
    if "--pass" not in what:
        what += rng.choice(([], ["--main-grad", "fp32"], ["--pass", "backward"]))
    how: list[Text] = ["--ranks", str(ranks)]
    how += rng.choice(([], ["--schedule", rng.choice(PRESETS)]))
    how += rng.choice(([], [], ["--check"], ["--repeat", "2"]))
    wanted = rng.random() < 0.2 if processes is None else processes
    if wanted:
        how.append("--processes")
    return Step(tuple(what), tuple(how), ranks, wanted)
