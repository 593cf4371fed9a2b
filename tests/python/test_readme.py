"""Lines of README.md and other pages, run as a newcomer would run them."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Train with it in PyTorch"
PAGES = ("README.md", "docs/python.md", "docs/transformers.md")
# These install what runs this test; scripts/python_environment.sh does so in another place.
INSTALLS = ("bash scripts/install_deps.sh", "python3 -m venv ", "pip install ")


def section(page: str) -> str:
    """Of README.md the part on PyTorch, else the page."""
    text = (ROOT / page).read_text()
    if page != "README.md":
        return text
    begin = text.index(SECTION)
    return text[begin : text.index("\n## ", begin + 1)]


def programs(page: str) -> dict[str, str]:
    """The Python blocks, by the file that the text before each asks to save it as."""
    found = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", section(page), re.DOTALL)
    return dict(found)


def commands(page: str) -> list[str]:
    lines = "".join(re.findall(r"```bash\n(.*?)```", section(page), re.DOTALL)).splitlines()
    return [line.split("#")[0].strip() for line in lines]


def runnable() -> list[tuple[str, str]]:
    return [(page, c) for page in PAGES for c in commands(page) if not c.startswith(INSTALLS)]


def test_every_python_block_is_saved_under_a_name() -> None:
    assert len(programs("README.md")) == section("README.md").count("```python") > 0
    assert all(programs(page) for page in PAGES)


def test_installation_is_what_the_test_environment_does() -> None:
    script = (ROOT / "scripts" / "python_environment.sh").read_text()
    own = [line for line in commands("README.md") if line.startswith("pip install --no-build")]
    assert own and "pip install --no-build-isolation" in script


def test_what_the_package_needs_to_run_comes_along() -> None:
    """PyTorch's collectives of objects need numpy, which it does not bring."""
    found = {re.split(r"[^a-z]", line)[0] for line in importlib.metadata.requires("uniep") or []}
    assert {"torch", "numpy"} <= found


@pytest.mark.parametrize(("page", "command"), runnable())
def test_command(page: str, command: str, tmp_path: Path) -> None:
    if "transformers" in page:
        pytest.importorskip("transformers")
    for name, text in programs(page).items():
        (tmp_path / name).write_text(text)
    for folder in ("examples", "README.md"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    bin_folder = str(Path(sys.executable).parent)
    words = shlex.split(command)
    program, flags = words[0], words[1:]
    if program == "torchrun":
        program, flags = "python", ["-m", "torch.distributed.run", "--standalone", *flags]
    assert program == "python", f"{command} is neither python nor torchrun"
    result = subprocess.run(
        [f"{bin_folder}/python", *flags], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
