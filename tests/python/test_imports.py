"""The modules of the package import one another one way."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import uniep

PACKAGE = Path(uniep.__file__).parent


def name_of(path: Path) -> str:
    parts = ("uniep", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(name: str, path: Path) -> Iterator[str]:
    """Names that may be modules, wherever they are imported: also for types, or late."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base.rstrip('.')}.{alias.name}" for alias in node.names)


def test_modules_import_one_way() -> None:
    modules = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in modules.items():
        found = {other for other in imported(name, path) if other in modules}
        # A package stands above its modules, which import from it what it has by then.
        graph[name] = {other for other in found if not f"{name}.".startswith(f"{other}.")}
    assert "uniep.group" in graph["uniep.workspace"]
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle
