"""Layer files of what a model really does: ``uniep run --input`` takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _hooks
from .arithmetic import Arithmetic
from .group import GroupLike, objects_on_first, rank_and_size

__all__ = ["capture", "write_layer", "write_trace"]

# Tensors that all ranks have alike; of others each has its part.
_SAME = ("shared_w1", "shared_w2")


class Captured:
    """What :func:`capture` yields.

    Attributes:
        path: the file.
        done: whether it is written.
        arguments: of ``uniep run``: the file, and what it does not say of the layer. Complete once
            the call was seen.
    """

    def __init__(self, path: Path, call: int) -> None:
        self.path = path
        self.done = False
        self.arguments = ["--input", str(path)]
        self._waits_for = call
        self._tensors: dict[str, Tensor] | None = None
        self._group: GroupLike = None

    def see(
        self, group: GroupLike, arithmetic: Arithmetic, tensors: dict[str, Tensor], out: Tensor
    ) -> None:
        """Called by :func:`uniep.moe` for each call."""
        self._waits_for -= 1
        if self._waits_for != -1:
            return
        self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._group = group
        self.arguments += _flags(arithmetic)
        if out.requires_grad:
            out.register_hook(self._see_gradient)  # type: ignore[no-untyped-call]

    def _see_gradient(self, dy: Tensor) -> None:
        if self._tensors is not None and "dy" not in self._tensors:
            self._tensors["dy"] = dy.detach().clone()

    def write(self) -> None:
        """Writes the file, on rank 0."""
        if self._tensors is None:
            raise RuntimeError(
                f"{self.path} is not written: the block ended before that call of uniep.moe"
            )
        write_layer(self.path, **self._tensors, group=self._group)
        self.done = True


@contextlib.contextmanager
def capture(path: str | Path, *, call: int = 0) -> Iterator[Captured]:
    """Writes one call of :func:`uniep.moe` of the block, and its backward, to a layer file.

    ::

        with uniep.capture("layer.safetensors", call=3) as captured:
            model(batch).loss.backward()
        print("python -m uniep run --ranks 4 --check", *captured.arguments)

    The file has the tokens and experts of all ranks; all ranks enter the block, and rank 0 writes.
    Without a backward in the block it has no dy, and serves for forward passes. Under activation
    checkpointing a forward that runs again in backward is a call, too; of a reentrant checkpoint
    that one alone has dy. Not for compiled models: run the step without torch.compile.

    Args:
        path: the file, in safetensors format.
        call: which call of the block, counted from 0.

    Raises:
        ImportError: where the package safetensors is missing.
        RuntimeError: where the block ends before the call, or where another capture is under way.
    """
    _safetensors()
    captured = Captured(Path(path), call)
    with _hooks.watching(captured.see):
        yield captured
    captured.write()


@torch.no_grad()
def write_layer(
    path: str | Path,
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: Tensor,
    w2: Tensor,
    dy: Tensor | None = None,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_probs: Tensor | None = None,
    group: GroupLike = None,
) -> None:
    """Writes a layer file of tensors as :func:`uniep.moe` takes them. Collective over `group`.

    Args:
        path: the file, written by rank 0.
        x: bf16 [..., H].
        topk_ids: int32 or int64 [..., K].
        topk_probs: fp32 [..., K].
        w1: bf16 [El, 2I, H], or [El, I, H] without a gate: the file does not say of which
            activation it is, nor where probabilities enter.
        w2: bf16 [El, H, I].
        dy: bf16 [..., H], the gradient of the output; None: the file serves for forward passes.
        b1: bf16 [El, 2I], with b2; None: experts have no biases.
        b2: bf16 [El, H].
        shared_w1: bf16 [S, 2I, H], as w1, with shared_w2; None: there are no shared experts.
        shared_w2: bf16 [S, H, I].
        shared_probs: fp32 [..., S], with these; None: each counts once.
        group: the ranks, whose tokens and experts are put together in their order.

    Raises:
        ImportError: where the package safetensors is missing.
    """
    save_file = _safetensors()
    topk = topk_ids.shape[-1]
    tensors = {
        "x": x.reshape(-1, x.shape[-1]),
        "topk_ids": topk_ids.reshape(-1, topk).to(torch.int32),
        "topk_probs": topk_probs.reshape(-1, topk),
        "w1": w1,
        "w2": w2,
    }
    if b1 is not None and b2 is not None:
        tensors |= {"b1": b1, "b2": b2}
    if shared_w1 is not None and shared_w2 is not None:
        tensors |= {"shared_w1": shared_w1, "shared_w2": shared_w2}
    if shared_probs is not None:
        tensors["shared_probs"] = shared_probs.reshape(-1, shared_probs.shape[-1])
    if dy is not None:
        tensors["dy"] = dy.reshape(-1, dy.shape[-1])
    own = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    if rank_and_size(group)[1] > 1:
        parts = objects_on_first(own, group)
        if parts is None:
            return
        own = {
            name: parts[0][name] if name in _SAME else torch.cat([part[name] for part in parts])
            for name in own
        }
    save_file(own, str(path))


#: :func:`write_layer` by the name that it had first. A trace is a timeline: ``uniep run --trace``.
write_trace = write_layer


def _flags(arithmetic: Arithmetic) -> list[str]:
    """Of ``uniep run``: what the tensors of a layer do not say."""
    names = ("activation", "probs", "combine_groups", "combine_partials")
    values, usual = arithmetic._asdict(), Arithmetic()._asdict()
    flags: list[str] = []
    for name in names:
        if values[name] != usual[name]:
            flags += [f"--{name.replace('_', '-')}", str(values[name])]
    return flags


def _safetensors() -> Any:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError(
            "layer files are written with the package safetensors; pip install safetensors"
        ) from None
    return save_file
