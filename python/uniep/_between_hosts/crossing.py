"""What of a call crosses between hosts while the fused layer of each computes.

On GPUs, tokens of other hosts come on a stream of their own. The passes of the fused layer take
tokens in waves (``Problem::first_host`` of uniep/problem.h): first half of those of this host,
then, as they come, those of the others, whose sums go back under the last of these and under the
other half. Gradients of tokens cross under those of weights, which need nothing of other ranks; on
CPUs, too.

A pass leaves SMs to the messages (``UNIEP_SPARE_SMS``). Without, they would begin behind it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from . import exchange
from .all_rows import AllRows, RowsOfCall
from .host_mesh import HostMesh
from .routes import Routes

__all__ = ["Crossing", "comes_in_waves", "crosses_under_weights", "waves_of_backward"]

_MOST_HOSTS = 14  # as include/uniep/problem.h has it

#: Of the tokens that a rank sends. Of fewer bytes, what crosses takes less than it costs that each
#: wave reads the weights anew (docs/hosts.md, "What crosses under what").
least_bytes = 1 << 24


def comes_in_waves(mesh: HostMesh | None, device: torch.device, token_bytes: int) -> bool:
    """Whether passes of a host's layer take tokens in waves, as they come from other hosts.

    Args:
        mesh: of the processes.
        device: theirs.
        token_bytes: that a rank sends to each host.
    """
    if mesh is None or device.type != "cuda" or not 1 < mesh.hosts <= _MOST_HOSTS:
        return False
    spares = os.environ.get("UNIEP_SPARE_SMS", "0") not in ("", "0")
    return spares and token_bytes >= least_bytes


class Crossing:
    """Of one call.

    Args:
        mesh: of the processes.
        in_waves: the fused layer's passes take tokens in waves: with :func:`comes_in_waves`.
        in_forward: so does that of forward, which does not wait for the device first.
        in_backward: so does that of backward, which has room for all rows.
        exact_hosts: tokens cross only to hosts that have experts of theirs.
        all_rows: rows cross, to be added up so; None: a sum of each host does.

    Attributes:
        rows: of the call, where they cross.
    """

    def __init__(
        self,
        mesh: HostMesh,
        all_rows: AllRows | None = None,
        *,
        in_waves: bool = False,
        in_forward: bool = True,
        in_backward: bool = True,
        exact_hosts: bool = False,
    ) -> None:
        self._mesh = mesh
        self._in_waves = in_waves
        self._in_forward = in_forward
        self._in_backward = in_backward
        self._exact_hosts = exact_hosts
        self._all_rows = all_rows
        self.rows: RowsOfCall | None = None
        self._routes: Routes | None = None
        self._agreed: Tensor | None = None
        self._tokens: _TokensInWaves | None = None
        self._dy: _TokensInWaves | None = None
        self._back: tuple[Tensor, exchange.Found, exchange.Found] | None = None

    @classmethod
    def of(
        cls,
        mesh: HostMesh,
        all_rows: AllRows | None,
        *,
        in_waves: bool,
        in_forward: bool,
        in_backward: bool,
        exact_hosts: bool,
    ) -> Crossing | None:
        """None where nothing is gained, nor while compiling, which does not see through it.

        Raises:
            ValueError: with ``exact_hosts`` while a CUDA graph is captured.
        """
        if mesh.hosts == 1 or torch.compiler.is_compiling():
            return None
        if exact_hosts and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "exact_hosts is True, which waits for the number of tokens that cross; a CUDA "
                "graph captures calls with exact_hosts=False"
            )
        return cls(
            mesh,
            all_rows,
            in_waves=in_waves,
            in_forward=in_forward,
            in_backward=in_backward,
            exact_hosts=exact_hosts,
        )

    @property
    def in_backward(self) -> bool:
        """Whether anything crosses beside the passes of backward."""
        return self._in_backward

    def find_routes(
        self, ids: Tensor, seen: tuple[Tensor, Tensor], experts: int
    ) -> tuple[Tensor, Tensor]:
        """Ahead of all that crosses: which tokens do.

        Args:
            ids: int [T, K] of this rank, numbers of experts among all.
            seen: int [N T, K], those of its rail, and [N T, K] probabilities.
            experts: of a host.

        Returns:
            seen, in the order in which its tokens will lie.
        """
        if not self._exact_hosts:
            return seen
        self._routes = routes = Routes(self._mesh, ids, seen[0], experts)
        return routes.moved_up(seen[0]), routes.moved_up(seen[1])

    def find_rows(self, sent: tuple[Tensor, Tensor], seen: Tensor, experts: int) -> None:
        """Ahead of all that goes back, with the arguments of :class:`RowsOfCall`."""
        if self._all_rows is not None:
            exact = self._exact_hosts
            self.rows = RowsOfCall(self._all_rows, self._mesh, sent, seen, experts, exact)

    def repeated(self, tokens: Tensor) -> Tensor:
        """[N T, H] as the fused layer is given them; where rows cross [N T, K, H]."""
        return tokens if self.rows is None else self.rows.repeated(tokens)

    @property
    def _routes_back(self) -> Routes | None:
        return self._routes if self.rows is None else self.rows.routes

    def agree(self, agreed: Tensor | None) -> None:
        """The fault of the call, int64 [2], 0 where there is none."""
        self._agreed = agreed

    def of_call(self, sums: Tensor) -> Tensor:
        """Those of a call with a fault are NaN, also of tokens that did not cross to its host."""
        if self._agreed is None or (self._routes is None and self.rows is None):
            return sums
        return sums.masked_fill_(self._agreed[0] != 0, math.nan)

    # ---- forward ----

    def spread(self, rows: Tensor) -> Tensor:
        """What :func:`exchange.spread` returns; of other hosts' tokens when their wave begins."""
        if not self._in_waves or not self._in_forward:
            return exchange.spread(self._mesh, rows, self._routes)
        back = _Back(self._routes_back, 1 if self.rows is None else self.rows.topk)
        self._tokens = _TokensInWaves(self._mesh, rows, self._routes, back)
        return self._tokens.seen

    @property
    def forward_waves(self) -> Tensor | None:
        """For the op of forward."""
        return None if self._tokens is None else self._tokens.events()

    def begin_to_collect(self, out: Tensor) -> None:
        """Ahead of all other messages behind the pass."""
        if self._tokens is not None:
            self._tokens.begin_to_collect(out)

    def collect(self, out: Tensor) -> exchange.Found:
        """What :func:`exchange.collect` returns of the results of forward."""
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            return tokens.collect()
        return exchange.collect(self._mesh, out, self._routes_back)

    # ---- backward ----

    def spread_dy(self, rows: Tensor) -> Tensor:
        """As :meth:`spread`."""
        if not self._in_waves or not self._in_backward:
            return exchange.spread(self._mesh, rows, self._routes)
        self._dy = _TokensInWaves(self._mesh, rows, self._routes, None)
        return self._dy.seen

    @contextmanager
    def backward_waves(self, dy: Tensor) -> Iterator[Tensor | None]:
        """For the op of backward; `dy`: what it is given."""
        came, self._dy = self._dy, None
        if came is not None and came.seen.data_ptr() != dy.data_ptr():  # a hook has changed it
            came.wait()
            came = None
        yield None if came is None else came.events()
        if came is not None:
            came.is_awaited = True  # wave by wave

    @contextmanager
    def ahead_of_others(self, dx: Tensor, dprobs: Tensor) -> Iterator[None]:
        """What the fused layer of this host has for all tokens that it sees crosses meanwhile."""
        # Tokens first. Products that fill a GPU would keep the message from starting, and those
        # behind this begin only when probabilities have made their way within the host.
        of_tokens = exchange.begin_to_collect(self._mesh, dx, self._routes_back)
        of_probs = exchange.begin_to_collect(self._mesh, dprobs, self._routes)
        try:
            yield
        finally:
            # Whether or not anybody asks: a pass behind it may take the SMs that the message needs.
            self._back = (dx, of_tokens(), of_probs())

    def take(self, dx: Tensor, dprobs: Tensor) -> tuple[exchange.Found, exchange.Found]:
        """What all hosts have for this rank's tokens."""
        back, self._back = self._back, None
        if back is not None and back[0].data_ptr() == dx.data_ptr():  # else a hook has changed it
            return back[1:]
        partials = exchange.collect(self._mesh, dx, self._routes_back)
        return partials, exchange.collect(self._mesh, dprobs, self._routes)


def crosses_under_weights(crossing: Crossing | None) -> bool:
    """Whether gradients of tokens cross while those of weights are computed."""
    return crossing is not None and crossing.in_backward


def waves_of_backward(
    crossing: Crossing | None, dy: Tensor
) -> AbstractContextManager[Tensor | None]:
    """:meth:`Crossing.backward_waves`, of a call that may have none."""
    return nullcontext() if crossing is None else crossing.backward_waves(dy)


class _Back(NamedTuple):
    """What goes back behind the waves of other hosts."""

    routes: Routes | None
    rows: int  # of a token: its sum, or one a slot


class _Done(NamedTuple):
    """Sums that are there behind a wave of forward."""

    wave: int
    steps: range  # of hosts behind this one
    event: torch.cuda.Event


def _done_in_forward(hosts: int) -> list[_Done]:
    """In the order in which sums go back."""
    if hosts == 2:
        return [_Done(1, range(1, 2), _recorded())]
    return [
        _Done(hosts - 1, range(1, hosts - 1), _recorded()),
        _Done(hosts, range(hosts - 1, hosts), _recorded()),
    ]


class _TokensInWaves:
    """Rows of this rank's tokens on their way to all hosts, and sums of them on their way back.

    Waves are those of ``Problem::first_host``: of N hosts the tokens of the s-th behind this one
    come s-th, with wave s of forward and of backward. Forward has more: from three hosts on another
    for tokens of the last, and one for those of this host. Sums of the s-th are there behind wave
    N - 1; of the last of more than two behind the wave after that.

    Args:
        mesh: of the processes.
        rows: [T, n], which stay as they are until all have been sent.
        routes: which of them cross; None: all.
        back: what comes back of them; None: nothing.
    """

    def __init__(
        self, mesh: HostMesh, rows: Tensor, routes: Routes | None, back: _Back | None
    ) -> None:
        self._mesh = mesh
        self._routes = routes
        self._back = back
        self._device = rows.device
        self._stream = mesh.stream(rows.device)
        self._begun_on = torch.cuda.current_stream(rows.device)
        self.is_awaited = False
        self._rows = rows
        self._blocks = rows.new_empty(mesh.hosts, *rows.shape)
        self._blocks[mesh.host] = rows
        with torch.cuda.device(rows.device):
            self._done: list[_Done] = [] if back is None else _done_in_forward(mesh.hosts)
        self._arrived: list[torch.cuda.Event] = []
        # What waits for the number of tokens, which forward does not know yet, is put off.
        if routes is None or back is None:
            self._begin()

    def _begin(self) -> None:
        mesh, routes = self._mesh, self._routes
        # All that both streams touch is this one's, from before the other takes over. Rows are
        # packed now, as beside a pass that would have few SMs.
        self._sent = exchange.to_hosts(mesh, self._rows, routes)
        self._received = exchange.by_host(self._blocks, routes)
        if self._back is not None:
            hosts, tokens, width = self._blocks.shape
            shape = (hosts, tokens * self._back.rows, width)
            self._found = exchange.Found(mesh, shape, self._blocks, self._back.routes)
        self._stream.wait_stream(self._begun_on)
        with torch.cuda.stream(self._stream):
            self._arrived = [self._receive(step) for step in range(1, mesh.hosts)]

    @property
    def seen(self) -> Tensor:
        """[N T, n]. That it is written later is ordered by events, and not for autograd to see."""
        return self._blocks.data.flatten(0, 1)

    def _neighbours(self, step: int) -> tuple[int, int]:
        """The hosts to which the step-th block behind this one is this one's, and whose it is."""
        host, hosts = self._mesh.host, self._mesh.hosts
        return (host - step) % hosts, (host + step) % hosts

    def _receive(self, step: int) -> torch.cuda.Event:
        before, behind = self._neighbours(step)
        sent, received = self._sent[before], self._received[behind]
        exchange.step(self._mesh, (sent, before), (received, behind))
        return _recorded()

    def events(self) -> Tensor:
        """int64 [2, waves] on the CPU: what waves wait for, and what is recorded behind them."""
        if not self._arrived:
            self._begin()
        arrived = [event.cuda_event for event in self._arrived]
        before = [0, *arrived] + [0] * len(self._done)
        behind = [0] * len(before)
        for done in self._done:
            behind[done.wave] = done.event.cuda_event
        return torch.tensor([before, behind], dtype=torch.int64, device="cpu")

    def begin_to_collect(self, out: Tensor) -> None:
        """Behind the pass in the order of the host, and behind waves of others on the device.

        Args:
            out: [N T, n], or rows [N T, K, n], of all tokens that this rank sees.
        """
        assert self._found is not None and self._done and self._back is not None
        mesh, routes, found = self._mesh, self._back.routes, self._found.parts
        blocks = out.view(mesh.hosts, -1, out.shape[-1])
        self._sums: list[Tensor] = []  # until they have been sent
        with torch.cuda.stream(self._stream):
            for done in self._done:
                self._stream.wait_event(done.event)
                ends = [self._neighbours(step) for step in done.steps]
                sums = [exchange.going_back(blocks, behind, routes) for _, behind in ends]
                for (before, behind), rows in zip(ends, sums, strict=True):
                    exchange.step(mesh, (rows, behind), (found[before], before))
                self._sums += sums
        found[mesh.host] = blocks[mesh.host]

    def collect(self) -> exchange.Found:
        """What every host has for this rank's rows."""
        assert self._found is not None
        self.wait()
        return self._found

    def wait(self) -> None:
        """Until all is here, and nothing of this is read or written any more."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.is_awaited = True

    def __del__(self) -> None:
        """Of a call that has failed. Its tensors may go once nothing is under way."""
        if not getattr(self, "is_awaited", True):
            self._begun_on.wait_stream(self._stream)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
