"""README.md's own lines, run as a newcomer would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Train with it in PyTorch"
# These install what runs this test; scripts/python_environment.sh does so in another place.
INSTALLS = ("make deps", "pip install ")


def section() -> str:
    text = (ROOT / "README.md").read_text()
    begin = text.index(SECTION)
    return text[begin : text.index("\n## ", begin + 1)]


def programs() -> dict[str, str]:
    """The Python blocks, by the file that the text before each asks to save it as."""
    found = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", section(), re.DOTALL)
    return dict(found)


def commands() -> list[str]:
    lines = "".join(re.findall(r"```bash\n(.*?)```", section(), re.DOTALL)).splitlines()
    return [line.split("#")[0].strip() for line in lines]


def test_every_python_block_is_saved_under_a_name() -> None:
    assert len(programs()) == section().count("```python") > 0


def test_installation_is_what_the_test_environment_does() -> None:
    script = (ROOT / "scripts" / "python_environment.sh").read_text()
    own = [line for line in commands() if line.startswith("pip install --no-build")]
    assert own and "pip install --no-build-isolation" in script


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith(INSTALLS)])
def test_command(command: str, tmp_path: Path) -> None:
    for name, text in programs().items():
        (tmp_path / name).write_text(text)
    for folder in ("examples", "README.md"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    bin_folder = str(Path(sys.executable).parent)
    words = command.split()
    program, flags = words[0], words[1:]
    if program == "torchrun":
        program, flags = "python", ["-m", "torch.distributed.run", "--standalone", *flags]
    assert program == "python", f"{command} is neither python nor torchrun"
    result = subprocess.run(
        [f"{bin_folder}/python", *flags], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
