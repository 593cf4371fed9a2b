"""The search for a schedule on the caller's own tensors and routing, inside this process."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import _arguments, _library
from ._between_hosts import exchange
from ._between_hosts.all_rows import tokens_of
from ._between_hosts.passes import to_all_hosts
from ._calls import BackwardCall, ForwardCall, RowMemory
from ._forms import ExpertWeight
from ._ops import ops
from ._plain_values import check_number, check_whole
from .workspace import Workspace, check_is_workspace

__all__ = ["Tuned", "tune_calls"]

_TEXT = 1024
_Stop = CFUNCTYPE(c_int, c_void_p)


class _TuneConfig(ctypes.Structure):
    """``uniep_tune_config`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("budget_s", c_double),
        ("candidates", c_int32),
        ("max_rounds", c_int32),
        ("space", c_char_p),
        ("profile", c_char_p),
        ("not_stored", c_int32),
        ("cache", c_char_p),
        ("stop", _Stop),
        ("stop_context", c_void_p),
    ]


class _TuneResult(ctypes.Structure):
    """``uniep_tune_result`` of c_api.h."""

    _fields_: ClassVar[list[Any]] = [
        ("schedule", c_char * _TEXT),
        ("seconds", c_double),
        ("default_seconds", c_double),
        ("speedup", c_double),
        ("faster", c_int32),
        ("decided", c_int32),
        ("stopped", c_int32),
        ("stored", c_int32),
        ("rounds", c_int32),
        ("candidates", c_int32),
        ("rejected", c_int32),
        ("why", c_char * _TEXT),
        ("problem", c_char * _TEXT),
    ]


for _name, _call in (
    ("uniep_tune_forward", ForwardCall),
    ("uniep_tune_backward", BackwardCall),
):
    _function = getattr(_library.library, _name)
    _function.restype = c_int
    _function.argtypes = [c_void_p, POINTER(_call), POINTER(_TuneConfig), POINTER(_TuneResult)]


@dataclass(frozen=True)
class Tuned:
    """What a search found; the same on all ranks.

    Attributes:
        schedule: the fastest, with every axis; the default where none is faster than that by more
            than chance.
        seconds: of a pass under it, a median; 0: the search ended before there was one.
        default_seconds: of a pass under the default.
        speedup: over the default.
        faster: than the default, by more than chance.
        decided: nothing that is left could be faster by more than half a percent.
        stopped: by an interrupt (Ctrl-C).
        stored: layers of the shape that are made from then on use it.
        rounds: that are complete.
        candidates: schedules that were measured.
        rejected: of these, for wrong bits: there should be none.
        why: what sets the schedule apart from the default.
        problem: why it could not be stored, or what of the cache cannot be used.
    """

    schedule: str
    seconds: float
    default_seconds: float
    speedup: float
    faster: bool
    decided: bool
    stopped: bool
    stored: bool
    rounds: int
    candidates: int
    rejected: int
    why: str
    problem: str


@contextmanager
def _ends_by_interrupt() -> Iterator[Any]:
    """A function for `stop` that says whether there was a Ctrl-C since; it does nothing else."""
    requested = threading.Event()
    stop = _Stop(lambda _: int(requested.is_set()))
    if threading.current_thread() is not threading.main_thread():
        yield stop  # others get no signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: requested.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def tune_calls(
    x: Tensor,
    topk_ids: Tensor,
    topk_probs: Tensor,
    w1: ExpertWeight,
    w2: ExpertWeight,
    dy: Tensor | None = None,
    *,
    workspace: Workspace,
    budget: float = 60.0,
    candidates: int = 16,
    space: str | None = None,
    profile: str | None = None,
    store: bool = True,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_probs: Tensor | None = None,
) -> Tuned:
    """Searches the fastest schedule of :func:`uniep.moe` for these tensors and this routing.

    Runs the pass a few hundred times, under one schedule after another, and compares every bit.
    Collective: all ranks of the workspace's group call it alike. No tensor of the caller changes.
    Over hosts each host searches for its own layer, which has the tokens of all. Shared experts
    that are no part of the pass are not searched for.

    Args:
        x: as in :func:`uniep.moe`; so the next four.
        topk_ids: likewise.
        topk_probs: likewise.
        w1: likewise, in the default layout; of several tensors, a copy in one is what is run.
        w2: likewise.
        dy: the gradient of the output, for a search of the backward pass. None: of the forward.
        workspace: what the calls work in. Its own schedule stays as it is.
        budget: seconds, 0.1 to 86400.
        candidates: schedules to measure besides the default and the presets, 1 to 1000.
        space: ``"axis=value|value,..."``: of the axes named, these values only. None: all.
        profile: of the cost model that proposes candidates, ``"none"`` or a shipped one's name.
            None: the device's, if there is one.
        store: keeps what was found on this machine, for workspaces that are made later.
        b1: as in :func:`uniep.moe`; so the next four.
        b2: likewise.
        shared_w1: likewise.
        shared_w2: likewise.
        shared_probs: likewise.

    Raises:
        TypeError: for a wrong dtype, and for what is of another type than these.
        ValueError: for a wrong shape, device or layout, a workspace for other tensors, and one
            with a row pool.
        uniep.Error: for options out of range, and where the library refuses or fails.
    """
    check_is_workspace(workspace)
    workspace.require_open()
    check_number(budget=budget)
    check_whole(candidates=candidates)
    for name, value in (("budget", budget), ("candidates", candidates)):
        if value == 0:  # of the C API: its default
            raise ValueError(f"{name} is 0; more is accepted, or none for the default")
    if workspace.pages is not None:
        raise ValueError(
            "the workspace has a row pool, whose pages serve one forward each; tune with one that "
            "has none, and what is found holds for both"
        )
    _arguments.check_device(x)
    weights = _arguments.experts(w1, w2, b1, b2, shared_w1, shared_w2)
    _arguments.check(x, topk_ids, topk_probs, weights, workspace.arithmetic)
    _arguments.check_shared_probs(shared_probs, x, weights, workspace.arithmetic)
    _arguments.check_workspace(workspace, x, weights, topk_ids.shape[-1], None)
    if dy is not None and (dy.shape != x.shape or dy.dtype != x.dtype or dy.device != x.device):
        raise ValueError(
            f"dy is {dy.dtype} {list(dy.shape)} on '{dy.device}'; it must be as x is: {x.dtype} "
            f"{list(x.shape)} on '{x.device}'"
        )
    first, second = (weight.detach() for weight in weights.joined())
    if workspace.of_shared is not None:  # a layer of their own
        weights, shared_probs = weights.routed(), None
    config = _TuneConfig(
        budget_s=budget,
        candidates=_library.int32(candidates=candidates),
        space=_encoded(space),
        profile=_encoded(profile),
        not_stored=int(not store),
    )
    with torch.no_grad(), _ends_by_interrupt() as config.stop:
        tokens = _arguments.rows(x.detach())
        ids = _arguments.int32(_arguments.rows(topk_ids))
        probs = _arguments.rows(topk_probs.detach())
        of_shared = None if shared_probs is None else _arguments.rows(shared_probs.detach())
        gradient = None if dy is None else _arguments.rows(dy.detach())
        if (over := workspace.over_hosts) is not None:  # its layer has the tokens of all hosts
            tokens, ids, probs, _ = to_all_hosts(over, tokens, ids, probs, None)
            tokens = tokens_of(tokens).contiguous()
            if gradient is not None:
                gradient = exchange.spread(over.mesh, exchange.resized(gradient, over.tokens))
        saved = ops.forward(
            workspace.key,
            workspace.overflow,
            tokens,
            ids,
            probs,
            [first],
            [second],
            workspace.rows,
            workspace.rows_of_x,
            workspace.rows_of_h,
            workspace.plan_bytes,
            False,
            None,
            *(None if t is None else t.detach() for t in weights.more()),
            of_shared,
        )
        more = weights.more_named()
        if of_shared is not None:
            more["shared_probs"] = of_shared
        if gradient is None:
            inputs = (tokens, ids, probs, first, second)
            found = _tune_forward(workspace, inputs, more, saved, config)
        else:
            inputs = (tokens, probs, first, second, gradient)
            found = _tune_backward(workspace, inputs, more, saved, config)
    figures = {name: getattr(found, name) for name, _ in _TuneResult._fields_}
    for name in ("schedule", "why", "problem"):
        figures[name] = figures[name].decode(errors="replace")
    for name in ("faster", "decided", "stopped", "stored"):
        figures[name] = bool(figures[name])
    return Tuned(**figures)


def _tune_forward(
    workspace: Workspace,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    more: dict[str, Tensor],
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    config: _TuneConfig,
) -> _TuneResult:
    x, ids, probs, w1, w2 = tensors
    out, plan, x_rows, h, row_probs = saved
    call = ForwardCall(
        tokens=x.shape[0],
        topk_ids=ids.data_ptr(),
        topk_probs=probs.data_ptr(),
        x=x.data_ptr(),
        w1=w1.data_ptr(),
        w2=w2.data_ptr(),
        out=out.data_ptr(),
        plan=plan.data_ptr(),
        memory=RowMemory(x_rows=_address(x_rows), h=_address(h), row_probs=row_probs.data_ptr()),
        stream=_stream(workspace),
        **{name: tensor.data_ptr() for name, tensor in more.items()},
    )
    return _searched("uniep_tune_forward", workspace, call, config)


def _tune_backward(
    workspace: Workspace,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    more: dict[str, Tensor],
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    config: _TuneConfig,
) -> _TuneResult:
    x, probs, w1, w2, dy = tensors
    out, plan, x_rows, h, row_probs = saved
    dx, dprobs, dw1, dw2 = (torch.empty_like(t) for t in (out, probs, w1, w2))
    gradients = {f"d{name}": torch.empty_like(tensor) for name, tensor in more.items()}
    more = {name: tensor for name, tensor in more.items() if name != "shared_probs"} | gradients
    call = BackwardCall(
        tokens=x.shape[0],
        plan=plan.data_ptr(),
        x_rows=_address(x_rows),
        h=_address(h),
        row_probs=row_probs.data_ptr(),
        dy=dy.data_ptr(),
        w1=w1.data_ptr(),
        w2=w2.data_ptr(),
        dx=dx.data_ptr(),
        dprobs=dprobs.data_ptr(),
        dw1=dw1.data_ptr(),
        dw2=dw2.data_ptr(),
        x=x.data_ptr() if workspace.save == "none" or "shared_w1" in more else None,
        stream=_stream(workspace),
        **{name: tensor.data_ptr() for name, tensor in more.items()},
    )
    return _searched("uniep_tune_backward", workspace, call, config)


def _searched(
    name: str, workspace: Workspace, call: ctypes.Structure, config: _TuneConfig
) -> _TuneResult:
    found = _TuneResult()
    search = getattr(_library.library, name)
    with workspace.library_layer.turn() as layer:
        _library.check(search(layer, ctypes.byref(call), ctypes.byref(config), ctypes.byref(found)))
    return found


def _address(tensor: Tensor) -> int | None:
    return tensor.data_ptr() if tensor.numel() > 0 else None


def _stream(workspace: Workspace) -> int | None:
    if workspace.device.type != "cuda":
        return None
    return torch.cuda.current_stream(workspace.device).cuda_stream
