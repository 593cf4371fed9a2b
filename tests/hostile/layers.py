"""Layer files: good ones, and ways to spoil them."""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "cli"))

import layer_file
from layer_file import Tensors
from layer_file import serialized as serialized

BIG = (-1, 0, 1, 7, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
DTYPES = ("BF16", "F16", "F32", "F64", "I32", "I64", "U8", "BOOL", "F8_E4M3", "", "bf16", "\udcff")


def tensors(rng: random.Random) -> Tensors:
    """Of a small random layer, whose experts can be split over 1, 2 or 4 ranks."""
    experts = rng.choice((4, 8, 12))
    return layer_file.layer(
        rng.choice((0, 1, 2, 5, 16, 33)),
        hidden=8 * rng.randint(1, 4),
        intermediate=8 * rng.randint(1, 3),
        experts=experts,
        topk=rng.randint(1, 4),
        seed=rng.randrange(10**6),
        with_dy=rng.random() < 0.9,
    )


def good(rng: random.Random) -> bytes:
    return serialized(tensors(rng))


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _joined(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(text)) + text + data


# ---- ways to spoil a file: each takes a good one


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.choice((rng.randrange(len(content)), rng.randrange(16)))]


def lengthen(rng: random.Random, content: bytes) -> bytes:
    return content + rng.randbytes(rng.choice((1, 8, 4096)))


def flip_bits(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    header_end = min(len(content), 8 + struct.unpack("<Q", content[:8])[0])
    for _ in range(rng.choice((1, 2, 8, 64))):
        where = rng.randrange(rng.choice((8, header_end, len(content))))
        changed[where] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_length(rng: random.Random, content: bytes) -> bytes:
    size = rng.choice((*BIG, len(content), len(content) - 8, 100 << 20)) % 2**64
    return struct.pack("<Q", size) + content[8:]


def change_header(rng: random.Random, content: bytes) -> bytes:
    header, data = _parts(content)
    name = rng.choice(list(header))
    entry = header[name]
    value: Any = rng.choice((*BIG, 1.5, 1e300, "8", None, [], {}, True, [[1]], "\udcff" * 9))
    match rng.randrange(9):
        case 0:
            entry["shape"] = [rng.choice(BIG) for _ in range(rng.randrange(5))]
        case 1:
            entry["shape"][rng.randrange(len(entry["shape"]))] = value
        case 2:
            entry["data_offsets"][rng.randrange(2)] = value
        case 3:
            entry["dtype"] = rng.choice(DTYPES)
        case 4:
            entry[rng.choice(("shape", "dtype", "data_offsets"))] = value
        case 5:
            del entry[rng.choice(list(entry))]
        case 6:
            del header[name]
        case 7:
            header[rng.choice(("x2", "__metadata__", "X", "", "\n", "\udcff" * 500))] = value
        case _:
            header[name] = header[rng.choice(list(header))]
    return _joined(header, data)


def change_text(rng: random.Random, content: bytes) -> bytes:
    header, data = _parts(content)
    text = json.dumps(header)
    where = rng.randrange(len(text))
    deep = rng.choice((100, 5000, 200000))
    spoiled = rng.choice(
        (
            text[:where] + rng.choice('{}[]",:\\\0\x1b e-9') + text[where + 1 :],
            text[:-1] + ',"x":' + json.dumps(header["x"]) + "}",
            "[" * deep,
            '{"a":' * deep,
            text + " " * rng.randrange(64),
            "\ufeff" + text,
            text.replace("0", "0.0", 1),
            text.replace(",", ",,", 1),
            "",
            "null",
            json.dumps(list(header)),
        )
    )
    spoiled_bytes = spoiled.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(spoiled_bytes)) + spoiled_bytes + data


def change_numbers(rng: random.Random, content: bytes) -> bytes:
    header, data = _parts(content)
    name = rng.choice([n for n in header if n != "dy"])
    begin, end = header[name]["data_offsets"]
    width = 2 if header[name]["dtype"] == "BF16" else 4
    if begin == end:
        return content
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 100))):
        where = begin + width * rng.randrange((end - begin) // width)
        ids = header[name]["dtype"] == "I32"
        value = (
            struct.pack("<i", rng.choice((-2, -1, 0, 99, 2**31 - 1, -(2**31))))
            if ids
            else struct.pack("<f", rng.choice((float("nan"), float("inf"), -float("inf"), 3e38)))
        )
        changed[where : where + width] = value[-width:]
    return _joined(header, bytes(changed))


def mix_tensors(rng: random.Random, content: bytes) -> bytes:
    """Shapes that do not fit together, each right by itself."""
    parts, other = tensors(rng), tensors(rng)
    for name in rng.sample(list(parts), rng.randint(1, 3)):
        if name in other:
            parts[name] = other[name]
    return serialized(parts)


def repeat_ids(rng: random.Random, content: bytes) -> bytes:
    """A token that goes to one expert several times."""
    parts = tensors(rng)
    dtype, shape, ids = parts["topk_ids"]
    parts["topk_ids"] = (dtype, shape, ids[:4] * (len(ids) // 4))
    return serialized(parts)


def leave(rng: random.Random, content: bytes) -> bytes:
    return content


SPOILERS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(cut, lengthen, flip_bits, change_length, change_header, change_text, change_numbers),
    *(mix_tensors, repeat_ids, leave),
)


def spoiled(rng: random.Random) -> tuple[str, bytes]:
    """A file, and the name of what is wrong with it; rarely nothing is."""
    spoil = rng.choice(SPOILERS)
    return spoil.__name__, spoil(rng, good(rng))
