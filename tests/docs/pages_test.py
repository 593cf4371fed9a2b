"""What pages must keep to: short lines, links that lead somewhere, files and code that exist."""

from __future__ import annotations

import re
import subprocess
import unittest
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_LINE = 120
MODELS = ("deepseek-v3", "qwen3-235b", "qwen3-30b", "mixtral-8x7b", "gpt-oss-120b")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
# A path in code that begins with a folder of this repository, and names a file or a folder in it.
MENTION = re.compile(
    r"`((?:benchmarks|cmake|data|docs|examples|include|profiles|python|scripts|src|tests|tools|tuned)"
    r"/[\w./+-]*\w/?)`"
)


def pages() -> list[Path]:
    """Those of the repository, or of an archive without its history."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = [ROOT / line for line in listed.stdout.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        patterns = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "tests/**/*.md")
        found = [page for pattern in patterns for page in ROOT.glob(pattern)]
    return sorted(page for page in found if page.exists())


def without_code_blocks(text: str) -> str:
    """The page with its fenced blocks emptied, line by line."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        lines.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(lines)


def anchors(page: Path) -> set[str]:
    text = without_code_blocks(page.read_text())
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = "".join(c for c in heading if c.isalnum() or c in " -_").replace(" ", "-")
        while slug in found:  # a heading that is there twice
            slug += "-1"
        found.add(slug)
    return found


def tables_of_speed(text: str) -> list[list[tuple[list[float], list[float]]]]:
    """Of each table over the models, forward and backward: times as fast, and % of the floor."""
    tables, rows = [], []
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip(" %") for cell in line.strip("|").split("|")]
        if cells[0] in MODELS:
            rows.append(cells)
        elif rows:
            columns = list(zip(*rows, strict=True))
            passes = [
                ([float(c) for c in columns[i]], [int(c) for c in columns[i + 1]]) for i in (3, 7)
            ]
            tables.append(passes)
            rows = []
    return tables


def problems_of_lines(name: str, text: str) -> list[str]:
    found = []
    for number, line in enumerate(without_code_blocks(text).splitlines(), 1):
        if line.startswith(("|", "    ")) or len(line) <= LONGEST_LINE:
            continue
        if " " not in line.strip() or re.fullmatch(
            r"\s*(?:[-*] )?" + LINK.pattern + r"[.,;:]?", line
        ):
            continue  # a link that cannot be broken
        found.append(f"{name}:{number} has {len(line)} characters; {LONGEST_LINE} are accepted")
    return found


def problems_of_links(page: Path, text: str) -> list[str]:
    found = []
    for target in LINK.findall(without_code_blocks(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            found.append(f"{page.name} links to {target}, which is not there")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            found.append(f"{page.name} links to {target}, which has no such heading")
    return found


def problems_of_mentions(page: Path, text: str) -> list[str]:
    """Of files in code. A name with another ending (`src/x.*`, `src/x` for x.h) is found, too."""
    found = []
    for path in MENTION.findall(without_code_blocks(text)):
        file = ROOT / path
        if not file.exists() and not list(file.parent.glob(file.name + ".*")):
            found.append(f"{page.name} names {path}, which is not there")
    return found


def tables_of_folders(text: str) -> list[tuple[str, list[str]]]:
    """Tables whose files lie below one folder, each as that folder and the first cells of its rows.

    The line before the table is "`src/x`:", or the head of its first column names the folder.
    """
    found: list[tuple[str, list[str]]] = []
    for table in re.finditer(r"^([^|\n]*)\n*((?:^\|.*\n?)+)", text, re.MULTILINE):
        head, _, *rows = [line.split("|")[1] for line in table.group(2).splitlines()]
        folder = re.fullmatch(r"`(src/\w+)`:", table.group(1)) or re.fullmatch(
            r" files? in `(src/\w+)` ", head
        )
        if folder is not None:
            found.append((folder.group(1), rows))
    return found


def problems_of_tables(name: str, text: str) -> list[str]:
    """Of names in code: they exist below the folder of their table, in whichever folder there."""
    found = []
    for folder, rows in tables_of_folders(text):
        names = [n for row in rows for n in re.findall(r"`([\w.*/]+?)/?`", row)]
        if not names:
            found.append(f"{name}: the table of {folder} names no files")
        for file in names:
            below = ROOT / folder
            if not any(below.rglob(file)) and not any(below.rglob(file + ".*")):
                found.append(f"{name} names {file} in the table of {folder}, which is not there")
    return found


def headers_left_out(text: str) -> list[str]:
    """Headers that lie in a folder of a table, and that no code of the page names."""
    code = " ".join(re.findall(r"`([^`\n]+)`", without_code_blocks(text)))
    return [
        str(header.relative_to(ROOT))
        for folder, _ in tables_of_folders(text)
        for header in sorted((ROOT / folder).glob("*.h"))
        if not re.search(rf"\b{header.stem}\b", code)
    ]


def folders_of_modules(text: str) -> list[str]:
    """Of the sources, each above those whose headers it includes."""
    table = text.partition("| folder | what belongs there |")[2].partition("\n\n")[0]
    return re.findall(r"^\|.*?`(src/\w+)` \|", table, re.MULTILINE)


def includes_upwards(folders: list[str], root: Path = ROOT) -> list[str]:
    """Includes of headers of folders that do not stand below, but for those in `include`."""
    found = []
    for i, folder in enumerate(folders):
        names = [Path(below).name for below in folders[i:]]
        for file in sorted((root / folder).rglob("*.*")):
            for header in re.findall(r'^#include "(\w+)/', file.read_text(), re.MULTILINE):
                if header not in (*names, "uniep") and header in map(name_of, folders):
                    found.append(f"{file.relative_to(root)} includes a header of {header}")
    return found


def name_of(folder: str) -> str:
    return folder.rpartition("/")[2]


def problems_of_quotes(page: Path, text: str) -> list[str]:
    """Of code whose first line names a file: it stands there, however it is indented."""
    found = []
    for block in re.findall(r"^ *```cpp\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        first, *quoted = [line.strip() for line in block.splitlines()]
        name = re.fullmatch(r"// ((?:src|tests|include)/\S+)", first)
        if name is None:
            continue
        lines = [line.strip() for line in (ROOT / name.group(1)).read_text().splitlines()]
        starts = range(len(lines) - len(quoted) + 1)
        if not any(lines[i : i + len(quoted)] == quoted for i in starts):
            found.append(f"{page.name} quotes {name.group(1)}, which has other lines: {quoted[0]}")
    return found


class Pages(unittest.TestCase):
    def of_all(self, check: Callable[[Path, str], list[str]]) -> list[str]:
        return [p for page in pages() for p in check(page, page.read_text())]

    def test_lines_are_short(self) -> None:
        self.assertEqual(
            self.of_all(lambda p, t: problems_of_lines(str(p.relative_to(ROOT)), t)), []
        )

    def test_links_lead_somewhere(self) -> None:
        self.assertEqual(self.of_all(problems_of_links), [])

    def test_files_that_are_named_are_there(self) -> None:
        self.assertEqual(self.of_all(problems_of_mentions), [])

    def test_files_in_tables_of_folders_are_there(self) -> None:
        page = ROOT / "docs" / "architecture.md"
        self.assertGreaterEqual(len(tables_of_folders(page.read_text())), 5)
        self.assertEqual(problems_of_tables(page.name, page.read_text()), [])
        self.assertEqual(headers_left_out(page.read_text()), [])

    def test_folders_include_what_stands_below_them(self) -> None:
        folders = folders_of_modules((ROOT / "docs" / "architecture.md").read_text())
        there = [f"src/{p.name}" for p in (ROOT / "src").iterdir() if p.is_dir()]
        self.assertEqual(sorted(folders), sorted(there))
        self.assertEqual(includes_upwards(folders), [])
        self.assertNotEqual(includes_upwards(folders[::-1]), [])

    def test_what_subcommands_share_includes_none_of_them(self) -> None:
        tools = ROOT / "tools" / "uniep"
        folders = [p.relative_to(ROOT).as_posix() for p in tools.iterdir() if p.is_dir()]
        of_sources = {p.name for p in (ROOT / "src").iterdir()}  # `trace/` may be either's
        folders = [f for f in folders if name_of(f) not in of_sources]
        folders.sort(key=lambda folder: name_of(folder) == "common")
        self.assertEqual([f for f in includes_upwards(folders) if "/common/" in f], [])

    def test_code_that_is_quoted_is_there(self) -> None:
        self.assertEqual(self.of_all(problems_of_quotes), [])

    def test_the_performance_page_is_short(self) -> None:
        lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
        self.assertLessEqual(len(lines), 120, "what is not a table or a command goes to research/")

    def test_the_first_figures_are_those_of_the_performance_page(self) -> None:
        text = (ROOT / "docs" / "performance.md").read_text()
        shown = tables_of_speed(text[text.index("## Four H200") : text.index("## Two GPUs")])
        self.assertEqual(len(shown), 2)
        readme = (ROOT / "README.md").read_text()
        for what, form in ((0, "{:.2f} to {:.2f}"), (1, "{} to {} %")):
            for table in shown:
                of_passes = [form.format(min(t[what]), max(t[what])) for t in table]
                self.assertIn(f"| {' | '.join(of_passes)} |", readme)

    def test_the_index_has_every_page(self) -> None:
        docs = ROOT / "docs"
        linked = set(LINK.findall((docs / "README.md").read_text()))
        missing = [str(p.relative_to(docs)) for p in sorted(docs.glob("**/*.md"))]
        self.assertEqual([p for p in missing if p != "README.md" and p not in linked], [])

    def test_raw_results_are_those_that_their_table_lists(self) -> None:
        folder = ROOT / "benchmarks" / "results"
        names = re.findall(r"`(20\d\d-[^`]*)`", (folder / "README.md").read_text())
        listed = {n.replace("MODEL", m) for n in names if "DATE" not in n for m in MODELS}
        self.assertEqual(listed, {p.stem for p in folder.glob("*.json")})


class Checks(unittest.TestCase):
    """That the checks above find what they look for."""

    def test_of_lines(self) -> None:
        long = "word " * 30
        self.assertEqual(len(problems_of_lines("x", long)), 1)
        self.assertEqual(problems_of_lines("x", f"| {long} |\n```\n{long}\n```\n    {long}"), [])
        self.assertEqual(problems_of_lines("x", f"[a page](https://{'x' * 130})"), [])

    def test_of_links(self) -> None:
        page = ROOT / "README.md"
        dead = "[a](docs/nowhere.md) [b\nc](docs/api.md#nothing)"
        self.assertEqual(len(problems_of_links(page, dead)), 2)
        self.assertEqual(problems_of_links(page, "[a](docs/api.md#limits)\n```\n[a](b)\n```"), [])

    def test_of_mentions(self) -> None:
        page = ROOT / "README.md"
        named = "`src/nowhere.cpp` `tests/docs/` `src/base/env`"
        self.assertEqual(len(problems_of_mentions(page, named)), 1)

    def test_of_tables(self) -> None:
        table = "`src/base`:\n\n| files | what |\n|---|---|\n| `env`, `cuda/`, `check_*` | `x` |\n"
        self.assertEqual(problems_of_tables("x", table), [])
        self.assertEqual(len(problems_of_tables("x", table.replace("env", "nowhere"))), 1)
        headed = table.replace("`src/base`:", "text").replace("files |", "file in `src/base` |")
        self.assertEqual(problems_of_tables("x", headed), [])
        self.assertEqual(len(problems_of_tables("x", headed.replace("env", "nowhere"))), 1)
        self.assertEqual(tables_of_folders(table.replace("`src/base`:", "text")), [])
        self.assertIn("src/base/deadline.h", headers_left_out(table))
        self.assertNotIn("src/base/env.h", headers_left_out(table))

    def test_of_quotes(self) -> None:
        page = ROOT / "CONTRIBUTING.md"
        true = "  ```cpp\n  // src/graph/layer_graph.h\n  #pragma once\n  ```\n"
        self.assertEqual(problems_of_quotes(page, true), [])
        wrong = true.replace("once", "twice")
        self.assertEqual(len(problems_of_quotes(page, wrong)), 1)


if __name__ == "__main__":
    unittest.main()
