"""Whether a file is a whole output of uniep."""

from __future__ import annotations

import json
import struct
import xml.etree.ElementTree
from collections.abc import Callable
from typing import Any

SIZES = {"BF16": 2, "F32": 4, "I32": 4}


def _not_a_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def strict_json(content: bytes) -> Any:
    """What every reader of JSON accepts: UTF-8, and neither NaN nor Infinity."""
    return json.loads(content.decode(), parse_constant=_not_a_number)


def check_figures(content: bytes) -> None:
    schema = strict_json(content)["schema"]
    if not schema.startswith("uniep-"):
        raise ValueError(f"its schema is {schema!r}")


def check_trace(content: bytes) -> None:
    if not strict_json(content)["traceEvents"]:
        raise ValueError("it has no events")


def check_plot(content: bytes) -> None:
    if not xml.etree.ElementTree.fromstring(content).tag.endswith("svg"):
        raise ValueError("it is no svg")


def check_tensors(content: bytes) -> None:
    (size,) = struct.unpack("<Q", content[:8])
    header = strict_json(content[8 : 8 + size])
    header.pop("__metadata__", None)
    ends = [t["data_offsets"][1] for t in header.values()]
    if 8 + size + max(ends) != len(content):
        raise ValueError(f"its tensors end at {max(ends)}, and it at {len(content) - 8 - size}")


CHECKS: dict[str, Callable[[bytes], None]] = {
    "figures": check_figures,
    "trace": check_trace,
    "plot": check_plot,
    "tensors": check_tensors,
}


def problem_of(kind: str, content: bytes) -> str | None:
    """What is wrong with it; None: it is whole."""
    try:
        CHECKS[kind](content)
    except (ValueError, KeyError, TypeError, IndexError, struct.error, SyntaxError) as error:
        return f"is no whole {kind} ({len(content)} bytes): {error}"
    return None
