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
CHECKPOINTS = "docs/checkpoints.md"
PARALLELISM = "docs/parallelism.md"
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


def blocks(page: str) -> list[list[str]]:
    """The commands of each block."""
    found = re.findall(r"```bash\n(.*?)```", section(page), re.DOTALL)
    return [[line.split("#")[0].strip() for line in block.splitlines()] for block in found]


def commands(page: str) -> list[str]:
    return [command for block in blocks(page) for command in block]


def runnable() -> list[tuple[str, list[str]]]:
    """The blocks of pages, without what installs."""
    found = ((page, block) for page in PAGES for block in blocks(page))
    left = ((page, [c for c in block if not c.startswith(INSTALLS)]) for page, block in found)
    return [(page, block) for page, block in left if block]


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


@pytest.mark.parametrize(("page", "block"), runnable())
def test_commands(page: str, block: list[str], tmp_path: Path) -> None:
    if "transformers" in page:
        pytest.importorskip("transformers")
    for name, text in programs(page).items():
        (tmp_path / name).write_text(text)
    for folder in ("examples", "README.md"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for command in block:
        assert run(command, tmp_path).strip()


def run(command: str, folder: Path) -> str:
    """What it prints."""
    program, *flags = shlex.split(command)
    if program == "torchrun":
        program, flags = "python", ["-m", "torch.distributed.run", "--standalone", *flags]
    assert program == "python", f"{command} is neither python nor torchrun"
    result = subprocess.run(
        [Path(sys.executable).parent / "python", *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(tmp_path: Path) -> None:
    for name, text in programs(CHECKPOINTS).items():
        (tmp_path / name).write_text(text)
    said = [run(command, tmp_path) for command in commands(CHECKPOINTS)]
    # Ranks write at the same time, so what they say may stand in one line.
    found = [sorted(re.findall(r"saved|loaded|\[\d+,", text)) for text in said]
    assert found == [["[4,", "[4,", "saved", "saved"], ["[8,", "loaded"]]


def test_a_router_is_balanced(tmp_path: Path) -> None:
    for name, text in programs(PARALLELISM).items():
        (tmp_path / name).write_text(text)
    said = "".join(run(command, tmp_path) for command in commands(PARALLELISM))
    loads = [float(load) for load in re.findall(r"busiest expert ([\d.]+)", said)]
    assert len(loads) == 5 and loads[-1] < 1.5 < loads[0]
