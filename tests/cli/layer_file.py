"""Writes and reads safetensors files with the standard library alone, broken ones too."""

import json
import random
import struct
from collections.abc import Sequence
from os import PathLike

Tensors = dict[str, tuple[str, list[int], bytes]]

SIZES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def bf16(values: Sequence[float]) -> bytes:
    """The upper halves of fp32 numbers; the values used here need no rounding."""
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def f32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def i32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def layer(tokens: int, hidden: int = 16, intermediate: int = 8, experts: int = 8, topk: int = 2,
          seed: int = 0, with_dy: bool = True) -> Tensors:
    """name -> (dtype, shape, bytes) of a small random layer, in the order of the file."""
    rng = random.Random(seed)

    def numbers(n: int) -> bytes:
        return bf16([rng.randint(-8, 8) / 8 for _ in range(n)])

    ids = [e for _ in range(tokens) for e in rng.sample(range(experts), topk)]
    if ids:
        ids[-1] = -1
    probs = [rng.randint(1, 8) / 16 for _ in ids]
    tensors: Tensors = {
        "x": ("BF16", [tokens, hidden], numbers(tokens * hidden)),
        "topk_ids": ("I32", [tokens, topk], i32(ids)),
        "topk_probs": ("F32", [tokens, topk], f32(probs)),
        "w1": ("BF16", [experts, 2 * intermediate, hidden],
               numbers(experts * 2 * intermediate * hidden)),
        "w2": ("BF16", [experts, hidden, intermediate], numbers(experts * hidden * intermediate)),
    }
    if with_dy:
        tensors["dy"] = ("BF16", [tokens, hidden], numbers(tokens * hidden))
    return tensors


def serialized(tensors: Tensors, header_text: str | None = None) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = (json.dumps(header) if header_text is None else header_text).encode()
    return struct.pack("<Q", len(text)) + text + data


def read(path: str | PathLike[str]) -> Tensors:
    """name -> (dtype, shape, bytes)"""
    with open(path, "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[t["data_offsets"][0]:t["data_offsets"][1]])
            for name, t in header.items()}
