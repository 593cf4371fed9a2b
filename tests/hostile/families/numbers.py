"""Layers in order, run in odd ways. As in all families, the results are those of the plain run."""

from __future__ import annotations

import commands
from case import Case, Command


def attack(case: Case) -> None:
    step = commands.random_step(case)
    command = Command(
        (*step.arguments, *_axes(case, step), "--output", "result"),
        outputs={"result": "tensors"},
        error_lines=step.ranks,
    )
    outcome = case.run(command)
    refused_schedule = outcome.code == 2 and "schedule" in outcome.errors
    case.require(outcome.code == 0 or refused_schedule, f"exit code {outcome.code}")


def _axes(case: Case, step: commands.Step) -> tuple[str, ...]:
    """A schedule of random axes, many of which exclude each other."""
    if "--schedule" in step.how or case.rng.random() < 0.3:
        return ()
    choices = {
        "launch": ("separate", "paired", "pipelined", "single"),
        "waves": ("1", "2", "16"),
        "workers": ("0", "1", "7", "64"),
        "dispatch_workers": ("0", "1", "9"),
        "dispatch_wire": ("dedup", "rows"),
        "tile_m": ("16", "32", "128"),
        "tile_n": ("64", "128", "256"),
        "rotate": ("none", "own-first", "next-first"),
        "wgrad": ("separate", "after", "interleaved"),
        "ready_rows": ("1", "64", "4096"),
        "push_depth": ("0", "1", "64"),
    }
    chosen = case.rng.sample(list(choices), case.rng.randint(1, 4))
    return ("--schedule", ",".join(f"{k}={case.rng.choice(choices[k])}" for k in chosen))
