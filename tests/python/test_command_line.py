"""The command line of the package, and what Python asks of it: schedules and searches."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from command_line import PROGRAM, uniep_command

import uniep


def test_the_command_line():
    assert uniep.__version__ in uniep_command("info", program=("-m", "uniep"))
    assert "uniep run: " in uniep_command("run", "--shape", "nothing", code=2)
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="uniep")
    assert script.value == "uniep_program:main"


def test_the_command_line_does_not_wait_for_pytorch():
    code = "import sys, os; from uniep_program import main; os.execv = print; main(['info'])"
    code += "; assert not {'torch', 'uniep'} & set(sys.modules)"
    assert "bin/uniep ['uniep', 'info']" in uniep_command(program=("-c", code))


def tuned_in_time(*shape, **options):
    """What uniep.tune gives within 2 seconds, or 20 where the machine is too busy for that."""
    try:
        return uniep.tune(*shape, budget=2, **options)
    except RuntimeError as error:
        if "is too small" not in str(error):
            raise
    return uniep.tune(*shape, budget=20, **options)


def test_tune_and_schedule(tmp_path, monkeypatch):
    shape = (64, 32, 8, 2, 64)
    assert uniep.schedule(*shape, device="cpu", name="two-kernel").startswith("launch=paired")
    monkeypatch.setenv("UNIEP_TUNE_CACHE", str(tmp_path / "tuned.json"))
    figures = tuned_in_time(*shape, ranks=1, direction="forward")
    assert figures
    assert (tmp_path / "tuned.json").exists()
    (entry,) = json.loads((tmp_path / "tuned.json").read_text())["entries"]
    axes = dict(axis.split("=") for axis in uniep.schedule(*shape, device="cpu").split(","))
    assert axes == {name: str(value) for name, value in entry["schedule"].items()}
    monkeypatch.setenv("UNIEP_OF_NOTHING", "1")  # of which a warning says that nothing reads it
    with pytest.raises(RuntimeError, match=r"^uniep tune: --shape .* is accepted$"):
        uniep.tune(*shape, ranks=3)


def test_tune_within_a_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("UNIEP_TUNE_CACHE", str(tmp_path / "tuned.json"))
    shape = (64, 32, 8, 2, 64)
    figures = tuned_in_time(*shape, memory=1.0, layers=2, in_flight=3, weight_bytes=18)
    memory = figures["memory"]
    assert (memory["layers"], memory["in_flight"], memory["bytes_of_parameter"]) == (2, 3, 18)
    best = memory["choices"][memory["fastest"]]
    assert best["fits"] and best["measured_ms"] > 0
    choice = {name: best[name] for name in ("save", "recompute_h", "exact_rows", "row_pool")}
    uniep.MoELayer(64, 32, 8, 2, **choice)(torch.ones(4, 64).bfloat16())
    with pytest.raises(RuntimeError, match="nothing fits"):
        uniep.tune(*shape, budget=1, memory=1e-6, layers=2)
    with pytest.raises(RuntimeError, match="--pass is given beside --memory"):
        uniep.tune(*shape, direction="forward", memory=1.0, layers=2)
    with pytest.raises(RuntimeError, match="--layers is 2"):
        uniep.tune(*shape, layers=2)


def test_the_command_line_with_a_closed_stdout(tmp_path):
    """As of a service that has none: `uniep ... >&-`."""
    file = tmp_path / "result.json"
    command = ("run", "--shape", "tiny", "--json", str(file))
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', sys.executable, *PROGRAM, *command],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stderr
    assert file.exists(), done.stderr


def test_a_program_that_cannot_be_run_is_named(tmp_path):
    program = tmp_path / "bin" / "uniep"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o600)
    code = f"import uniep_program as p; p._program = lambda: {str(program)!r}; p.main(['info'])"
    said = uniep_command(code=1, program=("-c", code))
    assert said == f"uniep: cannot run {program} (Permission denied); reinstall the package uniep\n"


IN_ASCII = r"""
import sys
from pathlib import Path
from uniep import _tensor_files as files, cli
try:
    cli.run("run", "--shape", "gr\udcc3\udcb6\udcc3\udc9fe")  # the bytes of UTF-8
except RuntimeError as error:
    assert "gr\u00f6\u00dfe" in str(error), ascii(str(error))
index = Path(sys.argv[1])
files.write_whole(index, '{"weight_map": {"\u00fc": "file"}}')
assert files._weight_map(index) == {"\u00fc": "file"}
"""


def test_text_is_utf_8_in_a_locale_that_is_not(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IN_ASCII, str(tmp_path / "index.json")],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_enough_ends_the_command_line():
    command = subprocess.Popen(
        [sys.executable, *PROGRAM, "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    command.stdout.close()
    assert command.stderr.read() == b""
    command.stderr.close()
    assert command.wait() == -signal.SIGPIPE
