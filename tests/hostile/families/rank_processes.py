"""Ranks as processes: one of them is killed or stopped, and the others say which, in time."""

from __future__ import annotations

import os
import re
import signal
import time

import isolation
from case import LONGEST_WAIT_MS, WAIT_MS, Case, Command, Running

# Beside the wait itself: what a busy machine takes to start and to end processes.
SLACK_SECONDS = 30.0
# tune::kLongestChoiceMs: what the others add to their wait for a choice of rank 0.
CHOICE_SECONDS = 60.0


def attack(case: Case) -> None:
    case.rng.choice((_end_a_rank, _end_a_rank, _stop_a_rank, _outer_group))(case)


def _step(case: Case) -> Command:
    """Long enough to be hit on the way."""
    ranks = case.rng.choice((2, 4, 8))
    words = ("run", "--shape", "tiny,tokens=64", "--ranks", str(ranks), "--processes")
    return Command(
        (*words, "--repeat", str(case.rng.choice((1, 2000))), "--output", "out"),
        outputs={"out": "tensors"},
        environment={"UNIEP_TIMEOUT_MS": str(WAIT_MS)},
        error_lines=ranks + 1,
        seconds=WAIT_MS / 1000 + SLACK_SECONDS,
    )


def _some_rank(case: Case, running: Running) -> int | None:
    """The process of one, once the first of them are there."""
    until = time.monotonic() + 5
    while time.monotonic() < until and running.process.poll() is None:
        children = isolation.children_of(running.process.pid)
        if children:
            time.sleep(case.rng.random() ** 2 * 0.3)
            children = isolation.children_of(running.process.pid) or children
            return case.rng.choice(children)
    return None


def _end_a_rank(case: Case) -> None:
    number = case.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGQUIT))
    command = _step(case)
    running = case.start(command)
    pid = _some_rank(case, running)
    rank = isolation.environment_of(pid).get("RANK") if pid else None
    if pid is None or rank is None or not _sent(pid, number):
        running.finish()
        return
    case.log(f"{signal.Signals(number).name} to rank {rank}")
    # That signal was ours, whatever it means elsewhere.
    command.signals = frozenset({number})
    outcome = running.finish()
    if outcome.code not in (0, 128 + number):
        # One whose exit code came first has to say whom it missed.
        case.require(outcome.code in (1, 2), f"exit code {outcome.code}")
    if outcome.code != 0:
        named = re.search(rf"(rank|peer) {rank}\b", outcome.errors)
        case.require(named is not None, f"no sentence names rank {rank}")


def _stop_a_rank(case: Case) -> None:
    command = _step(case)
    running = case.start(command)
    pid = _some_rank(case, running)
    if pid is not None and _sent(pid, signal.SIGSTOP):
        rank = isolation.environment_of(pid).get("RANK")
        case.log(f"stopped rank {rank}")
        if rank == "0":  # which may be choosing a schedule
            command.seconds += CHOICE_SECONDS
        if case.rng.random() < 0.5:
            time.sleep(case.rng.random() * 0.3)
            _sent(pid, signal.SIGCONT)
            case.log("continued it")
        # A stopped process is ended by the launcher in the end.
        command.signals = frozenset({signal.SIGKILL})
    running.finish()


def _outer_group(case: Case) -> None:
    """As torchrun starts them: each rank by itself, one of them with a mistake, late or never."""
    size = case.rng.choice((2, 3, 4))
    port = str(case.rng.randrange(20000, 60000))
    missing = case.rng.choice((None, None, *range(size)))
    shapes = ["tiny,experts=12"] * size
    if case.rng.random() < 0.4:
        shapes[case.rng.randrange(size)] = case.rng.choice(
            ("tiny", "tiny,tokens=9,experts=12", "x")
        )
    ranks = []
    for rank in range(size):
        if rank == missing:
            continue
        group = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        wait_ms = WAIT_MS if missing is not None else LONGEST_WAIT_MS
        group["UNIEP_TIMEOUT_MS"] = str(wait_ms)
        words = ("run", "--shape", shapes[rank], "--json", f"out{rank}")
        command = Command(words, environment=dict(group), seconds=wait_ms / 1000 + SLACK_SECONDS)
        case.expect(case.path(f"out{rank}"))
        ranks.append(case.start(command))
        time.sleep(case.rng.choice((0, 0, 0.05)))
    codes = [running.finish().code for running in ranks]
    wrong = missing is not None or len(set(shapes)) > 1
    case.require(not wrong or all(codes), f"exit codes {codes}, and the group is not one")
    case.require(wrong or not any(codes), f"exit codes {codes} of a group in order")


def _sent(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
