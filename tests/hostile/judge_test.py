"""That no promise is kept by looking away: programs that break one each, and are found out."""

from __future__ import annotations

import random
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import layers
from case import Broken, Case, Command
from isolation import Isolation, adopt_orphans

TENSORS = {"out": "tensors"}
GOOD = "echo done"
SENTENCE = "echo 'uniep run: there is no layer; one is accepted' >&2"


class Judge(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = Path(folder.name) / "uniep"
        adopt_orphans()

    def play(self, script: str, **command: object) -> None:
        """A case of one call of a program that is this script."""
        self.program.write_text(f"#!/bin/sh\n{script}\n")
        self.program.chmod(0o755)
        isolated = Isolation.__new__(Isolation)
        isolated.can_mount = False
        case = Case(self.program, random.Random(0), isolated, None)
        try:
            case.add_input(case.path("layer"), b"of somebody")
            case.add_earlier(case.path("out"))
            command.setdefault("arguments", ("run",))
            case.run(Command(**command))  # type: ignore[arg-type]
            case.finish()
        finally:
            case.close()

    def caught(self, script: str, what: str, **command: object) -> None:
        with self.assertRaisesRegex(Broken, what):
            self.play(script, **command)

    def test_what_is_in_order(self) -> None:
        self.play(GOOD)
        self.play(f"{SENTENCE}; exit 2")
        self.play('echo \'{"schema": "uniep-run-1"}\' > out', outputs={"out": "figures"})
        self.play(f"{SENTENCE}; exit 1", outputs={"out": "figures"})
        self.play("kill -TERM $$", signals=frozenset({15}))
        self.play("echo '# running: 50 %' >&2")
        self.play("exec sleep 60", interrupt_after=0.1)

    def test_ends(self) -> None:
        self.caught("kill -SEGV $$", "SIGSEGV")
        self.caught("exit 134", "SIGABRT")
        self.caught("kill -TERM $$", "exit code")
        self.caught(f"{SENTENCE}; exit 3", "exit code 3")
        self.caught("exec sleep 60", "did not end", seconds=0.2)
        self.caught("trap '' INT; sleep 60", "did not end", interrupt_after=0.1, seconds=0.2)

    def test_sentences(self) -> None:
        self.caught("exit 2", "without a sentence")
        self.caught(f"{SENTENCE}; {SENTENCE}; exit 2", "2 sentences")
        self.caught(SENTENCE, "exit code 0 with")
        self.caught("echo 'oh no' >&2; exit 2", "no sentence of uniep")
        self.caught("printf 'uniep run: half' >&2; exit 2", "within a line")
        self.caught("printf 'uniep run: \\377\\n' >&2; exit 2", "not UTF-8")
        self.caught("printf 'uniep run: \\033[31m\\n' >&2; exit 2", "control character")
        self.caught("echo 'uniep run: cannot write: Success' >&2; exit 2", "no reason")
        long = "printf 'uniep run: '; head -c 900 /dev/zero | tr '\\0' x; echo"
        self.caught(f"({long}) >&2; exit 2", "characters")

    def test_files(self) -> None:
        self.caught("echo > layer", "the input layer")
        self.caught("rm layer", "the input layer")
        self.caught("ln layer out2; rm out2; touch layer", "the input layer")
        self.caught("echo '{' > out", "no whole figures", outputs={"out": "figures"})
        self.caught("rm out", "there is no out", outputs={"out": "figures"})
        self.caught(GOOD, "what it was before", outputs={"out": "figures"})
        self.caught(f"{SENTENCE}; echo > out; exit 2", "no whole", outputs={"out": "trace"})
        self.caught("echo > .uniep.tmp-1", "left behind")
        self.caught(f"echo >> {self.program}", "program itself")

    def test_results(self) -> None:
        """The files differ unless the schedule is that of the plain run."""
        for name in ("plain", "other"):
            numbers = {"plain": b"\0\0", "other": b"\1\0"}[name]
            parts = {"out": ("BF16", [1], numbers)}
            (self.program.parent / name).write_bytes(layers.serialized(parts))
        here = self.program.parent
        script = f"""for last; do :; done
            case "$*" in *sequential*) cp {here}/plain $last;; *) cp {here}/%s $last;; esac"""
        self.play(script % "plain", arguments=("run", "--output", "out"), outputs=TENSORS)
        self.caught(
            script % "other", "differs", arguments=("run", "--output", "out"), outputs=TENSORS
        )

    def test_processes(self) -> None:
        with unittest.mock.patch("case.PATIENCE_SECONDS", 0.2):
            self.caught("sleep 60 >/dev/null 2>&1 &", "processes behind")


if __name__ == "__main__":
    unittest.main()
