#!/usr/bin/env python3
"""Writes a result file with one record a line, so that git shows which record has changed.

    python benchmarks/pack_results.py benchmarks/results/FILE.json ...
    python benchmarks/pack_results.py --extract --output tests/data/measured FILE.json ...

`--extract` keeps what tests read of passes: which layer, which schedule, how long. A list of times
becomes its median.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

FILE_KEYS = ("schema", "machine", "date", "commit", "command", "shape", "ranks", "skew")
RECORD_KEYS = (
    *("shape", "ranks", "hosts", "limit", "all_rows", "way", "tokens", "skew"),
    *("direction", "schedule", "ms"),
)
LISTS = ("records", "passes", "candidates", "points")


def text_of(value: Any, indent: int = 0) -> str:
    """JSON in which what holds a list of records is broken into lines, and all else is not."""
    is_open = isinstance(value, dict) and any(isinstance(value.get(key), list) for key in LISTS)
    if not is_open:
        return json.dumps(value)
    inner = "\n" + " " * (indent + 1)
    parts = []
    for key, item in value.items():
        if key in LISTS and isinstance(item, list):
            lines = ("," + inner + " ").join(text_of(entry, indent + 2) for entry in item)
            parts.append(f"{json.dumps(key)}: [{inner} {lines}{inner}]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(item)}")
    return "{" + inner + ("," + inner).join(parts) + "\n" + " " * indent + "}"


def record(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {key: entry[key] for key in RECORD_KEYS if key in entry}
    if isinstance(kept.get("ms"), list):
        kept["ms"] = statistics.median(kept["ms"])
    return kept


def extract_pass(entry: dict[str, Any]) -> dict[str, Any]:
    lists = {key: entry[key] for key in LISTS if isinstance(entry.get(key), list)}
    return {
        "direction": entry["direction"],
        **{key: [record(item) for item in items] for key, items in lists.items()},
    }


def extract(file: dict[str, Any]) -> dict[str, Any]:
    kept = {key: file[key] for key in FILE_KEYS if key in file}
    if "records" in file:
        passes = ("forward", "backward")
        kept["records"] = [record(r) for r in file["records"] if r["direction"] in passes]
    if "passes" in file:
        kept["passes"] = [extract_pass(entry) for entry in file["passes"]]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--extract", action="store_true", help="keep what tests read")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="instead of in place")
    arguments = parser.parse_args()
    for path in arguments.files:
        file = json.loads(path.read_text())
        target = arguments.output / path.name if arguments.output else path
        target.write_text(text_of(extract(file) if arguments.extract else file) + "\n")


if __name__ == "__main__":
    main()
