"""CONTRIBUTING's example of a new axis of the schedule, followed on copies of the sources.

Every `diff` block of its part "an axis" is applied to the first file that its step names. Then the
schedule is compiled with the changed files ahead of those of the tree, and a program asks the
library what it knows of the new axis.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AXIS = "rotate_step"
# Beside all of src/schedule.
NEEDED = (
    "src/base/nearest.cpp",
    "src/base/problem.cpp",
    "src/base/quotes.cpp",
    "src/layout/capacity.cpp",
)

PROGRAM = r"""
#include <cstdio>

#include "schedule/axes.h"
#include "schedule/tile_order.h"
#include "uniep/error.h"

using namespace uniep;

int main() {
  for (const Axis& axis : axes()) {
    if (axis.info.name != "AXIS") continue;
    const AxisInfo& a = axis.info;
    std::printf("range %d %d\n", a.min, a.max);
    std::printf("default %d\n", axis.get(Schedule{}));
    for (const Backend b : {Backend::kCpu, Backend::kCuda}) {
      std::printf("neutral %d\n", axis.get(neutral_schedule(b)));
    }
    for (const char* text : {"single", "rotate=next-first"}) {
      const bool matters = axis.matters(parse_schedule(text), Pass::kForward, Backend::kCpu);
      std::printf("matters %s %d\n", text, matters ? 1 : 0);
    }
  }
  PassView view{.schedule = parse_schedule("rotate=next-first,AXIS=2"), .rank = 1, .num_ranks = 4};
  std::printf("printed %s\n", to_string(view.schedule).c_str());
  std::printf("begins with %d\n", starting_source(view));
  view.schedule = neutral_schedule(Backend::kCpu);
  view.schedule.rotate = SourceRotation::kNextFirst;
  std::printf("neutral begins with %d\n", starting_source(view));
  try {
    parse_schedule("AXIS=1000");
  } catch (const Error& error) {
    std::printf("refused %s\n", error.what());
  }
}
""".replace("AXIS", AXIS)

Diff = tuple[str, str]  # what stands in a file, and what takes its place


def part_of(text: str, name: str) -> str:
    """From "**name**" on, up to the next such beginning of a line or the next heading."""
    found = re.search(rf"^\*\*{re.escape(name)}.*?(?=^\*\*|^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"CONTRIBUTING.md has no part '{name}'"
    return found.group()


def diffs_of(part: str) -> dict[str, list[Diff]]:
    """By file."""
    found: dict[str, list[Diff]] = {}
    for block in re.finditer(r"^( *)```diff\n(.*?)^ *```", part, re.MULTILINE | re.DOTALL):
        step = re.split(r"^\d+\. ", part[: block.start()], flags=re.MULTILINE)[-1]
        file = re.findall(r"`((?:include|src)/[^`]+)`", step)[0]
        lines = [line[len(block.group(1)) :] for line in block.group(2).splitlines()]
        old = [line[1:] for line in lines if not line.startswith("+")]
        new = [line[1:] for line in lines if not line.startswith("-")]
        found.setdefault(file, []).append(("\n".join(old) + "\n", "\n".join(new) + "\n"))
    return found


def applied(text: str, diff: Diff, name: str) -> str:
    old, new = diff
    times = text.count(old)
    assert times == 1, f"{name} has these lines {times} times; once is accepted:\n{old}"
    return text.replace(old, new)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return done.stdout


class AddAnAxis(unittest.TestCase):
    output = ""

    @classmethod
    def setUpClass(cls) -> None:
        diffs = diffs_of(part_of((ROOT / "CONTRIBUTING.md").read_text(), "an axis"))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, changes in diffs.items():
                text = (ROOT / file).read_text()
                for diff in changes:
                    text = applied(text, diff, file)
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text)
            sources = [str(p.relative_to(ROOT)) for p in (ROOT / "src" / "schedule").glob("*.cpp")]
            files = [folder / s if s in diffs else ROOT / s for s in (*sources, *NEEDED)]
            # Together, which takes a quarter of the time.
            main = folder / "main.cpp"
            main.write_text("".join(f'#include "{f}"\n' for f in files) + PROGRAM)
            include = [f"-I{base / part}" for base in (folder, ROOT) for part in ("include", "src")]
            compiler = shlex.split(os.environ.get("CXX", "c++"))
            program = folder / "main"
            # Of included sources GCC takes what is in an unnamed namespace for a header's.
            flags = ("-std=c++20", "-Wno-subobject-linkage")
            run([*compiler, *flags, *include, str(main), "-o", str(program)])
            cls.output = run([str(program)])

    def test_the_example_is_complete(self) -> None:
        files = diffs_of(part_of((ROOT / "CONTRIBUTING.md").read_text(), "an axis"))
        self.assertIn("include/uniep/schedule.h", files)
        self.assertIn("src/schedule/axes.cpp", files)

    def test_it_has_its_range_and_neutral_value(self) -> None:
        self.assertIn("range 1 63\ndefault 1\nneutral 1\nneutral 1\n", self.output)

    def test_it_parses_and_prints(self) -> None:
        self.assertRegex(self.output, rf"printed launch=.*,{AXIS}=2(,|\n)")

    def test_its_range_is_checked(self) -> None:
        self.assertRegex(self.output, rf"refused .*{AXIS}.*1 to 63")

    def test_it_has_an_effect_where_it_says(self) -> None:
        self.assertIn("matters single 0\nmatters rotate=next-first 1\n", self.output)

    def test_it_means_what_it_says(self) -> None:
        self.assertIn("\nbegins with 3\n", self.output)
        self.assertIn("neutral begins with 2\n", self.output)


if __name__ == "__main__":
    unittest.main()
