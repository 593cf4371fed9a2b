"""One case: commands in a folder of its own, and the promises that all of them must keep."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import isolation
import judge
import outputs
import results

EARLIER = b"what was there before"
# No command of a case has that much to do; a machine that is busy with other things is slow.
MOST_SECONDS = 60.0
# Waits of ranks that do answer: a machine that is busy takes seconds to start processes.
LONGEST_WAIT_MS = 20000
# Waits for ranks that do not answer: short, as cases are about what happens then.
WAIT_MS = 2000

# Until a process whose parent was killed has followed it.
PATIENCE_SECONDS = 10.0

# Opened here, for a case may have no /dev.
_NULL = os.open(os.devnull, os.O_RDONLY)

# Who has more than one: a search for each direction and file, others for each finding.
SENTENCES = {"tune": 6, "validate": 1000, "compare": 1000}

Text = str | bytes | Path


class Broken(AssertionError):
    """A promise that was not kept."""


class Skipped(Exception):
    """What this machine or user does not allow."""


@dataclass
class Command:
    """A call of uniep, and what is done to it."""

    arguments: Sequence[Text]
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Files it is to write: path and kind (outputs.py)."""
    environment: Mapping[str, Text | None] = field(default_factory=dict)
    """What differs from a plain one; None: unset."""
    limits: Mapping[int, int] = field(default_factory=dict)
    """RLIMIT_... and what it is set to."""
    user: int | None = None
    seconds: float = MOST_SECONDS
    interrupt_after: float | None = None
    """Legal work may be long: Ctrl-C after that many seconds has to end it."""
    closed: Sequence[int] = ()
    """Descriptors that the program starts without."""
    stdout: IO[bytes] | int = subprocess.PIPE
    stderr: IO[bytes] | int = subprocess.PIPE
    signals: frozenset[int] = frozenset()
    """That may end it."""
    error_lines: int = 1
    """Most sentences of a failure: one, but that every process of a group may say its own."""
    prepare: Callable[[], object] = lambda: None
    """What else is done in its process before it begins."""
    called: Text = "uniep"
    """Its first argument."""
    program: Sequence[Text] = ()
    """What is run instead of uniep."""
    may_not_start: bool = False
    """The system may refuse before the program's first line."""

    @property
    def most_sentences(self) -> int:
        return max(self.error_lines, SENTENCES.get(self.subcommand, 1))

    @property
    def subcommand(self) -> str:
        return os.fsdecode(self.arguments[0]) if self.arguments else ""


@dataclass
class Outcome:
    """How a command ended."""

    command: Command
    code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def worked(self) -> bool:
        return self.code == 0 or (self.code == 1 and self.command.subcommand in judge.VERDICTS)

    @property
    def errors(self) -> str:
        return self.stderr.decode(errors="replace")


class Running:
    """A command that has been started."""

    def __init__(self, case: Case, command: Command) -> None:
        self.case = case
        self.command = command
        self.started = time.monotonic()
        program = command.program or [command.called]
        self.process = subprocess.Popen(
            [os.fsencode(a) for a in (*program, *command.arguments)],
            executable=None if command.program else case.program,
            cwd=case.folder,
            env=case.environment(command.environment),
            stdin=_NULL,
            stdout=command.stdout,
            stderr=command.stderr,
            start_new_session=True,
            preexec_fn=lambda: _prepare(command),
        )

    def finish(self) -> Outcome:
        """Waits for its end and judges it."""
        command = self.command
        try:
            stdout, stderr = self._communicate()
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            raise Broken(f"did not end within {command.seconds:g} s") from None
        outcome = Outcome(
            command,
            self.process.returncode,
            stdout or b"",
            stderr or b"",
            time.monotonic() - self.started,
        )
        self.case.judge(outcome)
        return outcome

    def _communicate(self) -> tuple[bytes, bytes]:
        if self.command.interrupt_after is not None:
            try:
                return self.process.communicate(timeout=self.command.interrupt_after)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGINT)
                self.case.log("interrupted")
        return self.process.communicate(timeout=self.command.seconds)


def _prepare(command: Command) -> None:
    """In the child, before it becomes the program."""
    for descriptor in command.closed:
        os.close(descriptor)
    for limit, value in command.limits.items():
        resource.setrlimit(limit, (value, value))
    command.prepare()
    if command.user is not None:
        os.setgroups([])
        os.setgid(command.user)
        os.setuid(command.user)


class Case:
    """A fresh folder, what happened in it, and what must still be there."""

    def __init__(
        self, program: Path, rng: random.Random, isolated: isolation.Isolation, helpers: Path | None
    ) -> None:
        self.program = program
        self.rng = rng
        self.isolated = isolated
        self.api_library = helpers
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        self.logged: list[str] = []
        self.runs = 0
        self._inputs: dict[Path, tuple[bytes, tuple[int, ...]]] = {}
        self._earlier: dict[Path, bytes] = {}
        self._expected: set[Path] = set()
        self._caches = {self.folder / ".cache/uniep/tuned.json"}
        self._program = _identity(program)
        self._mounts: list[Path] = []

    # ---- what a family does

    def path(self, name: str) -> Path:
        return self.folder / name

    def log(self, text: str) -> None:
        """Is printed with a failure."""
        self.logged.append(text)

    def add_input(self, path: Path, content: bytes | None = None) -> Path:
        """A file that no command may change."""
        if content is not None:
            path.write_bytes(content)
        self._inputs[path] = (path.read_bytes(), _identity(path))
        self._expected.add(path)
        return path

    def add_earlier(self, path: Path, content: bytes = EARLIER) -> Path:
        """A file that is there before an output of the same name."""
        path.write_bytes(content)
        self._earlier[path] = content
        self._expected.add(path)
        return path

    def expect(self, *paths: Path) -> None:
        """May be there at the end."""
        self._expected.update(paths)

    def run(self, command: Command) -> Outcome:
        return self.start(command).finish()

    def start(self, command: Command) -> Running:
        shown = " ".join(shown_text(a) for a in command.arguments)
        extra = {n: v for n, v in command.environment.items()}
        self.log(f"{shown}   {extra or ''} {dict(command.limits) or ''}".rstrip())
        self.runs += 1
        try:
            return self._start(command)
        except (OSError, subprocess.SubprocessError) as error:
            if not command.limits:
                raise
            raise Skipped(
                f"nothing can be started under that limit: {type(error).__name__}"
            ) from None

    def _start(self, command: Command) -> Running:
        self._expected.update(self.folder / name for name in command.outputs)
        cache = command.environment.get("UNIEP_TUNE_CACHE")
        if cache:
            self._caches.add(self.folder / os.fsdecode(cache))
        return Running(self, command)

    def environment(self, changes: Mapping[str, Text | None]) -> dict[bytes, bytes]:
        plain: dict[str, Text | None] = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": self.folder,
            "UNIEP_TIMEOUT_MS": str(LONGEST_WAIT_MS),
            **changes,
        }
        return {os.fsencode(k): os.fsencode(v) for k, v in plain.items() if v is not None}

    def mount(self, name: str, options: str) -> Path:
        """A small disk."""
        if not self.isolated.can_mount:
            raise Skipped("no file system can be mounted here")
        folder = self.path(name)
        folder.mkdir()
        if not isolation.mount_tmpfs(folder, options):
            raise Skipped("no tmpfs can be mounted here")
        self._mounts.append(folder)
        return folder

    def hide(self, folder: str) -> None:
        """There is nothing in it, until the case ends."""
        if not self.isolated.can_mount or not isolation.mount_tmpfs(Path(folder), "size=4k"):
            raise Skipped("nothing can be mounted here")
        self._mounts.append(Path(folder))

    # ---- promises

    def require(self, ok: bool, what: str) -> None:
        if not ok:
            raise Broken(what)

    def judge(self, outcome: Outcome) -> None:
        command = outcome.command
        self.log(f"-> {outcome.code} in {outcome.seconds:.2f} s {shown_errors(outcome)}")
        problem = judge.problem_of_end(outcome)
        self.require(problem is None, problem or "")
        for name, kind in command.outputs.items():
            self._judge_output(outcome, Path(name), kind)

    def _judge_output(self, outcome: Outcome, name: Path, kind: str) -> None:
        path = self.folder / name
        if not path.exists():
            self.require(outcome.code != 0, f"exit 0, and there is no {name}")
            return
        if not stat.S_ISREG(path.stat().st_mode):
            return
        content = path.read_bytes()
        if content == self._earlier.get(path):
            self.require(outcome.code != 0, f"exit 0, and {name} is what it was before")
            return
        problem = outputs.problem_of(kind, content)
        self.require(problem is None, f"{name} {problem}")
        self._earlier[path] = content
        if outcome.code == 0 and kind == "tensors" and not outcome.command.program:
            words = [os.fsencode(a) for a in outcome.command.arguments]
            plain = results.plain_result(self.program, self.folder, self.environment({}), words)
            self.require(content == plain, f"{name} differs from that of the plain run")

    def finish(self) -> None:
        """What holds when all commands have ended."""
        for folder in [m for m in self._mounts if self.folder not in m.parents]:
            isolation.unmount(folder)
            self._mounts.remove(folder)
        names = isolation.end_leftover_children(PATIENCE_SECONDS)
        self.require(not names, f"left processes behind: {names}")
        for path, (content, identity) in self._inputs.items():
            self.require(path.exists(), f"the input {path.name} is gone")
            same = path.read_bytes() == content and _identity(path) == identity
            self.require(same, f"the input {path.name} has changed")
        left = [p for p in self._files() if not self._may_be_left(p)]
        self.require(not left, f"left behind: {[str(p.relative_to(self.folder)) for p in left]}")
        self.require(_identity(self.program) == self._program, "the program itself has changed")
        shared = os.listdir("/dev/shm") if self.isolated.can_mount else []
        self.require(not shared, f"left in /dev/shm: {shared}")

    def _files(self) -> list[Path]:
        return [Path(top) / n for top, _, names in os.walk(self.folder) for n in names]

    def _may_be_left(self, path: Path) -> bool:
        of_the_cache = any(judge.is_of_the_cache(path, cache) for cache in self._caches)
        return of_the_cache or path in self._expected

    def close(self) -> None:
        isolation.end_leftover_children(patience=0)
        for folder in self._mounts:
            isolation.unmount(folder)
        for top, folders, _ in os.walk(self.folder):
            for name in folders:
                with contextlib.suppress(OSError):
                    (Path(top) / name).chmod(0o700)
        shutil.rmtree(self.folder, ignore_errors=True)


def _identity(path: Path) -> tuple[int, ...]:
    info = path.stat()
    return (info.st_ino, info.st_mode, info.st_size, info.st_nlink, info.st_mtime_ns)


def shown_text(text: Text) -> str:
    """On one line, and not all of a long one."""
    shown = os.fsdecode(text)
    if len(shown) > 200:
        shown = f"{shown[:150]}...({len(shown)})"
    plain = all(c.isalnum() or c in "-_=.,:/|" for c in shown) and shown
    return shown if plain else repr(shown)


def shown_errors(outcome: Outcome) -> str:
    text = outcome.errors
    return repr(text if len(text) < 500 else f"{text[:300]} ... {text[-150:]}")


Attack = Callable[[Case], None]
