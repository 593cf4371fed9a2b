"""Several at once: one cache for all, outputs of the same name, a lock that somebody holds."""

from __future__ import annotations

import fcntl
import json
import re

from case import Case, Command, Text

STORED = re.compile(rb"^# stored +(?!nothing)\S", re.MULTILINE)
TUNE: tuple[Text, ...] = ("tune", "--profile", "none", "--budget", "1", "--ranks", "1")


def attack(case: Case) -> None:
    case.rng.choice((_tuners, _tuners, _same_output, _lock))(case)


def _tuners(case: Case) -> None:
    """All that any of them says to have stored is there at the end."""
    path = case.path("tuned.json")
    hidden = [8 * (n + 1) for n in range(case.rng.randint(2, 4))]
    running = []
    for size in hidden:
        shape = f"tiny,hidden={size}"
        words = (*TUNE, "--shape", shape)
        running.append(case.start(Command(words, environment={"UNIEP_TUNE_CACHE": path})))
        step = ("run", "--shape", "tiny,hidden=8")
        running.append(case.start(Command(step, environment={"UNIEP_TUNE_CACHE": path})))
    outcomes = [r.finish() for r in running]
    # A busy machine may need more than the budget for a first round.
    failed = [o for o in outcomes if o.code != 0 and "--budget" not in o.errors]
    case.require(not failed, f"exit codes {[o.code for o in outcomes]}")
    stored = json.loads(path.read_bytes())["entries"] if path.exists() else []
    # A line for each direction; "nothing", where there was no time for rounds enough.
    said = sum(len(STORED.findall(o.stdout)) for o in outcomes)
    case.require(len(stored) == said, f"{len(stored)} are stored, and {said} are said to be")


def _same_output(case: Case) -> None:
    """The last one wins, and the file is whole at any time."""
    path = case.path("out")
    case.expect(path)
    words = ("run", "--shape", "tiny", "--trace", "out")
    running = [case.start(Command(words)) for _ in range(4)]
    while any(r.process.poll() is None for r in running):
        if path.exists():
            json.loads(path.read_bytes())
    for r in running:
        case.require(r.finish().code == 0, "writing to one file at a time fails")


def _lock(case: Case) -> None:
    """Somebody holds the lock and does nothing."""
    path = case.path("tuned.json")
    with case.path("tuned.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = Command(
            (*TUNE, "--shape", "tiny", "--pass", "forward"),
            environment={"UNIEP_TUNE_CACHE": path},
            seconds=30,
        )
        outcome = case.run(command)
        case.require(outcome.code == 1, f"exit code {outcome.code}, and nothing can be stored")
