"""uniep completion: the scripts as the shells run them (program.py); an argument names one test
class."""

import re
import shutil
import subprocess
import unittest
from pathlib import Path

from program import COMMANDS, PRESETS, ProgramTest

ASK = """
COMP_CWORD=$(($# - 1))
COMP_WORDS=("$@")
_uniep
printf '%s\\n' "${COMPREPLY[@]}"
"""


class Completion(ProgramTest):
    def setUp(self) -> None:
        super().setUp()
        self.script = self.succeed("completion", "bash")

    def proposed(self, *words: str) -> list[str]:
        """What bash proposes for the last of `words`, behind the program's name."""
        if shutil.which("bash") is None:
            self.skipTest("there is no bash")
        done = subprocess.run(["bash", "--norc", "-c", self.script + ASK, "uniep", "uniep", *words],
                              capture_output=True, text=True, cwd=self.folder, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.split("\n")[:-1] if done.stdout != "\n" else []

    def test_subcommands(self) -> None:
        self.assertEqual(set(self.proposed("")), {*COMMANDS, "--help", "-h", "--version"})
        self.assertEqual(self.proposed("va"), ["validate"])
        self.assertEqual(self.proposed("--v"), ["--version"])

    def test_every_flag_of_every_subcommand(self) -> None:
        zsh = self.succeed("completion", "zsh")
        for command in COMMANDS:
            text = self.succeed(command, "--help")
            flags = set(re.findall(r"^ +(?:-\w,)?(--[\w-]+)", text, re.MULTILINE))
            self.assertEqual(set(self.proposed(command, "--")), flags, command)
            section = zsh.split(f"\n    {command})\n")[1].split(";;")[0]
            self.assertEqual(set(re.findall(r"'(--[\w-]+)", section)), flags, command)

    def test_values(self) -> None:
        self.assertEqual(self.proposed("run", "--pass", ""), ["forward", "backward", "both"])
        self.assertEqual(self.proposed("run", "--main-grad", "f"), ["fp32"])
        self.assertEqual(self.proposed("tune", "--backend", ""), ["cpu", "cuda"])
        self.assertEqual(self.proposed("simulate", "--shape", "deep"), ["deepseek-v3"])
        presets = {preset.removesuffix("4") for preset in PRESETS}
        self.assertEqual(set(self.proposed("simulate", "--schedule", "")), presets)
        self.assertEqual(set(self.proposed("run", "--schedule", "")), presets | {"auto"})
        self.assertEqual(self.proposed("simulate", "--profile", "h2"), ["h200"])
        self.assertEqual(self.proposed("tune", "--profile", "no"), ["none"])
        self.assertEqual(self.proposed("cache", ""), ["list", "clear"])
        self.assertEqual(self.proposed("completion", "z"), ["zsh"])
        self.assertEqual(self.proposed("run", "--seed", ""), [])

    def test_a_value_behind_an_equals_sign(self) -> None:
        # Bash makes three words of it.
        self.assertEqual(self.proposed("run", "--pass", "=", "b"), ["backward", "both"])
        self.assertEqual(self.proposed("run", "--backend", "="), ["auto", "cpu", "cuda"])

    def test_several_values(self) -> None:
        self.assertEqual(self.proposed("bench", "--shape", "tiny", "sm"), ["small"])
        self.assertEqual(self.proposed("run", "--shape", "tiny", "sm"), [])
        self.assertIn("--schedule", self.proposed("bench", "--shape", "tiny", "--s"))

    def test_what_is_given_does_not_end_the_flags(self) -> None:
        self.assertIn("--ranks", self.proposed("run", "--shape", "tiny", ""))
        self.assertEqual(self.proposed("run", "--shape", "tiny", "--chec"), ["--check"])

    def test_files(self) -> None:
        for name in ("a layer.safetensors", "a.json", "b"):
            (self.folder / name).touch()
        (self.folder / "another").mkdir()
        for words in (["run", "--input"], ["run", "--save-input"], ["validate"], ["compare", "b"],
                      ["simulate", "--plot"], ["bench", "--json"], ["tune", "--profile"]):
            self.assertLess({"a layer.safetensors", "a.json", "another"},
                            set(self.proposed(*words, "a")) | {"(others)"}, words)
        self.assertEqual(self.proposed("validate", "a l"), ["a layer.safetensors"])
        self.assertEqual(self.proposed("run", "--pass", "a"), [])

    def test_bash_is_told_which_program(self) -> None:
        done = subprocess.run(["bash", "--norc", "-c", self.script + "complete -p uniep"],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stdout.strip(), "complete -F _uniep uniep")

    def test_zsh_understands_its_script(self) -> None:
        if shutil.which("zsh") is None:
            self.skipTest("there is no zsh")
        path = self.folder / "_uniep"
        path.write_text(self.succeed("completion", "zsh"))
        subprocess.run(["zsh", "-f", "-n", path], check=True, timeout=60)
        load = f"fpath=({self.folder} $fpath); autoload -U compinit; compinit -u -D; " \
               "print $_comps[uniep]"
        done = subprocess.run(["zsh", "-f", "-c", load], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stdout.strip(), "_uniep")

    def test_arguments(self) -> None:
        self.refuse("completion", words=["SHELL"])
        self.refuse("completion", "fish", words=["'fish'", "bash, zsh"])

    def test_the_scripts_do_not_depend_on_where_they_are_made(self) -> None:
        self.assertNotIn(str(Path.cwd()), self.script)
        self.assertEqual(self.script, self.succeed("completion", "bash", UNIEP_CPU_ISA="portable"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
