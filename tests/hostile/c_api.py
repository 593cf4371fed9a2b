"""The structures and functions of uniep/c_api.h for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

ALL_GATHER = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)
ALLOCATE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
RELEASE = ctypes.CFUNCTYPE(None, c_void_p)


class GroupConfig(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("rank", "size", "backend", "device", "share_device")),
        ("timeout_ms", c_int32),
        ("all_gather", ALL_GATHER),
        ("context", c_void_p),
        ("ranks_note", c_char_p),
    )


class Problem(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("hidden", "intermediate", "num_experts", "topk", "max_tokens"),
            *("capacity_rows", "row_align", "save", "recompute_h"),
            *("activation", "probs", "bias", "backward_rows"),
            *("combine_groups", "combine_partials", "shared_experts", "no_shared_gate"),
            *("slot_rows", "gathered_hosts", "first_host"),
        )
    )


class MemoryNeeds(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("rows", "rows_of_x", "symmetric", "workspace", "plan"),
            *("forward_memory", "backward_memory", "alignment"),
        )
    )


class LayerConfig(ctypes.Structure):
    _fields_ = (
        ("timeout_ms", c_int32),
        ("record_timeline", c_int32),
        ("schedule", c_char_p),
        ("workspace", c_void_p),
        ("symmetric", c_void_p),
        ("peers", c_void_p),
        ("release", RELEASE),
        ("release_context", c_void_p),
        ("row_pool", c_void_p),
        ("erf_since_13_2", c_int32),
    )


class WaveEvents(ctypes.Structure):
    _fields_ = (("before", c_void_p), ("after", c_void_p), ("count", c_int32))


class ForwardCall(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64),
        *((n, c_void_p) for n in ("topk_ids", "topk_probs", "x", "w1", "w2", "out", "plan")),
        *((n, c_void_p) for n in ("x_rows", "h", "row_probs", "forward_memory")),
        ("allocate", ALLOCATE),
        *((n, c_void_p) for n in ("allocate_context", "overflow")),
        ("schedule", c_char_p),
        *((n, c_void_p) for n in ("stream", "saved", "b1", "b2")),
        *((n, c_void_p) for n in ("shared_w1", "shared_w2", "shared_probs")),
        *((n, c_int32) for n in ("interleaved", "in_out")),
        *((n, c_void_p) for n in ("w3", "w1_each", "w2_each")),
        ("waves", WaveEvents),
    )


class BackwardCall(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        ("part", c_int32),
        ("weight_grad", c_int32),
        ("tokens", c_int64),
        *((n, c_void_p) for n in ("plan", "x_rows", "h", "row_probs", "dy", "w1", "w2", "dx")),
        *((n, c_void_p) for n in ("dprobs", "dw1", "dw2", "backward_memory")),
        ("ignore_overflow", c_int32),
        ("x", c_void_p),
        ("schedule", c_char_p),
        *((n, c_void_p) for n in ("stream", "saved")),
        ("keep_pages", c_int32),
        *((n, c_void_p) for n in ("b1", "b2", "db1", "db2")),
        *((n, c_void_p) for n in ("shared_w1", "shared_w2", "dshared_probs")),
        *((n, c_void_p) for n in ("dshared_w1", "dshared_w2")),
        *((n, c_int32) for n in ("interleaved", "dw_interleaved", "in_out", "dw_in_out")),
        *((n, c_void_p) for n in ("w3", "w1_each", "w2_each")),
        *((n, c_void_p) for n in ("dw3", "dw1_each", "dw2_each")),
        ("waves", WaveEvents),
    )


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.uniep_last_error.restype = c_char_p
    for name in ("uniep_group_destroy", "uniep_layer_destroy"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = (c_void_p,)
    library.uniep_needs.argtypes = (c_void_p, c_int32, c_int32, c_void_p)
    library.uniep_group_create.argtypes = (c_void_p, c_void_p)
    library.uniep_group_find_hosts.argtypes = (c_void_p, c_void_p, c_void_p)
    library.uniep_group_layout.argtypes = (c_void_p, c_void_p, c_void_p)
    library.uniep_layer_create.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    library.uniep_layer_schedule.argtypes = (c_void_p, c_int32, c_char_p, c_size_t)
    library.uniep_layer_synchronize.argtypes = (c_void_p,)
    library.uniep_forward.argtypes = (c_void_p, c_void_p)
    library.uniep_backward.argtypes = (c_void_p, c_void_p)
    return library
