"""Writes a small random layer as safetensors: make_fixture.py LAYER (needs numpy)."""

import json
import struct
import sys

import numpy as np

T, H, I, E, K = 24, 16, 8, 4, 2


def bf16(values):
    """Rounds to nearest, ties to even; returned as the upper halves of the fp32 bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def layer(rng):
    ids = rng.integers(0, E, (T, K)).astype(np.int32)
    ids[ids == 2] = 1  # expert 2 has no rows
    ids[3] = 3  # one expert twice in a token
    ids[5, 0] = -1  # one dropped slot,
    ids[7] = -1  # a token without experts
    return {
        "x": ("BF16", bf16(rng.standard_normal((T, H)))),
        "topk_ids": ("I32", ids),
        "topk_probs": ("F32", rng.uniform(0.1, 1, (T, K)).astype(np.float32)),
        "w1": ("BF16", bf16(rng.standard_normal((E, 2 * I, H)) / H**0.5)),
        "w2": ("BF16", bf16(rng.standard_normal((E, H, I)) / I**0.5)),
        "dy": ("BF16", bf16(rng.standard_normal((T, H)))),
    }


def write(path, tensors):
    header, data = {}, b""
    for name, (dtype, a) in tensors.items():
        offsets = [len(data), len(data) + a.nbytes]
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": offsets}
        data += a.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


write(sys.argv[1], layer(np.random.default_rng(1)))
