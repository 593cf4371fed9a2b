"""Safetensors files, one or several with an index, and what reads tensors of them by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["INDEX", "SINGLE", "Reader", "Source", "reader_of", "write_whole"]

#: Tensors by name, a safetensors file, or a folder of these with or without their index.
Source: TypeAlias = "Mapping[str, Tensor] | str | Path"

INDEX = "model.safetensors.index.json"
#: Where all is in one file.
SINGLE = "model.safetensors"

# Types that are loaded, by their names in files.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Reader:
    """What reads tensors by name.

    Attributes:
        form: shape and type, or None where only reading tells.
        read: the tensor.
    """

    form: Callable[[str], tuple[Sequence[int], torch.dtype | str] | None]
    read: Callable[[str], Tensor]


def reader_of(source: Source, stack: ExitStack) -> Reader:
    """Of what `source` has; files are open as long as `stack`."""
    if isinstance(source, Mapping):
        return _reader_of_mapping(source)
    path = Path(source)
    files: dict[str, Any] = {}

    def file_of(name: str) -> Any:
        if name not in files:
            files[name] = _opened(name, stack)
        return files[name]

    if path.is_dir() and (path / INDEX).exists():
        weights = {name: str(path / file) for name, file in _weight_map(path / INDEX).items()}
    else:
        single = str(path / SINGLE if path.is_dir() else path)
        weights = dict.fromkeys(file_of(single).keys(), single)

    keys: dict[str, set[str]] = {}

    def file_with(name: str) -> Any:
        if name not in weights:
            raise KeyError(f"{name} is not in {path}, which has {len(weights)} tensors")
        file = weights[name]
        if file not in keys:
            keys[file] = set(file_of(file).keys())
        if name not in keys[file]:
            raise KeyError(f"{name} is not in {file}, where {path / INDEX} has it")
        return file_of(file)

    def form(name: str) -> tuple[Sequence[int], torch.dtype | str]:
        part = file_with(name).get_slice(name)
        return part.get_shape(), _DTYPES.get(part.get_dtype(), part.get_dtype())

    def read(name: str) -> Tensor:
        tensor: Tensor = file_with(name).get_tensor(name)
        return tensor

    return Reader(form, read)


def _reader_of_mapping(source: Mapping[str, Tensor]) -> Reader:
    def check(name: str) -> None:
        if name not in source:
            raise KeyError(f"{name} is not among the {len(source)} tensors of the source")

    def form(name: str) -> tuple[Sequence[int], torch.dtype | str] | None:
        check(name)
        # Others may read a file for each.
        return (source[name].shape, source[name].dtype) if isinstance(source, dict) else None

    def read(name: str) -> Tensor:
        check(name)
        return source[name]

    return Reader(form, read)


def _opened(file: str, stack: ExitStack) -> Any:
    """A safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except SafetensorError as error:
        raise ValueError(
            f"{file} is no whole safetensors file ({error}); one as save_file of safetensors "
            "writes is accepted"
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Files by the names of the tensors that they have."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(
            f"{index} is no JSON ({error}); an index as Hugging Face writes is accepted"
        ) from error
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(
            f"{index} has no weight_map of tensors' names to files; an index as Hugging Face "
            "writes is accepted"
        )
    return files


def write_whole(file: Path, text: str) -> None:
    """Who reads the file finds all of it, or what was there before."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
