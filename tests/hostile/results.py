"""The bytes that every run of a layer writes, whatever else is asked of it."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# What decides a result. The number of ranks is among them for made-up layers, of which each rank
# has so many tokens.
DECIDING = (
    "--input",
    "--shape",
    "--seed",
    "--skew",
    "--dropped",
    "--pass",
    "--main-grad",
    "--ranks",
)

_known: dict[tuple[bytes, ...], bytes] = {}


def deciding_words(arguments: Sequence[bytes]) -> tuple[bytes, ...]:
    words: list[bytes] = []
    for option, value in itertools.pairwise(arguments):
        if os.fsdecode(option) in DECIDING:
            words += (option, value)
    return tuple(words)


def plain_result(
    program: Path, folder: Path, environment: Mapping[bytes, bytes], arguments: Sequence[bytes]
) -> bytes:
    """Of the plain run of the same layer; of a made-up one it is remembered."""
    words = deciding_words(arguments)
    if words not in _known or b"--input" in words:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "plain"
            how = (b"--schedule", b"sequential", b"--output", bytes(path))
            call = (bytes(program), b"run", *words, *how)
            with (Path(place) / "log").open("wb") as log:
                subprocess.run(
                    call, cwd=folder, env=environment, check=True, stdout=log, stderr=log
                )
            _known[words] = path.read_bytes()
    return _known[words]
