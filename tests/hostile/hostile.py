"""Attacks on the uniep program: random cases by family, and promises that each must keep.

    python3 tests/hostile/hostile.py --program build/cpu-release/bin/uniep --cases 1000

A case is a function of seed, family and number; a failure prints the command that repeats it."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import families
from case import Broken, Case, Skipped
from isolation import Isolation

DEFAULT_SEED = 25


@dataclass(frozen=True)
class Options:
    program: Path
    seed: int
    api_library: Path | None
    keep: bool


@dataclass(frozen=True)
class Task:
    """One case."""

    family: str
    number: int


@dataclass(frozen=True)
class Verdict:
    task: Task
    runs: int
    seconds: float
    broken: str = ""
    skipped: str = ""
    log: tuple[str, ...] = ()


_isolation: Isolation
_options: Options


def _begin_worker(options: Options) -> None:
    global _isolation, _options
    _isolation, _options = Isolation(), options


def _program() -> Path:
    """A copy of this worker's, as new as ever: a case might spoil it."""
    place = Path(tempfile.gettempdir()) / f"hostile-{os.getpid()}"
    place.mkdir(exist_ok=True)
    shutil.copy2(_options.program, place / "uniep")
    return place / "uniep"


def _judge(task: Task) -> Verdict:
    rng = random.Random(f"{_options.seed}/{task.family}/{task.number}")
    case = Case(_program(), rng, _isolation, _options.api_library)
    started = time.monotonic()
    broken = skipped = ""
    try:
        families.BY_NAME[task.family].attack(case)
        case.finish()
    except Broken as error:
        broken = str(error)
    except Skipped as reason:
        skipped = str(reason)
    except Exception:  # of this suite itself, or of the machine: no case may end the others
        broken = traceback.format_exc()
    finally:
        if not (_options.keep and broken):
            case.close()
    seconds = time.monotonic() - started
    log = (*case.logged, f"in {case.folder}") if broken else ()
    return Verdict(task, case.runs, seconds, broken, skipped, log)


def tasks_of(cases: int, wanted: str | None, number: int | None) -> list[Task]:
    """Each family's share of the cases, in turns, so that any part of them is a mixture."""
    if number is not None:
        return [Task(wanted or families.ALL[0].name, number)]
    chosen = [f for f in families.ALL if wanted in (None, f.name)]
    total = sum(f.share for f in chosen)
    counts = {f.name: max(1, round(cases * f.share / total)) for f in chosen}
    order = [
        ((n + 0.5) / count, Task(name, n)) for name, count in counts.items() for n in range(count)
    ]
    return [task for _, task in sorted(order, key=lambda pair: pair[0])]


def repeat_command(options: Options, task: Task) -> str:
    words = [sys.executable, sys.argv[0], "--program", str(options.program)]
    if options.api_library is not None:
        words += ["--api-library", str(options.api_library)]
    words += ["--seed", str(options.seed), "--family", task.family, "--only", str(task.number)]
    return " ".join(words)


def verdicts(options: Options, tasks: list[Task], jobs: int) -> Iterator[Verdict]:
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, _begin_worker, (options,)) as pool:
        yield from pool.imap_unordered(_judge, tasks)


def print_failure(options: Options, verdict: Verdict) -> None:
    print(f"\nFAILED {verdict.task.family} {verdict.task.number}: {verdict.broken}")
    for line in verdict.log:
        print(f"    {line}")
    print(f"    repeat: {repeat_command(options, verdict.task)}", flush=True)


def print_table(all_verdicts: list[Verdict]) -> None:
    print(f"\n{'family':<12}{'cases':>8}{'commands':>10}{'skipped':>9}{'failed':>8}{'seconds':>9}")
    for family in families.ALL:
        of = [v for v in all_verdicts if v.task.family == family.name]
        if of:
            print_row(family.name, of)
    print_row("all", all_verdicts)
    reasons = Counter((v.task.family, v.skipped) for v in all_verdicts if v.skipped)
    for (name, reason), count in reasons.items():
        print(f"skipped: {count} of {name}: {reason}")


def print_row(name: str, of: list[Verdict]) -> None:
    skipped, failed = sum(bool(v.skipped) for v in of), sum(bool(v.broken) for v in of)
    runs, seconds = sum(v.runs for v in of), sum(v.seconds for v in of)
    print(f"{name:<12}{len(of):>8}{runs:>10}{skipped:>9}{failed:>8}{seconds:>9.0f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--program", type=Path, required=True, help="the uniep that is attacked")
    parser.add_argument("--api-library", type=Path, help="what tests/hostile builds of the C API")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--cases", type=int, default=1000, help="in all (default 1000)")
    parser.add_argument("--family", choices=list(families.BY_NAME), help="only cases of this one")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only this case of the family")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folders of failed cases")
    parser.add_argument("--json", type=Path, help="write the verdicts")
    given = parser.parse_args()
    if given.only is not None and given.family is None:
        parser.error("--only needs --family")
    return given


def cases_wanted(cases: int) -> int:
    """UNIEP_TEST_CASES multiplies it, as in all tests; uniep itself does not know the variable."""
    return max(1, round(cases * float(os.environ.pop("UNIEP_TEST_CASES", "1"))))


def main() -> int:
    given = arguments()
    library = given.api_library.resolve() if given.api_library else None
    options = Options(given.program.resolve(), given.seed, library, given.keep)
    tasks = tasks_of(cases_wanted(given.cases), given.family, given.only)
    print(f"{len(tasks)} cases, seed {given.seed}, {given.jobs} at a time", flush=True)
    started = time.monotonic()
    found = []
    for verdict in verdicts(options, tasks, given.jobs):
        found.append(verdict)
        if verdict.broken:
            print_failure(options, verdict)
    print_table(found)
    failed = sum(bool(v.broken) for v in found)
    print(f"{'FAILED' if failed else 'passed'} in {time.monotonic() - started:.0f} s")
    if given.json:
        given.json.write_text(json.dumps([vars(v) | {"task": vars(v.task)} for v in found]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
