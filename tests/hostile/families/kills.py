"""Signals at random moments: what was there before stays, or the whole new file is there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

import commands
from case import Case, Command, Text

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def attack(case: Case) -> None:
    command = case.rng.choice((_run, _run, _run_of_processes, _tune, _bench, _simulate))(case)
    running = case.start(command)
    # Most of a command's work is within that time, and some of it behind its end.
    time.sleep(case.rng.random() ** 2 * 0.12)
    number = case.rng.choice(SIGNALS)
    if case.rng.random() < 0.2:
        os.kill(running.process.pid, signal.SIGSTOP)
        time.sleep(case.rng.random() * 0.1)
        os.kill(running.process.pid, signal.SIGCONT)
        if case.rng.random() < 0.5:
            running.finish()
            return
    command.signals = frozenset({number})
    case.log(signal.Signals(number).name)
    if case.rng.random() < 0.2:
        os.killpg(running.process.pid, number)
    else:
        running.process.send_signal(number)
    running.finish()


def _outputs(case: Case, words: list[Text], names: Mapping[str, str]) -> dict[str, str]:
    outputs = {}
    for number, (option, kind) in enumerate(names.items()):
        if case.rng.random() < 0.7:
            words += [option, f"out{number}"]
            outputs[f"out{number}"] = kind
            if case.rng.random() < 0.5:
                case.add_earlier(case.path(f"out{number}"))
    return outputs


def _run(case: Case) -> Command:
    tokens = case.rng.choice((64, 512, 2048))
    words: list[Text] = ["run", "--shape", f"tiny,tokens={tokens}"]
    words += ["--ranks", case.rng.choice(("1", "2", "8"))]
    return Command(words, outputs=_outputs(case, words, commands.OF_RUN))


def _run_of_processes(case: Case) -> Command:
    command = _run(case)
    command.arguments = (*command.arguments, "--processes")
    command.error_lines = 10
    return command


def _tune(case: Case) -> Command:
    words: list[Text] = ["tune", "--shape", "tiny", "--profile", "none", "--budget", "1"]
    outputs = _outputs(case, words, {"--json": "figures"})
    return Command(
        words, outputs=outputs, environment={"UNIEP_TUNE_CACHE": case.path("tuned.json")}
    )


def _bench(case: Case) -> Command:
    words: list[Text] = ["bench", "--shape", "tiny", "--iterations", "20"]
    return Command(words, outputs=_outputs(case, words, {"--json": "figures"}))


def _simulate(case: Case) -> Command:
    words: list[Text] = ["simulate", "--shape", "small", "--ranks", "4"]
    return Command(words, outputs=_outputs(case, words, {"--json": "figures", "--plot": "plot"}))
