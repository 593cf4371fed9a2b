"""The structures of a forward and a backward call, as ``c_api.h`` has them."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

__all__ = ["BackwardCall", "ForwardCall", "RowMemory", "WaveEvents"]


class RowMemory(ctypes.Structure):
    """``uniep_row_memory`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("x_rows", c_void_p),
        ("h", c_void_p),
        ("row_probs", c_void_p),
        ("forward_memory", c_void_p),
    ]


class WaveEvents(ctypes.Structure):
    """``uniep_wave_events`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("before", c_void_p),
        ("after", c_void_p),
        ("count", c_int32),
    ]


class ForwardCall(ctypes.Structure):
    """``uniep_forward_call`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("tokens", c_int64),
        ("topk_ids", c_void_p),
        ("topk_probs", c_void_p),
        ("x", c_void_p),
        ("w1", c_void_p),
        ("w2", c_void_p),
        ("out", c_void_p),
        ("plan", c_void_p),
        ("memory", RowMemory),
        ("allocate", c_void_p),
        ("allocate_context", c_void_p),
        ("overflow", c_void_p),
        ("schedule", c_char_p),
        ("stream", c_void_p),
        ("saved", c_void_p),
        ("b1", c_void_p),
        ("b2", c_void_p),
        ("shared_w1", c_void_p),
        ("shared_w2", c_void_p),
        ("shared_probs", c_void_p),
        ("interleaved", c_int32),
        ("in_out", c_int32),
        ("w3", c_void_p),
        ("w1_each", c_void_p),
        ("w2_each", c_void_p),
        ("waves", WaveEvents),
    ]


class BackwardCall(ctypes.Structure):
    """``uniep_backward_call`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("rows", c_int64),
        ("part", c_int32),
        ("weight_grad", c_int32),
        ("tokens", c_int64),
        ("plan", c_void_p),
        ("x_rows", c_void_p),
        ("h", c_void_p),
        ("row_probs", c_void_p),
        ("dy", c_void_p),
        ("w1", c_void_p),
        ("w2", c_void_p),
        ("dx", c_void_p),
        ("dprobs", c_void_p),
        ("dw1", c_void_p),
        ("dw2", c_void_p),
        ("backward_memory", c_void_p),
        ("ignore_overflow", c_int32),
        ("x", c_void_p),
        ("schedule", c_char_p),
        ("stream", c_void_p),
        ("saved", c_void_p),
        ("keep_pages", c_int32),
        ("b1", c_void_p),
        ("b2", c_void_p),
        ("db1", c_void_p),
        ("db2", c_void_p),
        ("shared_w1", c_void_p),
        ("shared_w2", c_void_p),
        ("dshared_probs", c_void_p),
        ("dshared_w1", c_void_p),
        ("dshared_w2", c_void_p),
        ("interleaved", c_int32),
        ("dw_interleaved", c_int32),
        ("in_out", c_int32),
        ("dw_in_out", c_int32),
        ("w3", c_void_p),
        ("w1_each", c_void_p),
        ("w2_each", c_void_p),
        ("dw3", c_void_p),
        ("dw1_each", c_void_p),
        ("dw2_each", c_void_p),
        ("waves", WaveEvents),
    ]
