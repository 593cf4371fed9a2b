"""The C API of libuniep by ctypes, for calls that involve no tensors, and the library of ops."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

from ._plain_values import check_whole

__all__ = [
    "AllGather",
    "Error",
    "GroupConfig",
    "LayerConfig",
    "Needs",
    "Problem",
    "Release",
    "RowPoolState",
    "binary",
    "check",
    "has_cuda",
    "library",
    "refusals",
    "torch_library",
    "version",
    "with_refusals",
]

AllGather = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)
Release = CFUNCTYPE(None, c_void_p)


class Error(RuntimeError):
    """What the library refused or could not do, in one sentence.

    Attributes:
        code: ``"argument"``, ``"unsupported"``, ``"capacity"``, ``"timeout"``, ``"peer"``,
            ``"device"``, ``"file"`` or ``"internal"``.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        "argument",
        "unsupported",
        "capacity",
        "timeout",
        "peer",
        "device",
        "file",
        "internal",
    )

    def __init__(self, result: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = self.NAMES[result - 1] if 0 < result <= len(self.NAMES) else "internal"

    def __reduce__(self) -> tuple[Any, ...]:  # of another process, to which only args would go
        return Error.of, (self.code, str(self))

    @classmethod
    def of(cls, code: str, sentence: str) -> Error:
        """What the package itself refuses as the library does."""
        return cls(cls.NAMES.index(code) + 1, sentence)


class GroupConfig(ctypes.Structure):
    """``uniep_group_config`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("rank", c_int32),
        ("size", c_int32),
        ("backend", c_int32),
        ("device", c_int32),
        ("share_device", c_int32),
        ("timeout_ms", c_int32),
        ("all_gather", AllGather),
        ("context", c_void_p),
        ("ranks_note", c_char_p),
    ]


class Problem(ctypes.Structure):
    """``uniep_problem`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("num_experts", c_int64),
        ("topk", c_int64),
        ("max_tokens", c_int64),
        ("capacity_rows", c_int64),
        ("row_align", c_int64),
        ("save", c_int64),
        ("recompute_h", c_int64),
        ("activation", c_int64),
        ("probs", c_int64),
        ("bias", c_int64),
        ("backward_rows", c_int64),
        ("combine_groups", c_int64),
        ("combine_partials", c_int64),
        ("shared_experts", c_int64),
        ("no_shared_gate", c_int64),
        ("slot_rows", c_int64),
        ("gathered_hosts", c_int64),
        ("first_host", c_int64),
    ]


def _whole(name: str, value: Any, bits: int) -> int:
    """A whole number, NumPy's too, for a field of so many bits.

    Raises:
        TypeError: for anything else.
        ValueError: for one that they do not hold.
    """
    check_whole(**{name: value})
    number = operator.index(value)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):  # ctypes would cut it
        raise ValueError(f"{name} is {value}; a number of {bits} bits is accepted")
    return number


def int32(**figure: Any) -> int:
    """One figure for a field of 32 bits, by the name of the argument; raises as `problem` does."""
    ((name, value),) = figure.items()
    return _whole(name, value, 32)


def problem(**figures: Any) -> Problem:
    """Of whole numbers, NumPy's too.

    Raises:
        TypeError: for anything else.
        ValueError: for one that 64 bits do not hold.
    """
    return Problem(**{name: _whole(name, figure, 64) for name, figure in figures.items()})


class Needs(ctypes.Structure):
    """``uniep_memory_needs`` of c_api.h."""

    rows: int
    rows_of_x: int
    symmetric: int
    workspace: int
    plan: int
    forward_memory: int
    backward_memory: int
    alignment: int

    _fields_: ClassVar[list[Any]] = [
        ("rows", c_int64),
        ("rows_of_x", c_int64),
        ("symmetric", c_int64),
        ("workspace", c_int64),
        ("plan", c_int64),
        ("forward_memory", c_int64),
        ("backward_memory", c_int64),
        ("alignment", c_int64),
    ]


class LayerConfig(ctypes.Structure):
    """``uniep_layer_config`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("timeout_ms", c_int32),
        ("record_timeline", c_int32),
        ("schedule", c_char_p),
        ("workspace", c_void_p),
        ("symmetric", c_void_p),
        ("peers", c_void_p),
        ("release", Release),
        ("release_context", c_void_p),
        ("row_pool", c_void_p),
        ("erf_since_13_2", c_int32),
    ]


class RowPoolState(ctypes.Structure):
    """``uniep_row_pool_state`` of c_api.h."""

    pages: int
    page_bytes: int
    bytes: int
    free_pages: int
    fewest_free_pages: int

    _fields_: ClassVar[list[Any]] = [
        ("pages", c_int64),
        ("page_bytes", c_int64),
        ("bytes", c_int64),
        ("free_pages", c_int64),
        ("fewest_free_pages", c_int64),
    ]


def _package_file(folder: str, pattern: str) -> Path:
    # An editable install has the sources in one folder and the binaries in another.
    import uniep

    for root in uniep.__path__:
        found = sorted((Path(root) / folder).glob(pattern))
        if found:
            return found[0]
    raise ImportError(
        f"{folder}/{pattern} is not in {os.pathsep.join(uniep.__path__)}; "
        "install the package (pip install .) and import it from there, not from its sources"
    )


def _load() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(_package_file("lib", "libuniep.so.*")))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "uniep_version": (c_char_p, []),
        "uniep_last_error": (c_char_p, []),
        "uniep_has_cuda": (c_int, []),
        "uniep_group_create": (c_int, [POINTER(GroupConfig), POINTER(c_void_p)]),
        "uniep_group_find_hosts": (
            c_int,
            [POINTER(GroupConfig), POINTER(c_int32), POINTER(c_int32)],
        ),
        "uniep_group_layout": (c_int, [c_void_p, POINTER(c_int32), POINTER(c_int32)]),
        "uniep_group_destroy": (None, [c_void_p]),
        "uniep_needs": (c_int, [POINTER(Problem), c_int32, c_int32, POINTER(Needs)]),
        "uniep_layer_create": (
            c_int,
            [c_void_p, POINTER(Problem), POINTER(LayerConfig), POINTER(c_void_p)],
        ),
        "uniep_layer_needs": (c_int, [c_void_p, c_int64, POINTER(Needs)]),
        "uniep_layer_destroy": (None, [c_void_p]),
        "uniep_row_pool_create": (
            c_int,
            [c_void_p, POINTER(Problem), c_int64, c_void_p, POINTER(c_void_p)],
        ),
        "uniep_row_pool_destroy": (None, [c_void_p]),
        "uniep_row_pool_ask": (c_int, [c_void_p, POINTER(RowPoolState)]),
        "uniep_saved_destroy": (None, [c_void_p]),
        "uniep_layer_schedule": (c_int, [c_void_p, c_int32, c_char_p, c_size_t]),
        "uniep_layer_synchronize": (c_int, [c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


def _load_ops() -> ctypes.CDLL:
    path = str(_package_file("lib", "libuniep_torch.so"))
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    lib = ctypes.CDLL(path)
    lib.uniep_torch_bind.restype = None
    lib.uniep_torch_bind.argtypes = [c_int64, c_void_p, c_void_p, POINTER(c_int64)]
    lib.uniep_torch_unbind.restype = None
    lib.uniep_torch_unbind.argtypes = [c_int64]
    lib.uniep_torch_begin_turn.restype = c_void_p
    lib.uniep_torch_begin_turn.argtypes = [c_int64]
    lib.uniep_torch_end_turn.restype = None
    lib.uniep_torch_end_turn.argtypes = [c_void_p]
    lib.uniep_torch_last_failure.restype = c_int
    lib.uniep_torch_last_failure.argtypes = []
    lib.uniep_torch_bound.restype = c_int64
    lib.uniep_torch_bound.argtypes = []
    return lib


library = _load()
torch_library = _load_ops()


def check(result: int) -> None:
    """Raises :class:`Error` with the sentence of the call that returned `result`."""
    if result != 0:
        raise Error(result, library.uniep_last_error().decode())


class _Refusals:
    """Where ops are called: what the library refuses there is an :class:`Error`, too.

    PyTorch hands on its sentence alone.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if kind is RuntimeError and str(error) == library.uniep_last_error().decode():
            raise Error(torch_library.uniep_torch_last_failure(), str(error)) from None


refusals = _Refusals()


_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_refusals(backward: Callable[_P, _R]) -> Callable[_P, _R]:
    """A backward that is run with :data:`refusals`; not where it is compiled."""

    @functools.wraps(backward)
    def run(*given: _P.args, **named: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return backward(*given, **named)
        with refusals:
            return backward(*given, **named)

    return run


def version() -> str:
    """The version of libuniep, which is that of the package."""
    return str(library.uniep_version().decode())


def has_cuda() -> bool:
    """Whether this build has the CUDA backend."""
    return bool(library.uniep_has_cuda())


def binary() -> Path:
    """The command line that the package brings along."""
    return _package_file("bin", "uniep")
